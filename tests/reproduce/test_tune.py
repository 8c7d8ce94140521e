"""Tuning chooses on validation data, with as many trials for each method, and never looks at the test set."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from aedfl.data import Dataset
from aedfl.errors import UserError
from aedfl.experiment import workshop
from aedfl.reproduce import tune
from aedfl.reproduce.plan import FIRST_SEED, Cell, Wish, cell, cells, settings, target
from aedfl.reproduce.records import Store
from aedfl.reproduce.sitting import Sitting
from reproduce.fakes import TINY, record

WISH = Wish(overrides=TINY, until=20.0, device="cpu")


def run(folder: Path, method: str = "fedprox", count: int = 2) -> Store:
    store = Store(folder)
    Sitting(store, lambda line: None).run(tune.plan("digits-cnn", [method], count, WISH))
    return store


def test_every_method_gets_the_same_number_of_trials_and_its_default_first() -> None:
    assert set(tune.methods()) == set(target("table1").methods)
    for method in tune.methods():
        found = tune.trials("cifar10-lenet", method, 4)
        assert len(found) == 4 and found[0] == {}
        with pytest.raises(UserError, match="--trials 5"):
            tune.trials("cifar10-lenet", method, 5)
        for name in settings():
            count = tune.number(name)
            assert len({trial.identity for trial in tune.plan(name, [method], count, Wish())}) == count, (name, method)


def test_trials_use_a_share_of_the_training_data_and_a_seed_of_their_own() -> None:
    for trial in tune.plan("cifar10-lenet", ["fedavg"], 4, Wish()):
        assert trial.config.data.validation == 0.1
        assert trial.config.seed == tune.seed()
    table = {found.config.seed for found in cells(target("table2"), Wish(seeds=20), {})}
    assert tune.seed() not in table


def poison(monkeypatch: pytest.MonkeyPatch) -> None:
    """All test samples become noise with wrong labels."""
    load = workshop.load

    def poisoned(name: str, directory: str | None = None) -> Dataset:
        found = load(name, directory)
        noise = torch.full_like(found.test.x, 1e3)
        return replace(found, test=replace(found.test, x=noise, y=(found.test.y + 1) % 10))

    monkeypatch.setattr(workshop, "load", poisoned)


def test_the_test_set_is_never_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = [one["curve"] for one in run(tmp_path / "clean")]
    table = Wish(overrides=TINY, until=20.0, device="cpu")
    measured = [cell("digits-cnn", "fedprox", 1, table, (), "table2", {})]
    Sitting(before := Store(tmp_path / "before"), lambda line: None).run(measured)
    poison(monkeypatch)
    Sitting(after := Store(tmp_path / "after"), lambda line: None).run(measured)
    assert [one["curve"]["loss"] for one in before] != [one["curve"]["loss"] for one in after], "the poison works"
    assert [one["curve"] for one in run(tmp_path / "poisoned")] == clean


def trial(method: str, number: int, accuracies: list[float], reached: float = 1000.0) -> dict[str, object]:
    """The record of a method's trial of that number, cut at `reached`."""
    planned = tune.plan("cifar10-lenet", [method], 4, Wish())[number]
    made = record(method, accuracies, seed=tune.seed(), end=reached, target="tune", until=1000.0)
    return {**made, "changes": list(planned.key.changes), "config": planned.identity}


def freeze(folder: Path, *records: dict[str, object], until: float = 1000.0) -> dict[str, object]:
    store = Store(folder)
    for one in records:
        store.add(one)
    content = tune.freeze("cifar10-lenet", store, until, 4, Wish())
    assert json.loads((folder / "cifar10-lenet.json").read_text()) == content
    return {method: one["chosen"] for method, one in content["methods"].items()}


def test_the_best_at_the_end_is_frozen_and_used(tmp_path: Path) -> None:
    late = [[0.1, 0.4, 0.4, 0.4], [0.9, 0.5, 0.5, 0.5], [0.1, 0.3, 0.5, 0.7], [0.1, 0.6, 0.1, 0.1]]
    chosen = freeze(tmp_path, *(trial("fedprox", i, curve) for i, curve in enumerate(late)))
    wanted = tune.trials("cifar10-lenet", "fedprox", 4)
    assert chosen == {"fedprox": wanted[1]}, "0.5 (mean of 0.5, 0.5, 0.5); an equal one that comes later does not win"
    tuned = tune.frozen(tmp_path)
    found = cell("cifar10-lenet", "fedprox", FIRST_SEED, Wish(), (), "table2", tuned["cifar10-lenet"])
    assert found.key.tuned
    assert found.config.hyper == {"mu": wanted[1]["hyper.mu"]}
    assert found.config.data.validation == 0


def further(method: str, best: int, accuracies: list[float]) -> dict[str, object]:
    """The record of the trial after the others, where the one of that number was the best."""
    content = {"methods": {method: {"best": tune.trials("cifar10-lenet", method, 4)[best]}}}
    (planned,) = tune.plan_further("cifar10-lenet", [method], content, Wish())
    made = record(method, accuracies, seed=tune.seed(), target="tune", until=1000.0)
    return {**made, "changes": list(planned.key.changes), "config": planned.identity}


