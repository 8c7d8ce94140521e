"""`aedfl reproduce` from the command line, end to end on small settings."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from aedfl.cli import app
from aedfl.cli.reproduce import TARGETS
from aedfl.data import load
from aedfl.errors import UserError
from aedfl.reproduce.plan import targets
from aedfl.reproduce.records import Store
from reproduce.fakes import TINY, Told

SMALL = [part for change in TINY for part in ("--set", change)] + ["--until", "20", "--device", "cpu"]


def reproduce(*args: str) -> Result:
    return CliRunner().invoke(app, ["reproduce", *args], catch_exceptions=False)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_every_target_is_a_command_with_help() -> None:
    assert set(TARGETS) == set(targets())
    for name in TARGETS:
        assert reproduce(name, "--help").exit_code == 0


def test_a_cell_end_to_end_then_resumed_then_rendered_again() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg,aedfl", "--seeds", "1", "--out", "here", *SMALL)
    first = reproduce(*asked)
    assert first.exit_code == 0, first.output
    assert "0 of 2 cells done, 2 runs to go" in first.stdout
    page = Path("here/tables/table2.md").read_text()
    records = Path("here/records/digits-cnn.jsonl").read_text()
    accuracy = {one["method"]: one["curve"]["accuracy"][-3:] for one in Store(Path("here/records"))}
    for method, name in (("fedavg", "FedAvg"), ("aedfl", "AEDFL")):
        row = next(line for line in page.splitlines() if line.startswith(f"| {name} |"))
        assert f"{sum(accuracy[method]) / 3:.4f}" in row
    second = reproduce(*asked)
    assert "2 of 2 cells done, 0 runs to go" in second.stdout
    assert Path("here/records/digits-cnn.jsonl").read_text() == records
    more = reproduce(*asked[:6], "2", *asked[7:])
    assert "2 of 4 cells done, 2 runs to go" in more.stdout


def test_time_that_is_up_ends_cleanly_and_is_made_up_for_later() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg", "--seeds", "1", "--out", "here", *SMALL)
    cut = reproduce(*asked, "--minutes", "1e-9", "--records-only")
    assert cut.exit_code == 0, cut.output
    assert not list(Store(Path("here/records")))
    assert not Path("here/tables").exists()
    assert reproduce(*asked).exit_code == 0
    assert len(list(Store(Path("here/records")))) == 1


@pytest.mark.parametrize("processes", ["1", "2"])
def test_a_scheduler_that_ends_it_leaves_what_there_is(processes: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """SIGTERM does what Ctrl-C does."""
    before = signal.getsignal(signal.SIGTERM)
    told = Told(20.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    monkeypatch.setattr("aedfl.reproduce.sitting.teller", lambda say: told)
    long = ["1e6" if part == "20" else part for part in SMALL]
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg", "--seeds", "2", "--out", "here", *long)
    ended = reproduce(*asked, "--processes", processes)
    assert ended.exit_code == 130 and "go on by the same command" in ended.output
    records = list(Store(Path("here/records")))
    assert records and all(one["reached"] > 0 and not one["complete"] for one in records)
    assert signal.getsignal(signal.SIGTERM) == before


def test_cells_run_in_processes_of_their_own() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg,fedprox", "--seeds", "1", *SMALL)
    assert reproduce(*asked, "--out", "alone").exit_code == 0
    result = reproduce(*asked, "--out", "beside", "--processes", "2")
    assert result.exit_code == 0, result.output
    curves = [{one["method"]: one["curve"] for one in Store(Path(out) / "records")} for out in ("alone", "beside")]
    assert set(curves[0]) == {"fedavg", "fedprox"} and curves[0] == curves[1]


def test_tuned_values_are_used_by_the_tables() -> None:
    tuned = reproduce("tune", "digits-cnn", "--methods", "fedavg", "--trials", "2", "--out", "results", *SMALL)
    assert tuned.exit_code == 0, tuned.output
    assert "fedavg: " in tuned.stdout
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg,fedprox", "--seeds", "1", *SMALL)
    assert reproduce(*asked).exit_code == 0
    flags = {one["method"]: one["tuned"] for one in Store(Path("results/records"))}
    assert flags == {"fedavg": True, "fedprox": False}


def test_tuning_one_method_leaves_the_choices_of_others() -> None:
    asked = ("tune", "digits-cnn", "--trials", "2", *SMALL)
    assert reproduce(*asked, "--methods", "fedavg").exit_code == 0
    path = Path("results/tuning/digits-cnn.json")
    (chosen,) = json.loads(path.read_text())["methods"].values()
    assert chosen["chosen"] is not None
    before = path.read_text()
    assert reproduce(*asked, "--methods", "fedavgg").exit_code == 2
    assert path.read_text() == before, "a mistake changes nothing"
    longer = [*asked[:-4], "--until", "40", "--device", "cpu"]
    assert reproduce(*longer, "--methods", "fedprox", "--minutes", "1e-9").exit_code == 0
    assert json.loads(path.read_text())["methods"]["fedavg"] == chosen
    assert reproduce("tune", "digits-cnn", "--quick", "--out", "results", "--methods", "fedprox").exit_code == 2
    assert path.read_text() == before


def test_a_version_of_ones_own_does_not_take_the_published_ones_place() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg", "--seeds", "1", *SMALL)
    assert reproduce(*asked).exit_code == 0
    assert len(list(Store(Path("results/records")))) == 1
    assert not Path("results/tables").exists()
    assert "| FedAvg | 1 |" in Path("runs/reproduce-own/tables/table2.md").read_text()
    assert reproduce("tables", "--until", "10").exit_code == 0
    assert not Path("results/tables").exists()
    assert reproduce("tables").exit_code == 0
    published = Path("results/tables/table2.md").read_text()
    pace = ("--set", "record.checkpoint_seconds=900", "--minutes", "1e-9")
    assert reproduce("table2", "--settings", "cifar10-lenet", "--methods", "fedavg", *pace).exit_code == 0
    assert Path("results/tables/table2.md").read_text() == published, "all of it, whatever was run"
    other = ("--settings", "cifar10-lenet", "--methods", "fedavg,aedfl-0", "--minutes", "1e-9")
    assert reproduce("table2", *other).exit_code == 0
    assert Path("results/tables/table2.md").read_text() == published, "AEDFL-0 is none of its methods"
    assert "AEDFL-0" in Path("runs/reproduce-own/tables/table2.md").read_text()


def test_records_made_elsewhere_are_collected_and_listed() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg", "--seeds", "1", "--out", "away", *SMALL)
    assert reproduce(*asked, "--records-only").exit_code == 0
    taken = reproduce("collect", "away")
    assert "taken over: 1 records" in taken.stdout, taken.output
    assert Path("results/README.md").is_file()
    listed = reproduce("list").stdout
    assert "aedfl reproduce table1 --settings emnist-lenet --seeds 3" in listed
    assert reproduce("tables", "--until", "10").exit_code == 0


def test_trials_run_in_shares_are_chosen_from_once_they_are_together() -> None:
    asked = ("tune", "digits-cnn", "--methods", "fedavg", "--trials", "2", *SMALL)
    for share in ("1of2", "2of2"):
        done = reproduce(*asked, "--share", share.replace("of", "/"), "--out", share)
        assert done.exit_code == 0 and "fedavg: undecided" in done.stdout, done.output
        assert len(list(Store(Path(share, "tuning")))) == 1
    assert reproduce("collect", "1of2", "2of2").exit_code == 0
    done = reproduce(*asked)
    assert "2 of 2 cells done, 0 runs to go" in done.stdout and "fedavg: undecided" not in done.stdout, done.output


def test_shares_do_everything_once_between_them() -> None:
    asked = ("table2", "--settings", "digits-cnn", "--methods", "fedavg,fedprox", "--seeds", "2", *SMALL)
    found = []
    for share in ("1/3", "2/3", "3/3"):
        folder = share.replace("/", "of")
        assert reproduce(*asked, "--share", share, "--out", folder, "--records-only").exit_code == 0
        found.append({(one["method"], one["seed"]) for one in Store(Path(folder, "records"))})
    assert [len(share) for share in found] == [2, 1, 1]
    assert set.union(*found) == {(method, seed) for method in ("fedavg", "fedprox") for seed in (1, 2)}
    file = Path("1of3/records/digits-cnn.jsonl")
    file.write_text(file.read_text().splitlines(keepends=True)[0])  # as if it had been interrupted after one run
    again = reproduce(*asked, "--share", "1/3", "--out", "1of3", "--records-only")
    assert "1 of 2 cells done, 1 runs to go" in again.stdout
    assert {(one["method"], one["seed"]) for one in Store(Path("1of3/records"))} == found[0]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("table1", "--share", "3/2"), "--share is '3/2'; allowed is K/N with K from 1 to N"),
        (("table1", "--share", "half"), "--share is 'half'; allowed is K/N with K from 1 to N"),
        (("table1", "--settings", "emnist"), "unknown setting 'emnist'; did you mean 'emnist-lenet'?"),
        (("table1", "--methods", "fedavgg"), "did you mean fedavg?"),
        (("table1", "--methods", ","), "--methods is empty; name at least one"),
        (("table1", "--methods", "fedavg,fedavg"), "--methods names one twice: fedavg,fedavg"),
        (("table1", "--minutes", "-1"), "--minutes -1: must be a number above 0"),
        (("table1", "--until", "nan"), "--until nan: must be a number above 0"),
        (("table1", "--set", "seed=3"), "--set seed=3: use --until, --seeds, --methods, --data or --device for that"),
        (("table1", "--set", "training.lr=fast"), "training.lr = 'fast'"),
        (("fig-c", "--device", "tpu"), "engine.device = 'tpu'"),
        (("tune", "digits"), "unknown setting 'digits'; did you mean 'digits-cnn'?"),
        (("tune", "digits-cnn", "-p", "2", "--at-once", "3"), "--at-once is 3; with --processes 2, 1 is allowed"),
        (("tune", "digits-cnn", "--trials", "9"), "--trials 9: aedfl has 4, and there must be at least one"),
        (("tune", "digits-cnn", "--methods", "aedfl-p"), "method 'aedfl-p' has no trials to tune"),
        (("collect", "nowhere"), "nowhere does not exist"),
        (("table1", "--tuning", "nowhere"), "--tuning nowhere: there is no such folder"),
        (("tables", "--out", "nowhere"), "nowhere/records holds no records"),
    ],
)
def test_a_mistake_is_one_sentence(args: tuple[str, ...], words: str) -> None:
    result = reproduce(*args)
    assert result.exit_code == 2
    assert words in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_data_that_are_not_there_stop_their_setting_only(tmp_path: Path) -> None:
    asked = ("--settings", "emnist-lenet,digits-cnn", "--methods", "fedavg", "--quick", "--data", str(tmp_path))
    result = reproduce("table1", *asked, "--device", "cpu")
    assert result.exit_code == 1
    assert "emnist" in result.stderr
    assert [one["setting"] for one in Store(Path("runs/reproduce-quick/records"))] == ["digits-cnn"]


def data_folder() -> str:
    """Where the real data lie, or a skip that says why."""
    places = [os.environ.get("AEDFL_DATA"), str(Path(__file__).parents[3] / "shared" / "data")]
    for place in places:
        if place and Path(place).is_dir():
            return place
    pytest.skip("the real data sets are not here; AEDFL_DATA says where they lie")


def test_a_cell_on_real_data() -> None:
    folder = data_folder()
    try:
        load("emnist-letters", folder)
    except UserError as error:
        pytest.skip(str(error))
    result = reproduce("table1", "--quick", "--settings", "emnist-lenet", "--methods", "aedfl", "--data", folder)
    assert result.exit_code == 0, result.output
    (found,) = Store(Path("runs/reproduce-quick/records"))
    assert found["complete"] and found["summary"]["preset"] == "emnist-lenet"
    assert "| AEDFL | 1 |" in Path("runs/reproduce-quick/tables/table1.md").read_text()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", sorted(TARGETS))
def test_a_small_version_of_every_target(name: str) -> None:
    result = reproduce(name, "--quick", "--data", data_folder())
    assert result.exit_code == 0, result.output
    kind = "tables" if targets()[name].is_table else "figures"
    assert Path(f"runs/reproduce-quick/{kind}/{name}.md").is_file()
    assert all(one["complete"] for one in Store(Path("runs/reproduce-quick/records")))
