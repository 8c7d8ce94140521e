"""Writes the pre-trained selector that ships with the package: `python scripts/pretrain_selector.py`."""

from __future__ import annotations

from pathlib import Path

import safetensors.torch
import torch

from aedfl.rules import pretrain


def main() -> None:
    torch.set_num_threads(1)  # the network is too small to share
    target = Path(pretrain.__file__).with_name(pretrain.FILE)
    safetensors.torch.save_file({"theta": pretrain.pretrain()}, target)
    print(f"{target.name}: {target.stat().st_size} bytes")


if __name__ == "__main__":
    main()
