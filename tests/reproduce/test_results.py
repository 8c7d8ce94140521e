"""What is published in results/ follows from its records, and a record follows from its command."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aedfl.cli import app
from aedfl.reproduce import publish, tune
from aedfl.reproduce.overview import ranking
from aedfl.reproduce.plan import FIRST_SEED, QUICK, Wish, cell, cells, settings, target, targets, titles
from aedfl.reproduce.records import CURVE, Store, key_of
from aedfl.reproduce.standing import COLUMNS, standing

RESULTS = Path(__file__).parents[2] / "results"
STORE = Store(RESULTS / "records")
FILES = publish.everything(STORE)


@pytest.mark.parametrize("name", sorted(FILES))
def test_a_published_file_is_what_its_records_say(name: str) -> None:
    assert (RESULTS / name).read_text(encoding="utf-8") == FILES[name], "write it anew: aedfl reproduce tables"


def test_nothing_is_published_without_records() -> None:
    there = {
        path.relative_to(RESULTS).as_posix() for kind in ("tables", "figures") for path in (RESULTS / kind).rglob("*")
    }
    assert there <= set(FILES)


def test_frozen_values_are_what_the_trials_say(tmp_path: Path) -> None:
    store = Store(RESULTS / "tuning")
    store.folder = tmp_path
    for path in (RESULTS / "tuning").glob("*.json"):
        content = json.loads(path.read_text())
        assert tune.freeze(path.stem, store, content["until"], content["trials"], Wish()) == content


def test_records_are_whole_and_of_fresh_seeds() -> None:
    for record in STORE:
        assert FIRST_SEED <= record["seed"] < min(tune.seeds())
        assert {"command", "config", "code", "device", "torch", "when"} <= set(record), key_of(record)
        assert "data.validation" not in "".join(record["changes"])
        if "curve" in record:
            assert set(record["curve"]) == set(CURVE)
            assert record["curve"]["time"][-1] == pytest.approx(record["reached"], abs=1e-3)
    for record in Store(RESULTS / "tuning"):
        assert record["seed"] in tune.seeds()
        assert any(change.startswith("data.validation=") for change in record["changes"])


def test_the_docs_name_leaders_and_figures_as_the_records_have_them() -> None:
    text = (RESULTS.parent / "docs" / "reproduction.md").read_text(encoding="utf-8")
    section = text.split("### Who leads")[1].split("\n\n")
    (table,) = [part for part in section if part.startswith("| setting | accuracy |")]
    lines = table.splitlines()[2:]
    methods, named = {words: name for name, words in titles().items()}, {one.title: one for one in settings().values()}
    tables = [aim for aim in targets().values() if aim.is_table]
    assert len(lines) == sum(len(aim.settings) for aim in tables)
    for line in lines:
        setting, *fields = [field.strip() for field in line.strip("|").split("|")]
        (aim,) = [aim for aim in tables if named[setting].name in aim.settings]
        stand = standing(aim, named[setting].name, STORE, Wish())
        for field, column in zip(fields, COLUMNS, strict=True):
            order = ranking(stand, column)
            assert (field in ("none", "FedAvg not run")) == (not order), (setting, column.key)
            found = re.findall(r"([\w-]+?)\** ([\d.]+)", field)
            assert {words for words, _ in found} <= set(methods) and bool(found) == bool(order), (setting, column.key)
            for words, figure in found:
                places = len(figure.partition(".")[2])
                assert f"{dict(order)[methods[words]]:.{places}f}" == figure, (setting, column.key, words)
            for words in re.findall(r"\*\*(.+?)\*\*", field):
                assert methods[words] == order[0][0], (setting, column.key)


def test_no_record_is_of_a_config_that_is_no_longer_run() -> None:
    """Tables show whatever goes far enough; this keeps out what a changed default has made out of date."""
    tuned = tune.frozen(RESULTS / "tuning")
    for record in STORE:
        quick, changes = QUICK in record["changes"], [change for change in record["changes"] if change != QUICK]
        now = cell(
            record["setting"],
            record["method"],
            record["seed"],
            Wish(quick=quick),
            changes,
            record["target"],
            tuned.get(record["setting"], {}) if record["tuned"] else {},
        )
        assert now.key == key_of(record)
        assert now.identity == record["config"], key_of(record)


def test_every_record_can_be_run_again_by_its_command() -> None:
    """With the values that tuning chose, or by `--tuning` and an empty folder if the record was made without."""
    tuned = tune.frozen(RESULTS / "tuning")
    for record in STORE:
        program, group, name, *words = shlex.split(record["command"])
        options = [word for word in words if word != "--quick"]
        assert (program, group, len(options) % 2) == ("aedfl", "reproduce", 0)
        given = [pair for pair in zip(options[::2], options[1::2], strict=True) if pair[0] != "--set"]
        asked = dict(given)
        assert len(given) == len(asked)
        wish = Wish(
            settings=tuple(asked.pop("--settings").split(",")),
            methods=tuple(asked.pop("--methods").split(",")),
            seeds=int(asked.pop("--seeds")),
            until=float(asked.pop("--until", 0)) or None,
            quick="--quick" in words,
        )
        assert not asked
        runs = cells(target(name), wish, tuned if record["tuned"] else {})
        assert record["config"] in {one.identity for one in runs}, record["command"]


def test_every_trial_is_one_that_its_command_runs() -> None:
    for path in (RESULTS / "tuning").glob("*.json"):
        content = json.loads(path.read_text())
        methods = list(content["methods"])
        planned = [
            *tune.plan(path.stem, methods, content["trials"], Wish()),
            *tune.plan_further(path.stem, methods, content, Wish()),
            *tune.plan_late(path.stem, methods, content, Wish()),
        ]
        trials = {record["config"]: record for record in Store(RESULTS / "tuning") if record["setting"] == path.stem}
        replaced = set(trials) - {one.identity for one in planned}
        assert len(planned) + len(replaced) == len(trials)
        assert len(replaced) <= 1 and all(trials[one]["method"] == "aedfl" for one in replaced), "as the docs say"
        for record in trials.values():
            words = ["aedfl", "reproduce", tune.TARGET, record["setting"], "--methods", record["method"]]
            assert shlex.split(record["command"])[:6] == words


def test_a_cheap_cell_comes_out_as_published(tmp_path: Path) -> None:
    """Re-runs the cheapest record; another processor may round the last bits differently, and no more."""
    (published,) = [record for record in STORE if record["setting"] == "digits-cnn"]
    _, *args = shlex.split(published["command"])
    result = CliRunner().invoke(app, [*args, "--out", str(tmp_path), "--device", "cpu"], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (again,) = Store(tmp_path / "records")
    assert again["config"] == published["config"]
    assert again["curve"]["time"] == published["curve"]["time"]
    assert again["curve"]["updates"] == published["curve"]["updates"]
    assert again["curve"]["bytes_sent"] == published["curve"]["bytes_sent"]
    for column in ("accuracy", "local_accuracy"):
        assert again["curve"][column] == pytest.approx(published["curve"][column], abs=0.02)
    assert again["curve"]["loss"] == pytest.approx(published["curve"]["loss"], abs=0.01)
