"""Hessian-vector products and probes, against a Hessian written out and against curvlinops."""

from __future__ import annotations

import pytest
import torch
from curvlinops import HessianLinearOperator
from torch import nn
from torch.func import hessian, vmap

from aedfl.sparsity import Objective, curvature, flat_loss, hutchinson, hvp, rademacher


def test_products_are_those_of_the_written_out_hessian(tiny) -> None:
    objective, m = tiny.objective, tiny.vector
    written = hessian(objective)(m)
    probes = rademacher(1, (5, len(m)))
    torch.testing.assert_close(hvp(objective, m, probes[0]), written @ probes[0], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hvp(objective, m, probes), probes @ written, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(hvp(objective, m, probes, chunk=2), hvp(objective, m, probes), rtol=1e-5, atol=1e-5)


def test_loss_and_gradient_come_with_it(tiny) -> None:
    at = curvature(tiny.objective, tiny.vector)
    assert at.loss == tiny.objective(tiny.vector)
    wanted = torch.func.grad(tiny.objective)(tiny.vector)
    torch.testing.assert_close(at.gradient, wanted)
    assert not at.hessian(wanted).requires_grad


def test_lenet_against_curvlinops(lenet) -> None:
    module, objective = lenet.module, lenet.objective
    operator = HessianLinearOperator(
        module, nn.CrossEntropyLoss(), list(module.parameters()), [(objective.x, objective.y)],
        check_deterministic=False,
    )  # fmt: skip
    probes = rademacher(2, (3, len(lenet.vector)))
    theirs = torch.stack([operator @ probe for probe in probes])
    ours = hvp(objective, lenet.vector, probes)
    torch.testing.assert_close(ours, theirs.detach(), rtol=1e-3, atol=1e-4 * float(theirs.abs().max()))


def test_hutchinson_is_within_its_error_of_the_trace(tiny) -> None:
    written = hessian(tiny.objective)(tiny.vector)
    estimate, error = hutchinson(curvature(tiny.objective, tiny.vector).hessian, rademacher(3, (200, 294)))
    assert abs(estimate - written.trace()) < 4 * error
    assert error < 0.1 * written.trace()


@pytest.mark.parametrize("model", ["resnet8", "resnet8-batch", "textcnn", "vgg9-group"])
def test_products_are_differences_of_gradients_on_every_model(model: str, made) -> None:
    case = made(model)
    x = case.x.double() if case.x.is_floating_point() else case.x
    start = case.vector.double()
    objective = flat_loss(case.module, case.layout, x, torch.tensor([0, 1, 1]), vector=start)
    m = start[: case.layout.parameters]
    v = torch.randn(len(m), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    step, slope = 1e-6, torch.func.grad(objective)
    difference = (slope(m + step * v) - slope(m - step * v)) / (2 * step)
    torch.testing.assert_close(hvp(objective, m, v), difference, rtol=1e-3, atol=1e-5)


def test_probes_are_a_function_of_the_seed() -> None:
    probes = rademacher(5, (8, 1000))
    assert torch.equal(probes, rademacher(5, (8, 1000)))
    assert torch.equal(probes[:3], rademacher(5, (3, 1000)))
    assert not torch.equal(probes, rademacher(6, (8, 1000)))
    assert set(probes.unique().tolist()) == {-1.0, 1.0}
    assert (probes @ probes.T / 1000 - torch.eye(8)).abs().max() < 0.15


@pytest.mark.parametrize("shape", [(5,), (0,), (3, 1), (0, 5), (2, 0), (3, 5, 7), (0, 5, 7)])
def test_probes_have_any_shape(shape: tuple[int, ...]) -> None:
    probes = rademacher(5, shape)
    assert probes.shape == shape and probes.dtype == torch.float32
    assert (probes.abs() == 1).all()


def test_probes_leave_the_global_generator_alone() -> None:
    before = torch.random.get_rng_state()
    rademacher(5, (3, 4))
    assert torch.equal(before, torch.random.get_rng_state())


def test_many_devices_at_once(tiny) -> None:
    """Each with its own parameters and its own samples."""
    o = tiny.objective
    stack = torch.stack([tiny.vector, 0.5 * tiny.vector])
    x, y = torch.stack([o.x[:40], o.x[40:80]]), torch.stack([o.y[:40], o.y[40:80]])
    v = rademacher(0, (3, 294))

    def product(m, x, y):
        return hvp(Objective(o.module, o.layout, x, y, o.loss, o.buffers), m, v)

    together = vmap(product)(stack, x, y)
    for row in range(2):
        torch.testing.assert_close(together[row], product(stack[row], x[row], y[row]), rtol=1e-4, atol=1e-5)
