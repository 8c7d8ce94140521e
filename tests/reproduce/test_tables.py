"""Tables and figures from made-up records whose figures are known."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest

from aedfl.reproduce import figures, plan, publish, tables
from aedfl.reproduce.overview import gap, overview, ranking, report
from aedfl.reproduce.plan import Target, Wish, target
from aedfl.reproduce.records import Record, Store
from aedfl.reproduce.standing import ACCURACY, LOCAL, MMACS, TIME, TIME95, Standing, as_tuned, standing
from reproduce.fakes import record, store_of

RISING = [0.0, 0.2, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6]


@pytest.fixture(autouse=True)
def thousand_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting ends there, in tables and figures, whatever its real end is today."""
    known = plan.settings()
    monkeypatch.setitem(known, "cifar10-lenet", replace(known["cifar10-lenet"], end=1000.0))
    for name, aim in plan.targets().items():
        monkeypatch.setitem(plan.targets(), name, replace(aim, ends={}))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Times are 0, 1000/7, … 1000. AEDFL ends at 0.6 and 0.8, FedAvg at 0.5 and 0.4, FedProx got half-way."""
    return store_of(
        tmp_path,
        record("aedfl", RISING, seed=1, mmacs=0.4),
        record("aedfl", [0.0, 0.5, 0.8, 0.8, 0.8, 0.8, 0.8, 0.8], seed=2, mmacs=0.6),
        record("fedavg", [0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.5, 0.5], seed=1),
        record("fedavg", [0.0, 0.1, 0.2, 0.3, 0.4, 0.3, 0.4, 0.5], seed=2),
        record("fedprox", RISING, seed=1, end=500.0, complete=False, until=1000.0),
        record("hap", RISING, seed=1, error="out of memory"),
    )


@pytest.fixture
def stand(store: Store) -> Standing:
    return standing(target("table2"), "cifar10-lenet", store, Wish())


def test_figures_are_means_over_seeds(stand: Standing) -> None:
    row = stand.row("aedfl")
    assert row is not None and row.seeds == 2
    assert row.cells["accuracy"].mean == pytest.approx(0.7)
    assert row.cells["accuracy"].std == pytest.approx(0.2 / 2**0.5)
    assert stand.mean(LOCAL, "aedfl") == pytest.approx(0.35)
    assert stand.mean(MMACS, "aedfl") == pytest.approx(0.5)
    assert stand.mean(ACCURACY, "fedavg") == pytest.approx((0.5 + 0.4) / 2)
    assert stand.mean(TIME, "aedfl") == pytest.approx((3 + 1) / 2 * 1000 / 7), "the first measurement with 0.5"
    assert stand.second == pytest.approx(0.95 * 0.45)
    assert stand.mean(TIME95, "fedavg") == pytest.approx((5 + 7) / 2 * 1000 / 7)
    assert stand.mean(TIME, "fedavg") == pytest.approx((5 + 7) / 2 * 1000 / 7)


def test_a_target_that_one_seed_misses_has_no_mean(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("aedfl", RISING), record("aedfl", [0.1, 0.2, 0.3], seed=2))
    stand = standing(target("table2"), "cifar10-lenet", store, Wish())
    assert stand.mean(TIME, "aedfl") is None
    page = tables.page(target("table2"), [stand])
    assert "| 429 (1 of 2) | 1,478 |" in page


def test_half_and_failed_runs_do_not_count(stand: Standing) -> None:
    for method in ("fedprox", "hap"):
        row = stand.row(method)
        assert row is not None and row.seeds == 0


def test_curves_can_be_cut_at_a_common_time(store: Store) -> None:
    stand = standing(target("table2"), "cifar10-lenet", store, Wish(until=500.0))
    assert stand.mean(ACCURACY, "fedprox") == pytest.approx(0.6)
    assert stand.mean(ACCURACY, "fedavg") == pytest.approx((0.1 + 0.2 + 0.3) / 3)


def line_of(text: str, start: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(start))


def test_markdown_has_both_accuracies_and_the_papers_numbers(stand: Standing) -> None:
    text = tables.page(target("table2"), [stand])
    assert "## CIFAR-10 & LeNet, 1,000 virtual seconds" in text
    assert "| time to 0.5 (s) | paper | time to 0.427 (s) | MMACs | paper |" in text
    assert line_of(text, "| AEDFL |") == (
        "| AEDFL | 2 | **0.7000** ± 0.1414 | 0.6363 | **0.3500** ± 0.0707 | **286** ± 202 | 1,478 "
        "| **286** ± 202 | **0.5** ± 0.1414 | 0.436 |"
    )
    assert line_of(text, "| FedProx |") == "| FedProx | · | · | 0.5317 | · | · | 14,178 | · | · | 0.652 |"


def test_latex_says_the_same(stand: Standing) -> None:
    text = tables.source(target("table2"), [stand])
    assert line_of(text, "AEDFL &").startswith(r"AEDFL & 2 & \textbf{0.7000} $\pm$ 0.1414 & 0.6363 & ")
    assert text.count(r"\begin{tabular}") == text.count(r"\end{tabular}") == 1
    assert "%" not in text.split(r"\begin{tabular}")[1].replace(r"\%", "")


def test_the_best_is_found_in_every_direction(stand: Standing) -> None:
    assert ranking(stand, ACCURACY)[0][0] == "aedfl"
    assert [method for method, _ in ranking(stand, TIME)] == ["aedfl", "fedavg"]
    assert ranking(stand, MMACS)[0] == ("aedfl", pytest.approx(0.5))


def test_the_overview_shows_who_leads_what_is_missing_and_how_to_run_it(store: Store) -> None:
    text = overview(store)
    assert "| CIFAR-10 & LeNet | 1,000 | 2 | 2 | **AEDFL 0.7000** |" in text
    assert "| table2 | CIFAR-10 & LeNet | 4 | 45 |" in text
    assert line_of(text, "| AEDFL |") == "| AEDFL | · | · | · | · | · | 2 | · |"
    assert "- cifar10-lenet fedprox seed 1: 500 of 1,000 s" in text
    assert "- cifar10-lenet hap seed 1: out of memory" in text
    wanted = gap(target("fig-bandwidth"), "cifar10-lenet", store)
    assert (wanted.missing, wanted.of) == (30 - 4, 30), "the setting as it is stands in the table already"
    assert wanted.command == "aedfl reproduce fig-bandwidth --settings cifar10-lenet --seeds 2"
    assert wanted.command in text


def test_a_lost_column_shows_aedfls_rank(tmp_path: Path) -> None:
    made = [
        record("aedfl", [0.1, 0.2]),
        record("fedavg", [0.1, 0.6]),
        record("hap", [0.1, 0.3]),
        record("port", [0, 0]),
    ]
    text = overview(store_of(tmp_path, *made))
    assert "| FedAvg 0.3500 (AEDFL 0.1500, 3 of 4) |" in text
    assert "| all methods 1 |" in line_of(text, "| CIFAR-10 & LeNet |")


def leaders(folder: Path, *made: Record) -> str:
    """The overview's line of the setting."""
    return line_of(overview(store_of(folder, *made)), "| CIFAR-10 & LeNet |")


