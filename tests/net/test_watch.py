"""The live page in a real browser, and metrics as Prometheus' own parser reads them."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from aedfl.errors import UserError
from aedfl.net.protocol_pb2 import Member, Report, Status, View
from aedfl.net.watch import Watch, describe, metrics
from net.cluster import PATIENCE, cluster

CHROMIUM = Path("/usr/bin/chromium")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]


def status() -> Status:
    reports = [Report(update=3, loss=0.5, bytes_sent=1200), Report(loss=float("nan"), staleness=float("nan"))]
    members = [Member(index=i, name=f"device-{i}", state="here", report=report) for i, report in enumerate(reports)]
    return Status(run="r", method="aedfl", view=View(members=members, elapsed=7.5, begun=True), beats_per_second=2.0)


def test_what_was_not_measured_is_null() -> None:
    first, second = describe(status())["devices"]
    assert (first["update"], first["loss"], first["bytes_sent"]) == (3, 0.5, 1200)
    assert second["loss"] is None and second["staleness"] is None
    json.dumps(describe(status()), allow_nan=False)


def test_metrics_are_prometheus_text() -> None:
    families = {family.name: family for family in text_string_to_metric_families(metrics(status()))}
    (sample,) = [s for s in families["aedfl_updates"].samples if s.labels["device"] == "0"]
    assert sample.value == 3 and sample.labels["name"] == "device-0"
    assert len(families["aedfl_loss"].samples) == 1, "NaN is left out"
    assert families["aedfl_elapsed_seconds"].samples[0].value == 7.5


async def get(port: int, request: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    answer = await reader.read()
    writer.close()
    return answer


def test_the_server_understands_get_and_nothing_else(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False, start=False) as made:
            watch = Watch(made.coordinator)
            with pytest.raises(UserError, match="open to others"):
                await watch.start("0.0.0.0:0")
            port = await watch.start("127.0.0.1:0")
            for request, code in (
                (b"GET /status.json HTTP/1.1\r\n\r\n", b"200"), (b"POST / HTTP/1.1\r\n\r\n", b"405"),
                (b"GET /../secret HTTP/1.1\r\n\r\n", b"404"), (b"\r\n\r\n", b"405"),
            ):  # fmt: skip
                assert (await get(port, request)).split(b" ")[1] == code
            assert await get(port, b"x" * 100_000) == b"", "a request without an end is dropped"
            assert b"Content-Security-Policy" in await get(port, b"GET / HTTP/1.1\r\n\r\n")
            await watch.close()

    asyncio.run(test())


async def until(page: Any, condition: str) -> None:
    """Asked from outside: the page's own policy forbids to evaluate strings in it."""
    async with asyncio.timeout(PATIENCE):
        while not await page.evaluate(condition):  # noqa: ASYNC110 (it happens in another process)
            await asyncio.sleep(0.1)


async def in_browser(url: str, look: Any) -> Any:
    playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed")
    async with playwright.async_playwright() as engine:
        browser = await engine.chromium.launch(executable_path=str(CHROMIUM), args=FLAGS)
        page = await browser.new_page(viewport={"width": 1200, "height": 800})
        problems: list[str] = []
        page.on("console", lambda said: problems.append(said.text) if said.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        await page.goto(url)
        found = await look(page)
        await browser.close()
        return found, problems


@pytest.mark.skipif(not CHROMIUM.exists(), reason="there is no /usr/bin/chromium")
def test_the_page_lives(tmp_path: Path) -> None:
    """Devices, updates that grow, neighbours as a graph, and a device that falls silent."""

    async def test() -> None:
        async with cluster(tmp_path, devices=3, tls=False) as made:
            watch = Watch(made.coordinator)
            port = await watch.start("127.0.0.1:0")

            async def look(page: Any) -> None:
                await until(page, "document.querySelectorAll('#devices tr').length === 3")
                cells = "[...document.querySelectorAll('#devices tr')].map(r => [...r.cells].map(c => c.textContent))"
                before = await page.evaluate(cells)
                assert [row[0] for row in before] == ["0", "1", "2"] and before[1][1] == "device-1"
                assert await page.evaluate("document.querySelectorAll('svg circle').length") == 3
                assert await page.evaluate("document.querySelectorAll('svg line').length") == 6
                updates = int(before[0][4])
                await until(page, f"+document.querySelector('#devices tr').cells[4].textContent > {updates}")
                after = await page.evaluate(cells)
                assert float(after[0][5]) > 0 and after[0][8].endswith("kB")
                assert await page.inner_text("#phase") == "running"
                await made.kill(2)
                await until(page, "document.querySelectorAll('#devices tr')[2].cells[2].textContent === 'away'")
                width = await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                assert width, "nothing sticks out of the window"
                await page.set_viewport_size({"width": 380, "height": 700})
                assert await page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
                await watch.close()
                await until(page, "document.querySelector('#lost').textContent.includes('go on without it')")

            _, problems = await in_browser(f"http://127.0.0.1:{port}/", look)
            assert [problem for problem in problems if "ERR_CONNECTION_REFUSED" not in problem] == []

    asyncio.run(test())


def test_it_can_be_read_by_any_client(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            watch = Watch(made.coordinator)
            port = await watch.start("127.0.0.1:0")
            await made.until(lambda: any(m.report.update for m in made.coordinator.status().view.members))
            text = await asyncio.to_thread(
                lambda: urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60).read().decode()
            )
            families = {family.name for family in text_string_to_metric_families(text)}
            assert {"aedfl_up", "aedfl_updates", "aedfl_bytes_sent", "aedfl_staleness"} <= families
            await watch.close()

    asyncio.run(test())
