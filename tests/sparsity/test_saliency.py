"""The two-term saliency: each estimate against what it estimates, and the closed form against minimisation."""

from __future__ import annotations

import pytest
import torch
from scipy.stats import spearmanr
from torch import Tensor
from torch.func import hessian, vmap

from aedfl.errors import UserError
from aedfl.layout import Layout
from aedfl.sparsity import (
    ChannelGroups,
    Curvature,
    Objective,
    Probes,
    adapted,
    curvature,
    draw,
    flat_loss,
    gauss_newton,
    gradient_changes,
    loss_changes,
    rademacher,
    saliency,
)
from aedfl.sparsity.loss_change import alone


def correlation(one: Tensor, other: Tensor) -> float:
    return float(spearmanr(one.abs(), other.abs()).statistic)


@pytest.fixture(scope="module")
def explicit(lenet) -> tuple[Curvature, Tensor, Tensor]:
    """LeNet's curvature, and for every unit the explicit products: m_c' H_cc m_c and ||H (m 1_c)||."""
    at = curvature(lenet.objective, lenet.vector)
    pairs = [(at.hessian(part), part) for part in alone(lenet.vector, lenet.groups)]
    return at, torch.cat([(h * p).sum(-1) for h, p in pairs]), torch.cat([h.norm(dim=-1) for h, _ in pairs])


def test_gradient_change_of_every_unit_is_within_its_error(lenet, explicit) -> None:
    """The square is a mean of K squares; its error bar is their spread. Five bars for 226 units at once."""
    at, _, exact = explicit
    m, groups = lenet.vector, lenet.groups
    squares = groups.sums(at.hessian(rademacher(1, (60, len(m)))) * m) ** 2
    error = squares.std(0) / 60**0.5
    outside = ((squares.mean(0) - exact**2).abs() / error.clamp(min=1e-12)).sort(descending=True).values
    assert outside[0] < 5 and outside[12] < 3


def test_ten_probes_rank_the_gradient_changes(lenet, explicit) -> None:
    at, _, exact = explicit
    probes = rademacher(2, (10, len(lenet.vector)))
    found = gradient_changes(lenet.vector, lenet.groups, at.hessian(probes))
    print(f"\nrank correlation of ||dg_c||, 10 probes: {correlation(found, exact):.3f}")
    assert correlation(found, exact) > 0.95


@pytest.mark.parametrize(
    ("form", "probes", "least"),
    [("exact", 1, 0.999), ("gauss_newton", 1, 0.97), ("trace", 100, 0.8), ("unbiased", 100, 0.6)],
)
def test_forms_rank_the_loss_changes(lenet, explicit, form, probes: int, least: float) -> None:
    at, quadratic, _ = explicit
    m, groups = lenet.vector, lenet.groups
    exact = 0.5 * quadratic - groups.sums(at.gradient * m)
    signs = draw(3, groups, 50, 10, probes)
    found = loss_changes(lenet.objective, at, m, groups, signs, at.hessian(signs.entries), form)
    print(f"\nrank correlation of |dFC_c|, {form}, {probes} probes: {correlation(found, exact):.3f}")
    assert correlation(found, exact) > least


def test_gauss_newton_is_exact_on_relu_networks(lenet, explicit) -> None:
    """With every output's direction in turn instead of random signs, nothing is left to chance."""
    at, quadratic, _ = explicit
    m, groups = lenet.vector, lenet.groups
    directions = torch.eye(10)[:, None].expand(10, 50, 10) * 10**0.5
    found = gauss_newton(lenet.objective, m, groups, directions) + groups.sums(at.gradient * m)
    torch.testing.assert_close(found, quadratic, rtol=1e-2, atol=1e-3 * float(quadratic.abs().max()))


