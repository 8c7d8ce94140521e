"""Makes `src/aedfl/net/protocol_pb2.py` and its types from `protocol.proto`: `python scripts/protocol.py`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "src" / "aedfl" / "net"


def main() -> None:
    out = [f"--{kind}_out={FOLDER}" for kind in ("python", "pyi")]
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{FOLDER}", *out, "protocol.proto"]
    subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
