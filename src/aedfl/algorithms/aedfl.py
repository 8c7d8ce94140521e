"""AEDFL: asynchronous decentralised federated learning with heterogeneous devices.

Liu, Che, Zhou, Jin, Dai, Dou, Valduriez, *AEDFL: Efficient Asynchronous Decentralized Federated Learning with
Heterogeneous Devices*, SDM 2024. A device trains, learns from what its last merge did to its loss, selects cached
models of its neighbours, weighs and merges them, sometimes prunes, and sends the result to one random
neighbour. Nobody waits for anybody. The six variants of the paper's ablation are switches of this file.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field, replace
from typing import Any, Literal, cast

import numpy as np
import torch

from .. import costs, forms
from ..context import Context, Method, Model, Size, Trained, option
from ..graph import Chosen, Value
from ..ops import HeldOut, LargestNorm, SlowMomentum
from ..rules.baseline import empty_window
from ..rules.jobs import Learn, Merge, Select
from ..rules.pretrain import Start, pretrained
from ..rules.selector import reinforce_flops, selector_flops
from ..rules.weights import Derivative, Step, control_flops
from ..sparsity.job import Budget, Measure, Prune, Rate
from ..sparsity.loss_change import Form
from ..sparsity.rate import cap
from ..training.plan import Indices, Plan

SELDOM = 10
"""How much rarer pruning steps are once the rate is no longer to rise."""
FEW = 4
"""Times `hessian_samples` that a device must hold; else a pruning step would take as long as many local updates."""


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of AEDFL: three switches, then the settings of each module."""

    selection: bool = option(True, "choose the models to merge by reinforcement learning")
    weighting: bool = option(True, "weigh models by samples, staleness, loss and learned control parameters")
    pruning: bool = option(True, "train and send a model that is pruned as it goes")

    outer: Literal["training", "held-out"] = option("training", "data behind losses and gradients of merged models")
    held_out_samples: int = option(100, "held-out samples looked at per update, with outer = held-out")

    reuse_merged: bool = option(False, "cached models that were merged before may be merged again, as in the paper")
    selector: Start = option("open", "the selector begins open to everything new, or wary of models of high loss")
    selector_lr: float = option(0.03, "learning rate of the selector")
    epsilon: float = option(0.01, "share of choices made at random")
    reward: Literal["loss", "gain"] = option(
        "gain", "reward: loss after the merge, or what the merge changed (held-out)"
    )
    greedy: bool = option(False, "take every model of probability above 1/2 instead of drawing")
    window: int = option(10, "losses in the mean that is REINFORCE's baseline")
    count_since: bool = option(True, "the selector sees how long nothing was merged")

    control_rate: float = option(0.01, "learning rate of the control parameters")
    weight_gradient: Derivative = option("exact", "derivative of the weights: the paper's truncated one, or exact")
    control_step: Step = option("exponentiated", "step of the control parameters; raw is the paper's")
    own_staleness: Literal["one", "counted"] = option("counted", "age of the own model: 1, or updates since a merge")
    own_power: float = option(0.5, "exponent of the own model's age in its weight; the paper's is 1/2")
    loss_power: float = option(0.0, "a model's weight is divided by this power of its loss; the paper's is 1")

    momentum: float = option(0.5, "slow momentum: share of the last merges' change that goes on; the paper has 0")
    quiet_lr: float = option(2.0, "the learning rate falls by this power of the updates since a model came; 0: never")
    quiet_after: float = option(1000.0, "SGD steps behind a model by which that power is reached; it grows from 0")
    quiet_limit: int = option(0, "updates without a new model after which a device waits for one; 0: it never waits")
    patience: float = option(4.0, "how long it waits at most, in local updates of its own")

    prune_start: float = option(10.0, "age of a model (see State.age) from which it is pruned")
    prune_every: float = option(6.0, "age between pruning steps; ten times as much after prune_end")
    prune_end: float = option(40.0, "age at which the cap of the rate reaches max_rate")
    max_rate: float = option(0.45, "largest rate: the share that goes")
    rate_of: Measure = option("macs", "what the rate is a share of; units go by their saliency per MAC, or as such")
    rate: Rate = option("schedule", "the rate itself: gap rule of the paper under the schedule's cap, or the schedule")
    probes: int = option(4, "Hessian products behind the change of the gradient")
    form: Form = option("gauss_newton", "estimate of the change of the loss")
    c: float = option(1.5, "the paper's C: how soon the loss outweighs the gradient in the saliency")
    lanczos_steps: int = option(16, "steps of Lanczos for the gap rule")
    hessian_samples: int = option(50, "samples that curvature is estimated on; a fifth where data are few")

    @property
    def learns(self) -> bool:
        return self.selection or self.weighting