def test_the_best_is_tried_once_more_and_that_counts_when_all_methods_have_had_it(tmp_path: Path) -> None:
    four = [trial(method, i, [0.1, 0.2, 0.5 if i == 1 else 0.3]) for method in ("fedprox", "fedbuff") for i in range(4)]
    best = {method: tune.trials("cifar10-lenet", method, 4)[1] for method in ("fedprox", "fedbuff")}
    assert freeze(tmp_path, *four, further("fedprox", 1, [0.6, 0.6, 0.6])) == best
    chosen = freeze(tmp_path, further("fedbuff", 1, [0.1, 0.1, 0.1]))
    assert chosen == {**best, "fedprox": {**best["fedprox"], "training.weight_decay": 0.01}}
    again = json.loads((tmp_path / "cifar10-lenet.json").read_text())["methods"]
    assert again["fedprox"]["best"] == best["fedprox"] and again["fedbuff"]["further"]["accuracy"] == pytest.approx(0.1)
    found = cell("cifar10-lenet", "fedprox", FIRST_SEED, Wish(), (), "table2", tune.frozen(tmp_path)["cifar10-lenet"])
    assert found.config.training.weight_decay == 0.01


def test_nothing_is_chosen_before_all_trials_are_there(tmp_path: Path) -> None:
    three = [trial("fedprox", i, [0.1, 0.2, 0.3]) for i in range(3)]
    assert freeze(tmp_path, *three) == {"fedprox": None}
    short = trial("fedprox", 3, [0.1, 0.9], reached=500.0)
    assert freeze(tmp_path, short) == {"fedprox": None}
    assert tune.frozen(tmp_path) == {"cifar10-lenet": {}}
    assert freeze(tmp_path, until=500.0) == {"fedprox": tune.trials("cifar10-lenet", "fedprox", 4)[3]}


def test_what_is_frozen_keeps_its_terms_whatever_is_tuned_next(tmp_path: Path) -> None:
    store = Store(tmp_path)
    assert tune.terms("cifar10-lenet", tmp_path, Wish(until=160.0), 2) == (160.0, 2), "nothing is there yet"
    for i in range(4):
        store.add(trial("fedprox", i, [0.1, 0.2, 0.3]))
    tune.freeze("cifar10-lenet", store, 1000.0, 4, Wish())
    assert tune.terms("cifar10-lenet", tmp_path, Wish(until=1700.0), None) == (1000.0, 4)
    with pytest.raises(UserError, match=r"--trials 2: .*cifar10-lenet.json has 4 of each method"):
        tune.terms("cifar10-lenet", tmp_path, Wish(until=1700.0), 2)
    with pytest.raises(UserError, match="with nothing changed, now it is devices=4"):
        tune.terms("cifar10-lenet", tmp_path, Wish(overrides=("devices=4",)), 4)


def test_trials_end_where_the_setting_says_unless_a_person_does() -> None:
    assert tune.aim("emnist-lenet", Wish()).end("emnist-lenet") == 80 < Wish().end("emnist-lenet")
    assert tune.aim("emnist-lenet", Wish(until=50.0)).until == 50
    assert tune.aim("emnist-lenet", Wish(quick=True)).until is None
    assert tune.aim("digits-cnn", Wish()) == Wish()
    late = tune.plan_late("emnist-lenet", ["fedprox"], {"methods": {"fedprox": {"late": [{"changes": {}}]}}}, Wish())
    assert (late[0].config.stop.virtual_seconds or 0) > 80, "for longer, as docs and help say"


def test_trials_that_were_cut_late_are_compared_where_the_shortest_got_to(tmp_path: Path) -> None:
    """Up to 1,000 s the first would win, up to 800 s the second does."""
    whole = [trial("fedprox", i, [0.1, 0.1, 0.1, 0.1, 0.1, 0.9 if i == 0 else 0.1]) for i in (0, 2, 3)]
    cut = trial("fedprox", 1, [0.1, 0.2, 0.2, 0.2, 0.2], reached=800.0)
    assert freeze(tmp_path, *whole, cut) == {"fedprox": tune.trials("cifar10-lenet", "fedprox", 4)[1]}
    content = json.loads((tmp_path / "cifar10-lenet.json").read_text())
    assert content["until"] == 1000.0
    assert content["methods"]["fedprox"]["until"] == 800.0


def test_trials_that_all_went_further_are_compared_where_they_got_to(tmp_path: Path) -> None:
    """At 500 s the first would win, at 1,000 s the third does."""
    rising = [[0.1, 0.3, 0.4, 0.1, 0.1, 0.1], [0.1] * 6, [0.1, 0.2, 0.2, 0.5, 0.5, 0.5], [0.1] * 6]
    trials = [trial("fedprox", i, curve) for i, curve in enumerate(rising)]
    assert freeze(tmp_path, *trials, until=500.0) == {"fedprox": tune.trials("cifar10-lenet", "fedprox", 4)[2]}


