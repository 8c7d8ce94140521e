"""Models trained together by the GPU's kernels, in Triton's interpreter, against each of them alone."""

from __future__ import annotations

import json
from unittest.mock import patch

import torch

from aedfl.training.grouped import GroupedTrainer
from aedfl.training.plan import Plan
from aedfl.training.sequential import SequentialTrainer
from training.tasks import built_in, jobs, with_masks

PLANS = {
    "textcnn": Plan(batch_size=4, probe=True),
    "resnet8": Plan(batch_size=4, probe=True, weight_decay=0.1, clip_norm=1.0),
    "vgg9": Plan(batch_size=4, probe=True),
}


def error(name: str) -> float:
    """How far the trained parameters are off, relative to how far training has moved them, or the first gradient."""
    torch.backends.cudnn.allow_tf32 = False
    task, plan = built_in(name), PLANS[name]
    given = with_masks(task, jobs(task, sizes=(3, 9, 6)))
    with patch("aedfl.training.grouped.has_kernels", lambda device: True):
        found = GroupedTrainer(task).train(plan, given)
    alone = SequentialTrainer(task).train(plan, given)
    apart = [
        distance
        for one, other, job in zip(found, alone, given, strict=True)
        for distance in (
            (one.vector - other.vector).norm() / (other.vector - job.vector).norm(),
            (one.gradient - other.gradient).norm() / other.gradient.norm(),
        )
    ]
    return float(torch.stack(apart).max())


if __name__ == "__main__":
    print(json.dumps({name: error(name) for name in PLANS}))
