"""Bad neighbours: what each rule does to a model, and eight devices of which one is poisoned."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from aedfl.algorithms import get
from aedfl.context import SERVER, Message, Model, Size
from aedfl.experiment.config import RunConfig, load
from aedfl.graph import Value
from aedfl.net.gate import Gate, Robust
from aedfl.net.kit import Kit, gather
from net.cluster import Cluster

START = torch.zeros(4)


def model(*values: float, mask: list[bool] | None = None) -> Model:
    kept = None if mask is None else Value(torch.tensor(mask))
    return Model(Value(torch.tensor(values, dtype=torch.float32)), Size(4, 1.0), kept)


def message(source: int, given: Model) -> Message:
    return Message(source, "model", given, {"samples": 3})


def passed(gate: Gate, source: int, given: Model, own: Model) -> list[float] | None:
    found = gate(message(source, given), own)
    return None if found is None or found.model is None else found.model.vector.get().tolist()


def test_nothing_is_done_by_default() -> None:
    assert not Robust().active and Robust(rule="median").active and Robust(clip=1.0).active


def test_a_message_without_a_model_passes() -> None:
    gate = Gate(Robust(cosine=0.9, clip=0.1, rule="median"), START)
    assert gate(Message(1, "ready", None, {}), model(1, 0, 0, 0)) is not None


def test_cosine_keeps_out_what_went_the_other_way() -> None:
    gate = Gate(Robust(cosine=0.0), START)
    own = model(1, 1, 0, 0)
    assert passed(gate, 1, model(2, 0, 0, 0), own) == [2, 0, 0, 0]
    assert passed(gate, 1, model(-1, -1, 0, 0), own) is None
    assert passed(gate, 1, model(1, 1, 0, 0), model(0, 0, 0, 0)) is None, "nothing to compare with yet"
    assert passed(Gate(Robust(cosine=0.0), START, trusting=True), 1, model(1, 1, 0, 0), model(0, 0, 0, 0)) is not None
    assert passed(gate, SERVER, model(-1, -1, 0, 0), own) is not None


def test_clip_pulls_a_far_model_near() -> None:
    gate = Gate(Robust(clip=1.0), START)
    own = model(3, 4, 0, 0)
    assert passed(gate, 1, model(3, 4, 50, 0), own) == pytest.approx([3, 4, 5, 0])
    assert passed(gate, 1, model(3, 4, 1, 0), own) == [3, 4, 1, 0]


def test_the_median_is_over_the_own_model_and_the_newest_of_each() -> None:
    gate = Gate(Robust(rule="median"), START)
    own = model(1, 1, 1, 1)
    assert passed(gate, 1, model(2, 2, 2, 2), own) == [1, 1, 1, 1], "two opinions have no middle"
    assert passed(gate, 2, model(-9e9, 9e9, 3, 0), own) == [1, 2, 2, 1]
    assert passed(gate, 2, model(3, 3, 3, 3), own) == [2, 2, 2, 2], "its older model has no say"
    gate.forget({2})
    assert passed(gate, 2, model(3, 3, 3, 3), own) == [1, 1, 1, 1]


def test_the_trimmed_mean_leaves_out_either_end() -> None:
    gate = Gate(Robust(rule="trimmed", trim=0.34), START)
    own = model(0, 0, 0, 0)
    passed(gate, 1, model(1, 1, 1, 1), own)
    passed(gate, 2, model(2, 2, 2, 2), own)
    assert passed(gate, 3, model(9e9, -9e9, 1, 1), own) == pytest.approx([1.5, 0.5, 1, 1])


def test_a_pruned_entry_is_no_opinion() -> None:
    gate = Gate(Robust(rule="median"), START)
    own = model(1, 1, 1, 1)
    gate(message(2, model(2, 2, 2, 2)), own)
    found = gate(message(1, model(5, 0, 5, 0, mask=[True, False, True, False])), own)
    assert found is not None and found.model is not None and found.model.mask is not None
    assert found.model.vector.get().tolist() == [2, 0, 2, 0]


# ---- eight devices, one of them poisoned

DEVICES, UPDATES = 8, 40


def settings() -> RunConfig:
    return load(
        "digits", method="aedfl-rl-dwu", devices=DEVICES, model={"name": "mlp"},
        data={"name": "digits", "partition": "iid"}, training={"epochs": 2, "batch_size": 10, "lr": 0.1},
        stop={"updates": UPDATES, "virtual_seconds": 100.0, "target_accuracy": "none"},
    )  # fmt: skip


@cache
def digits() -> Kit:
    kit = gather(settings())
    return replace(kit, test_rows=kit.test_rows[:0])


class Poisoned:
    """Well-formed and finite: the sign flipped, ten times as large, and said to be the best of all."""

    def __init__(self, outbox: Any) -> None:
        self._outbox = outbox

    def __getattr__(self, name: str) -> Any:
        return getattr(self._outbox, name)

    def send(self, to: int, kind: str, given: Model, fields: dict[str, Any]) -> None:
        bad = replace(given, vector=Value(given.vector.get() * -10.0))
        self._outbox.send(to, kind, bad, {**fields, "loss": Value(torch.tensor(1e-3))})


def learned(folder: Path, robust: Robust, poisoned: bool = True) -> list[float]:
    """Accuracy of the seven honest devices' own models after so many local updates."""

    async def run() -> list[Model]:
        made = Cluster(folder, DEVICES, False, get("aedfl-rl-dwu").device)
        made.config, made.method = settings(), get("aedfl-rl-dwu")
        await made.coordinate()
        for index in range(DEVICES):
            made.start(index, robust=robust, prepare=lambda config: replace(digits(), config=config), settle=2.0)
        await made.until(lambda: all(hasattr(node, "context") for node in made.nodes.values()), 30)
        if poisoned:
            made.nodes[3].context._outbox = Poisoned(made.nodes[3].transport)
        await made.until(lambda: all(made.updates(i) >= UPDATES for i in range(DEVICES)), 80)
        models = [made.nodes[i].context.model for i in range(DEVICES) if i != 3]
        await made.close()
        return [found for found in models if found is not None]

    kit = gather(settings())
    return sorted(kit.score(found) or 0.0 for found in asyncio.run(run()))


def test_one_of_eight_is_poisoned_and_the_others_still_learn(tmp_path: Path) -> None:
    digits()
    assert learned(tmp_path, Robust(rule="median"))[0] > 0.6


@pytest.mark.slow
@pytest.mark.parametrize(
    "robust", [Robust(rule="trimmed"), Robust(cosine=0.0), Robust(cosine=0.0, clip=1.0, rule="median")]
)
def test_every_rule_withstands_it(tmp_path: Path, robust: Robust) -> None:
    digits()
    assert learned(tmp_path, robust)[0] > 0.75


@pytest.mark.slow
def test_without_a_rule_the_poison_works(tmp_path: Path) -> None:
    """So the tests above show something."""
    digits()
    clean, poisoned = learned(tmp_path / "a", Robust(), poisoned=False), learned(tmp_path / "b", Robust())
    assert clean[0] > 0.8 and poisoned[0] < clean[0] - 0.2
