"""Convolution, ReLU and maximum in one kernel, against PyTorch in double precision; on the CPU by the interpreter."""

from __future__ import annotations

import json

import torch
from torch import Tensor
from torch.nn import functional as F

CASES = {
    "textcnn": (2, 3, 50, 100, 32, 4),
    "more places than a block": (1, 2, 3, 131, 5, 3),
    "filters and channels in several blocks": (2, 2, 70, 9, 66, 2),
    "one place": (2, 2, 4, 5, 3, 5),
    "more samples than a block": (1, 70, 4, 6, 3, 2),
}
"""Models, samples, channels, length, filters, width."""
BROKEN = [False, False, False, True] + [True] * 4


def plain(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    biases = [None] * len(x) if bias is None else bias
    answers = [F.conv1d(*one) for one in zip(x, weight, biases, strict=True)]
    return F.relu(torch.stack(answers)).amax(-1)


def errors(case: str, device: str, turned: bool = False, biased: bool = True) -> dict[str, float]:
    """How far the result and its gradients are from double precision, relative to their size."""
    from aedfl.training.line import line_max

    torch.manual_seed(0)
    models, samples, channels, length, filters, width = CASES[case]
    x = torch.randn(models, samples, length, channels, device=device).transpose(2, 3)
    x = (x if turned else x.contiguous()).requires_grad_()
    weight = torch.randn(models, filters, channels, width, device=device, requires_grad=True)
    usual = 2.4 * (channels * width) ** 0.5 if length > width else 0.0
    bias = (torch.randn(models, filters, device=device) - usual).requires_grad_() if biased else None
    inputs = [x, weight] if bias is None else [x, weight, bias]
    exact = plain(x.double(), weight.double(), None if bias is None else bias.double())
    found = line_max(x, weight, bias)
    slope = torch.randn_like(found)
    ours = found, *torch.autograd.grad(found, inputs, slope)
    theirs = exact, *torch.autograd.grad(exact, inputs, slope.double())
    if biased and case == "textcnn":
        assert 0.05 < (exact == 0).double().mean() < 0.95, "some are cut off by the ReLU, some are not"
    names = ("forward", "by input", "by weight", "by bias")
    return {name: _error(*pair) for name, *pair in zip(names, ours, theirs, strict=False)}


def _error(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def broken(device: str) -> list[bool]:
    """Which results are not numbers when one word of the second sample and the bias of the last filter are not."""
    from aedfl.training.line import line_max

    x, weight, bias = (torch.ones(size, device=device) for size in ((1, 2, 3, 90), (1, 4, 3, 2), (1, 4)))
    x[0, 1, 2, 80] = bias[0, 3] = torch.nan
    return line_max(x, weight, bias).isnan().flatten().tolist()  # type: ignore[no-any-return]


def shared(device: str) -> dict[str, float]:
    """Equal words give equal answers; the table of words gets the same slopes as from PyTorch, wherever they go."""
    from aedfl.training.line import line_max

    torch.manual_seed(0)
    ids = torch.zeros(1, 4, 30, dtype=torch.long, device=device)
    ids[:, 1, :7], ids[:, 2, ::2] = torch.arange(7, device=device), 3
    table = torch.randn(8, 5, device=device, requires_grad=True)
    weight = torch.randn(1, 6, 5, 3, device=device, requires_grad=True)
    found = line_max(table[ids].transpose(2, 3), weight, None)
    exact = plain(table.double()[ids].transpose(2, 3), weight.double(), None)
    slope = torch.randn_like(found)
    pairs = zip(
        torch.autograd.grad(found, [table, weight], slope),
        torch.autograd.grad(exact, [table, weight], slope.double()),
        strict=True,
    )
    return {name: _error(*pair) for name, pair in zip(("table", "weight"), pairs, strict=True)}


def refuses_short_lines(device: str) -> bool:
    from aedfl.training.line import line_max

    try:
        line_max(torch.ones(1, 2, 3, 4, device=device), torch.ones(1, 4, 3, 5, device=device), None)
    except ValueError as error:
        return "4 places is shorter than a filter of 5" in str(error)
    return False


def interpreted() -> dict[str, dict[str, float]]:
    """All of the above in Triton's interpreter, if `TRITON_INTERPRET=1` was set before Triton was imported."""
    torch.backends.cudnn.allow_tf32 = False
    found = {f"{case}, turned={turned}": errors(case, "cpu", turned) for case in CASES for turned in (False, True)}
    assert broken("cpu") == BROKEN
    assert refuses_short_lines("cpu")
    return found | {"no bias": errors("textcnn", "cpu", biased=False), "shared": shared("cpu")}


if __name__ == "__main__":
    print(json.dumps(interpreted()))
