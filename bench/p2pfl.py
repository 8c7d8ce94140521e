"""Small messages per second beside p2pfl's, in turns on the same machine, over mutual TLS and in plaintext.

p2pfl pins packages that aedfl does not, so it wants an environment of its own:

    python -m venv p2pfl && p2pfl/bin/pip install "p2pfl[dp]" "datasets>=2.19,<4" "pyarrow<18" "huggingface_hub<0.30"
    python bench/p2pfl.py --python p2pfl/bin/python

A message is a model of 1,000 float32 values, from one process to another on 127.0.0.1: one by one, the next when the
receiver has answered for the last; and with several under way. p2pfl gets bytes that are packed already and a command
that leaves them packed, and its logs are silent; ours packs, unpacks and checks every model.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from aedfl.bench.stamp import stamp
from aedfl.bench.wire import small
from aedfl.net.identity import Authority

VALUES = 1000
ENDS = '''
import os, sys, threading, time
from p2pfl.settings import Settings
Settings.general.DISABLE_RAY = True
from p2pfl.communication.commands.command import Command
from p2pfl.communication.protocols.protobuff.grpc import GrpcCommunicationProtocol
from p2pfl.management.logger import logger

role, own, other = sys.argv[1:4]
size, count, threads = map(int, sys.argv[4:7])
tls = sys.argv[7]
logger.set_level("CRITICAL")
Settings.ssl.USE_SSL = bool(tls)
for side, name in (("SERVER", "device-1"), ("CLIENT", "device-0")):
    setattr(Settings.ssl, side + "_CRT", os.path.join(tls, name, "cert.pem"))
    setattr(Settings.ssl, side + "_KEY", os.path.join(tls, name, "key.pem"))
Settings.ssl.CA_CRT = os.path.join(tls, "device-0", "ca.pem")

class Take(Command):
    @staticmethod
    def get_name():
        return "take"
    def execute(self, source, round, weights=None, **others):
        assert len(weights) == size

made = GrpcCommunicationProtocol([Take()])
made.set_addr(own)
made.start()
if role == "receive":
    print("ready", flush=True)
    sys.stdin.read()
else:
    made.connect(other)
    message = made.build_weights("take", 1, bytes(size))
    def send(share):
        for _ in range(share):
            made.send(other, message, raise_error=True)
    send(20)
    begin = time.perf_counter()
    many = [threading.Thread(target=send, args=(count // threads,)) for _ in range(threads)]
    for each in many: each.start()
    for each in many: each.join()
    print(count // threads * threads / (time.perf_counter() - begin), flush=True)
os._exit(0)
'''


def theirs(python: str, count: int, tls: str | None, port: int, threads: int = 1) -> float:
    """p2pfl's messages per second, whose `send` waits for the answer, from so many threads at once."""
    places = f"127.0.0.1:{port}", f"127.0.0.1:{port + 1}"
    rest = [str(4 * VALUES), str(count), str(threads), tls or ""]
    start = [python, "-c", ENDS]
    receiver = subprocess.Popen(
        [*start, "receive", places[0], places[1], *rest], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert receiver.stdout is not None and receiver.stdin is not None
    try:
        while (line := receiver.stdout.readline()) and line.strip() != "ready":
            pass
        sender = [*start, "send", places[1], places[0], *rest]
        said = subprocess.run(sender, stdout=subprocess.PIPE, text=True, check=True).stdout
        return float(said.splitlines()[-1])
    finally:
        receiver.stdin.close()
        receiver.wait()


def _turn(python: str, count: int, tls: str | None, port: int) -> dict[str, float]:
    """Everybody once: one message after the other, and as many at once as each allows."""
    return {
        "ours, one by one": small(VALUES, count, tls),
        "p2pfl, one by one": theirs(python, count, tls, port),
        "ours, 16 waiting": small(VALUES, count, tls, 16),
        "p2pfl, 4 threads": theirs(python, count, tls, port, 4),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", required=True, help="the Python of an environment with p2pfl")
    parser.add_argument("--messages", type=int, default=1000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--port", type=int, default=7790, help="this one and the next are used")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    version = "import importlib.metadata as m; print(m.version('p2pfl'))"
    said = subprocess.run([given.python, "-c", version], stdout=subprocess.PIPE, text=True, check=True).stdout
    found: dict[str, Any] = stamp() | {"p2pfl": said.strip(), "messages": given.messages}
    with tempfile.TemporaryDirectory() as scratch:
        authority = Authority.create(Path(scratch) / "tls")
        for name in ("device-0", "device-1"):
            authority.issue(name, ["127.0.0.1"])
        for way, tls in (("tls", str(Path(scratch) / "tls")), ("plaintext", None)):
            rows = [_turn(given.python, given.messages, tls, given.port) for _ in range(given.repeats)]
            best = {name: max(row[name] for row in rows) for name in rows[0]}
            found[way] = best | {"all": rows}
            print(f"{way}: " + ", ".join(f"{name} {rate:,.0f}/s" for name, rate in best.items()), flush=True)
    if given.out is not None:
        given.out.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
