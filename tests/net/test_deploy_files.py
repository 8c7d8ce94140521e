"""Service files and compose.yaml: what can be said of them without starting them."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from aedfl.cli import app

FOLDER = Path(__file__).parents[2] / "deploy"
SERVICES = sorted(FOLDER.glob("*.service"))


def parsed(words: list[str]) -> dict[str, Any]:
    """The command's parameters, as the command line reads them."""
    command = typer.main.get_command(app).commands[words[0]]  # type: ignore[attr-defined]
    return dict(command.make_context(words[0], words[1:]).params)


def command_line(path: Path) -> list[str]:
    (line,) = re.findall(r"^ExecStart=\S+/aedfl (.*)$", path.read_text(), re.MULTILINE)
    return shlex.split(line)


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
def test_services_start_a_command_that_exists(path: Path) -> None:
    words = command_line(path)
    given = parsed(words)
    assert f"aedfl-{words[0]}.service" == path.name and given["tls"] == Path("/etc/aedfl/tls")
    state = given.get("out") or given["state"]
    assert state.is_relative_to("/var/lib/aedfl"), "the only place that the service may write to"


@pytest.mark.parametrize("path", SERVICES, ids=lambda path: path.name)
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_understands_every_line(path: Path, tmp_path: Path) -> None:
    """The program and its user are not on this machine; everything else is as it is."""
    text = re.sub(r"^(User|Group)=.*\n", "", path.read_text(), flags=re.MULTILINE)
    unit = tmp_path / path.name
    unit.write_text(text.replace("/opt/aedfl/bin/aedfl", "/bin/true"))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert said.returncode == 0 and said.stderr == ""
    unit.write_text(unit.read_text().replace("NoNewPrivileges", "NoNewPrivilege"))
    said = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert "NoNewPrivilege" in said.stderr, "a key that does not exist is seen"


def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())
    return found


KEYS = {
    "image", "build", "read_only", "cap_drop", "security_opt", "tmpfs", "logging", "command", "ports", "volumes",
    "restart",
}  # fmt: skip
VARIABLES = {
    "COORDINATOR": "192.0.2.7:7700", "ADVERTISE": "192.0.2.13:7701", "NAME": "device-0", "DATA": "/srv/mine.parquet",
    "SHAPE": "1,8,8", "CLASSES": "10",
}  # fmt: skip


def filled(text: str) -> str:
    """As compose fills in variables from `.env`."""
    return re.sub(r"\$\{(\w+):-[^}]*\}", lambda match: VARIABLES[match[1]], text)


def test_compose_has_the_shape_that_compose_files_have() -> None:
    services = compose()["services"]
    assert set(services) == {"coordinator", "device", "server"}
    for service in services.values():
        assert set(service) <= KEYS and {"image", "command", "volumes", "restart"} <= set(service)
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert all(re.fullmatch(r"(127\.0\.0\.1:)?\d+:\d+", port) for port in service["ports"])
        named = {volume.partition(":")[0] for volume in service["volumes"] if volume[0] not in "./$"}
        assert named == set(compose()["volumes"])


@pytest.mark.parametrize("name", ["coordinator", "device", "server"])
def test_compose_starts_commands_that_exist_with_files_that_are_there(name: str) -> None:
    service = compose()["services"][name]
    words = shlex.split(filled(service["command"]))
    given = parsed(words)
    mounted = {Path(filled(volume).split(":")[1]) for volume in service["volumes"]}
    files = [given[key] for key in ("tls", "out", "state", "token_file", "data", "source") if given.get(key)]
    assert words[0] == name and {Path(str(file)) for file in files} == mounted
    listening = given["listen"].rpartition(":")[2]
    assert any(port.endswith(f":{listening}") for port in service["ports"])


def test_the_image_owns_the_folder_that_state_is_mounted_on() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    assert re.search(r"install -d -o aedfl .* /state", text) and text.index("/state") < text.index("USER aedfl")
