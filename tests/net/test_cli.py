"""The commands: what they say to mistakes, and certificates and tokens made by hand."""

from __future__ import annotations

import asyncio
import math
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from aedfl.cli import app
from aedfl.cli.deploy import _show, _watched
from aedfl.experiment.config import load
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Plaintext, Tls
from aedfl.net.ledger import Ledger
from aedfl.net.protocol_pb2 import Member, Report, Status, View


def call(*words: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, [str(word) for word in words])
    return result.exit_code, " ".join((result.output + (result.stderr or "")).split())


@pytest.mark.parametrize(
    ("words", "match"),
    [
        (("device", "-c", "127.0.0.1:1"), "--tls is missing: make certificates with `aedfl certs init`"),
        (("device", "-c", "127.0.0.1:1", "--plaintext"), "--plaintext needs --name"),
        (("device", "-c", "127.0.0.1:1", "--plaintext", "--name", "A B"), "lower-case letters, digits and hyphens"),
        (("device", "-c", "192.0.2.1:1", "--plaintext", "--name", "a"), "plaintext is allowed on 127.0.0.1 only"),
        (("device", "-c", "nowhere", "--plaintext", "--name", "a"), "address 'nowhere' is not HOST:PORT"),
        (("device", "-c", "127.0.0.1:1", "--tls", "nowhere"), "TLS needs ca.pem, cert.pem, key.pem in nowhere"),
        (("device", "-c", "127.0.0.1:1", "--plaintext", "--tls", "x"), "contradict each other"),
        (("device", "-c", "127.0.0.1:1", "--robust", "some", "--plaintext", "--name", "a"), "none, trimmed, median"),
        (("device", "-c", "127.0.0.1:1", "--trim", "0.7", "--plaintext", "--name", "a"), "from 0 to below 0.5"),
        (("device", "-c", "127.0.0.1:1", "--token-file", "no", "--plaintext", "--name", "a"), "cannot read the join"),
        (
            ("server", "-c", "127.0.0.1:1", "--plaintext", "--name", "server", "--shape", "1,x"),
            "expected sizes with commas between",
        ),
        (("device", "-c", "127.0.0.1:1", "--plaintext", "--name", "a", "--cosine", "2"), "from -1 to 1"),
        (("device", "-c", "127.0.0.1:1", "--plaintext", "--name", "a", "--clip", "0"), "a number above 0"),
        (
            ("device", "-c", "127.0.0.1:1", "--plaintext", "--name", "a", "--listen", "0.0.0.0:1"),
            "does not say where others find this device; add --advertise",
        ),
        (
            ("device", "-c", "127.0.0.1:1", "--plaintext", "--name", "a", "--advertise", "here"),
            "address 'here' is not HOST:PORT",
        ),
        (("coordinator", "digits"), "--tls is missing"),
        (("coordinator", "digits", "--plaintext", "--listen", "0.0.0.0:0"), "plaintext is allowed on 127.0.0.1 only"),
        (
            ("coordinator", "digits", "--plaintext", "--listen", "127.0.0.1:99999"),
            "address '127.0.0.1:99999' is not HOST:PORT with a port from 0 to 65535",
        ),
        (("coordinator", "digits", "--plaintext", "--watch", "127.0.0.1:99999"), "a port from 0 to 65535"),
        (("coordinator", "digits", "--plaintext", "--watch", "0.0.0.0:7780"), "open to others on 0.0.0.0:7780"),
        (("up", "2", "--watch", "0.0.0.0:7780"), "open to others on 0.0.0.0:7780"),
        (("up", "2", "--watch", ""), "address '' is not HOST:PORT"),
        (("certs", "issue", "nowhere", "device-0"), "holds no certificate authority"),
        (("certs", "token", "nowhere"), "is not a coordinator's state folder"),
        (("up", "2", "--method", "fedavgg"), "fedavg"),
    ],
)
def test_a_mistake_is_one_sentence(
    words: tuple[str, ...], match: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = call(*words)
    assert code == 2 and match in said and "Traceback" not in said


def test_nothing_listens_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code, said = call("status", "-c", "127.0.0.1:9", "--plaintext")
    assert code == 1 and "nothing listens there; check host and port" in said


def test_certificates_by_hand(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    assert call("certs", "init", folder, "device-0", "server")[0] == 0
    first = Tls(folder / "device-0")
    assert call("certs", "renew", folder, "device-0", "--days", "5")[0] == 0
    assert first.refresh() and first.name == "device-0"
    code, said = call("certs", "revoke", folder, "device-0")
    assert code == 0 and "revoked 2 certificate(s)" in said
    assert Tls(folder / "coordinator").revocations[0] == 2
    assert "no certificate was issued to 'x'" in call("certs", "revoke", folder, "x")[1]


@pytest.mark.parametrize(
    ("names", "match"),
    [
        (("device-0", "bad name/.."), "name 'bad name/..': allowed are"),
        (("device-0", "../evil"), "name '../evil': allowed are"),
        (("a", "b", "a"), "name 'a' would get two certificates"),
        (("coordinator",), "name 'coordinator' would get two certificates"),
    ],
)
def test_a_wrong_name_makes_no_certificate(names: tuple[str, ...], match: str, tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    code, said = call("certs", "init", folder, *names)
    assert code == 2 and match in said and not folder.exists()
    assert call("certs", "init", folder, "device-9")[0] == 0
    issued = len(list(folder.glob("issued/*")))
    for name in names[1:]:
        assert call("certs", "issue", folder, "device-8", name, name)[0] == 2
    assert len(list(folder.glob("issued/*"))) == issued


def test_only_what_was_issued_is_renewed(tmp_path: Path) -> None:
    folder = tmp_path / "tls"
    call("certs", "init", folder, "device-0")
    issued = len(list(folder.glob("issued/*")))
    code, said = call("certs", "renew", folder, "device-0", "nobody")
    assert code == 2 and "no certificate was issued to 'nobody'" in said
    assert len(list(folder.glob("issued/*"))) == issued and not (folder / "nobody").exists()


def test_what_was_not_measured_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    members = [Member(index=i, name=f"device-{i}", report=Report(loss=loss)) for i, loss in enumerate((0.5, math.nan))]
    _show(Status(run="r", method="aedfl", view=View(members=members)))
    said = capsys.readouterr().out
    assert "0.5" in said and "–" in said and "nan" not in said


def test_where_the_live_page_is_stands_in_a_file_too(capsys: pytest.CaptureFixture[str]) -> None:
    async def wait(_: object) -> None: ...

    asyncio.run(_watched(wait, "http://127.0.0.1:7780"))
    assert capsys.readouterr().out.count("live page: http://127.0.0.1:7780") == 1


def test_a_page_that_cannot_be_served_is_one_sentence(tmp_path: Path) -> None:
    """In a process of its own: what gRPC's finaliser complains of comes when that ends."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        watch = f"127.0.0.1:{taken.getsockname()[1]}"
        words = ["coordinator", "digits", "--plaintext", "--listen", "127.0.0.1:0", "--watch", watch]
        command = [sys.executable, "-c", "from aedfl.cli import main; main()", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert f"cannot serve the page on {watch}" in done.stderr


def test_tokens_by_hand(tmp_path: Path) -> None:
    Coordinator(load("digits"), tmp_path, Plaintext("coordinator")).ledger.close()
    code, token = call("certs", "token", tmp_path, "--uses", "2")
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert code == 0 and ledger.problem(token) == ""
    ledger.close()


def test_up_never_takes_over_a_folder(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("precious")
    code, said = call("up", "2", "--out", tmp_path)
    assert code == 2 and "is not empty" in said
