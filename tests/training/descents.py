"""Steps of several models in one pass over their weights, against what the plain path does; on the CPU by Triton's
interpreter."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from aedfl.training.grouped import Batch, _adjusted
from aedfl.training.plan import Plan

PLANS = {
    "nothing": Plan(),
    "decay": Plan(weight_decay=0.1),
    "pull": Plan(proximal=0.3),
    "momentum": Plan(momentum=0.7),
    "clipping": Plan(clip_norm=2.0),
    "clipping that is not reached": Plan(clip_norm=1e6),
    "all of it": Plan(weight_decay=0.1, proximal=0.3, momentum=0.7, clip_norm=2.0),
}
SHAPES = (5,), (16, 3, 3, 3), (40, 64), (1,)
"""Of the parameters; the third takes more than one block."""


def errors(plan: Plan, masked: bool, device: str, models: int = 3) -> dict[str, float]:
    """How far weights and velocities are off after two steps, relative to how far they went."""
    from aedfl.training.descent import descend

    drawn = torch.Generator().manual_seed(0)

    def some() -> list[Tensor]:
        return [torch.randn(models, *shape, generator=drawn).to(device) for shape in SHAPES]

    def kept() -> list[Tensor]:
        return [(part > -0.5).float() for part in some()]

    begin, rate = some(), torch.tensor([0.1, 0.0, 0.3], device=device)
    masks, anchors = kept() if masked else None, some() if plan.proximal else None
    ours, theirs = (_batch([part.clone() for part in begin], masks, anchors, plan.momentum > 0) for _ in range(2))
    for gradients in (some(), some()):
        descend(plan, ours.weights, gradients, masks, anchors, ours.velocity, rate)
        torch._foreach_sub_(theirs.weights, _adjusted(plan, theirs, [part.clone() for part in gradients], rate))
    assert all(torch.equal(found[1], start[1]) for found, start in zip(ours.weights, begin, strict=True))
    found = {"weights": _apart(ours.weights, theirs.weights, begin)}
    if ours.velocity is not None and theirs.velocity is not None:
        found["velocity"] = _apart(ours.velocity, theirs.velocity, [torch.zeros_like(part) for part in begin])
    return found


def _batch(weights: list[Tensor], masks: list[Tensor] | None, anchors: list[Tensor] | None, moving: bool) -> Batch:
    nothing = torch.zeros(0)
    velocity = [torch.zeros_like(part) for part in weights] if moving else None
    rest = {name: nothing for name in ("rows", "present", "keys", "lr", "loss", "first_loss", "step")}
    return Batch(weights, masks, anchors, velocity, first_gradient=[], **rest)


def _apart(found: list[Tensor], expected: list[Tensor], begin: list[Tensor]) -> float:
    ours, theirs, start = (torch.cat([part.flatten() for part in parts]) for parts in (found, expected, begin))
    return float((ours - theirs).norm() / (theirs - start).norm())


def interpreted() -> dict[str, dict[str, float]]:
    """All plans with and without masks in Triton's interpreter, if `TRITON_INTERPRET=1` was set before."""
    return {
        f"{name}, masks {masked}": errors(plan, masked, "cpu")
        for name, plan in PLANS.items()
        for masked in (False, True)
    }


if __name__ == "__main__":
    print(json.dumps(interpreted()))
