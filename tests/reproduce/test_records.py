"""Records: nothing finished is lost, nothing better is overwritten, and what is there is not run again."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from aedfl.algorithms import METHODS
from aedfl.errors import UserError
from aedfl.reproduce.collect import collect
from aedfl.reproduce.plan import FIRST_SEED, setting
from aedfl.reproduce.pool import Outcome
from aedfl.reproduce.records import CURVE, Store, code_version, key_of
from aedfl.reproduce.sitting import Sitting, todo
from reproduce.fakes import key, record, store_of, tiny


def quiet(line: str) -> None: ...


def test_a_record_says_where_its_numbers_come_from(tmp_path: Path) -> None:
    cell = tiny("fedavg")
    sitting = Sitting(Store(tmp_path), quiet)
    sitting.run([cell])
    (found,) = Store(tmp_path)
    assert key_of(found) == cell.key
    assert found["config"] == cell.identity
    assert found["command"] == cell.command
    assert found["complete"] and found["reached"] == found["until"] == 30.0
    assert found["code"] == code_version() and len(found["code"]["source"]) == 16
    assert found["hyper"] == {"share": METHODS["fedavg"].hyper.share}
    assert found["device"] == "cpu" and not found["tuned"]
    assert {len(column) for column in found["curve"].values()} == {7}
    assert found["summary"]["accuracy"] == found["curve"]["accuracy"][-1]
    assert found["costs"]["training"] > 0


def test_what_is_there_is_not_run_again_unless_it_must_go_further(tmp_path: Path) -> None:
    store = Store(tmp_path)
    Sitting(store, quiet).run([tiny("fedavg", until=20.0)])
    again = Store(tmp_path)
    assert todo([tiny("fedavg", until=20.0), tiny("fedavg", until=10.0)], again) == []
    assert len(todo([tiny("fedavg", until=30.0)], again)) == 1
    assert len(todo([tiny("fedavg", seed=FIRST_SEED + 1, until=20.0)], again)) == 1
    changed = tiny("fedavg", until=20.0, changes=("training.lr=0.5",))
    assert todo([changed], again) == [changed]


def test_cells_of_one_config_are_run_once(tmp_path: Path) -> None:
    lines: list[str] = []
    store = Store(tmp_path)
    same = [tiny("fedbuff"), tiny("fedbuff", changes=("hyper.buffer=10",))]
    assert same[0].identity == same[1].identity
    Sitting(store, lines.append).run(same)
    assert "1 runs to go" in lines[0]
    first, second = (store.get(cell.key) for cell in same)
    assert first is not None and second is not None and first["curve"] == second["curve"]
    third = replace(tiny("fedbuff", changes=("hyper.lr=1.0",)), target="fig-topology", command="aedfl reproduce fig")
    assert todo([third], store) == [], "a record under another key is taken over"
    taken = store.get(third.key)
    assert taken is not None and taken["curve"] == first["curve"]
    assert (taken["target"], taken["command"]) == ("fig-topology", "aedfl reproduce fig"), "what it was taken for"


def test_shorter_and_failed_ones_do_not_replace_longer_ones(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("fedavg", [0.1, 0.2, 0.3]))
    assert not store.add(record("fedavg", [0.1, 0.2], end=400))
    assert not store.add(record("fedavg", [0.1, 0.2], end=1000, error="out of memory"))
    assert store.add(record("fedavg", [0.1, 0.4, 0.5]))
    again = Store(store.folder).get(key("fedavg"))
    assert again is not None and again["curve"]["accuracy"] == [0.1, 0.4, 0.5]


def test_another_config_replaces_a_longer_one_only_when_told(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("fedavg", [0.1, 0.2, 0.3]))
    for end in (400, 1000):
        assert not store.add(record("fedavg", [0.1, 0.9], end=end, config="new")), "nor one that goes just as far"
    assert store.add(record("fedavg", [0.1, 0.9], end=2000, config="new"))
    assert store.add(record("fedavg", [0.1, 0.9], end=400, config="newer"), replace=True)


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("fedavg", [0.1, 0.2]), record("fedprox", [0.1, 0.2]))
    path = store.folder / "cifar10-lenet.jsonl"
    path.write_text(path.read_text()[:-40])
    assert [one["method"] for one in Store(store.folder)] == ["fedavg"]
    path.write_text("no json\n" + path.read_text())
    with pytest.raises(UserError, match=r"line 1 is no JSON"):
        Store(store.folder)


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"3\n", "line 1 is no record"), (b'{"setting": "x"}\n', "line 1 is no record"), (b"\xff\xfe\x00", "is no text")],
)
def test_what_is_no_record_is_said_in_one_sentence(content: bytes, words: str, tmp_path: Path) -> None:
    (tmp_path / "cifar10-lenet.jsonl").write_bytes(content)
    with pytest.raises(UserError, match=words):
        Store(tmp_path)


def test_where_nothing_can_be_written_nothing_is_run(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    lines: list[str] = []
    with pytest.raises(OSError, match="taken"):
        Sitting(Store(tmp_path / "taken" / "records"), lines.append).run([tiny("fedavg")])
    assert len(lines) == 1 and "1 runs to go" in lines[0]


def test_what_comes_after_a_line_that_was_cut_off_is_not_lost(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("fedavg", [0.1, 0.2]), record("fedprox", [0.1, 0.2]))
    path = store.folder / "cifar10-lenet.jsonl"
    path.write_text(path.read_text()[:-40])
    again = Store(store.folder)
    for method in ("fedbuff", "port"):
        assert again.add(record(method, [0.1, 0.2]))
    assert sorted(one["method"] for one in Store(store.folder)) == ["fedavg", "fedbuff", "port"]


def test_a_run_of_the_present_config_replaces_a_longer_one_of_another(tmp_path: Path) -> None:
    end = setting("digits-cnn").end
    cell, short = tiny("fedavg", until=end), tiny("fedavg", until=20.0)
    old = record("fedavg", [0.1, 0.2, 0.3], setting="digits-cnn", changes=list(cell.key.changes), config="old")
    store = store_of(tmp_path, old)
    assert end < old["reached"] and todo([cell], store) == [cell]
    Sitting(store, quiet).run([short])
    assert [one["config"] for one in Store(store.folder)] == ["old"], "one that ends before its table replaces nothing"
    Sitting(store, quiet).run([cell])
    assert todo([cell], Store(store.folder)) == []


def test_a_run_that_is_cut_does_not_replace_a_longer_one_and_says_so(tmp_path: Path) -> None:
    lines: list[str] = []
    cell = tiny("fedavg", until=20.0)
    old = record("fedavg", [0.1, 0.2, 0.3], setting="digits-cnn", changes=list(cell.key.changes), config="old")
    store = store_of(tmp_path, old)
    row = {**dict.fromkeys(CURVE, 0.1), "time": 10.0, "costs": {}}
    row |= {name: 0.0 for name in ("consensus", "samples", "wall")}
    Sitting(store, lines.append)._save([cell], Outcome([row], complete=False))
    assert lines[-1].endswith("; the record of before goes further")
    Sitting(store, lines.append)._save([cell], Outcome([], complete=False, error="out of memory"))
    assert lines[-1].endswith("failed: out of memory")
    assert [one["config"] for one in Store(store.folder)] == ["old"]


def test_files_do_not_depend_on_the_order_of_running(tmp_path: Path) -> None:
    records = [record("fedavg", [0.1, 0.2], seed=2), record("aedfl", [0.1, 0.2]), record("fedavg", [0.1, 0.2])]
    for name, order in (("a", records), ("b", records[::-1])):
        store_of(tmp_path / name, *order).tidy()
    texts = {(tmp_path / name / "records" / "cifar10-lenet.jsonl").read_text() for name in "ab"}
    assert len(texts) == 1


def test_collecting_sorts_trials_from_cells(tmp_path: Path) -> None:
    away = tmp_path / "away"
    away.mkdir()
    trial = record("fedavg", [0.1, 0.2], seed=1000, target="tune", changes=["data.validation=0.1"])
    lines = [record("fedavg", [0.1, 0.2]), trial]
    (away / "all.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    outcome = collect([away], tmp_path / "results")
    assert (outcome.taken, outcome.left, outcome.tuned) == (2, 0, {"cifar10-lenet"})
    assert [one["seed"] for one in Store(tmp_path / "results" / "records")] == [1]
    assert [one["seed"] for one in Store(tmp_path / "results" / "tuning")] == [1000]
    assert (tmp_path / "results" / "tuning" / "cifar10-lenet.json").exists()


@pytest.mark.parametrize(("name", "words"), [("nowhere", "does not exist"), ("", "has no records")])
def test_collecting_from_the_wrong_place(tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        collect([tmp_path / name], tmp_path / "results")