def test_unbiased_and_trace_estimate_what_they_say(tiny) -> None:
    m, groups = tiny.vector, tiny.groups
    written = hessian(tiny.objective)(m)
    at = curvature(tiny.objective, m)
    signs = Probes(rademacher(4, (3000, 294)), torch.empty(0))
    products = signs.entries @ written
    held = groups.spread(torch.eye(groups.count))
    slope = groups.sums(at.gradient * m)
    quadratic = torch.stack([(h * m) @ written @ (h * m) for h in held])
    samples = groups.sums(signs.entries * m) * groups.sums(products * m)
    error = samples.std(0) / 3000**0.5
    unbiased = 2 * (loss_changes(tiny.objective, at, m, groups, signs, products, "unbiased") + slope)
    assert ((unbiased - quadratic).abs() <= 4.5 * error + 1e-5).all()
    mean = torch.stack([(h * written.diag()).sum() / h.sum() * ((h * m) ** 2).sum() for h in held])
    trace = 2 * (loss_changes(tiny.objective, at, m, groups, signs, products, "trace") + slope)
    assert correlation(trace, mean) > 0.99


@pytest.fixture(scope="module")
def definite(tiny) -> tuple[Curvature, Tensor, Tensor, float]:
    """The tiny network with its Hessian written out and shifted to be positive definite, in float64."""
    written = hessian(tiny.objective)(tiny.vector).double()
    shift = 0.1 - float(torch.linalg.eigvalsh(written)[0])
    shifted = written + shift * torch.eye(len(written))
    at = curvature(tiny.objective, tiny.vector)
    return Curvature(at.loss, at.gradient.double(), lambda v: v @ shifted), tiny.vector.double(), shifted, shift


