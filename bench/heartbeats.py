"""What many devices cost the coordinator: heartbeats of 64 devices with a tiny model, all in one process. Prints JSON.

    python bench/heartbeats.py [--devices 64] [--seconds 15]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))


async def many(devices: int, seconds: float, folder: Path) -> dict[str, Any]:
    """That many nodes with a tiny model in this process; the coordinator's share of one core, heartbeats per second."""
    from net.cluster import Cluster, kit

    async def idle(ctx: Any, _: Any) -> None:
        while ctx.running:
            await ctx.sleep(2.0)
            ctx.send(int(ctx.random("neighbour").choice(ctx.out_neighbours)), ctx.initial(), samples=1)
            ctx.publish(ctx.initial())
            ctx.receive()

    made = Cluster(folder, devices, False, idle)
    exponential = made.config.topology.model_copy(update={"kind": "exponential"})
    made.config = made.config.model_copy(update={"topology": exponential})
    await made.coordinate(beat=1.0)
    ready = kit(made.config)
    for index in range(devices):
        made.start(index, prepare=lambda _: _shared(ready, devices))
    await made.until(lambda: all(made.updates(i) for i in range(devices)), 120)
    cpu, begin = time.process_time(), time.monotonic()
    updates = sum(made.updates(i) for i in range(devices))
    await asyncio.sleep(seconds)
    status = made.coordinator.status()
    found = {
        "devices": devices, "here": sum(member.state == "here" for member in status.view.members),
        "heartbeats_per_second": status.beats_per_second,
        "updates_per_second": (sum(made.updates(i) for i in range(devices)) - updates) / seconds,
        "messages_per_second": sum(made.received(i) for i in range(devices)) / (made.coordinator.clock.now or 1),
        "core_share_of_everything": (time.process_time() - cpu) / (time.monotonic() - begin),
    }  # fmt: skip
    begin = time.process_time()
    roster = made.coordinator.roster
    for _ in range(2000):
        roster.view(next(iter(roster.entries.values())), roster.epoch)
    found["seconds_per_heartbeat_answer"] = (time.process_time() - begin) / 2000
    await made.close()
    return found


def _shared(ready: Any, devices: int) -> Any:
    from dataclasses import replace
    from types import SimpleNamespace

    rows = SimpleNamespace(
        train=[ready.rows.train[i % 5] for i in range(devices)],
        held_out=[ready.rows.held_out[i % 5] for i in range(devices)], public=ready.rows.public,
    )  # fmt: skip
    return replace(ready, rows=rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=15.0)
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        found = asyncio.run(many(given.devices, given.seconds, Path(scratch) / "many"))
    print(json.dumps({"cpus": os.cpu_count(), **found}, indent=2))


if __name__ == "__main__":
    main()
