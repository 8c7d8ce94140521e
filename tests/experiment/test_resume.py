"""A run that was interrupted ends as if it had not been."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from aedfl.errors import UserError
from aedfl.experiment import checkpoint
from aedfl.experiment.compare import compare
from aedfl.experiment.config import RunConfig, config_hash, from_toml, to_toml
from aedfl.experiment.progress import Silent
from aedfl.experiment.record import read_rows
from aedfl.experiment.run import Run, claim, drive_all, resume, run
from aedfl.experiment.workshop import Workshop
from experiment.small import NOSY, interrupted, pruning, record, simple_run, small, whole

CONFIGS: dict[str, Callable[[], RunConfig]] = {
    "plain": small,
    "nosy": lambda: small(NOSY),
    "pruning": pruning,
    "server": lambda: small("fedbuff"),
    "pairs": lambda: small("ad-psgd"),
    "crashing": lambda: small(NOSY, fleet={"mean_up": 12.0, "mean_down": 3.0}),
    "sequential": lambda: small(NOSY, engine={"trainer": "sequential"}, devices=3, stop={"virtual_seconds": 16.0}),
    "updates": lambda: small(stop={"virtual_seconds": None, "updates": 4}, evaluation={"every": 0.5}),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_run_dropped_at_any_flush_ends_the_same(name: str, tmp_path: Path) -> None:
    """Dropped again and again, after a random number of flushes each time."""
    config = CONFIGS[name]()
    expected = whole(config)
    folder = tmp_path / "torn"
    claim(folder, config, force=False)
    draw = random.Random(name)
    interruptions = 0
    workshop = Workshop()
    while not interrupted(folder, draw.randint(1, 5 if interruptions < 12 else 1000), workshop):
        interruptions += 1
    assert interruptions >= 2
    assert record(folder) == expected


def test_a_run_dropped_at_every_single_flush_ends_the_same(tmp_path: Path) -> None:
    config = small(NOSY, stop={"virtual_seconds": 8.0})
    expected = whole(config)
    workshop = Workshop()
    for flushes in range(1, 200, 2):
        folder = tmp_path / f"torn{flushes}"
        claim(folder, config, force=False)
        if interrupted(folder, flushes, workshop):
            break
        assert interrupted(folder, 10_000, workshop)
        assert record(folder) == expected
    assert flushes > 8


def test_resuming_trains_nothing_that_was_trained_before(tmp_path: Path) -> None:
    """Work is done again only from the last checkpoint on."""
    config = small(NOSY)
    all_at_once, rest = Workshop(), Workshop()
    claim(tmp_path / "whole", config, force=False)
    interrupted(tmp_path / "whole", 10_000, all_at_once)
    claim(tmp_path / "torn", config, force=False)
    interrupted(tmp_path / "torn", all_at_once.queue.flushes - 5)
    interrupted(tmp_path / "torn", 10_000, rest)
    assert 0 < sum(rest.queue.batches) < 0.5 * sum(all_at_once.queue.batches)


def test_what_programs_read_is_journalled(tmp_path: Path) -> None:
    simple_run(small(NOSY), tmp_path / "run")
    answers = read_rows(tmp_path / "run" / "journal.jsonl")
    updates = read_rows(tmp_path / "run" / "updates.jsonl")
    own = [answer for answer in answers if isinstance(answer[1], list)]
    assert len(own) >= len(updates)
    assert any(vector != sorted(vector) for _, vector in own), "the journal has what the program made of it"


KILLER = Path(__file__).parent / "killer.py"


def killed(config: RunConfig, folder: Path, kills: int, longest: float) -> int:
    """Runs the config in a process that is killed so many times; how many of them hit it alive."""
    folder.mkdir()
    (folder.parent / "given.toml").write_text(to_toml(config))
    arguments = [str(folder.parent / "given.toml"), str(folder), str(kills), str(longest)]
    command = [sys.executable, str(KILLER), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def timed(config: RunConfig) -> tuple[Any, float]:
    """The record of a whole run, and how long a process may live so that a few of them are killed before its end."""
    began = time.monotonic()
    expected = whole(config)
    return expected, (time.monotonic() - began) / 5


def test_a_run_killed_at_random_moments_ends_the_same(tmp_path: Path) -> None:
    config = small(NOSY, stop={"virtual_seconds": 240.0})
    expected, share = timed(config)
    hits = killed(config, tmp_path / "torn", kills=8, longest=min(0.8, share))
    assert hits >= 5
    assert record(tmp_path / "torn") == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "nosy", "pruning", "crashing", "sequential"])
def test_a_run_killed_very_often_ends_the_same(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]()
    config = config.model_copy(update={"stop": config.stop.model_copy(update={"virtual_seconds": 200.0})})
    expected, share = timed(config)
    assert killed(config, tmp_path / "torn", kills=25, longest=min(1.5, share)) >= 10
    assert record(tmp_path / "torn") == expected


# What stands in the way --------------------------------------------------------------------------------------


@pytest.fixture
def torn(tmp_path: Path) -> Path:
    """A run that was dropped after a few checkpoints."""
    folder = tmp_path / "torn"
    claim(folder, small(NOSY), force=False)
    assert not interrupted(folder, 12)
    assert len(checkpoints(folder)) == 3
    return folder


def checkpoints(folder: Path) -> list[Path]:
    return sorted(checkpoint.folder(folder).glob("*.safetensors"))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def damaged(data: bytes, damage: str) -> bytes:
    """The bytes with a part missing, with nonsense in place of them, or with one bit another one."""
    if damage in ("value", "position"):
        place = len(data) - 9 if damage == "value" else data.index(b"evaluations") + len(b'evaluations\\": ')
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]
    return {"truncated": data[:-100], "empty": b"", "garbage": bytes(reversed(data))}[damage]


DAMAGES = ["truncated", "empty", "garbage", "value", "position"]


@pytest.mark.parametrize("damage", DAMAGES)
def test_if_all_checkpoints_are_damaged_the_newest_is_named_and_nothing_is_touched(damage: str, torn: Path) -> None:
    for path in checkpoints(torn):
        path.write_bytes(damaged(path.read_bytes(), damage))
    before = content(torn)
    newest = checkpoints(torn)[-1]
    with pytest.raises(UserError, match=rf"checkpoint {newest} is damaged \(.*\), and no other one is whole") as error:
        resume(torn)
    assert "\n" not in str(error.value)
    assert content(torn) == before


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(damage: str, torn: Path, caplog: pytest.LogCaptureFixture) -> None:
    expected = whole(small(NOSY))
    *_, before, newest = checkpoints(torn)
    newest.write_bytes(damaged(newest.read_bytes(), damage))
    assert interrupted(torn, 10_000)
    (said,) = caplog.messages
    assert said.startswith(f"checkpoint {newest} is damaged") and said.endswith(f"goes on from {before.name}")
    assert record(torn) == expected


def test_no_bit_of_a_checkpoint_can_change_unnoticed(tmp_path: Path) -> None:
    claim(tmp_path, config := small(devices=2, model={"name": "mlp", "options": {"hidden": [1]}}), force=False)
    assert not interrupted(tmp_path, 5)
    path, fingerprint = checkpoints(tmp_path)[-1], config_hash(config)
    for other in checkpoints(tmp_path)[:-1]:
        other.unlink()
    whole, draw = path.read_bytes(), random.Random(0)
    expected, _ = cast(tuple[checkpoint.Position, Path], checkpoint.latest(tmp_path, fingerprint))
    values = checkpoint.tensors(path, "cpu")
    for place in draw.sample(range(len(whole)), 300):
        changed = bytes([whole[place] ^ 1 << draw.randrange(8)])
        path.write_bytes(whole[:place] + changed + whole[place + 1 :])
        try:
            found, _ = cast(tuple[checkpoint.Position, Path], checkpoint.latest(tmp_path, fingerprint))
        except UserError:
            continue
        assert found == expected and all(map(torch.equal, checkpoint.tensors(path, "cpu").values(), values.values()))


def test_a_checkpoint_without_a_checksum_is_taken(torn: Path) -> None:
    expected = whole(small(NOSY))
    newest = checkpoints(torn)[-1]
    with checkpoint.safe_open(newest, "pt") as file:
        position = file.metadata()["position"]
    checkpoint.save(checkpoint.tensors(newest, "cpu"), newest, {"position": position})
    assert interrupted(torn, 10_000)
    assert record(torn) == expected


@pytest.mark.parametrize("line", [b"\xff garbage", b'{"time":', b"7", b""])
@pytest.mark.parametrize("stream", ["metrics", "journal"])
def test_a_damaged_row_is_named_and_nothing_is_touched(stream: str, line: bytes, torn: Path) -> None:
    path = torn / f"{stream}.jsonl"
    lines = path.read_bytes().split(b"\n")
    lines[1] = line + b" " * (len(lines[1]) - len(line))
    path.write_bytes(b"\n".join(lines))
    before = content(torn)
    with pytest.raises(UserError) as error:
        resume(torn)
    assert str(error.value) == f"{path} is damaged: line 2 is no row of a record"
    assert content(torn) == before


@pytest.mark.parametrize("text", ["{}", "", "[1]", '{"seed": 0}', '{"method": '])
def test_a_damaged_summary_is_named(text: str, tmp_path: Path) -> None:
    folder = tmp_path / "aedfl-0-seed0"
    run(config := small(), folder)
    expected = record(folder)
    (folder / "summary.json").write_text(text)
    for go_on in (lambda: resume(folder), lambda: compare([config], tmp_path, resume=True)):
        with pytest.raises(UserError) as error:
            go_on()
        assert str(error.value) == f"{folder / 'summary.json'} is damaged; delete it, and --resume makes the run anew"
    (folder / "summary.json").unlink()
    resume(folder)
    assert record(folder) == expected


def test_without_the_damaged_checkpoint_the_one_before_serves(torn: Path, tmp_path: Path) -> None:
    expected = whole(small(NOSY))
    checkpoints(torn)[-1].unlink()
    assert interrupted(torn, 10_000)
    assert record(torn) == expected


def test_without_any_checkpoint_a_run_begins_anew(torn: Path, tmp_path: Path) -> None:
    expected = whole(small(NOSY))
    for path in checkpoints(torn):
        path.unlink()
    assert interrupted(torn, 10_000)
    assert record(torn) == expected


def test_a_checkpoint_of_another_config_is_refused_and_nothing_is_touched(torn: Path) -> None:
    (torn / "config.toml").write_text(to_toml(small(NOSY, training={"lr": 0.06})))
    before = content(torn)
    with pytest.raises(UserError) as error:
        resume(torn)
    newest = checkpoints(torn)[-1]
    assert str(error.value) == f"checkpoint {newest} was made with another config than {torn / 'config.toml'}"
    assert content(torn) == before


def test_settings_without_effect_may_change_between(torn: Path, tmp_path: Path) -> None:
    expected = whole(small(NOSY))
    (torn / "config.toml").write_text(to_toml(small(NOSY, engine={"lookahead": 2, "threads": 2})))
    assert interrupted(torn, 10_000)
    assert record(torn) == expected


def test_a_record_that_was_cut_off_is_refused_and_nothing_is_touched(torn: Path) -> None:
    path = torn / "updates.jsonl"
    path.write_bytes(path.read_bytes()[:50])
    before = content(torn)
    with pytest.raises(UserError, match=f"{path} is shorter than when the checkpoint was made"):
        resume(torn)
    assert content(torn) == before


def test_only_the_last_few_checkpoints_are_kept_and_none_after_the_end(torn: Path) -> None:
    numbers = [int(path.stem) for path in checkpoints(torn)]
    assert numbers == list(range(numbers[-1] - 2, numbers[-1] + 1))
    assert interrupted(torn, 10_000)
    assert not checkpoints(torn)


def test_what_is_no_run_folder_cannot_be_resumed(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=f"{tmp_path} is not a run folder: .*config.toml does not exist"):
        resume(tmp_path)


def test_resuming_a_finished_run_gives_its_summary_and_changes_nothing(tmp_path: Path) -> None:
    summary = run(small(), tmp_path / "run")
    before = content(tmp_path / "run")
    assert resume(tmp_path / "run") == summary
    assert content(tmp_path / "run") == before


def test_a_report_that_was_not_written_any_more_is_written_later(tmp_path: Path) -> None:
    """Killed between the summary and the report."""
    run(small(), tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    resume(tmp_path / "run")
    assert (tmp_path / "run" / "report.html").is_file()


def test_wall_time_is_added_up(torn: Path) -> None:
    with checkpoint.safe_open(checkpoints(torn)[-1], "pt") as file:
        used = json.loads(file.metadata()["position"])["wall"]
    summary: dict[str, Any] = resume(torn)
    assert summary["wall_seconds"] > used > 0


def test_a_resumed_run_reads_the_config_that_it_was_started_with(torn: Path) -> None:
    assert from_toml((torn / "config.toml").read_text()) == small(NOSY)


def test_a_checkpoint_of_a_method_that_asks_for_other_values_is_not_taken(tmp_path: Path) -> None:
    config = small()
    claim(tmp_path, config, force=False)
    interrupted(tmp_path, 6)
    position, path = cast(tuple[checkpoint.Position, Path], checkpoint.latest(tmp_path, config_hash(config)))
    other = replace(position, values=position.values + 1)
    checkpoint.save(checkpoint.tensors(path, "cpu"), path, {"position": json.dumps(asdict(other))})
    with pytest.raises(UserError, match="was made by another version of the method"):
        interrupted(tmp_path, 1000)


def test_checkpoints_take_a_small_share_of_the_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of their own: each takes ten seconds or so, and a few pass between two looks."""
    now = [0.0]
    written: list[float] = []

    def clock() -> float:
        now[0] += 4.0
        return now[0]

    def write(*_: Any) -> None:
        now[0] += 10.0
        written.append(now[0])

    monkeypatch.setattr("aedfl.experiment.run.time.monotonic", clock)
    monkeypatch.setattr("aedfl.experiment.run.checkpoint.write", write)
    record = {"checkpoint_seconds": 1e-9, "checkpoint_share": 0.25}
    claim(tmp_path, config := small(record=record, stop={"virtual_seconds": 60.0}), force=False)
    workshop = Workshop()
    drive_all([Run(config, workshop, tmp_path, Silent())], workshop)
    assert len(written) >= 2
    assert all(later - earlier >= 40 for earlier, later in pairwise(written))
