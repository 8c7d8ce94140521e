"""The comparison table in every form."""

from __future__ import annotations

import json
from typing import Any

import pytest
from rich.console import Console

from aedfl.report import comparison_table
from aedfl.report.tables import key_figures, to_html, to_json, to_latex, to_markdown, to_rich


def summary(method: str, seed: int, accuracy: float, time: float | None, **more: Any) -> dict[str, Any]:
    figures = {"local_accuracy": accuracy - 0.1, "mmacs": 0.652, "bytes_sent": 1e7, "best_accuracy": accuracy}
    return {"method": method, "preset": "digits", "seed": seed, "devices": 20} | figures | {
        "accuracy": accuracy,
        "time_to_target": time,
        **more,
    }  # fmt: skip


RUNS = [
    summary("a", 0, 0.90, 100.0),
    summary("a", 1, 0.92, 120.0),
    summary("b_c", 0, 0.95, 80.0),
    summary("b_c", 1, 0.95, None, mmacs=0.5),
]


def test_means_spreads_and_best() -> None:
    a, b = comparison_table(RUNS)
    assert (a.name, b.name, a.seeds) == ("a", "b_c", 2)
    assert a.cells["accuracy"].mean == pytest.approx(0.91)
    assert a.cells["accuracy"].std == pytest.approx(0.0141421, rel=1e-4)
    assert (a.cells["accuracy"].best, b.cells["accuracy"].best) == (False, True)
    assert b.cells["mmacs"].best and not a.cells["mmacs"].best
    assert not a.cells["bytes_sent"].best and not b.cells["bytes_sent"].best  # equal: nobody is best


def test_a_target_that_one_seed_misses_does_not_win() -> None:
    a, b = comparison_table(RUNS)
    assert (b.cells["time_to_target"].mean, b.cells["time_to_target"].count) == (80.0, 1)
    assert a.cells["time_to_target"].best and not b.cells["time_to_target"].best
    assert "80 (1 of 2)" in to_markdown([a, b])


def test_a_single_method_has_no_best_and_missing_figures_are_dashes() -> None:
    (row,) = comparison_table([{"method": "x.py", "accuracy": float("nan")}])
    assert row.name == "x" and not any(cell.best for cell in row.cells.values())
    assert row.cells["accuracy"].mean is None


def test_settings_are_named_where_they_differ() -> None:
    rows = comparison_table([summary("a", 0, 0.5, None), summary("a", 0, 0.6, None, devices=40)])
    assert [row.name for row in rows] == ["a (digits, 20 devices)", "a (digits, 40 devices)"]


def test_every_form_says_the_same() -> None:
    rows = comparison_table(RUNS)
    markdown, latex, html = to_markdown(rows), to_latex(rows), to_html(rows)
    assert "| a | 2 | 0.9100 ± 0.0141 |" in markdown and "**0.9500** ± 0.0000" in markdown
    assert r"b\_c & 2 & \textbf{0.9500} $\pm$ 0.0000" in latex and latex.count(r"\\") == 3
    assert '<td class=best>0.9500 <span class="pm">± 0.0000</span></td>' in html
    assert json.loads(to_json(rows))[1]["accuracy"] == {"mean": 0.95, "std": 0.0, "seeds": 2, "best": True}
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(to_rich(rows))
    assert "0.9100 ± 0.0141" in console.export_text()


def test_names_cannot_break_the_page_or_the_terminal() -> None:
    rows = comparison_table([summary("<script>", 0, 0.5, None), summary("[red]|", 0, 0.6, None)])
    assert "<script>" not in to_html(rows) and "\\|" in to_markdown(rows)
    console = Console(width=200, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(to_rich(rows))
    assert "[red]|" in console.export_text()


def test_key_figures_of_one_run() -> None:
    figures = {name: (value, more) for name, value, more in key_figures(RUNS[0] | {"target_accuracy": 0.9})}
    assert figures["Accuracy"] == ("0.9000", "best 0.9000")
    assert figures["Time to target"] == ("100 s", "target 0.9")
    missed = {name: more for name, _, more in key_figures(RUNS[3] | {"target_accuracy": 0.99})}
    assert missed["Time to target"] == "target 0.99 not reached"
    assert key_figures({})[0] == ("Accuracy", "–", "best –")
