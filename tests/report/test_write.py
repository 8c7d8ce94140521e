"""Reports of whole, broken, unfinished and huge runs."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
from html.parser import HTMLParser
from pathlib import Path

import pytest

from aedfl.errors import UserError
from aedfl.report import write_report
from aedfl.report.record import find, read
from report.fakes import fake_run

VOID = {"meta", "br", "input", "link"}
TITLES = [
    "Accuracy over virtual time",
    "Accuracy over communication",
    "Loss",
    "Staleness",
    "Consensus distance",
]
FLEET = ["Who sent to whom", "Device time line", "Where the devices' time goes"]
METHOD = [
    "Merging weights",
    "Control parameters",
    "Selection",
    "Pruning rate",
    "Kept channels",
    "Merged models",
]


class Balanced(HTMLParser):
    """Fails on a tag that is closed without being open, and on one that fetches something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.titles: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert not {"src", "href"} & {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "h2":
            self.titles.append(data)


def titles(page: Path) -> list[str]:
    """The cards of a page, after checking that it is well-formed and fetches nothing."""
    text = page.read_text()
    parser = Balanced()
    parser.feed(text)
    assert parser.open == []
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "nan" not in re.sub(r"<script>.*</script>", "", text, flags=re.S).lower().replace("finance", "")
    return parser.titles


def report(tmp_path: Path, *runs: Path) -> list[str]:
    write_report(list(runs), tmp_path / "out" / "report.html")
    return titles(tmp_path / "out" / "report.html")


def test_a_plain_run_shows_what_was_recorded(tmp_path: Path) -> None:
    shown = report(tmp_path, fake_run(tmp_path / "run"))
    assert set(TITLES + FLEET) <= set(shown)
    assert "Pruning rate" not in shown and "Merging weights" not in shown


def test_what_a_method_records_is_shown(tmp_path: Path) -> None:
    shown = report(tmp_path, fake_run(tmp_path / "run", extras=True))
    assert set(TITLES + FLEET + METHOD) <= set(shown) and "Cost of the model" in shown


def test_the_page_has_the_figures_and_the_config(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    report(tmp_path, run)
    text = (tmp_path / "out" / "report.html").read_text()
    accuracy = json.loads((run / "summary.json").read_text())["accuracy"]
    assert f"<dd>{accuracy:.4f}" in text and "20 devices · seed 0" in text
    assert "<td>mean_up</td><td>–</td>" in text and "target 0.9" in text


def test_an_unfinished_run_is_shown_as_far_as_it_went(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", finished=False)
    for name in ("metrics.jsonl", "updates.jsonl"):
        data = (run / name).read_bytes()
        (run / name).write_bytes(data[: len(data) // 2])  # a kill cuts a line in two
    (run / "traffic.json").unlink()
    shown = report(tmp_path, run)
    assert set(TITLES) <= set(shown) and "Who sent to whom" not in shown
    assert "not finished" in (tmp_path / "out" / "report.html").read_text()
    assert read(run).summary["best_accuracy"] > 0.5


@pytest.mark.parametrize("name", ["metrics.jsonl", "updates.jsonl", "traffic.json", "summary.json", "config.toml"])
@pytest.mark.parametrize("content", [None, b"", b"\xff\x00{", b'{"edges": 3, "time": "x"}\n[1]\nnull\n'])
def test_a_missing_or_damaged_file_costs_only_its_charts(tmp_path: Path, name: str, content: bytes | None) -> None:
    run = fake_run(tmp_path / "run", seconds=40.0, extras=True)
    (run / name).unlink()
    if content is not None:
        (run / name).write_bytes(content)
    assert len(report(tmp_path, run)) >= 3


def test_a_run_that_was_killed_before_its_first_evaluation(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", finished=False)
    for path in run.glob("*.json*"):
        path.unlink()
    assert report(tmp_path, run) == []


def test_odd_numbers_do_not_break_a_report(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", extras=True)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for i, row in enumerate(rows):
        row["loss"] = float("nan") if i % 2 else float("inf")
        row["accuracy"] = 0.5
        row["consensus"] = None
        del row["worst_tenth"]
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shown = report(tmp_path, run)
    assert "Consensus distance" not in shown and "Accuracy over virtual time" in shown


def test_a_method_may_have_a_hostile_name(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"method": "<img src=x onerror=alert(1)>"}))
    report(tmp_path, run)
    text = (tmp_path / "out" / "report.html").read_text()
    assert "<img" not in text and "&lt;img src=x" in text


def test_several_runs_are_compared(tmp_path: Path) -> None:
    runs = [
        fake_run(tmp_path / f"{m}-{s}", method=m, seed=s, speed=v) for m, v in (("a", 1.5), ("b", 0.6)) for s in (0, 1)
    ]
    shown = report(tmp_path, *runs)
    assert shown[:2] == ["Results", "Accuracy over virtual time"]
    text = (tmp_path / "out" / "report.html").read_text()
    assert "2 methods · 4 runs" in text and text.count('class="band') >= 8 and "<td class=best>" in text


def test_a_server_has_its_own_row(tmp_path: Path) -> None:
    report(tmp_path, fake_run(tmp_path / "run", server=True))
    assert "Sender server|Sender 0|" in (tmp_path / "out" / "report.html").read_text()


def test_a_huge_run_stays_small_and_quick(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run", devices=1000, seconds=5.0)
    row = '{{"time":{},"start":{},"device":{},"loss":0.5,"merged":[[3,{}],[4,1]],"weights":[0.4,0.6,0]}}\n'
    with (run / "updates.jsonl").open("w") as file:
        file.writelines(row.format(i / 40 + 5, i / 40, i % 1000, i % 13) for i in range(200_000))
    began = time.perf_counter()
    shown = report(tmp_path, run)
    assert time.perf_counter() - began < 30  # about 3 on a core of its own
    assert (tmp_path / "out" / "report.html").stat().st_size < 3_000_000
    assert "Idle devices" in shown and "Merging weights" in shown


def test_what_is_not_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a run folder"):
        write_report([tmp_path], tmp_path / "x.html")
    with pytest.raises(UserError, match="at least one"):
        write_report([], tmp_path / "x.html")
    with pytest.raises(UserError, match="is not a folder"):
        find([tmp_path / "none"])
    with pytest.raises(UserError, match="holds none"):
        find([tmp_path])


def test_runs_are_found_inside_a_folder_and_only_once(tmp_path: Path) -> None:
    a, b = fake_run(tmp_path / "c" / "a"), fake_run(tmp_path / "c" / "b")
    assert find([tmp_path / "c", a]) == [a, b]


HOVER = """
const at = (svg, fx, fy) => {
  const box = svg.getBoundingClientRect();
  svg.dispatchEvent(new PointerEvent("pointermove",
    {clientX: box.left + box.width * fx, clientY: box.top + box.height * fy}));
  return document.getElementById("tip").innerText.replaceAll("\\n", " ");
};
document.body.dataset.line = at(document.querySelector("svg.lines"), 0.98, 0.5);
document.body.dataset.heat = at(document.querySelector("svg.heat"), 0.5, 0.5);
document.querySelector(".key").click();
document.body.dataset.hidden = document.querySelectorAll(".series.off").length;
"""


@pytest.mark.skipif(shutil.which("chromium") is None, reason="no browser here")
def test_a_reader_can_point_at_values(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    page = tmp_path / "report.html"
    write_report([run], page)
    page.write_text(page.read_text().replace("</body>", f"<script>{HOVER}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--dump-dom"]
    command = ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    found = {name: re.search(rf'data-{name}="([^"]*)"', dom) for name in ("line", "heat", "hidden")}
    line, heat, hidden = (match.group(1) if match else "" for match in found.values())
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert line.startswith("300 s") and "mean model" in line
    shown = float(re.findall(r"mean model\D*([\d.]+)", line)[0])
    assert shown == pytest.approx(last["accuracy"], abs=0.003)
    assert re.fullmatch(r"Sender \d+ → \d+ \d+ messages", heat)
    assert hidden == "1"


def test_a_users_own_metric_is_called_by_its_name(tmp_path: Path) -> None:
    run = fake_run(tmp_path / "run")
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"metric": "negative_squared_error"}))
    shown = report(tmp_path, run)
    assert "Negative squared error over virtual time" in shown
    assert "<dt>Local negative squared error</dt>" in (tmp_path / "out" / "report.html").read_text()
