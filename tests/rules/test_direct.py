"""Merging where the models lie, against the same on stacks."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aedfl import native
from aedfl.ops import SlowMomentum
from aedfl.rules import direct
from aedfl.rules.exchange import Exchange
from aedfl.rules.jobs import Merge
from aedfl.rules.merge import merge
from aedfl.rules.weights import control_gradient

pytestmark = pytest.mark.skipif(native.library() is None, reason="no C compiler here, so there are no kernels")


class Jobs:
    """Merges of some models each: with and without masks, with empty slots, and with models that are no numbers."""

    def __init__(self, count: int, models: int, size: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)

        def uniform(*shape: int) -> Tensor:
            return torch.rand(shape, generator=generator)

        self.weights = torch.where(uniform(count, models) > 0.3, uniform(count, models), 0.0).double()
        self.stack = torch.randn(count, models, size, generator=generator)
        self.stack[self.weights == 0] = float("nan")  # a diverged model that was not chosen
        self.stack[:, 0] = self.stack[:, 0].nan_to_num(1.0)
        self.held = uniform(count, models, size) > 0.4
        self.stack[~self.held & (uniform(count, models, size) > 0.5)] = float("inf")
        self.stack[:, 0] = self.stack[:, 0].nan_to_num(1.0, 2.0, 3.0)
        whole = uniform(count, models) > 0.7
        self.held[whole] = True
        self.stack[whole] = self.stack[whole].nan_to_num(1.0, 2.0, 3.0)
        empty = (self.weights == 0) & (uniform(count, models) > 0.5)
        empty[:, 0] = False
        rows = range(count), range(models)
        self.vectors = [[None if empty[b, m] else self.stack[b, m].clone() for m in rows[1]] for b in rows[0]]
        self.masks = [[None if empty[b, m] or whole[b, m] else self.held[b, m] for m in rows[1]] for b in rows[0]]
        self.gradients = torch.randn(count, size, generator=generator)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 5, 16, 1023, 1024, 1025, 3000]), st.integers(0, 10**6))
def test_a_merge_has_the_same_bits_as_on_a_stack(count: int, models: int, size: int, seed: int) -> None:
    jobs = Jobs(count, models, size, seed)
    assert direct.possible(jobs.vectors, jobs.masks)
    found = torch.stack(direct.merge_each(jobs.vectors, jobs.masks, jobs.weights))
    assert torch.equal(found, merge(jobs.stack, jobs.held, jobs.weights))
    assert found.isfinite().all()


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 4), st.integers(1, 9), st.sampled_from([1, 5, 1024, 3000]), st.integers(0, 10**6))
def test_slopes_are_those_of_the_stack_also_where_buffers_follow(count: int, models: int, size: int, seed: int) -> None:
    jobs = Jobs(count, models, size, seed)
    merged, gradients = merge(jobs.stack, jobs.held, jobs.weights), jobs.gradients[:, : max(1, size - 3)]
    found = direct.slopes_each(gradients.unbind(), jobs.vectors, jobs.masks, jobs.weights.float(), merged.unbind())
    stack, ones = jobs.stack.double(), torch.ones(count, models)
    exact = control_gradient(gradients.double(), stack, jobs.weights, ones, jobs.held, merged.double(), "exact")
    assert torch.allclose(found, exact, rtol=1e-4, atol=1e-4 * max(1.0, float(exact.abs().max())))


def test_what_the_kernels_cannot_read_is_left_to_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    vector, mask = torch.zeros(6), torch.ones(6, dtype=torch.bool)
    assert direct.possible([[vector, None]], [[mask, None]])
    assert not direct.possible([[vector.double()]], [[None]])
    assert not direct.possible([[torch.zeros(12)[::2]]], [[None]])
    assert not direct.possible([[vector, torch.zeros(5)]], [[None, None]])
    assert not direct.possible([[vector]], [[mask.float()]])
    assert not direct.possible([[vector.to("meta")]], [[None]])
    monkeypatch.setattr(direct, "library", lambda: None)
    assert not direct.possible([[vector]], [[mask]])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 5, 1023, 1024, 1025, 3000]),
    st.integers(0, 3),
    st.sampled_from([0.3, 0.5, 0.9]),
    st.integers(0, 10**6),
)
def test_what_follows_on_a_merge_has_the_bits_of_single_steps(
    count: int, size: int, state: int, beta: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)

    def drawn() -> Tensor:
        return torch.randn(size, generator=generator)

    def chance() -> bool:
        return bool(torch.rand((), generator=generator) < 0.6)

    op = Exchange(Merge(dynamic=False), SlowMomentum(beta, parameters=max(0, size - state)))
    merged, starts, weights = ([drawn() for _ in range(count)] for _ in range(3))
    masks = [drawn() > 0 if chance() else None for _ in range(count)]
    updates = [(drawn(), 1.3, 0.4 if chance() else None) if chance() else None for _ in range(count)]
    paces = [(drawn(), drawn()) if chance() else None for _ in range(count)]
    job = merged, weights, starts, masks, updates, paces
    ours = direct.follow_each(zip(*job, strict=True), op.momentum.parameters, beta)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct, "possible", lambda *_: False)
        theirs = op._follow(*job)
    for found, expected in zip(ours, theirs, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