def test_a_shared_lead_names_who_shares_it(tmp_path: Path) -> None:
    made = [record("aedfl", [0.1, 0.4]), record("fedbuff", [0.1, 0.4]), record("port", [0.1, 0.3])]
    assert "| 3 | 1 | AEDFL and FedBuff 0.2500 |" in leaders(tmp_path, *made)


def test_a_target_that_nobody_reaches_is_no_run_that_is_missing(tmp_path: Path) -> None:
    with_fedavg = leaders(tmp_path / "with", record("aedfl", [0.1, 0.4, 0.4]), record("fedavg", [0.1, 0.1, 0.3]))
    assert "| / | **AEDFL 500** |" in with_fedavg
    without = leaders(tmp_path / "without", record("aedfl", [0.1, 0.4]), record("port", [0.1, 0.3]))
    assert "| / | · |" in without, "95 % of FedAvg is not known"


def test_the_overview_says_where_aedfl_is_missing_and_where_it_alone_misses_the_target(tmp_path: Path) -> None:
    absent = leaders(tmp_path / "absent", record("port", [0.1, 0.6]), record("hap", [0.1, 0.3]))
    assert "| Port 0.3500 (AEDFL not run) |" in absent
    late = leaders(tmp_path / "late", record("aedfl", [0.1, 0.4]), record("port", [0.1, 0.6]))
    assert "| Port 1,000 (AEDFL /) |" in late


