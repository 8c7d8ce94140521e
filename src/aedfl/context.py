"""`Context`: the few verbs a method may use. One contract, two clocks.

A method is an `async def` program over a `Context`. In the simulator its clock is virtual and its results may be
computed later than it asks for them; on a real machine its clock is the wall's. A program that keeps to these
verbs cannot tell the difference. It imports neither `simpy`, `asyncio`, `grpc`, `time` nor `random`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from inspect import iscoroutinefunction, unwrap
from typing import Any

import numpy as np
from torch import Tensor

from .errors import UserError
from .forms import Form
from .graph import Op, Value
from .task import Task
from .training.plan import Plan

SERVER = -1
"""Index of the server, in methods that have one."""

State = Mapping[str, Any]
"""What `Context.save` keeps: names to models, values, numbers and strings, and lists, dicts or frozen dataclasses of
those."""


@dataclass(frozen=True, slots=True)
class Size:
    """What the clock and the wire see of a model: the part of it that is kept."""

    parameters: int
    """Kept entries of the flat vector, buffers included; the values a message carries."""
    macs: float
    """Multiply-accumulates of one sample's forward pass."""


@dataclass(frozen=True, slots=True)
class Model:
    """An immutable model: the full flat vector, a mask (1 = kept; None = everything), and the kept size."""

    vector: Value
    size: Size
    mask: Value | None = None


@dataclass(frozen=True, slots=True)
class Trained:
    """What local training gives."""

    model: Model
    loss: Value
    """Mean training loss over all steps."""
    first_loss: Value
    """Loss of the model that training started from, on its first mini-batch (0-dimensional)."""
    gradient: Value
    """That mini-batch's gradient [layout.parameters], at the masked model; empty unless `plan.probe`."""
    steps: int


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A model (or none) with a few named numbers, as one whole. Immutable, like everything that was sent."""

    source: int
    kind: str
    model: Model | None
    fields: Mapping[str, Any] = field(default_factory=dict)
    """Numbers, strings, `Value`s, or tuples of them; what the sender gave by name."""


class Spawned(ABC):
    """A second coroutine of a device, started by `Context.spawn`."""

    @abstractmethod
    def cancel(self) -> None:
        """Ends it at its current `await`; nothing after that runs. Ending it twice is allowed."""


class Context(ABC):
    """One device's (or the server's) view of the world.

    Order: a program's own verbs take effect in program order. Between two `await`s nothing else of the same
    device runs, so what a program does between them is atomic for its second coroutine. Messages of one
    sender to one receiver arrive in the order sent, or not at all; between senders no order is promised.
    """

    index: int
    """Own index, 0 … devices-1, handed out once; `SERVER` for the server."""
    devices: int
    samples: int
    """Training samples on this device; on a server, its public samples (see `Method.public_samples`)."""
    held_out: int
    """Samples of this device that training never sees."""
    task: Task
    """The learning problem: layout, loss, channel groups. Its data are reached through verbs only."""
    update: int
    """Local updates finished, i.e. calls of `publish` so far, those before a crash included."""

    @property
    @abstractmethod
    def now(self) -> float:
        """Seconds since the run began, virtual or wall."""

    @property
    @abstractmethod
    def running(self) -> bool:
        """False once a stop condition holds: number of updates, time, target accuracy, consensus distance.

        On a server the number of updates counts as reached once every device has done its own (or has left for good)
        and all that they sent has been taken from the mailbox.
        """

    @property
    @abstractmethod
    def in_neighbours(self) -> tuple[int, ...]:
        """Devices that may send to this one, in a fixed order.

        May change when devices join or leave, but never within a local update: only when it is published.
        """

    @property
    @abstractmethod
    def out_neighbours(self) -> tuple[int, ...]:
        """Devices that this one may send to."""

    @abstractmethod
    def initial(self) -> Model:
        """The model that every device starts from; the same on all."""

    @abstractmethod
    def plan(self, done: float | None = None) -> Plan:
        """The run's settings for local training, with the learning rate after that many local updates.

        By default those published so far; a program that publishes more often than that counts in parts.
        """

    @abstractmethod
    def random(self, purpose: str) -> np.random.Generator:
        """A fresh generator keyed by (seed, device, update, purpose): the same key, the same numbers."""

    @abstractmethod
    async def train(self, model: Model, plan: Plan | None = None, anchor: Model | None = None) -> Trained:
        """Local SGD on the device's training data. Takes time in proportion to the kept size.

        Entries that the mask removes stay as they are and get no gradient. With `plan.proximal` the loss is
        pulled towards `anchor`, by default `model` itself. The order of the samples is keyed by (seed, device,
        number of this call).
        """

    @abstractmethod
    async def compute(self, op: Op, *args: Any, flops: float, purpose: str) -> tuple[Value, ...]:
        """Runs a pure function on values; takes `flops` of time, booked under `purpose`.

        Jobs of many devices with equal ops run as one batch. `args` may hold values, tuples of values, and
        plain objects.
        """

    @abstractmethod
    async def spend(self, flops: float, purpose: str) -> None:
        """Takes the time of work whose results came with those of an earlier `compute`, and books it.

        One job that does several things for many devices at once is cheaper to simulate than several jobs.
        """

    @abstractmethod
    def known(self, data: Tensor) -> Value:
        """A value for a tensor that needs no computing, such as a start value."""

    @abstractmethod
    def batch(self, count: int, purpose: str, held_out: bool = False) -> np.ndarray[Any, np.dtype[np.int64]]:
        """Up to `count` sample numbers of this device, for ops that look at data; keyed as `random`."""

    @abstractmethod
    async def read(self, *values: Value) -> list[Any]:
        """The values as Python numbers (nested lists for tensors). The only way from tensors to decisions.

        Takes no time on the clock, but it makes the engine compute what is queued; read seldom and together.
        """

    @abstractmethod
    def send(self, to: int, model: Model | None = None, kind: str = "model", **fields: Any) -> None:
        """Hands a message to the network and returns at once; it may be lost. Takes none of the sender's time."""

    @abstractmethod
    def waiting(self, to: int) -> bool:
        """Whether a message to that device still waits to leave this one: its link is slow, or it is not there."""

    @abstractmethod
    def receive(self) -> list[Message]:
        """Everything that has arrived and was not taken yet, oldest first. Never waits."""

    @abstractmethod
    async def wait(self, timeout: float | None = None, kind: str | None = None) -> Message | None:
        """The oldest message (of that kind) that was not taken yet, waiting for one if need be.

        None when `timeout` seconds have passed first; 0 looks without waiting. Waiting coroutines of one
        device are served in the order they began to wait.
        """

    @abstractmethod
    async def sleep(self, seconds: float) -> None:
        """Lets that much time pass."""

    @abstractmethod
    def spawn(self, program: Coroutine[Any, Any, None]) -> Spawned:
        """Starts a second coroutine of this device, at the next `await`; it may train and wait as well.

        It outlives the program that started it, so that it can go on answering others, and ends with the device or
        with the run, which it does not keep going.
        """

    @abstractmethod
    def publish(self, model: Model, **metrics: Any) -> None:
        """Ends a local update: `model` is what the device now stands for, and what is evaluated.

        Metrics (numbers, values, short lists) go into the record.
        """

    @abstractmethod
    def save(self, state: State) -> None:
        """Makes `state` the one that survives a crash. Atomic: a crash leaves the old or the new one, whole."""

    @abstractmethod
    def restore(self) -> dict[str, Any] | None:
        """The state saved last, after a crash or a restart; None on the first start."""