@dataclass(frozen=True)
class Cached:
    """The newest model of an in-neighbour."""

    model: Model
    loss: Value
    samples: int
    rate: float
    arrived: int
    """Own local updates when it came."""
    version: int
    """How many models of this neighbour have come, this one included."""


@dataclass(frozen=True)
class Merged:
    """What the last merge was made of, until its result has been judged."""

    vectors: tuple[Value | None, ...]
    masks: tuple[Value | None, ...]
    weights: Value
    result: Value
    features: Value
    versions: tuple[int, ...]
    choices: Value


@dataclass
class State:
    """Everything a device knows; what survives a crash."""

    model: Model
    control: Value
    theta: Value
    window: Value
    largest: Value
    seen: Value
    since: Value
    cache: dict[int, Cached] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    last: Merged | None = None
    judged: tuple[Value, Value, Value | None] | None = None
    """On held-out data: loss and gradient of the last merge's result, and the loss before the merge."""
    rate: float = 0.0
    rates: tuple[float, ...] = ()
    """Pruning rates of the neighbours whose models were there at the last merge, by slot."""
    cut: tuple[Value, ...] | None = None
    """Kept entries, MACs and rate of the last pruning, until they have been read."""
    base: Value | None = None
    velocity: Value | None = None
    """With slow momentum: where it was applied last, and what changed between such points of late."""
    age: float = 0.0
    """Local updates behind the model: one more with each, averaged with the ages of the models that come. So it
    grows alike on fast and slow devices, by the fleet's mean number of updates."""
    next_cut: float = 0.0
    """Age at which the next pruning step is due."""
    quiet: int = 0
    """Local updates since a model came."""
    slots: tuple[int, ...] = ()
    """The in-neighbours that `control` and `seen` are about."""

    @classmethod
    def begin(cls, ctx: Context, hyper: Hyper) -> State:
        slots = len(ctx.in_neighbours)
        known = ctx.known
        return cls(
            model=ctx.initial(),
            control=known(torch.ones(slots + 1)),
            theta=known(pretrained(hyper.selector) if hyper.selection else torch.zeros(0)),
            window=known(empty_window(1, hyper.window)[0]),
            largest=known(torch.zeros(())),
            seen=known(torch.zeros(slots, dtype=torch.int64)),
            since=known(torch.zeros((), dtype=torch.int64)),
            slots=ctx.in_neighbours,
        )


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
            trained = await settle(ctx, state, trained)
        if hyper.pruning:
            (state.largest,) = await ctx.compute(
                LargestNorm(), state.largest, trained.gradient,
                flops=2.0 * ctx.task.layout.parameters, purpose="pruning",
            )  # fmt: skip
        await receive(ctx, hyper, state, ctx.now - began)
        await learn(ctx, hyper, state, trained)
        metrics = await merge(ctx, hyper, state, trained)
        if hyper.weighting and hyper.momentum and not state.quiet:
            await go_on(ctx, hyper, state)
        loss = await judge(ctx, hyper, state, trained)
        if prune is not None:
            metrics |= await prune(ctx, hyper, state, metrics["weights"])
        send(ctx, state, loss)
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
    given = ctx.plan()
    steps = state.age * given.steps(ctx.samples)
    power = hyper.quiet_lr * (min(1.0, steps / hyper.quiet_after) if hyper.quiet_after else 1.0) * hyper.weighting
    lr = given.lr / (1 + state.quiet) ** power
    return replace(given, lr=lr, probe=hyper.learns or hyper.pruning)