def test_other_seeds_than_the_first_are_named(tmp_path: Path) -> None:
    store = store_of(tmp_path, record("aedfl", RISING, seed=2), record("port", RISING, seed=1))
    text = overview(store)
    assert "| 2 | 1, not the same for all |" in line_of(text, "| CIFAR-10 & LeNet |")
    assert line_of(text, "| AEDFL |") == "| AEDFL | · | · | · | · | · | 1 (seed 2) | · |"
    page = tables.page(target("table2"), [standing(target("table2"), "cifar10-lenet", store, Wish())])
    assert line_of(page, "| AEDFL |").startswith("| AEDFL | 1 (seed 2) |")
    assert line_of(page, "| Port |").startswith("| Port | 1 |")
    uneven = leaders(
        tmp_path / "uneven", record("aedfl", RISING), record("aedfl", RISING, seed=2), record("port", [0, 1])
    )
    assert "| 2 | 1 to 2 |" in uneven


def test_the_list_knows_records_of_another_config(store: Store) -> None:
    lines = report(store, {})
    assert "  CIFAR-10 & LeNet: 0 of 45 cells done, 4 more of another config" in lines


def test_the_list_knows_that_a_method_was_tuned_since(tmp_path: Path) -> None:
    (cell,) = plan.cells(target("table2"), Wish(settings=("cifar10-lenet",), methods=("fedbuff",), seeds=1), {})
    store = store_of(tmp_path, record("fedbuff", RISING, config=cell.identity))
    assert "  CIFAR-10 & LeNet: 1 of 45 cells done" in report(store, {})
    tuned = {"cifar10-lenet": {"fedbuff": {"hyper.buffer": 5}}}
    assert "  CIFAR-10 & LeNet: 0 of 45 cells done, 1 more of another config" in report(store, tuned)
    (cell,) = plan.cells(target("table2"), Wish(settings=("cifar10-lenet",), methods=("fedbuff",), seeds=1), tuned)
    store.add(record("fedbuff", RISING, config=cell.identity, tuned=True))
    store.add(record("fedbuff", RISING, seed=2))
    assert "  CIFAR-10 & LeNet: 1 of 45 cells done, 1 more of another config" in report(store, tuned), "seed 2"


def test_the_list_has_a_command_that_runs_what_is_out_of_date_alone(tmp_path: Path) -> None:
    wish = Wish(settings=("cifar10-lenet",))
    made = [
        record(cell.key.method, RISING, seed=cell.key.seed, changes=list(cell.key.changes), config=cell.identity)
        for cell in plan.cells(target("fig-200"), wish, {})
    ]
    store = store_of(tmp_path, *made)
    lines = report(store, {})
    assert "  CIFAR-10 & LeNet: 10 of 10 cells done" in lines
    assert not any("fig-200" in line for line in lines)
    lines = report(store, {"cifar10-lenet": {"fedbuff": {"hyper.buffer": 5}}})
    assert "  CIFAR-10 & LeNet: 8 of 10 cells done, 2 more of another config" in lines
    assert "    aedfl reproduce fig-200 --settings cifar10-lenet --methods fedbuff --seeds 2" in lines


def test_a_figure_still_lacks_the_tuned_runs_of_methods_that_were_tuned(tmp_path: Path) -> None:
    """They are what its command runs, whatever is shown until then."""
    swept = ["devices=200"]
    store = store_of(tmp_path, *(record("fedbuff", RISING, seed=seed, changes=swept) for seed in (1, 2)))
    assert gap(target("fig-200"), "cifar10-lenet", store).missing == 8
    store.add(record("fedbuff", RISING, tuned=True, config="table"))
    assert gap(target("fig-200"), "cifar10-lenet", store).missing == 10
    store.add(record("fedbuff", RISING, tuned=True, config="figure", changes=swept))
    assert gap(target("fig-200"), "cifar10-lenet", store).missing == 9


