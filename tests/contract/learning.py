"""Randomness, samples, training, computing, reading."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from aedfl.context import Context, Model, Size
from contract.harness import Harness, Note, Scaled, Total
from sim.worlds import OWN, PLAN, tiny_rows, tiny_task


def check_randomness_is_a_function_of_its_key(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        for _ in range(2):
            a, again, b = (ctx.random(purpose).random(3).tolist() for purpose in ("a", "a", "b"))
            note([a, again, b])
            ctx.publish(ctx.initial())

    first, same, other = (harness.run(program, seed=seed) for seed in (0, 0, 1))
    assert first == same
    drawn = []
    for notes in (first, other):
        for a, again, b in [*notes[0], *notes[1]]:
            assert a == again
            drawn += [tuple(a), tuple(b)]
    assert len(set(drawn)) == len(drawn)


def check_batch_gives_own_samples_only(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        for purpose in ("a", "a", "b"):
            note(ctx.batch(4, purpose).tolist())
        note(ctx.batch(1000, "all").tolist())
        note(ctx.batch(1000, "all", held_out=True).tolist())
        ctx.publish(ctx.initial())
        note(ctx.batch(4, "a").tolist())

    for device, (a, again, b, everything, held, later) in harness.run(program).items():
        own, apart = (set(rows.tolist()) for rows in tiny_rows(device))
        assert a == again and a != b and a != later
        assert len(set(a)) == 4 and set(a) < own
        assert sorted(everything) == sorted(own) and sorted(held) == sorted(apart)


def gradient(vector: Tensor, device: int, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Loss and gradient on all training samples of a device, by autograd alone."""
    task = tiny_task()
    x, y = task.gather(torch.from_numpy(tiny_rows(device)[0]))
    weights = (vector if mask is None else vector * mask).clone().requires_grad_()
    loss = F.cross_entropy(x @ weights[:12].view(3, 4).T + weights[12:], y)
    (slope,) = torch.autograd.grad(loss, weights)
    return loss.detach(), slope if mask is None else slope * mask


ONE_STEP = replace(PLAN, batch_size=OWN)
"""All samples at once: their order does not matter, so a step is known beforehand."""


def close(vector: Tensor) -> Any:
    return pytest.approx(vector.tolist(), abs=1e-6)


