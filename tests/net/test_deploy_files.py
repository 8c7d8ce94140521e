"""Service files and compose.yaml start commands that exist, with options that exist."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from aedfl.cli import app

FOLDER = Path(__file__).parents[2] / "deploy"


def check(words: list[str]) -> None:
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    command.make_context(words[0], words[1:])


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.service")), ids=lambda path: path.name)
def test_services_start_a_command_that_exists(path: Path) -> None:
    (line,) = re.findall(r"^ExecStart=\S+/aedfl (.*)$", path.read_text(), re.MULTILINE)
    check(shlex.split(line))
    assert f"aedfl-{line.split()[0]}.service" == path.name


def test_compose_starts_commands_that_exist() -> None:
    yaml = pytest.importorskip("yaml", reason="PyYAML is not installed")
    services = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert set(services) == {"coordinator", "device", "server"}
    for service in services.values():
        check(shlex.split(re.sub(r"\$\{(\w+):-([^}]*)\}", r"\2x", service["command"]).replace("10x", "10")))
