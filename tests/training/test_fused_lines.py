"""A convolution over a line, its ReLU and the maximum in one kernel on a CPU, against PyTorch's own."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

from aedfl import models, native
from aedfl.training.fused import Fused, Fusion, line_max
from aedfl.training.sequential import SequentialTrainer
from training.tasks import PLANS, assert_close, built_in, jobs, same_bits, with_masks
from training.test_fused import by_steps, target, whole

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so there are no kernels")
__all__ = ["target"]


def plainly(x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    return F.relu(F.conv1d(x, w, b)).amax(2)


def assert_right(samples: int, channels: int, places: int, filters: int, width: int, bias: bool = True) -> None:
    """Whole numbers: values are exact. Of equal answers the first one has the slope, so gradients are checked there."""
    x, w = whole(samples, channels, places), whole(filters, channels, width, key=1)
    b = whole(filters, key=2) if bias else None
    leaves = [None if part is None else part.clone().requires_grad_() for part in (x, w, b)]
    y = line_max(*leaves)  # type: ignore[arg-type]
    assert torch.equal(y, plainly(x, w, b))
    slopes = whole(*y.shape, key=9)
    y.backward(slopes)
    answers = F.conv1d(x, w, b)
    first = (answers == answers.amax(2, keepdim=True)).int().argmax(2)
    at = F.one_hot(first, answers.shape[2]).float() * (slopes * (y > 0)).unsqueeze(2)
    known = [part.clone().requires_grad_() for part in (x, w)]
    (F.conv1d(*known) * at).sum().backward()
    assert leaves[0] is not None and leaves[1] is not None
    assert torch.equal(leaves[0].grad, known[0].grad) and torch.equal(leaves[1].grad, known[1].grad)
    if leaves[2] is not None:
        assert torch.equal(leaves[2].grad, at.sum((0, 2)))


@pytest.mark.parametrize("sizes", [(3, 50, 256, 32, 5), (2, 7, 30, 33, 3), (1, 3, 5, 1, 5), (2, 1, 13, 64, 1)])
def test_values_and_gradients_are_those_of_pytorch(target: str, sizes: tuple[int, ...]) -> None:
    assert_right(*sizes)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_shape(data: st.DataObject) -> None:
    width = data.draw(st.integers(1, 6))
    places = width + data.draw(st.integers(0, 40))
    samples, channels, filters = (data.draw(st.integers(1, most)) for most in (3, 20, 70))
    assert_right(samples, channels, places, filters, width, data.draw(st.booleans()))


def test_the_slope_is_pytorchs_where_no_answers_are_equal() -> None:
    generator = torch.Generator().manual_seed(0)
    x, w, b = (torch.randn(shape, generator=generator) for shape in ((4, 6, 20), (5, 6, 3), (5,)))
    ours, theirs = ([part.clone().requires_grad_() for part in (x, w, b)] for _ in range(2))
    (line_max(*ours) ** 2).sum().backward()
    (plainly(*theirs) ** 2).sum().backward()
    for one, other in zip(ours, theirs, strict=True):
        assert one.grad is not None and torch.allclose(one.grad, other.grad, rtol=1e-4, atol=1e-5)


def test_what_is_no_number_stays_to_be_seen(target: str) -> None:
    for place in (0, 7, 29):
        x, w, b = whole(2, 3, 30), whole(20, 3, 4, key=1), whole(20, key=2)
        x[0, 1, place] = float("nan")
        ours, theirs = line_max(x, w, b), plainly(x, w, b)
        assert torch.equal(ours.isnan(), theirs.isnan())
        assert torch.equal(ours.nan_to_num(7.0), theirs.nan_to_num(7.0))


def test_short_lines_are_refused_as_by_pytorch() -> None:
    with pytest.raises(RuntimeError, match="[Kk]ernel size"):
        line_max(torch.zeros(1, 2, 3), torch.zeros(1, 2, 4), None)


def test_a_text_network_is_fused_and_others_are_not() -> None:
    module = models.build("textcnn", (16,), 2, vocabulary=30)
    fusion = Fusion.of(module)
    assert fusion is not None
    faster, x = fusion.apply(module), torch.randint(0, 30, (3, 16))
    assert sum(isinstance(layer, Fused) for layer in faster.modules()) == 3
    assert torch.allclose(faster(x), module(x), atol=1e-6)

    class Mean(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(3, 4, 2)

        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x)).mean(2)

    class Kept(Mean):
        def forward(self, x: Tensor) -> Tensor:
            return F.relu(self.conv(x)).amax(2, keepdim=True)

    assert Fusion.of(Mean()) is None and Fusion.of(Kept()) is None


@pytest.mark.parametrize("plan", ["plain", "everything"])
@pytest.mark.parametrize("masks", ["none", "structured"])
def test_training_is_that_of_the_plain_loop(plan: str, masks: str) -> None:
    task = built_in("textcnn")
    work = jobs(task) if masks == "none" else with_masks(task, jobs(task), structured=True)
    ours = by_steps(task).train(PLANS[plan], work)
    assert_close(ours, SequentialTrainer(task, kernels=False).train(PLANS[plan], work))
    assert same_bits(ours, by_steps(task, workers=2).train(PLANS[plan], work))
