"""Models scored together by the GPU's kernels, in Triton's interpreter, against each of them alone."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch

from aedfl.training.evaluate import Evaluator
from training.tasks import built_in

NAMES = ("lenet5", "cnn", "resnet8", "vgg9", "textcnn")


@torch.no_grad()
def error(name: str) -> float:
    """How far the outputs for a few samples are off, relative to the largest."""
    evaluator, random = Evaluator(task := built_in(name)), torch.Generator().manual_seed(0)
    stack = task.start + 0.1 * torch.randn(2, len(task.start), generator=random)
    x, _ = task.gather(torch.arange(2), test=True)
    with patch("aedfl.training.evaluate.has_kernels", lambda device: True):
        found = evaluator._outputs(stack, x)
    alone = []
    for vector in stack:
        evaluator.flat.load(vector)
        alone.append(evaluator.flat.module(x))
    expected = torch.stack(alone)
    return float((found - expected).abs().max() / expected.abs().max())


if __name__ == "__main__":
    print(json.dumps({name: error(name) for name in NAMES}))