async def receive(ctx: Context, hyper: Hyper, state: State, took: float) -> None:
    """Every cache entry is replaced as a whole by the newest model that has come from that neighbour."""
    messages = ctx.receive()
    if not messages and 0 < hyper.quiet_limit <= state.quiet + 1:
        news = await ctx.wait(timeout=hyper.patience * took)
        messages = [] if news is None else [news]
    state.quiet += 1
    ages = [state.age + 1]
    for message in messages:
        source, given = message.source, message.fields
        if message.kind != "model" or source not in ctx.in_neighbours:
            continue
        state.quiet = 0
        ages.append(given["age"])
        state.versions[source] = state.versions.get(source, 0) + 1
        state.cache[source] = Cached(
            cast(Model, message.model), given["loss"], given["samples"], given["rate"], ctx.update,
            state.versions[source],
        )  # fmt: skip
    state.age = sum(ages) / len(ages)


async def learn(ctx: Context, hyper: Hyper, state: State, trained: Trained) -> None:
    """Formulas control and rlupdate: what the last merge did to the loss moves lambda and theta."""
    if state.last is None:
        return
    last, slots = state.last, len(ctx.in_neighbours)
    loss, gradient, before = state.judged or (trained.first_loss, trained.gradient, None)
    flops = reinforce_flops(slots) * hyper.selection
    flops += control_flops(slots + 1, ctx.task.layout.parameters) * hyper.weighting
    state.control, state.theta, state.window = await ctx.compute(
        Learn(hyper.weighting, hyper.selection, hyper.control_rate, hyper.weight_gradient, hyper.control_step,
              hyper.selector_lr, hyper.epsilon, reuse=hyper.reuse_merged),
        state.control, state.theta, state.window, last.vectors, last.masks, last.weights, last.result,
        last.features, np.array(last.versions), last.choices, loss, before, gradient,
        flops=flops, purpose="learning",
    )  # fmt: skip


async def merge(ctx: Context, hyper: Hyper, state: State, trained: Trained) -> dict[str, Any]:
    """Formulas importanceDef, weightDef and parameterAggregation over the models that the selector picks."""
    slots = ctx.in_neighbours
    cached = [state.cache.get(source) for source in slots]
    versions = tuple(0 if entry is None else entry.version for entry in cached)
    now = ctx.update + 1
    ages = np.array([1 if entry is None else max(1, now - entry.arrived) for entry in cached])
    losses = tuple(None if entry is None else entry.loss for entry in cached)
    choices, probabilities, features, state.seen, since = await ctx.compute(
        Select(hyper.selection, hyper.reuse_merged, hyper.greedy, hyper.epsilon, hyper.count_since),
        state.theta, state.seen, state.since, np.array(versions), ages, losses, trained.loss,
        ctx.random("selection").random(len(slots)) if hyper.selection else np.zeros(len(slots)),
        flops=selector_flops(len(slots)) * hyper.selection, purpose="selection",
    )  # fmt: skip
    models = [trained.model, *(None if entry is None else entry.model for entry in cached)]
    vectors = tuple(None if model is None else model.vector for model in models)
    masks = tuple(None if model is None else model.mask for model in models)
    samples = np.array([ctx.samples, *(entry.samples if entry else 0 for entry in cached)])
    vector, weights = await ctx.compute(
        Merge(hyper.weighting, hyper.own_staleness == "counted", hyper.loss_power, hyper.own_power),
        vectors, masks, samples, ages, (trained.loss, *losses), state.control, choices, state.since,
        flops=costs.merging(ctx.task.layout.size, 1 + sum(v > 0 for v in versions)), purpose="merging",
    )  # fmt: skip
    state.since = since
    state.rates = tuple(0.0 if entry is None else entry.rate for entry in cached)
    state.model = replace(trained.model, vector=vector)
    state.last = None
    if hyper.learns:
        state.last = Merged(vectors, masks, weights, vector, features, versions, choices)
    merged = Chosen(tuple(zip(slots, ages.tolist(), strict=True)), choices)
    if not hyper.selection and not hyper.reuse_merged:
        state.cache = {}  # what is not chosen by the selector may be chosen later
    metrics = {"merged": merged, "weights": weights}
    metrics |= {"priorities": probabilities} if hyper.selection else {}
    return metrics | ({"control": state.control} if hyper.weighting else {})


