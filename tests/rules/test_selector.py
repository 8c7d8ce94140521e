"""The selector against a per-device `nn.LSTMCell`, finite differences, and its own promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from aedfl.rules.network import FEATURES, PARAMETERS, SHAPES, STEP_FLOPS, unpack
from aedfl.rules.selector import (
    log_prob_gradient,
    reinforce_flops,
    reinforce_step,
    select,
    selector_flops,
)
from rules.oracle import Oracle

Draw = Callable[..., Tensor]
B, M = 6, 5


class Case(NamedTuple):
    theta: Tensor
    features: Tensor
    valid: Tensor
    uniforms: Tensor


@pytest.fixture
def case(normal: Draw, uniform: Draw) -> Case:
    valid = uniform(B, M) < 0.7
    valid[0], valid[1] = True, False
    return Case(normal(B, PARAMETERS) * 0.3, normal(B, M, FEATURES), valid, uniform(B, M))


def test_theta_has_the_published_shape(case: Case) -> None:
    network = unpack(case.theta)
    assert [tuple(part.shape[1:]) for part in network] == list(SHAPES.values())
    rebuilt = torch.cat([part.flatten(1) for part in network], 1)
    assert torch.equal(rebuilt, case.theta)


@pytest.mark.parametrize("epsilon", [0.0, 0.05, 0.5])
def test_probabilities_and_choices_are_the_oracles(case: Case, epsilon: float) -> None:
    chosen = select(*case, epsilon=epsilon)
    for b in range(B):
        oracle = Oracle(case.theta[b])
        slots = case.valid[b].nonzero().flatten().tolist()
        chances = oracle.chances(case.features[b], case.valid[b], chosen.choices[b])
        for m, taken in zip(slots, chances, strict=True):
            yes = taken.item() if chosen.choices[b, m] else 1 - taken.item()
            assert chosen.probabilities[b, m].item() == pytest.approx(yes, rel=1e-5, abs=1e-7)
            assert bool(chosen.choices[b, m]) == (case.uniforms[b, m] < (1 - epsilon) * yes + epsilon / 2)
        log_prob = oracle.log_prob(case.features[b], case.valid[b], chosen.choices[b], epsilon)
        assert chosen.log_prob[b].item() == pytest.approx(log_prob.item(), rel=1e-5, abs=1e-6)


def test_greedy_takes_what_is_likelier_than_not(case: Case) -> None:
    chosen = select(*case, epsilon=0.9, greedy=True)
    assert torch.equal(chosen.choices, chosen.probabilities > 0.5)
    other = select(*case._replace(uniforms=1 - case.uniforms), greedy=True)
    assert torch.equal(chosen.choices, other.choices)


def test_previous_choice_is_an_input(case: Case) -> None:
    valid = torch.ones_like(case.valid)
    taken = select(case.theta, case.features, valid, torch.zeros(B, M), epsilon=0.0)
    refused = select(case.theta, case.features, valid, torch.ones(B, M), epsilon=0.0)
    assert taken.choices.all() and not refused.choices.any()
    assert torch.equal(taken.probabilities[:, 0], refused.probabilities[:, 0])
    assert (taken.probabilities[:, 1:] != refused.probabilities[:, 1:]).all()


def test_a_model_never_received_is_never_chosen_and_leaves_no_trace(case: Case) -> None:
    garbage = case.features.clone()
    garbage[~case.valid] = torch.nan
    chosen = select(case.theta, garbage, case.valid, torch.zeros(B, M), epsilon=0.5)
    assert torch.equal(chosen.choices, case.valid)
    assert (chosen.probabilities[~case.valid] == 0).all()
    assert chosen.log_prob[1] == 0, "no neighbour, nothing decided"
    clean = select(case.theta, case.features, case.valid, torch.zeros(B, M), epsilon=0.5)
    assert all(torch.equal(a, b) for a, b in zip(chosen, clean, strict=True))


def test_sampling_frequencies_are_the_probabilities(case: Case, uniform: Draw) -> None:
    count = 4000
    first = Case(*(t[:1].expand(count, *t.shape[1:]) for t in case))._replace(uniforms=uniform(count, M))
    chosen = select(*first, epsilon=0.2)
    expected = 0.8 * chosen.probabilities[0, 0] + 0.1
    assert chosen.choices[:, 0].float().mean() == pytest.approx(expected.item(), abs=0.03)


@pytest.mark.parametrize("epsilon", [0.0, 0.1])
def test_gradient_is_that_of_the_oracle(case: Case, epsilon: float) -> None:
    choices = select(*case, epsilon=epsilon).choices
    actual = log_prob_gradient(case.theta, case.features, case.valid, choices, epsilon)
    for b in range(B):
        expected = Oracle(case.theta[b]).gradient(case.features[b], case.valid[b], choices[b], epsilon)
        torch.testing.assert_close(actual[b], expected, rtol=1e-8, atol=1e-11)


def test_gradient_agrees_with_finite_differences(case: Case, generator: torch.Generator) -> None:
    theta = case.theta.double()
    choices = select(*case).choices
    gradient = log_prob_gradient(theta, case.features, case.valid, choices)
    for at in torch.randint(PARAMETERS, (15,), generator=generator).tolist():
        shift = torch.zeros(PARAMETERS, dtype=torch.float64)
        shift[at] = 1e-5
        ends = [
            [Oracle(theta[b] + s).log_prob(case.features[b], case.valid[b], choices[b]).item() for b in range(B)]
            for s in (shift, -shift)
        ]
        plus, minus = torch.tensor(ends, dtype=torch.float64)
        torch.testing.assert_close(gradient[:, at], (plus - minus) / 2e-5, rtol=1e-5, atol=1e-8)


def test_step_is_the_formula_when_not_clipped(case: Case) -> None:
    choices = select(*case).choices
    advantage = torch.tensor([0.5, 1.0, -0.25, 2.0, -1.0, 0.1])
    moved = reinforce_step(case.theta, case.features, case.valid, choices, advantage, 0.01, max_norm=1e9)
    for b in range(B):
        gradient = Oracle(case.theta[b]).gradient(case.features[b], case.valid[b], choices[b])
        expected = case.theta[b].double() - 0.01 * gradient * advantage[b]
        torch.testing.assert_close(moved[b], expected.float(), rtol=1e-6, atol=1e-8)


def test_step_is_clipped_by_norm(case: Case) -> None:
    choices = select(*case).choices
    advantage = torch.full((B,), 1e6)
    moved = reinforce_step(case.theta, case.features, case.valid, choices, advantage, lr=0.5, max_norm=0.3)
    lengths = (moved - case.theta).norm(dim=1)
    busy = case.valid.any(1)
    torch.testing.assert_close(lengths[busy], torch.full((int(busy.sum()),), 0.15), rtol=1e-3, atol=0)


def test_nothing_to_learn_leaves_theta_as_it_is(case: Case) -> None:
    choices = select(*case).choices
    for value in (0.0, torch.nan, torch.inf):
        advantage = torch.full((B,), value)
        moved = reinforce_step(case.theta, case.features, case.valid, choices, advantage, 0.1)
        assert torch.equal(moved, case.theta)
    moved = reinforce_step(case.theta, case.features, case.valid, choices, torch.ones(B), 0.1)
    changed = (moved != case.theta).any(1)
    assert torch.equal(changed, case.valid.any(1))


def test_a_good_result_makes_the_choices_likelier(case: Case) -> None:
    choices = select(*case).choices

    def log_probs(theta: Tensor) -> Tensor:
        rows = [Oracle(theta[b]).log_prob(case.features[b], case.valid[b], choices[b]).detach() for b in range(B)]
        return torch.stack(rows)

    busy = case.valid.any(1)
    better = reinforce_step(case.theta, case.features, case.valid, choices, torch.full((B,), -1.0), 0.01)
    worse = reinforce_step(case.theta, case.features, case.valid, choices, torch.full((B,), 1.0), 0.01)
    assert (log_probs(better) > log_probs(case.theta))[busy].all()
    assert (log_probs(worse) < log_probs(case.theta))[busy].all()


def test_no_neighbour_slots_at_all(case: Case) -> None:
    features, valid = case.features[:, :0], case.valid[:, :0]
    chosen = select(case.theta, features, valid, case.uniforms[:, :0])
    assert chosen.choices.shape == (B, 0) and chosen.log_prob.tolist() == [0] * B
    moved = reinforce_step(case.theta, features, valid, chosen.choices, torch.ones(B), 0.1)
    assert torch.equal(moved, case.theta)


def test_inputs_are_not_changed(case: Case) -> None:
    before = [t.clone() for t in case]
    choices = select(*case).choices
    reinforce_step(case.theta, case.features, case.valid, choices, torch.ones(B), 0.1)
    assert all(torch.equal(a, b) for a, b in zip(before, case, strict=True))


def test_flops_count_the_matrices() -> None:
    assert selector_flops(7) == 7 * STEP_FLOPS > 7 * 2 * PARAMETERS
    assert reinforce_flops(7) == 3 * selector_flops(7)