def minimise(g: Tensor, h: Tensor, m: Tensor, gone: Tensor) -> float:
    """min over dm_r of g·dm + dm'H dm/2 with dm_p = -m_p, by L-BFGS."""
    rest = torch.zeros(int((~gone).sum()), dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.LBFGS(
        [rest], lr=1, max_iter=1000, tolerance_grad=1e-11, tolerance_change=1e-16, line_search_fn="strong_wolfe"
    )  # fmt: skip

    def value() -> Tensor:
        dm = torch.where(gone, -m, 0.0).masked_scatter(~gone, rest)
        return g @ dm + 0.5 * dm @ h @ dm

    def closure() -> float:
        optimizer.zero_grad()
        loss = value()
        loss.backward()
        return float(loss.detach())

    optimizer.step(closure)
    return float(value().detach())


def closed_form(g: Tensor, h: Tensor, m: Tensor, p: Tensor) -> float:
    """The paper's expression, term by term."""
    r = ~p
    inverse = torch.linalg.inv(h[r][:, r])
    cross = h[r][:, p] @ m[p]
    return float(
        0.5 * m[p] @ h[p][:, p] @ m[p] - 0.5 * cross @ inverse @ cross - 0.5 * g[r] @ inverse @ g[r]
        + g[r] @ inverse @ cross - g[p] @ m[p]
    )  # fmt: skip


def test_the_closed_form_is_the_minimum_over_the_rest(tiny, definite) -> None:
    at, m, h, _ = definite
    found = adapted(at, m, tiny.groups, steps=600)
    held = tiny.groups.spread(torch.eye(tiny.groups.count)) > 0
    for unit in range(tiny.groups.count):
        wanted = minimise(at.gradient, h, m, held[unit])
        assert closed_form(at.gradient, h, m, held[unit]) == pytest.approx(wanted, abs=1e-7)
        assert float(found[unit]) == pytest.approx(wanted, abs=1e-4)


@pytest.mark.parametrize("form", ["exact", "trace", "unbiased", "gauss_newton"])
def test_practical_forms_rank_as_the_closed_form(tiny, definite, form) -> None:
    """With their signs: the closed form counts in what training the rest would gain anyway, about the same
    for every unit, and an absolute value would fold the ranks there."""
    at, m, _, shift = definite
    full = adapted(at, m, tiny.groups, steps=600)
    signs = Probes(*(s.double() for s in draw(5, tiny.groups, 200, 4, 100)))
    objective = tiny.objective
    if form == "gauss_newton":
        objective = Objective(
            objective.module, objective.layout, objective.x.double(), objective.y, objective.loss, objective.buffers
        )  # fmt: skip
    found = loss_changes(objective, at, m, tiny.groups, signs, at.hessian(signs.entries), form)
    if form == "gauss_newton":  # it sees the network itself, so the shift is added by hand
        found = found + 0.5 * shift * tiny.groups.sums(m**2)
    rank = float(spearmanr(found, full).statistic)
    print(f"\nrank correlation with the closed form, {form}: {rank:.3f}")
    assert rank > 0.8


def test_the_score_is_the_papers(lenet) -> None:
    signs = draw(6, lenet.groups, 50, 10)
    s = saliency(lenet.objective, lenet.vector, lenet.groups, signs, largest_gradient=10.0, control=1.5)
    balance = float(s.gradient_norm) / 15
    assert float(s.balance) == pytest.approx(balance)
    wanted = (1 - balance) * s.loss_change.abs() / s.loss + balance * s.gradient_change / s.gradient_norm
    torch.testing.assert_close(s.score, wanted)
    assert float(s.loss) == pytest.approx(float(lenet.objective(lenet.vector)))


@pytest.mark.parametrize(("largest", "control", "balance"), [(0.0, 1.5, 1 / 1.5), (0.0, 0.5, 1.0)])
def test_the_largest_gradient_includes_the_present_one(tiny, largest, control, balance) -> None:
    signs = draw(6, tiny.groups, 200, 4, 2, 1)
    s = saliency(tiny.objective, tiny.vector, tiny.groups, signs, largest, control=control)
    assert float(s.balance) == pytest.approx(balance)


def test_a_dead_unit_is_worth_nothing(tiny) -> None:
    unit = tiny.groups.layers["hidden.1"].start + 2
    mask = tiny.groups.full()
    mask[unit] = False
    vector = tiny.vector * tiny.groups.expand(mask)
    score = saliency(tiny.objective, vector, tiny.groups, draw(0, tiny.groups, 200, 4)).score
    assert score[unit] == 0 and score.median() > 0


def test_many_devices_at_once(tiny) -> None:
    """Scores of a batch are those of each device alone."""
    o, groups = tiny.objective, tiny.groups
    stack = torch.stack([tiny.vector, 0.7 * tiny.vector])
    x, y = torch.stack([o.x[:40], o.x[40:80]]), torch.stack([o.y[:40], o.y[40:80]])
    signs = [draw(seed, groups, 40, 4, 4, 2) for seed in (1, 2)]
    both = Probes(*(torch.stack(pair) for pair in zip(*signs, strict=True)))
    largest = torch.tensor([0.5, 2.0])

    def scores(m, x, y, signs, largest):
        return saliency(Objective(o.module, o.layout, x, y, o.loss, o.buffers), m, groups, signs, largest).score

    together = vmap(scores)(stack, x, y, both, largest)
    for row in range(2):
        one = scores(stack[row], x[row], y[row], signs[row], largest[row])
        torch.testing.assert_close(together[row], one, rtol=1e-3, atol=1e-5)


def test_other_losses_work_too(digits) -> None:
    """A regression: the loss' Hessian in the outputs is constant."""
    module = torch.nn.Sequential(torch.nn.Linear(16, 6), torch.nn.ReLU(), torch.nn.Linear(6, 2))
    x = torch.nn.functional.avg_pool2d(digits[0][:30], 2).flatten(1)
    layout = Layout.of(module)
    groups = ChannelGroups.of(module, x[:1])
    objective = flat_loss(module, layout, x, x[:, :2], torch.nn.functional.mse_loss)
    m, signs = layout.flatten(module), draw(0, groups, 30, 2, 2, 200)
    at = curvature(objective, m)
    exact = loss_changes(objective, at, m, groups, signs, at.hessian(signs.entries), "exact")
    found = loss_changes(objective, at, m, groups, signs, at.hessian(signs.entries), "gauss_newton")
    torch.testing.assert_close(found, exact, rtol=0.1, atol=0.02 * float(exact.abs().max()))


def test_mistakes_are_named(tiny) -> None:
    signs = draw(0, tiny.groups, 200, 4, 1, 1)
    with pytest.raises(UserError, match="gauss_newton, trace"):
        saliency(tiny.objective, tiny.vector, tiny.groups, signs, form="newton")
    with pytest.raises(UserError, match="needs an Objective"):
        saliency(lambda m: tiny.objective(m), tiny.vector, tiny.groups, signs)