async def go_on(ctx: Context, hyper: Hyper, state: State) -> None:
    """Slow momentum (Wang et al., ICLR 2020): directions that many merges have in common add up, others cancel.

    The mean of n models moves by the n-th part of each device's update; a server that averages ten moves faster.
    Updates between two merges are one step: momentum on each would carry a device further its own way.
    """
    layout = ctx.task.layout
    start = state.base or ctx.initial().vector
    velocity = state.velocity or ctx.known(torch.zeros(layout.size))
    state.base, state.velocity = await ctx.compute(
        SlowMomentum(hyper.momentum, layout.parameters), start, state.model.vector, velocity,
        flops=4.0 * layout.size, purpose="merging",
    )  # fmt: skip
    state.model = replace(state.model, vector=state.base)


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
    """Section Sparse Training: at certain ages, score all units, take the lowest out, let others come back."""
    if ctx.task.groups.count and state.age >= max(hyper.prune_start, state.next_cut):
        state.next_cut = state.age + hyper.prune_every * (1 if state.age < hyper.prune_end else SELDOM)
        limit = cap(state.age, hyper.prune_start - hyper.prune_every, hyper.prune_end, hyper.max_rate)
        steps = hyper.lanczos_steps if hyper.rate == "gap" else 0
        few = ctx.samples < FEW * hyper.hessian_samples
        rows = ctx.batch(max(1, hyper.hessian_samples // 5) if few else hyper.hessian_samples, "curvature")
        budget = Budget(len(rows), hyper.probes, steps=steps)
        op = Prune(ctx.task, budget, hyper.form, hyper.c, hyper.rate, hyper.rate_of)
        key = int(ctx.random("probes").integers(1 << 62))
        mask, kept, rate, raw, state.largest, *size = await ctx.compute(
            op, state.model.vector, ctx.initial().vector, rows, key, state.largest, weights, state.rates, limit,
            flops=op.flops(ctx.task.macs), purpose="pruning",
        )  # fmt: skip
        take_out(state, mask, rate, size)
        return {"prune_rate": rate, "raw_rate": raw, "kept": kept}
    return {"prune_rate": state.rate}


def take_out(state: State, mask: Value, rate: Value, size: list[Value]) -> None:
    """From here on the device trains and sends the smaller model; a merge before the cut teaches nothing.

    How much smaller it is depends on results that may not be computed yet; the clock learns it one update later.
    """
    state.model = Model(state.model.vector, state.model.size, mask)
    state.cut = (*size, rate)
    state.last = state.judged = None


async def settle(ctx: Context, state: State, trained: Trained) -> Trained:
    """Reads how much the last pruning left over; the trained model is of that size."""
    assert state.cut is not None
    entries, macs, state.rate = await ctx.read(*state.cut)
    state.cut = None
    return replace(trained, model=replace(trained.model, size=Size(int(entries), float(macs))))


def send(ctx: Context, state: State, loss: Value) -> None:
    """To one out-neighbour drawn uniformly."""
    if ctx.out_neighbours:
        target = int(ctx.random("neighbour").choice(ctx.out_neighbours))
        ctx.send(target, state.model, loss=loss, samples=ctx.samples, rate=state.rate, age=state.age)


MESSAGES = {"model": forms.Form({"loss": forms.loss, "samples": forms.some, "rate": forms.share, "age": forms.amount})}


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
