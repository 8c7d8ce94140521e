"""Runs a config in a child process that is killed -9 at random moments and then resumed, until it is done.

    python killer.py CONFIG.toml FOLDER KILLS LONGEST

Children are forked, so that what they need is imported only once. Prints how many were killed before their end.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
import traceback
from pathlib import Path

import torch

from aedfl.experiment.config import from_toml
from aedfl.experiment.run import resume, run


def work(given: Path, folder: Path) -> None:
    if (folder / "config.toml").exists():
        resume(folder)
    else:
        run(from_toml(given.read_text()), folder)


def child(given: Path, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    try:
        work(given, folder)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def main(given: Path, folder: Path, kills: int, longest: float) -> None:
    draw, hits = random.Random(given.read_text()), 0
    for number in range(kills + 1):
        pid = child(given, folder)
        if number < kills:
            time.sleep(draw.uniform(0.0, longest))
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        hits += os.WIFSIGNALED(status)
        if not os.WIFSIGNALED(status):
            sys.exit(os.waitstatus_to_exitcode(status)) if status else None
    print(hits)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
