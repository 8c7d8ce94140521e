"""Environments of other simulators: made once with plain pip, and used again."""

from __future__ import annotations

import json
import subprocess
from dataclasses import dataclass
from pathlib import Path

TORCH = "torch==2.13.0"
"""Goes first and by exact version: a looser request may pull gigabytes of CUDA packages."""


class Unavailable(Exception):
    """A simulator could not be installed or run; the message says why."""


@dataclass(frozen=True)
class Recipe:
    """What is installed for one simulator."""

    name: str
    requirements: tuple[str, ...]


RECIPES = {
    "pfl": Recipe("pfl", ("pfl==0.6.0",)),
    "flower": Recipe("flower", ("flwr[simulation]==1.41.0",)),
    "fluke": Recipe("fluke", ("fluke-fl==0.8.1",)),
    "gossipy": Recipe("gossipy", ("gossipy-dfl==0.0.1",)),
}


def interpreter(recipe: Recipe, folder: Path, python: str) -> Path:
    """The Python of the environment `folder`/name; makes and fills it if it is not there as wanted."""
    home = folder / recipe.name
    found, stamp = home / "bin" / "python", home / "recipe.json"
    wanted = json.dumps([TORCH, *recipe.requirements])
    if stamp.is_file() and stamp.read_text() == wanted:
        return found
    call([python, "-m", "venv", str(home)])
    pip = [str(found), "-m", "pip", "install", "--quiet"]
    call([*pip, TORCH, "numpy"])
    call([*pip, TORCH, *recipe.requirements])
    stamp.write_text(wanted)
    return found


def versions(python: Path) -> dict[str, str]:
    """Of everything that is installed there."""
    listed = call([str(python), "-m", "pip", "list", "--format", "json"])
    return {row["name"].lower(): row["version"] for row in json.loads(listed)}


def call(command: list[str]) -> str:
    """What the command prints; the last line of its complaint when it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True)
    except OSError as error:
        raise Unavailable(f"cannot start {command[0]}: {error.strerror}") from None
    if done.returncode:
        raise Unavailable(f"{' '.join(command[1:4])} … failed: {last_line(done.stderr or done.stdout)}")
    return done.stdout


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "it said nothing"