def check_training_is_a_step_down_the_gradient(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        trained = await ctx.train(ctx.initial(), replace(ONE_STEP, probe=True))
        values = (trained.model.vector, trained.loss, trained.first_loss, trained.gradient)
        note(await ctx.read(*values))
        note(trained.steps)
        note(await ctx.read(ctx.initial().vector))

    start = tiny_task().start
    for device, ((vector, loss, first, probed), steps, unchanged) in harness.run(program).items():
        value, slope = gradient(start, device)
        assert vector == close(start - PLAN.lr * slope)
        assert loss == first == pytest.approx(value.item(), rel=1e-5)
        assert probed == close(slope)
        assert steps == 1 and unchanged == [start.tolist()]


def check_training_takes_the_samples_in_a_keyed_order(harness: Harness) -> None:
    """The same in every run, another one at every call."""

    async def program(ctx: Context, note: Note) -> None:
        for _ in range(2):
            trained = await ctx.train(ctx.initial())
            note([trained.steps, *await ctx.read(trained.model.vector)])

    first, again = harness.run(program), harness.run(program)
    assert first == again
    assert first[0][0] != first[0][1] and first[0][0][0] == OWN // PLAN.batch_size


def check_masked_entries_stay_as_they_are(harness: Harness) -> None:
    mask = torch.arange(15) % 3 > 0

    async def program(ctx: Context, note: Note) -> None:
        model = Model(ctx.initial().vector, Size(10, 8.0), ctx.known(mask))
        trained = await ctx.train(model, replace(ONE_STEP, probe=True))
        note(await ctx.read(trained.model.vector, trained.loss, trained.gradient))
        note([trained.model.size.parameters, *await ctx.read(trained.model.mask)])

    start = tiny_task().start
    (vector, loss, probed), (size, kept) = harness.run(program, devices=1)[0]
    value, slope = gradient(start, 0, mask)
    assert vector == close(start - PLAN.lr * slope)
    assert [v for v, k in zip(vector, mask, strict=True) if not k] == start[~mask].tolist()
    assert loss == pytest.approx(value.item(), rel=1e-5)
    assert probed == close(slope) and (size, kept) == (10, mask.tolist())


def check_a_proximal_term_pulls_towards_the_anchor(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        anchor = Model(ctx.known(torch.ones(15)), ctx.initial().size)
        trained = await ctx.train(ctx.initial(), replace(ONE_STEP, proximal=0.5), anchor)
        note(*await ctx.read(trained.model.vector))

    start = tiny_task().start
    slope = gradient(start, 0)[1] + 0.5 * (start - 1)
    assert harness.run(program, devices=1)[0] == [close(start - PLAN.lr * slope)]


def check_the_learning_rate_decays_with_updates(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        for _ in range(3):
            note(ctx.plan().lr)
            ctx.publish(ctx.initial())
        (moved,) = await ctx.read((await ctx.train(ctx.initial())).model.vector)
        (same,) = await ctx.read(ctx.initial().vector)
        note([moved != same, ctx.plan().batch_size])

    notes = harness.run(program, devices=1, lr_decay=0.5)[0]
    assert notes == [pytest.approx(0.1), pytest.approx(0.05), pytest.approx(0.025), [True, PLAN.batch_size]]


def check_training_uses_the_decayed_rate(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        ctx.publish(ctx.initial())
        plan = replace(ctx.plan(), batch_size=OWN)
        note(*await ctx.read((await ctx.train(ctx.initial(), plan)).model.vector))

    start = tiny_task().start
    expected = start - 0.5 * PLAN.lr * gradient(start, 0)[1]
    assert harness.run(program, devices=1, lr_decay=0.5)[0] == [close(expected)]


def check_compute_runs_a_function_on_values(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        ones = ctx.known(torch.ones(3))
        doubled, count = await ctx.compute(Scaled(2.0), ones, flops=10.0, purpose="test")
        tripled, _ = await ctx.compute(Scaled(3.0), ones, flops=10.0, purpose="test")
        (total,) = await ctx.compute(Total(), ones, (doubled, tripled), flops=10.0, purpose="test")
        note(await ctx.read(doubled, count, tripled, total))

    expected = [[2.0] * 3, 3, [3.0] * 3, 18.0]
    assert harness.run(program) == {0: [expected], 1: [expected]}


def check_spending_takes_a_part_of_no_result(harness: Harness) -> None:
    """Work that came with an earlier job: time goes on, and nothing else changes."""

    async def program(ctx: Context, note: Note) -> None:
        doubled, _ = await ctx.compute(Scaled(2.0), ctx.known(torch.ones(3)), flops=10.0, purpose="test")
        before = ctx.now
        await ctx.spend(10.0, "test")
        note([ctx.now >= before, ctx.update, *await ctx.read(doubled)])

    assert harness.run(program, devices=1)[0] == [[True, 0, [2.0] * 3]]


def check_read_gives_plain_numbers(harness: Harness) -> None:
    tensors = (torch.tensor(1.5), torch.tensor(2), torch.tensor(True), torch.tensor([[1, 2], [3, 4]]))

    async def program(ctx: Context, note: Note) -> None:
        answers = await ctx.read(*(ctx.known(tensor) for tensor in tensors))
        note([[type(answer).__name__ for answer in answers], answers])
        note(await ctx.read())

    assert harness.run(program, devices=1)[0] == [
        [["float", "int", "bool", "list"], [1.5, 2, True, [[1, 2], [3, 4]]]],
        [],
    ]


def check_what_was_read_belongs_to_the_reader(harness: Harness) -> None:
    async def program(ctx: Context, note: Note) -> None:
        value = ctx.known(torch.tensor([3.0, 1.0]))
        (mine,) = await ctx.read(value)
        mine.sort()
        note(*await ctx.read(value))

    assert harness.run(program, devices=1)[0] == [[3.0, 1.0]]
