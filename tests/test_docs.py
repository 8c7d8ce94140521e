"""Every example in README and docs works: Python is executed, configs and commands are checked."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.core import TyperGroup

from aedfl.cli import app
from aedfl.experiment.config import load

ROOT = Path(__file__).parents[1]
PAGES = sorted(path for path in (ROOT / "README.md", *(ROOT / "docs").glob("**/*.md")) if path.is_file())
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page: Path, *languages: str) -> list[tuple[str, str]]:
    """(place, text) of the page's blocks in these languages."""
    text = page.read_text()
    found = [m for m in FENCE.finditer(text) if m[1] in languages]
    name = page.relative_to(ROOT) if page.is_relative_to(ROOT) else page.name
    return [(f"{name}:{text.count(chr(10), 0, m.start()) + 1}", m[2]) for m in found]


def everywhere(*languages: str) -> list[object]:
    return [pytest.param(text, id=place) for page in PAGES for place, text in blocks(page, *languages)]


def commands(text: str) -> list[list[str]]:
    """The arguments of every `aedfl …` line, with or without a prompt; lines may be continued by a backslash."""
    lines = text.replace("\\\n", " ").splitlines()
    bare = [re.sub(r"^\s*\$\s+", "", line).strip() for line in lines]
    return [shlex.split(line, comments=True)[1:] for line in bare if line.startswith("aedfl ")]


@pytest.mark.parametrize("code", everywhere("python"))
def test_python_runs(code: str, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(code)
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
    result = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "2"},
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("text", everywhere("toml"))
def test_configs_are_valid(text: str, tmp_path: Path) -> None:
    """A part of a config is checked on top of the default preset."""
    whole = re.search(r"^(preset|devices)\s*=", text, re.MULTILINE)
    path = tmp_path / "example.toml"
    path.write_text(text if whole else f'preset = "digits"\n{text}')
    load(path)


@pytest.mark.parametrize("text", everywhere("sh", "bash", "console"))
def test_commands_exist_and_take_these_options(text: str) -> None:
    for args in commands(text):
        check(args)


def check(args: list[str]) -> None:
    """Parses a command line without running it; overrides are put onto the preset that it names."""
    group = typer.main.get_command(app)
    if args[0].startswith("-"):
        return
    command = group.commands[args[0]]  # type: ignore[attr-defined]
    while isinstance(command, TyperGroup):
        command, args = command.commands[args[1]], args[1:]
    rest = args[1:]
    while hasattr(command, "commands") and rest:
        command, rest = command.commands[rest[0]], rest[1:]
    given = command.make_context(args[0], rest).params
    if args[0] in ("run", "compare") and not str(given.get("source")).endswith(".toml"):
        load(given.get("source") or "digits", given.get("overrides") or [])


def test_examples_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# t\n\n```python\nx = 1\n```\n\n```sh\n$ aedfl run digits \\\n  --seed 3  # why\nls\n```\n")
    assert blocks(page, "python") == [("page.md:3", "x = 1\n")]
    ((_, text),) = blocks(page, "sh")
    assert commands(text) == [["run", "digits", "--seed", "3"]]


@pytest.mark.parametrize(
    "line",
    ["run digits --sed 3", "runn digits", "run digit", "run digits --set lr=3", "bench enginn", "bench engine --sed 3"],
)
def test_a_wrong_example_is_noticed(line: str) -> None:
    with pytest.raises(Exception, match=r"sed|runn|digit|lr|enginn"):
        check(line.split())
