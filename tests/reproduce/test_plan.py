"""Which runs a table or figure needs, and what identifies a run."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from pathlib import Path

import pytest

from aedfl.algorithms import METHODS, fedavg
from aedfl.errors import UserError
from aedfl.reproduce import paper, plan
from aedfl.reproduce.plan import Wish, cell, cells, identity, setting, settings, target, targets
from aedfl.reproduce.records import Store
from aedfl.reproduce.standing import standing

PAPER_SETTINGS = {
    "emnist-lenet",
    "cifar10-lenet",
    "cifar10-resnet8",
    "cifar10-vgg9",
    "tiny-vgg9",
    "tiny-resnet8",
    "imdb-textcnn",
}


def one(method: str, swept: tuple[str, ...] = (), wish: Wish | None = None, **tuned: dict[str, object]) -> plan.Cell:
    return cell("cifar10-lenet", method, 1, wish or Wish(), swept, "table2", tuned)


def test_both_tables_together_have_all_settings_and_methods() -> None:
    tables = [target("table1"), target("table2")]
    assert sorted(name for table in tables for name in table.settings) == sorted(PAPER_SETTINGS)
    variants = {name for name in METHODS if name.startswith("aedfl-")}
    for table in tables:
        assert set(table.methods) == set(METHODS) - variants
    assert set(target("fig-ablation").methods) == variants | {"aedfl"}


@pytest.mark.parametrize("name", sorted(PAPER_SETTINGS))
def test_settings_are_the_papers(name: str) -> None:
    config = cell(name, "fedavg", 1, Wish(), (), "table1", {}).config
    training = config.training
    assert (config.devices, config.data.partition, config.data.alpha) == (100, "dirichlet", 0.5)
    assert (training.lr, training.lr_decay, training.batch_size, training.epochs) == (0.03, 0.001, 50, 4)
    assert config.fleet.slowest / config.fleet.fastest == 15
    assert config.topology.kind == "exponential"
    assert config.data.validation == 0
    assert setting(name).end % config.evaluation.every == 0, "the last measurement lies at the end"


@pytest.mark.parametrize("name", sorted(targets()))
def test_all_cells_of_a_target_have_a_config(name: str) -> None:
    base = target(name)
    found = cells(base, Wish(seeds=1), {})
    assert len(found) == len(base.settings) * len(base.methods) * len(base.values)
    assert len({one.key for one in found}) == len(found)


def test_a_figure_may_end_before_its_settings_table(monkeypatch: pytest.MonkeyPatch) -> None:
    longer = replace(setting("cifar10-lenet"), end=1000.0)
    monkeypatch.setitem(settings(), "cifar10-lenet", longer)
    figure, table = target("fig-200"), target("table2")
    ends = {one.target: one.config.stop.virtual_seconds for aim in (figure, table) for one in cells(aim, Wish(), {})
            if one.key.setting == "cifar10-lenet"}  # fmt: skip
    assert ends == {"fig-200": 220.0, "table2": 1000.0}
    assert {one.config.stop.virtual_seconds for one in cells(figure, Wish(until=50.0), {})} == {50.0}
    store = Store(Path("nowhere"))
    assert standing(figure, "cifar10-lenet", store, Wish()).until == 220.0
    assert standing(table, "cifar10-lenet", store, Wish()).until == 1000.0


def test_the_longest_go_first_and_settings_stay_together() -> None:
    found = [one.key for one in cells(target("table1"), Wish(seeds=2, methods=("fedavg", "aedfl", "dispfl")), {})]
    order = list(dict.fromkeys(key.setting for key in found))
    assert order == list(target("table1").settings)
    first = [key.method for key in found if key.setting == order[0]]
    assert first == ["aedfl", "aedfl", "fedavg", "fedavg", "dispfl", "dispfl"]


def test_identity_leaves_out_length_and_machine() -> None:
    base = one("aedfl").identity
    assert one("aedfl", wish=Wish(until=7.0)).identity == base
    assert one("aedfl", wish=Wish(device="cpu", data="/elsewhere")).identity == base
    assert one("aedfl", wish=Wish(overrides=("engine.lookahead=3",))).key == one("aedfl").key


def test_identity_counts_values_whether_given_or_default() -> None:
    base = one("fedprox")
    default = METHODS["fedprox"].hyper.mu
    assert one("fedprox", (f"hyper.mu={default}",)).identity == base.identity
    assert one("fedprox", ("hyper.mu=0.5",)).identity != base.identity
    config = base.config
    assert identity(config.model_copy(update={"seed": 2})) != base.identity
    assert one("fedprox", ("training.momentum=0.0",)).identity == base.identity
    for change in (
        "training.momentum=0.5",
        "data.alpha=0.1",
        "fleet.slowest=20.0",
        "devices=50",
        "engine.precision=fp32",
        "engine.kernels=false",
    ):
        assert one("fedprox", (change,)).identity != base.identity


def test_a_users_own_method_counts_by_what_it_says(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    text = (
        Path(fedavg.__file__)
        .read_text()
        .replace("from ..", "from aedfl.")
        .replace("from ._", "from aedfl.algorithms._")
    )
    path.write_text(text)
    first = one(str(path)).identity
    path.write_text(text + "# changed\n")
    assert one(str(path)).identity != first


def test_topology_does_not_concern_a_server() -> None:
    ring = ("topology.kind=ring",)
    assert one("fedavg", ring).identity == one("fedavg").identity
    assert one("ad-psgd", ring).identity != one("ad-psgd").identity


def test_frozen_values_are_used_and_shared_by_variants() -> None:
    tuned = {"fedprox": {"hyper.mu": 0.1}, "aedfl": {"hyper.max_rate": 0.3}}
    assert one("fedprox", **tuned).config.hyper == {"mu": 0.1}
    assert one("fedprox", **tuned).key.tuned
    assert one("aedfl-p", **tuned).config.hyper == {"max_rate": 0.3}
    assert not one("fedavg", **tuned).key.tuned
    changed = one("fedprox", wish=Wish(overrides=("hyper.mu=0.7",)), **tuned)
    assert changed.config.hyper == {"mu": 0.7}, "what a person asks for counts most"


def test_tables_and_figures_have_methods_as_they_were_tuned() -> None:
    tuned = {"cifar10-lenet": {"fedbuff": {"hyper.buffer": 5}}}
    wish = Wish(methods=("fedbuff",), seeds=1)
    (table,) = plan.cells(plan.target("table2"), dataclasses.replace(wish, settings=("cifar10-lenet",)), tuned)
    (figure,) = plan.cells(plan.target("fig-200"), wish, tuned)
    assert (table.key.tuned, table.config.hyper) == (True, {"buffer": 5})
    assert (figure.key.tuned, figure.config.hyper) == (True, {"buffer": 5})


def test_keys_of_a_method_in_a_setting_hold_for_it_and_its_variants_alone() -> None:
    given = plan.setting("cifar10-vgg9").methods
    assert set(given) == {"aedfl"}
    wish = Wish(settings=("cifar10-vgg9",), methods=("aedfl", "aedfl-p", "fedavg"), seeds=1)
    found = {cell.key.method: cell.config.hyper for cell in plan.cells(plan.target("table2"), wish, {})}
    own = {key.removeprefix("hyper."): value for key, value in given["aedfl"].items() if key.startswith("hyper.")}
    assert found == {"aedfl": own, "aedfl-p": own, "fedavg": {}}
    tuned = {"cifar10-vgg9": {"aedfl": {"hyper.max_rate": 0.1}}}
    (aedfl, *_) = plan.cells(plan.target("table2"), wish, tuned)
    assert aedfl.config.hyper == {**own, "max_rate": 0.1}


def test_the_small_version_is_small() -> None:
    for name in targets():
        for found in cells(target(name), Wish(quick=True), {}):
            config = found.config
            assert config.devices <= 16 and (config.data.samples or 0) <= 400
            assert found.key.changes[0] == "quick" and found.key.seed == 1


def test_a_command_says_everything_that_was_asked() -> None:
    wish = Wish(quick=True, until=9.0, overrides=("hyper.mu=0.7",))
    asked = "--settings cifar10-lenet --methods fedprox --seeds 1 --quick --until 9 --set hyper.mu=0.7"
    assert one("fedprox", wish=wish).command == f"aedfl reproduce table2 {asked}"


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Wish(settings=("cifar-lenet",)), "unknown setting 'cifar-lenet'; did you mean 'cifar10-lenet'"),
        (Wish(methods=("fedavgg",)), "did you mean fedavg"),
        (Wish(overrides=("stop.virtual_seconds=3",)), "use --until"),
        (Wish(methods=("fedavg",), overrides=("hyper.mu=1",)), "unknown hyper-parameter 'mu'"),
        (Wish(overrides=("training.lr=fast",)), "training.lr = 'fast'"),
    ],
)
def test_mistakes_are_said_before_anything_runs(wish: Wish, words: str) -> None:
    with pytest.raises(UserError, match=words):
        for found in cells(target("table2"), replace(wish, seeds=1), {}):
            _ = found.identity


def gap(name: str, other: str, column: str) -> float:
    ours, theirs = paper.printed(name, "aedfl"), paper.printed(name, other)
    assert ours is not None and theirs is not None
    if column == "accuracy":
        return 100 * (ours.accuracy - theirs.accuracy)
    if column == "mmacs":
        return 100 * (1 - ours.mmacs / theirs.mmacs)
    assert ours.time is not None and theirs.time is not None
    return 100 * (1 - ours.time / theirs.time)


@pytest.mark.parametrize(
    ("name", "other", "column", "said"),
    [
        ("cifar10-lenet", "fedavg", "accuracy", 8.1),
        ("cifar10-lenet", "port", "accuracy", 12.3),
        ("cifar10-lenet", "ad-psgd", "accuracy", 13.1),
        ("cifar10-lenet", "fedavg", "time", 89.6),
        ("cifar10-lenet", "sageflow", "time", 92.0),
        ("cifar10-lenet", "dispfl", "time", 19.5),
        ("cifar10-lenet", "hap", "mmacs", 16.4),
        ("emnist-lenet", "fednova", "time", 61.5),
        ("emnist-lenet", "hap", "accuracy", 5.8),
        ("cifar10-resnet8", "fedavg", "accuracy", 8.5),
        ("cifar10-resnet8", "ad-psgd", "time", 92.8),
        ("tiny-resnet8", "fedap", "accuracy", 3.1),
        ("tiny-resnet8", "ad-psgd", "time", 24.5),
        ("cifar10-vgg9", "fedavg", "mmacs", 42.3),
        ("imdb-textcnn", "dispfl", "accuracy", 5.3),
        ("imdb-textcnn", "fedap", "time", 64.4),
        ("imdb-textcnn", "fedavg", "mmacs", 40.3),
    ],
)
def test_typed_numbers_give_what_the_papers_text_says(name: str, other: str, column: str, said: float) -> None:
    assert gap(name, other, column) == pytest.approx(said, abs=0.11)


def test_every_cell_of_the_papers_tables_is_typed_in() -> None:
    for name in PAPER_SETTINGS:
        assert all(paper.printed(name, method) for method in target("table1").methods)
    assert paper.printed("cifar10-vgg9", "safa") == paper.Printed(0.5732, None, 5.16)
    assert set(settings()) == PAPER_SETTINGS | {"digits-cnn"}
