"""The hyper-parameters of AEDFL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ..context import option
from ..rules.pretrain import Start
from ..rules.weights import Derivative, Step
from ..sparsity.job import Measure, Rate
from ..sparsity.loss_change import Form


@dataclass(frozen=True)
class Hyper:
    """Hyper-parameters of AEDFL: three switches, then the settings of each module."""

    selection: bool = option(True, "choose the models to merge by reinforcement learning")
    weighting: bool = option(True, "weigh models by samples, staleness, loss and learned control parameters")
    pruning: bool = option(True, "train and send a model that is pruned as it goes")

    outer: Literal["training", "held-out"] = option("training", "data behind losses and gradients of merged models")
    held_out_samples: int = option(100, "held-out samples looked at per update, with outer = held-out", least=1)

    reuse_merged: bool = option(False, "cached models that were merged before may be merged again, as in the paper")
    selector: Start = option("open", "the selector begins open to everything new, or wary of models of high loss")
    selector_lr: float = option(0.03, "learning rate of the selector")
    epsilon: float = option(0.01, "share of choices made at random", most=1)
    reward: Literal["loss", "gain"] = option(
        "gain", "reward: loss after the merge, or what the merge changed (held-out)"
    )
    greedy: bool = option(False, "take every model of probability above 1/2 instead of drawing")
    window: int = option(10, "losses in the mean that is REINFORCE's baseline", least=1)
    count_since: bool = option(True, "the selector sees how long nothing was merged")

    control_rate: float = option(0.01, "learning rate of the control parameters")
    weight_gradient: Derivative = option("exact", "derivative of the weights: the paper's truncated one, or exact")
    control_step: Step = option("exponentiated", "step of the control parameters; raw is the paper's")
    own_staleness: Literal["one", "counted"] = option("counted", "age of the own model: 1, or updates since a merge")
    own_power: float = option(0.5, "exponent of the own model's age in its weight; the paper's is 1/2")
    loss_power: float = option(0.0, "a model's weight is divided by this power of its loss; the paper's is 1")

    exchange: int = option(1, "epochs after which models are merged and sent; 0: all of a local update, as the paper")
    own_step: float = option(1.0, "times the own update goes into the merged model; 0: the paper's way, by its weight")
    sent_step: float = option(1.7, "the same for the model that is sent")
    settle: float = option(60.0, "age of a model (see State.age) at which both steps are half as long; 0: never")
    sends: int = option(2, "neighbours, drawn at random, that get the model after an exchange; the paper has 1")
    momentum: float = option(0.5, "slow momentum: share of the last merges' change that goes on; paper: 0", most=1)
    quiet_lr: float = option(2.0, "the learning rate falls by this power of the updates since a model came; 0: never")
    quiet_after: float = option(1000.0, "SGD steps behind a model by which that power is reached; it grows from 0")
    quiet_limit: int = option(0, "updates without a new model after which a device waits for one; 0: it never waits")
    patience: float = option(4.0, "how long it waits at most, in local updates of its own")

    prune_start: float = option(15.0, "age of a model (see State.age) from which it is pruned")
    prune_every: float = option(6.0, "age between pruning steps; ten times as much after prune_end")
    prune_end: float = option(45.0, "age at which the cap of the rate reaches max_rate")
    regroup: float = option(2.0, "age between steps that let masks follow what units are worth to others; 0: none")
    max_rate: float = option(0.25, "largest rate: the share that goes", most=1)
    rate_of: Measure = option("macs", "what the rate is a share of; units go by their saliency per MAC, or as such")
    view: float = option(0.1, "share of the own scores in what units are worth to neighbours; paper: 1", most=1)
    comeback: float = option(2.0, "how much less a unit that is out counts than it scores; paper: 1", least=1)
    rate: Rate = option("schedule", "the rate itself: gap rule of the paper under the schedule's cap, or the schedule")
    probes: int = option(4, "Hessian products behind the change of the gradient", least=1)
    form: Form = option("gauss_newton", "estimate of the change of the loss")
    c: float = option(1.5, "the paper's C: how soon the loss outweighs the gradient in the saliency")
    lanczos_steps: int = option(16, "steps of Lanczos for the gap rule")
    hessian_samples: int = option(50, "samples that curvature is estimated on; a fifth where data are few", least=1)

    @property
    def moves(self) -> bool:
        """The own update is not weighed, but counts as such."""
        return self.weighting and self.own_step > 0

    def rest(self, age: float) -> float:
        """What is left of the steps at that age; what devices disagree on cancels out in smaller ones."""
        return 1 / (1 + age / self.settle) if self.settle else 1.0

    @property
    def learns(self) -> bool:
        return self.selection or self.weighting