Program = Callable[[Context, Any], Coroutine[Any, Any, None]]
"""An `async def program(ctx, hyper)`."""


def option(default: Any, text: str, least: float | None = 0, most: float | None = None) -> Any:
    """A hyper-parameter's default value, its line of help, and, of a number, the bounds of what is allowed."""
    return field(default=default, metadata={"help": text, "least": least, "most": most})


@dataclass(frozen=True)
class Method:
    """A method: what a device does, and what a server does where there is one."""

    name: str
    summary: str
    hyper: Any
    """Frozen dataclass instance: the default hyper-parameters. Fields carry `metadata={'help': …}`."""
    device: Program
    server: Program | None = None
    paper: str = ""
    public_samples: int = 0
    """Samples that the server gets from the training data before they are shared out; at most a twentieth."""
    messages: Mapping[str, Form] = field(default_factory=dict)
    """What its messages look like, by kind. On real machines all others are refused; without forms none is."""

    def __post_init__(self) -> None:
        for who, program in (("device", self.device), ("server", self.server)):
            if program is not None and not _is_program(program):
                raise UserError(f"method {self.name!r}: {who} must be an 'async def program(ctx, hyper)'")


def _is_program(program: Any) -> bool:
    """True also for a partial or decorated program, and for an object with an `async def __call__`."""
    return any(map(iscoroutinefunction, (program, unwrap(program), type(program).__call__)))