def test_a_figure_of_another_fleet_has_its_own_second_target(tmp_path: Path) -> None:
    slow = [value / 2 for value in RISING]
    store = store_of(tmp_path, record("fedavg", RISING), record("fedavg", slow, changes=["devices=200"], config="200"))
    assert standing(target("table2"), "cifar10-lenet", store, Wish()).second == pytest.approx(0.95 * 0.6)
    assert standing(target("fig-200"), "cifar10-lenet", store, Wish()).second == pytest.approx(0.95 * 0.3)


def test_a_run_that_went_to_its_figures_end_is_not_cut_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(plan.targets(), "fig-200", replace(target("fig-200"), ends={"cifar10-lenet": 500.0}))
    half = {"end": 500.0, "complete": False, "until": 1000.0}
    assert "hap seed 1" in overview(store_of(tmp_path / "gone", record("hap", RISING, target="fig-gone", **half)))
    store = store_of(tmp_path, record("dispfl", RISING, target="fig-200", **half), record("fedavg", RISING, **half))
    cut = overview(store).partition("## Runs cut short")[2]
    assert "fedavg" in cut and "dispfl" not in cut


def swept(method: str, change: list[str], accuracy: float) -> Record:
    return record(method, [0.0, accuracy, accuracy, accuracy], changes=change, config=f"{method}{change}")


def said(aim: Target, store: Store) -> list[list[str]]:
    """The lines that set the paper's words beside what came out here."""
    grid = figures.compared(aim, standing(aim, "cifar10-lenet", store, Wish()))
    return [[field.words for field in line] for line in grid]


def test_a_figure_says_what_the_paper_says(tmp_path: Path) -> None:
    aim = target("fig-c")
    scores = {"0.5": 0.50, "1": 0.51, "1.5": 0.54, "2": 0.52, "2.5": 0.51}
    store = store_of(tmp_path, *(swept("aedfl", list(aim.values[value]), score) for value, score in scores.items()))
    stand = standing(aim, "cifar10-lenet", store, Wish())
    words = said(aim, store)
    assert ["best C", "1.5", "1.5"] in words
    assert ["best against worst, points of accuracy", "+4.0", "+2.2"] in words
    drawn = ElementTree.fromstring(figures.draw(aim, stand, store, Wish()))
    lines = [one for one in drawn.iter() if one.get("data-name")]
    assert [one.get("data-name") for one in lines] == ["AEDFL"]


def test_the_largest_lead_over_all_values_waits_for_all_of_them(tmp_path: Path) -> None:
    aim = target("fig-bandwidth")
    made = [swept(method, list(aim.values["100"]), score) for method, score in (("aedfl", 0.5), ("fedavg", 0.4))]
    some = store_of(tmp_path / "some", *made)
    words = said(aim, some)
    assert ["AEDFL's largest lead in accuracy, points (100)", "+10.0", "–"] in words
    assert ["AEDFL's largest lead in accuracy, points", "·", "+12.8"] in words
    made += [swept("aedfl", list(aim.values[value]), 0.3) for value in ("1", "10")]
    whole = store_of(tmp_path / "whole", *made, swept("fedavg", list(aim.values["1"]), 0.1))
    words = said(aim, whole)
    assert ["AEDFL's largest lead in accuracy, points", "+20.0", "+12.8"] in words


def test_the_time_that_more_points_have_is_drawn(tmp_path: Path) -> None:
    aim = target("fig-bandwidth")
    scores = {"aedfl": 0.6, "fedavg": 0.4, "fedbuff": 0.45}
    store = store_of(tmp_path, *(swept(method, list(aim.values["100"]), score) for method, score in scores.items()))
    text = figures.draw(aim, standing(aim, "cifar10-lenet", store, Wish()), store, Wish())
    names = [one.get("data-name") for one in ElementTree.fromstring(text).iter() if one.get("data-name")]
    assert names == ["AEDFL", "FedAvg", "FedBuff"] and "Time to 0.38 " in text, "only AEDFL has 0.5"


def test_the_ablation_is_measured_against_aedfl_without_modules(tmp_path: Path) -> None:
    aim = target("fig-ablation")
    store = store_of(tmp_path, record("aedfl", [0, 0.5, 0.6, 0.6, 0.6]), record("aedfl-0", [0, 0.2, 0.5, 0.5, 0.5]))
    words = said(aim, store)
    assert ["AEDFL over AEDFL-0: accuracy, points", "+10.0", "+10.9"] in words
    assert ["AEDFL over AEDFL-0: time to target, %", "+50.0", "+64.9"] in words
    assert ["AEDFL-P over AEDFL-0: accuracy, points", "·", "+6.5"] in words