def test_the_last_stage_is_for_longer_and_on_a_seed_of_its_own() -> None:
    content = {"methods": {"fedprox": {"late": [{"changes": {}}, {"changes": {"training.weight_decay": 0.003}}]}}}
    plain, decayed = tune.plan_late("emnist-lenet", ["fedprox", "fedbuff"], content, Wish(until=80))
    assert plain.config.seed not in (tune.seed(), FIRST_SEED) and plain.config.seed in tune.seeds()
    assert plain.config.stop.virtual_seconds == decayed.config.stop.virtual_seconds == 300
    assert (plain.config.training.weight_decay, decayed.config.training.weight_decay) == (0, 0.003)
    assert plain.config.data.validation == 0.1
    assert plain.command.endswith("tune emnist-lenet --methods fedprox --until 80")
    assert tune.plan_late("emnist-lenet", ["fedprox"], content, Wish(quick=True)) == []
    assert tune.plan_late("cifar10-lenet", ["fedprox"], content, Wish()) == []


LATE = "imdb-textcnn"


def before(folder: Path, method: str, best: int, further: bool = True, name: str = LATE) -> Store:
    """A method's trials, of which that number was the best, and the one after them, which was not."""
    store = Store(folder)

    def add(planned: Cell, accuracy: float) -> None:
        made = record(method, [0.1, accuracy], seed=tune.seed(), until=100.0, setting=name)
        store.add({**made, "changes": list(planned.key.changes), "config": planned.identity})

    for number, planned in enumerate(tune.plan(name, [method], 4, Wish())):
        add(planned, 0.5 if number == best else 0.3)
    content = tune.freeze(name, store, 100.0, 4, Wish())
    for planned in tune.plan_further(name, [method], content, Wish()) if further else []:
        add(planned, 0.1)
    return store


def late(folder: Path, method: str, best: int, accuracies: tuple[float, float]) -> dict[str, Any]:
    """What is frozen after a method's trials and both of the last stage."""
    store = before(folder, method, best)
    content = tune.freeze(LATE, store, 100.0, 4, Wish())
    for accuracy, planned in zip(accuracies, tune.plan_late(LATE, [method], content, Wish()), strict=True):
        made = record(method, [0.1, *[accuracy] * 4], seed=planned.key.seed, until=400.0, end=400.0, setting=LATE)
        store.add({**made, "changes": list(planned.key.changes), "config": planned.identity})
    return dict(tune.freeze(LATE, store, 100.0, 4, Wish())["methods"])


def test_the_last_stage_decides_when_all_methods_have_had_it(tmp_path: Path) -> None:
    best = tune.trials(LATE, "fedprox", 4)[1]
    decayed = {**best, "training.weight_decay": 0.003}
    assert late(tmp_path, "fedprox", 1, (0.4, 0.6))["fedprox"]["chosen"] == decayed
    waiting = before(tmp_path, "fedbuff", 0)
    assert tune.freeze(LATE, waiting, 100.0, 4, Wish())["methods"]["fedprox"]["chosen"] == best
    found = late(tmp_path, "fedbuff", 0, (0.5, 0.4))
    assert found["fedprox"]["chosen"] == decayed and found["fedbuff"]["chosen"] == {}


def test_the_last_stage_is_not_begun_before_all_methods_have_had_the_others(tmp_path: Path) -> None:
    """What it compares is not known yet."""
    name = "emnist-lenet"
    before(tmp_path, "fedprox", 1, name=name)
    content = tune.freeze(name, before(tmp_path, "fedbuff", 0, further=False, name=name), 100.0, 4, Wish())
    assert tune.plan_late(name, ["fedprox", "fedbuff"], content, Wish()) == []
    content = tune.freeze(name, before(tmp_path, "fedbuff", 0, name=name), 100.0, 4, Wish())
    assert len(tune.plan_late(name, ["fedprox", "fedbuff"], content, Wish())) == 4


def test_a_setting_without_a_further_trial_goes_on_with_the_last_stage(tmp_path: Path) -> None:
    content = tune.freeze(LATE, before(tmp_path, "fedprox", 1), 100.0, 4, Wish())
    assert tune.plan_further(LATE, ["fedprox"], content, Wish()) == []
    assert "further" not in content["methods"]["fedprox"]
    assert len(tune.plan_late(LATE, ["fedprox"], content, Wish())) == 2


def test_the_last_stage_changes_nothing_for_less_than_its_margin(tmp_path: Path) -> None:
    best = tune.trials(LATE, "fedprox", 4)[1]
    assert late(tmp_path / "less", "fedprox", 1, (0.5, 0.507))["fedprox"]["chosen"] == best
    assert late(tmp_path / "more", "fedprox", 1, (0.5, 0.509))["fedprox"]["chosen"] != best


def test_what_decays_already_is_tried_without(tmp_path: Path) -> None:
    found = late(tmp_path, "aedfl", 3, (0.4, 0.5))
    decays = tune.trials(LATE, "aedfl", 4)[3]
    without = {key: value for key, value in decays.items() if key != "training.weight_decay"}
    assert len(without) == len(decays) - 1
    assert [one["changes"] for one in found["aedfl"]["late"]] == [decays, without]
    assert found["aedfl"]["chosen"] == without
