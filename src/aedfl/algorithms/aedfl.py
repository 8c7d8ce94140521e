"""AEDFL: asynchronous decentralised federated learning with heterogeneous devices.

Liu, Che, Zhou, Jin, Dai, Dou, Valduriez, *AEDFL: Efficient Asynchronous Decentralized Federated Learning with
Heterogeneous Devices*, SDM 2024. A device trains, learns from what its last merge did to its loss, selects cached
models of its neighbours, weighs and merges them, sometimes prunes, and sends the result to random
neighbours. Nobody waits for anybody. The six variants of the paper's ablation are switches of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch

from .. import costs, forms
from ..context import Context, Method, Model, Size, Trained
from ..graph import Chosen, Job, Value
from ..ops import HeldOut, SlowMomentum
from ..rules.exchange import Choose, Exchange
from ..rules.jobs import Learn, Merge, Select
from ..rules.selector import reinforce_flops, selector_flops
from ..rules.weights import control_flops
from ..sparsity.job import Budget, Prune, Regroup
from ..sparsity.rate import cap
from ..training.plan import Indices, Plan
from ._options import Hyper
from ._state import Cached, Merged, State

SELDOM = 10
"""How much rarer pruning steps are once the rate is no longer to rise."""
FEW = 4
"""Times `hessian_samples` that a device must hold; else a pruning step would take as long as many local updates."""


Pruner = Callable[[Context, Any, State, Value], Coroutine[Any, Any, dict[str, Any]]]
"""Looks at the state after a merge (and the merge's weights), may give it a pruned model; returns metrics."""


async def device(ctx: Context, hyper: Hyper) -> None:
    await local_updates(ctx, hyper, sparse if hyper.pruning else None)


async def local_updates(ctx: Context, hyper: Hyper, prune: Pruner | None) -> None:
    """Train, learn, select, weigh and merge, prune, send; again and again."""
    state = State(**saved) if (saved := ctx.restore()) else State.begin(ctx, hyper)
    while ctx.running:
        await follow(ctx, state)
        began = ctx.now
        trained = await ctx.train(state.model, plan(ctx, hyper, state))
        if state.cut is not None:
            trained = await shrunk(ctx, state, trained)
        if hyper.pruning:
            await ctx.spend(2.0 * ctx.task.layout.parameters, "pruning")  # for the gradient's norm
        await receive(ctx, hyper, state, ctx.now - began)
        metrics, further = await merge(ctx, hyper, state, trained)
        loss = await judge(ctx, hyper, state, trained)
        if prune is not None:
            metrics |= await prune(ctx, hyper, state, metrics["weights"])
        sent = state.model
        if further is not None:
            await ctx.spend(2.0 * ctx.task.layout.size, "merging")
            sent = Model(further, sent.size, sent.mask)
        send(ctx, hyper, state, sent, loss)
        ctx.publish(state.model, loss=trained.loss, **metrics)
        ctx.save(vars(state))


async def follow(ctx: Context, state: State) -> None:
    """When neighbours have come or gone, those that stay keep what was learned about them."""
    if state.slots == ctx.in_neighbours:
        return
    (own, *control), seen = await ctx.read(state.control, state.seen)
    known = dict(zip(state.slots, zip(control, seen, strict=True), strict=True))
    now = [known.get(source, (1.0, 0)) for source in ctx.in_neighbours]
    state.control = ctx.known(torch.tensor([own, *(weight for weight, _ in now)]))
    state.seen = ctx.known(torch.tensor([version for _, version in now], dtype=torch.int64))
    state.cache = {source: entry for source, entry in state.cache.items() if source in ctx.in_neighbours}
    state.slots, state.last, state.judged = ctx.in_neighbours, None, None


def plan(ctx: Context, hyper: Hyper, state: State) -> Plan:
    """Local training; a device that hears nothing moves less, so that it does not drift away from the others.

    Not at first: as long as all learn the same, what a fast device finds alone is what the others need.
    """
    share = part(ctx, hyper)
    given = ctx.plan(ctx.update * share)
    steps = state.age * given.steps(ctx.samples)
    power = hyper.quiet_lr * (min(1.0, steps / hyper.quiet_after) if hyper.quiet_after else 1.0) * hyper.weighting
    lr = given.lr / (1 + state.quiet) ** power
    return replace(given, epochs=round(share * given.epochs), lr=lr, probe=hyper.learns or hyper.pruning)


def part(ctx: Context, hyper: Hyper) -> float:
    """The share of a local update after which models are exchanged."""
    epochs = ctx.plan().epochs
    return min(hyper.exchange or epochs, epochs) / epochs if hyper.weighting else 1.0


async def receive(ctx: Context, hyper: Hyper, state: State, took: float) -> None:
    """Every cache entry is replaced as a whole by the newest model that has come from that neighbour."""
    messages = ctx.receive()
    if not messages and 0 < hyper.quiet_limit <= state.quiet + 1:
        news = await ctx.wait(timeout=hyper.patience * took)
        messages = [] if news is None else [news]
    state.quiet += 1
    ages = [state.age]
    for message in messages:
        source, given = message.source, message.fields
        if message.kind != "model" or source not in ctx.in_neighbours:
            continue
        state.quiet = 0
        ages.append(given["age"])
        state.versions[source] = state.versions.get(source, 0) + 1
        state.cache[source] = Cached(
            cast(Model, message.model), given["loss"], given["samples"], given["rate"], given.get("worth"),
            ctx.update, state.versions[source],
        )  # fmt: skip
    state.age = sum(ages) / len(ages) + part(ctx, hyper)


async def choose(ctx: Context, hyper: Hyper, state: State, trained: Trained, selection: Job) -> tuple[Value, ...]:
    """What the selector picks; before, formulas control and rlupdate: what the last merge did to the loss moves lambda
    and theta. With pruning, the gradient's norm is taken as well.

    Both learning rates are those of a whole local update, shared out between its merges.
    """
    slots, share, lesson = len(ctx.in_neighbours), part(ctx, hyper), None
    if last := state.last:
        judged = state.judged or (trained.first_loss, trained.gradient, None)
        lesson = (last.vectors, last.masks, last.weights, last.result, last.features, np.array(last.versions),
                  last.choices, judged[0], judged[2], judged[1])  # fmt: skip
    op = Choose(
        Learn(hyper.weighting, hyper.selection, share * hyper.control_rate, hyper.weight_gradient, hyper.control_step,
              share * hyper.selector_lr, hyper.epsilon, reuse=hyper.reuse_merged),
        Select(hyper.selection, hyper.reuse_merged, hyper.greedy, hyper.epsilon, hyper.count_since),
    )  # fmt: skip
    growth = (state.largest, trained.gradient) if hyper.pruning else None
    job = growth, (state.control, state.theta, state.window), lesson, selection
    flops, purpose = float(selector_flops(slots) * hyper.selection), "selection"
    if lesson is None:
        largest, *found = await ctx.compute(op, *job, flops=flops, purpose=purpose)
    else:
        learning = reinforce_flops(slots) * hyper.selection
        learning += control_flops(slots + 1, ctx.task.layout.parameters) * hyper.weighting
        largest, *found = await ctx.compute(op, *job, flops=learning, purpose="learning")
        await ctx.spend(flops, purpose)
    state.largest = largest if growth else state.largest
    state.control, state.theta, state.window, *picked = found
    return tuple(picked)


async def merge(ctx: Context, hyper: Hyper, state: State, trained: Trained) -> tuple[dict[str, Any], Value | None]:
    """Formulas importanceDef, weightDef and parameterAggregation over the models that the selector picks.

    Returns metrics, and the vector to send where it is not that of the new model.
    """
    slots = ctx.in_neighbours
    cached = [state.cache.get(source) for source in slots]
    versions = tuple([0 if entry is None else entry.version for entry in cached])
    now = ctx.update + 1
    ages = np.array([1 if entry is None else max(1, now - entry.arrived) for entry in cached])
    losses = tuple([None if entry is None else entry.loss for entry in cached])
    uniforms = ctx.random("selection").random(len(slots)) if hyper.selection else np.zeros(len(slots))
    selection = state.seen, state.since, np.array(versions), ages, losses, trained.loss, uniforms
    choices, probabilities, features, state.seen, since = await choose(ctx, hyper, state, trained, selection)
    own = state.model if hyper.moves else trained.model
    models = [own, *[None if entry is None else entry.model for entry in cached]]
    vectors = tuple([None if model is None else model.vector for model in models])
    masks = tuple([None if model is None else model.mask for model in models])
    samples = np.array([ctx.samples, *[entry.samples if entry else 0 for entry in cached]])
    merging = vectors, masks, samples, ages, (trained.loss, *losses), state.control, choices, state.since
    result, weights, further = await exchange(ctx, hyper, state, trained, merging, cached)
    state.since = since
    state.rates = tuple([0.0 if entry is None else entry.rate for entry in cached])
    state.last = None
    if hyper.learns:
        state.last = Merged(vectors, masks, weights, result, features, versions, choices)
    merged = Chosen(tuple(zip(slots, ages.tolist(), strict=True)), choices)
    if not hyper.selection and not hyper.reuse_merged:
        state.cache = {}  # what is not chosen by the selector may be chosen later
    metrics = {"merged": merged, "weights": weights}
    metrics |= {"priorities": probabilities} if hyper.selection else {}
    return metrics | ({"control": state.control} if hyper.weighting else {}), further


async def exchange(
    ctx: Context, hyper: Hyper, state: State, trained: Trained, merging: Job, cached: list[Cached | None]
) -> tuple[Value, Value, Value | None]:
    """From the models to the next one, in one job; what was merged, by which weights, and what to send instead.

    A device that weighs its trained model against k others puts 1/(k+1) of its update into the merged model, and with
    it into what it sends: the more it hears, the slower the fleet. So what was there before the update is averaged;
    the update itself counts whole, as it does where a server adds it to its model.

    Slow momentum (Wang et al., ICLR 2020): directions that many merges have in common add up, others cancel. The mean
    of n models moves by the n-th part of each device's update; a server that averages ten moves faster. Updates between
    two merges are one step: momentum on each would carry a device further its own way.

    As the paper does with pruning rates: what units are worth is averaged with those whose models are merged.
    """
    layout, rest = ctx.task.layout, hyper.rest(state.age)
    there = 1 + sum(entry is not None for entry in cached)
    worths = update = pace = None
    units = ctx.task.filters.count if hyper.pruning else 0
    if units:
        known = [None if entry is None else entry.worth for entry in cached]
        worths = state.worth or ctx.known(torch.zeros(units)), *known
    if hyper.moves:
        more = rest * (hyper.sent_step - hyper.own_step)
        update = trained.model.vector, rest * hyper.own_step, more or None
    if hyper.weighting and hyper.momentum and not state.quiet:
        pace = state.base or ctx.initial().vector, state.velocity or ctx.known(torch.zeros(layout.size))
    op = Exchange(
        Merge(hyper.weighting, hyper.own_staleness == "counted", hyper.loss_power, hyper.own_power),
        SlowMomentum(hyper.momentum, layout.parameters),
    )
    merged, weights, worth, vector, velocity, sent = await ctx.compute(
        op, merging, worths, update, pace, flops=costs.merging(layout.size, there), purpose="merging"
    )
    if worths:
        state.worth = worth
        await ctx.spend(costs.merging(units, 1 + sum(other is not None for other in worths[1:])), "pruning")
    if update:
        await ctx.spend(2.0 * layout.size, "merging")
    if pace:
        state.base, state.velocity = vector, velocity
        await ctx.spend(4.0 * layout.size, "merging")
    state.model = Model(vector, trained.model.size, trained.model.mask)
    return merged, weights, sent if update and update[2] else None


async def judge(ctx: Context, hyper: Hyper, state: State, trained: Trained) -> Value:
    """The loss that goes out with the model: of its last training, or of the merged model on held-out data."""
    if hyper.outer == "training" or not ctx.held_out:
        return trained.loss
    rows = ctx.batch(hyper.held_out_samples, "held-out", held_out=True)
    loss, gradient = await held_out(ctx, state.model, rows)
    before: Value | None = None
    if hyper.selection and hyper.reward == "gain":
        before, _ = await held_out(ctx, trained.model, rows)
    state.judged = (loss, gradient, before)
    return loss


async def held_out(ctx: Context, model: Model, rows: Indices) -> tuple[Value, ...]:
    flops = costs.training(model.size.macs, len(rows))
    return await ctx.compute(HeldOut(ctx.task), model.vector, model.mask, rows, flops=flops, purpose="held-out")


async def sparse(ctx: Context, hyper: Hyper, state: State, weights: Value) -> dict[str, Any]:
    """Section Sparse Training: at certain ages, score all units, take the lowest out, let others come back.

    Where devices are to agree, they score once before the first cut, so that they have heard of each other by then.
    """
    units, first = ctx.task.filters.count, hyper.prune_start - hyper.prune_every * (hyper.view < 1)
    if units and state.age >= max(first, state.next_cut):
        state.next_cut = state.age + hyper.prune_every * (1 if state.age < hyper.prune_end else SELDOM)
        limit = cap(state.age, hyper.prune_start - hyper.prune_every, hyper.prune_end, hyper.max_rate)
        steps = hyper.lanczos_steps if hyper.rate == "gap" else 0
        few = ctx.samples < FEW * hyper.hessian_samples
        rows = ctx.batch(max(1, hyper.hessian_samples // 5) if few else hyper.hessian_samples, "curvature")
        budget = Budget(len(rows), hyper.probes, steps=steps)
        op = Prune(ctx.task, budget, hyper.form, hyper.c, hyper.rate, hyper.rate_of, hyper.view, hyper.comeback)
        key = int(ctx.random("probes").integers(1 << 62))
        before = state.kept or ctx.known(torch.ones(units, dtype=torch.bool))
        mask, kept, rate, raw, state.largest, state.worth, *size = await ctx.compute(
            op, state.model.vector, ctx.initial().vector, rows, key, state.largest, weights, state.rates, limit,
            state.worth, before, flops=op.flops(ctx.task.macs), purpose="pruning",
        )  # fmt: skip
        if state.age < hyper.prune_start:
            return {"prune_rate": state.rate}
        state.kept = kept
        take_out(state, mask, rate, size)
        return {"prune_rate": rate, "raw_rate": raw, "kept": kept}
    if hyper.regroup and hyper.view < 1 and state.kept is not None and state.age >= state.next_group:
        return await regroup(ctx, hyper, state)
    return {"prune_rate": state.rate}


async def regroup(ctx: Context, hyper: Hyper, state: State) -> dict[str, Any]:
    """Between scorings, what units are worth is averaged from merge to merge; so the masks may follow, at no cost.

    Devices that keep different units each work by themselves, but their mean does not.
    """
    assert state.worth is not None
    state.next_group = state.age + hyper.regroup
    share = cap(state.age, hyper.prune_start - hyper.prune_every, hyper.prune_end, hyper.max_rate)
    mask, state.kept, *size = await ctx.compute(
        Regroup(ctx.task, hyper.rate_of), state.worth, share, flops=2.0 * ctx.task.layout.size, purpose="pruning"
    )
    take_out(state, mask, ctx.known(torch.tensor(share)), size)
    return {"prune_rate": share, "kept": state.kept}


def take_out(state: State, mask: Value, rate: Value, size: list[Value]) -> None:
    """From here on the device trains and sends the smaller model; a merge before the cut teaches nothing.

    How much smaller it is depends on results that may not be computed yet; the clock learns it one update later.
    """
    state.model = Model(state.model.vector, state.model.size, mask)
    state.cut = (*size, rate)
    state.last = state.judged = None


async def shrunk(ctx: Context, state: State, trained: Trained) -> Trained:
    """Reads how much the last pruning left over; the trained model is of that size."""
    assert state.cut is not None
    entries, macs, state.rate = await ctx.read(*state.cut)
    state.cut = None
    return replace(trained, model=replace(trained.model, size=Size(int(entries), float(macs))))


def send(ctx: Context, hyper: Hyper, state: State, model: Model, loss: Value) -> None:
    """To out-neighbours drawn uniformly from those for whom nothing waits any more: a slow link sends less often."""
    free = [target for target in ctx.out_neighbours if not ctx.waiting(target)]
    worth: dict[str, Any] = {} if state.worth is None else {"worth": state.worth}
    random = ctx.random("neighbour")
    for _ in range(min(len(free), hyper.sends if hyper.weighting else 1)):
        target = free.pop(int(random.integers(len(free))))
        ctx.send(target, model, loss=loss, samples=ctx.samples, rate=state.rate, age=state.age, **worth)


MESSAGES = {
    "model": forms.Form(
        {"loss": forms.loss, "samples": forms.some, "rate": forms.share, "age": forms.amount},
        optional={"worth": forms.per_unit},
    )
}


def _variant(name: str, summary: str, selection: bool, weighting: bool, pruning: bool) -> Method:
    hyper = Hyper(selection=selection, weighting=weighting, pruning=pruning)
    return Method(name, summary, hyper, device, paper="Liu et al., SDM 2024", messages=MESSAGES)


VARIANTS = (
    _variant("aedfl", "AEDFL with all three modules", True, True, True),
    _variant("aedfl-0", "AEDFL without its modules: sample-weighted merging of new models", False, False, False),
    _variant("aedfl-rl", "AEDFL with learned selection only", True, False, False),
    _variant("aedfl-dwu", "AEDFL with dynamic weights only", False, True, False),
    _variant("aedfl-p", "AEDFL with sparse training only", False, False, True),
    _variant("aedfl-rl-dwu", "AEDFL with dynamic model aggregation", True, True, False),
)
