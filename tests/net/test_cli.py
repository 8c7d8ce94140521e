"""The commands: what they say to mistakes, and certificates and tokens made by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from aedfl.cli import app
from aedfl.experiment.config import load
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Plaintext, Tls
from aedfl.net.ledger import Ledger


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