def test_a_server_has_one_line_whatever_the_topology(tmp_path: Path) -> None:
    aim = target("fig-topology")
    made = [swept("aedfl", list(change), 0.5) for change in aim.values.values()]
    made += [{**swept("fedavg", list(change), 0.4), "config": "same"} for change in aim.values.values()]
    store = store_of(tmp_path, *made)
    drawn = ElementTree.fromstring(figures.draw(aim, standing(aim, "cifar10-lenet", store, Wish()), store, Wish()))
    names = [one.get("data-name") for one in drawn.iter() if one.get("data-name")]
    assert names == ["AEDFL, exponential", "AEDFL, ring", "AEDFL, star", "FedAvg"]


def test_two_hundred_devices_are_not_compared_with_the_papers_hundred(tmp_path: Path) -> None:
    files = publish.of_target(target("fig-200"), Store(tmp_path), Wish())
    assert "0.6363" not in files["figures/fig-200.md"]
    assert "+16.3" in files["figures/fig-200.md"]


def test_a_table_shows_a_method_as_it_was_tuned_as_soon_as_it_was(tmp_path: Path) -> None:
    better = [value + 0.1 for value in RISING]
    store = store_of(
        tmp_path,
        record("fedbuff", RISING, seed=1),
        record("fedbuff", RISING, seed=2),
        record("fedbuff", better, seed=1, tuned=True, config="tuned"),
        record("ad-psgd", RISING, seed=1),
    )
    table = standing(target("table2"), "cifar10-lenet", store, Wish())
    assert table.mean(ACCURACY, "fedbuff") == pytest.approx(0.7)
    assert table.mean(ACCURACY, "ad-psgd") == pytest.approx(0.6), "not tuned yet"
    assert gap(target("table2"), "cifar10-lenet", store).missing == 15 * 3 - 2, "seed 2 of the tuned one is to be run"


def test_a_figure_shows_methods_as_they_were_tuned_once_all_it_shows_were_run_so(tmp_path: Path) -> None:
    better, aim, ring = [value + 0.1 for value in RISING], target("fig-topology"), ["topology.kind=ring"]

    def tuned(method: str, changes: Sequence[str] = ()) -> Record:
        return record(method, better, changes=list(changes), tuned=True, config=f"tuned {method} {changes}")

    def shown() -> tuple[float | None, float | None, str]:
        stand = standing(aim, "cifar10-lenet", store, Wish())
        page = publish.of_target(aim, store, Wish())["figures/fig-topology.md"]
        means = (stand.mean(ACCURACY, "aedfl", value) for value in ("exponential", "ring"))
        return *means, line_of(page, "Methods ")

    store = store_of(tmp_path, record("aedfl", RISING), record("aedfl", RISING, changes=ring, config="ring"))
    store.add(record("fedbuff", RISING))
    plain = (*map(pytest.approx, (0.6, 0.6)), "Methods have the setting's values, without tuning.")
    assert shown() == plain
    store.add(tuned("aedfl"))
    store.add(tuned("fedbuff"))
    assert shown() == plain, "the ring was run with the default alone"
    store.add(tuned("aedfl", ring))
    assert shown() == (*map(pytest.approx, (0.7, 0.7)), "Methods are as they were tuned.")
    store.add(record("ad-psgd", RISING))  # was never tuned, so that nothing is to be waited for
    assert shown() == (*map(pytest.approx, (0.7, 0.7)), "Methods are as they were tuned, but for AD-PSGD.")


def test_variants_of_aedfl_wait_for_each_other(tmp_path: Path) -> None:
    aim, store = target("fig-ablation"), store_of(tmp_path, record("aedfl", RISING), record("aedfl-0", RISING))
    store.add(record("aedfl", [value + 0.1 for value in RISING], tuned=True, config="tuned"))
    assert not as_tuned(aim, store, "cifar10-lenet", Wish())
    store.add(record("aedfl-0", RISING, tuned=True, config="tuned 0"))
    assert as_tuned(aim, store, "cifar10-lenet", Wish())
