"""Importance, weights and control parameters against numbers, autograd and extreme inputs."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, inf, nan, sqrt

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aedfl.rules.merge import merge
from aedfl.rules.weights import (
    control_gradient,
    control_step,
    importance,
    normalise,
    own_staleness,
    staleness,
)

Draw = Callable[..., Tensor]
anything = st.floats(allow_nan=True, allow_infinity=True)
B, K, P = 3, 5, 11


def test_staleness_is_at_least_one() -> None:
    ages = staleness(torch.tensor([10, 3]), torch.tensor([[10, 9, 4], [4, 3, 0]]))
    assert ages.tolist() == [[1, 1, 6], [1, 1, 3]]


def test_own_staleness_counts_only_on_request() -> None:
    since = torch.tensor([0, 4])
    assert own_staleness(since, counted=False).tolist() == [1, 1]
    assert own_staleness(since, counted=True).tolist() == [1, 5]


def test_importance_is_the_formula() -> None:
    arguments = [torch.tensor([[v]]) for v in (300.0, 0.5, 9.0, 2.0)]
    assert importance(*arguments).item() == 300 * 0.5 / (sqrt(9) * 2)


def test_loss_has_a_floor_and_a_bad_loss_counts_nothing() -> None:
    loss = torch.tensor([[0.0, -1.0, nan, inf, 1e-3]])
    ones = torch.ones(1, 5)
    result = importance(ones, ones, ones, loss, loss_floor=1e-3)
    torch.testing.assert_close(result, torch.tensor([[1000.0, 1000.0, 0.0, 0.0, 1000.0]]).double())


def test_weights_of_the_chosen_sum_to_one() -> None:
    weights = normalise(torch.tensor([[1.0, 2.0, 5.0, 1.0]]), torch.tensor([[True, False, True]]))
    assert weights.tolist() == [[0.25, 0.5, 0.0, 0.25]]


def test_without_any_importance_the_own_model_stays() -> None:
    weights = normalise(torch.zeros(2, 3), torch.tensor([[True, True], [False, False]]))
    assert weights.tolist() == [[1, 0, 0], [1, 0, 0]]
    assert normalise(torch.ones(2, 1), torch.ones(2, 0, dtype=torch.bool)).tolist() == [[1], [1]]


slot = st.tuples(anything, anything, anything, anything, st.booleans())


@settings(max_examples=150, deadline=None)
@given(st.lists(slot, min_size=1, max_size=6))
def test_weights_are_a_distribution_for_any_input(
    slots: list[tuple[float, float, float, float, bool]],
) -> None:
    samples, control, age, loss = torch.tensor([s[:4] for s in slots], dtype=torch.float64).T.unsqueeze(1)
    chosen = torch.tensor([[s[4] for s in slots[1:]]], dtype=torch.bool).reshape(1, len(slots) - 1)
    raw = importance(samples, control, age, loss)
    assert raw.isfinite().all() and (raw >= 0).all()
    weights = normalise(raw, chosen)
    assert weights.isfinite().all() and (weights >= 0).all()
    assert abs(weights.sum().item() - 1) < 1e-12
    assert (weights[:, 1:][~chosen] == 0).all()


@settings(max_examples=50, deadline=None)
@given(st.permutations(range(1, 6)), st.integers(0, 1000))
def test_permuting_neighbours_permutes_weights(order: list[int], seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    raw = torch.rand(2, 6, generator=generator) + 0.01
    chosen = torch.rand(2, 5, generator=generator) < 0.6
    shuffled = normalise(raw[:, [0, *order]], chosen[:, [m - 1 for m in order]])
    torch.testing.assert_close(shuffled, normalise(raw, chosen)[:, [0, *order]], rtol=1e-14, atol=0)


def problem(normal: Draw, uniform: Draw, masked: bool) -> dict[str, Tensor]:
    """A merge with everything in float64, so that derivatives can be compared closely."""
    masks = uniform(B, K, P) < 0.7 if masked else torch.ones(B, K, P, dtype=torch.bool)
    masks[:, :, 0] = not masked
    return {
        "gradient": normal(B, P, dtype=torch.float64),
        "vectors": normal(B, K, P, dtype=torch.float64),
        "masks": masks,
        "scale": uniform(B, K, dtype=torch.float64) + 0.1,
        "control": uniform(B, K, dtype=torch.float64) + 0.5,
    }


def weights_of(p: dict[str, Tensor], control: Tensor) -> Tensor:
    raw = p["scale"] * control
    return raw / raw.sum(1, keepdim=True)


@pytest.mark.parametrize("masked", [False, True])
def test_exact_derivative_is_autograd_of_the_masked_merge(normal: Draw, uniform: Draw, masked: bool) -> None:
    p = problem(normal, uniform, masked)
    control = p["control"].clone().requires_grad_()
    shares = weights_of(p, control).unsqueeze(-1) * p["masks"]
    held = shares.sum(1)
    merged = torch.where(held > 0, (shares * p["vectors"]).sum(1) / held.clamp(min=1e-300), p["vectors"][:, 0])
    (expected,) = torch.autograd.grad((p["gradient"] * merged).sum(), control)
    weights = weights_of(p, p["control"])
    masks = p["masks"] if masked else None
    for given_merged in (None, merged.detach()):
        actual = control_gradient(p["gradient"], p["vectors"], weights, p["control"], masks, given_merged, kind="exact")
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_paper_derivative_is_autograd_of_its_truncation(normal: Draw, uniform: Draw, masked: bool) -> None:
    """The weight of model j multiplies m_j alone; what lambda_j does to the other weights is left out."""
    p = problem(normal, uniform, masked)
    control = p["control"].clone().requires_grad_()
    weights = weights_of(p, control)
    models = p["vectors"] * p["masks"]
    columns = []
    for j in range(K):
        others = [weights[:, k].detach().unsqueeze(-1) * models[:, k] for k in range(K) if k != j]
        merged = weights[:, j].unsqueeze(-1) * models[:, j] + sum(others)
        (slope,) = torch.autograd.grad((p["gradient"] * merged).sum(), control, retain_graph=True)
        columns.append(slope[:, j])
    actual = control_gradient(
        p["gradient"], p["vectors"], weights.detach(), p["control"], p["masks"] if masked else None
    )
    torch.testing.assert_close(actual, torch.stack(columns, 1), rtol=1e-10, atol=1e-12)


def test_paper_derivative_as_printed(normal: Draw, uniform: Draw) -> None:
    p = problem(normal, uniform, masked=False)
    raw = p["scale"] * p["control"]
    total = raw.sum(1, keepdim=True)
    inner = (p["gradient"].unsqueeze(1) * p["vectors"]).sum(-1)
    printed = (total - raw) / total**2 * p["scale"] * inner
    actual = control_gradient(p["gradient"], p["vectors"], raw / total, p["control"], kind="paper")
    torch.testing.assert_close(actual, printed, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kind", ["paper", "exact"])
def test_models_left_out_get_no_gradient_and_buffers_are_ignored(normal: Draw, uniform: Draw, kind: str) -> None:
    p = problem(normal, uniform, masked=False)
    weights = normalise(p["scale"], torch.tensor([[True, True, False, False]] * B))
    vectors = p["vectors"].clone()
    vectors[:, 3:] = nan
    with_buffers = torch.cat([vectors, normal(B, K, 4, dtype=torch.float64)], 2)
    slopes = control_gradient(p["gradient"], with_buffers, weights, p["control"], kind=kind)  # type: ignore[arg-type]
    assert (slopes[:, 3:] == 0).all()
    clean = control_gradient(p["gradient"], p["vectors"], weights, p["control"], kind=kind)  # type: ignore[arg-type]
    assert torch.equal(slopes, clean)


def test_a_tiny_weight_does_not_blow_up_the_exact_derivative(normal: Draw) -> None:
    vectors, masks = normal(1, 2, P), torch.ones(1, 2, P, dtype=torch.bool)
    masks[:, 0, :5] = False
    weights = torch.tensor([[1.0, 1e-19]], dtype=torch.float64)
    merged = merge(vectors, masks, weights)
    slopes = control_gradient(normal(1, P), vectors, weights, torch.ones(1, 2), masks, merged, "exact")
    assert slopes.abs().max() < 1e-5


def test_control_step_is_scaled_and_clamped() -> None:
    control = torch.tensor([[1.0, 1.0, 9.9, 0.11]])
    moved = control_step(control, torch.tensor([[-2.0, 1.0, -2.0, 2.0]]), rate=0.2)
    torch.testing.assert_close(moved, torch.tensor([[exp(0.2), exp(-0.1), 10.0, 0.1]]))


def test_raw_control_step_is_the_papers_with_a_floor() -> None:
    control = torch.tensor([[1.0, 1.0, 1.0]])
    moved = control_step(control, torch.tensor([[-20.0, 0.5, 20.0]]), rate=1.0, mode="raw")
    assert moved[0].tolist() == pytest.approx([21.0, 0.5, 0.1])


@settings(max_examples=100, deadline=None)
@given(st.lists(anything, min_size=1, max_size=6), st.floats(0, 10), st.sampled_from(["exponentiated", "raw"]))
def test_control_stays_positive_and_finite(slopes: list[float], rate: float, mode: str) -> None:
    control = torch.ones(1, len(slopes))
    moved = control_step(control, torch.tensor([slopes]), rate, mode=mode)  # type: ignore[arg-type]
    assert (moved >= 0.1 - 1e-6).all() and not moved.isnan().any()
    if mode == "exponentiated":
        assert (moved <= 10).all()


def test_no_slope_no_step() -> None:
    control = torch.tensor([[0.7, 3.3]])
    for slopes in (torch.zeros(1, 2), torch.full((1, 2), nan)):
        for mode in ("exponentiated", "raw"):
            assert torch.equal(control_step(control, slopes, 0.5, mode=mode), control)  # type: ignore[arg-type]
