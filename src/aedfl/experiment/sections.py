"""What a run's config may say: one small model per section of the TOML file, with its limits."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=True)]
Share = Annotated[float, Field(ge=0, lt=0.9)]
Count = Annotated[int, Field(ge=1)]
TrackerName = Literal["tensorboard", "wandb", "mlflow"]

MOST_MEASUREMENTS = 1_000_000_000
"""Of a run: more would never come to an end."""

NONE = "none"
"""How a file or an override says that an optional key has no value; TOML has no word for it."""


class Section(BaseModel):
    """Immutable, and every key must be known."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _none(cls, given: Any) -> Any:
        if not isinstance(given, dict):
            return given
        return {key: None if value == NONE and cls._optional(key) else value for key, value in given.items()}

    @classmethod
    def _optional(cls, key: str) -> bool:
        field = cls.model_fields.get(key)
        return field is not None and type(None) in get_args(field.annotation)


class Data(Section):
    """Which samples there are, and who gets which."""

    name: str
    """A data set of `aedfl datasets`, `module:attribute`, or the path of a Parquet file."""
    directory: str | None = None
    """Where the data sets lie."""
    partition: Literal["iid", "dirichlet", "shards", "lognormal"] = "dirichlet"
    alpha: Positive = 0.5
    """Concentration of the Dirichlet distribution; smaller is less even."""
    sigma: NonNegative = 0.1
    """Spread of the lognormal sizes of the devices' shares."""
    shards: Count = 2
    """Shards per device, where data are dealt in shards."""
    held_out: Share = 0.0
    """Share of a device's samples that it never trains on."""
    validation: Share = 0.0
    """Share of the training data set aside, which is then evaluated on instead of the test set."""
    samples: Count | None = None
    """Use only so many training samples, drawn by the seed."""
    test_samples: Count | None = None


class Model(Section):
    """The network."""

    name: str
    options: dict[str, Any] = {}


class Training(Section):
    """Local SGD."""

    epochs: Count = 4
    batch_size: Annotated[int, Field(ge=1, lt=2**31)] = 50
    lr: Positive = 0.03
    lr_decay: NonNegative = 0.001
    """Per local update."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.0
    weight_decay: NonNegative = 0.0
    clip_norm: Positive | None = None


class Fleet(Section):
    """How fast the devices are, and when they are there. Virtual seconds."""

    fastest: Positive = 1.0
    """A local update of the unpruned model on the mean number of samples; uniform over the devices."""
    slowest: Positive = 15.0
    trace: str | None = None
    """CSV file `device,time,event`; events are join, crash and leave."""
    mean_up: Positive | None = None
    """Availability by chance: exponential times of being there, and of being away."""
    mean_down: Positive | None = None
    speeds: str | None = None
    """CSV file `device,seconds`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.slowest < self.fastest:
            raise ValueError(f"slowest = {self.slowest:g} must not be below fastest = {self.fastest:g}")
        if (self.mean_up is None) != (self.mean_down is None):
            raise ValueError("mean_up and mean_down must be given together")
        return self


class Links(Section):
    """The network: seconds, bits per second, and the share of messages that is lost."""

    latency: NonNegative = 0.02
    bandwidth: Rate = 100e6
    server_bandwidth: Rate = 1e9
    """Of the server's link, shared by its clients."""
    loss: Annotated[float, Field(ge=0, lt=1)] = 0.0


class Topology(Section):
    """Who may send to whom."""

    kind: Literal["exponential", "ring", "star", "torus", "full", "random", "file"] = "exponential"
    degree: Count | None = None
    """Of a random graph."""
    path: str | None = None
    """Edge list, for kind `file`."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if (self.kind == "file") != (self.path is not None):
            raise ValueError("path must be given with kind = 'file', and only then")
        return self


class Stop(Section):
    """When a run ends: at the first of these."""

    virtual_seconds: Positive | None = None
    updates: Count | None = None
    """Local updates of each device, as its program counts them: AEDFL has one for every exchange of models."""
    target_accuracy: Annotated[float, Field(gt=0, le=1)] | None = None
    """The time to reach it is reported."""
    stop_at_target: bool = False
    consensus: Positive | None = None
    """Consensus distance below which the run ends."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.virtual_seconds is None and self.updates is None:
            raise ValueError("virtual_seconds or updates must be given, or the run would never end")
        if self.stop_at_target and self.target_accuracy is None:
            raise ValueError("stop_at_target needs a target_accuracy")
        return self


class Evaluation(Section):
    """How often, and on how much. Measuring costs no virtual time."""

    every: Positive = 15.0
    """Virtual seconds."""
    local_samples: Count = 1000
    """Test samples for the devices' own models."""
    local_devices: Count = 100
    """Devices whose own models are measured."""


class Engine(Section):
    """What does the computing."""

    trainer: Literal["auto", "sequential", "batched"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    precision: Literal["fp32", "tf32", "bf16"] = "tf32"
    kernels: bool = True
    """Train and evaluate by kernels of our own (Triton on a GPU, C on a CPU) where they fit, or by PyTorch alone."""
    lookahead: Count | None = None
    """Jobs that may be queued before they are computed together; by default 256, on a GPU as many as devices."""
    overlap: bool | None = None
    """Compute jobs in a thread of its own while the simulation goes on; by default on a GPU, without Ray."""
    threads: Count | None = None
    cache_budget_mib: Positive | None = None
    """Memory for models on the accelerator; beyond it they live in the host's."""
    ray: str | None = None
    """Where a Ray cluster is that shares the work: `host:port`, `auto`, or `local` to start one here."""
    actors: Count | None = None
    """Ray actors; one per free GPU, or without GPUs per free core, by default."""


class Record(Section):
    """What is written, and how often. Nothing here changes a run's results."""

    updates: bool = True
    """One line per local update in `updates.jsonl`."""
    checkpoint_seconds: Positive = 30.0
    """Wall seconds between checkpoints, at least."""
    checkpoint_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Largest share of the wall time that goes into writing them; large models are saved less often."""
    keep_checkpoints: Count = 2
    trackers: Annotated[tuple[TrackerName, ...], Field(strict=False)] = ()


class RunConfig(Section):
    """Everything that describes one run."""

    method: str = "aedfl-0"
    """A method of `aedfl methods`, or the path of a Python file that defines one."""
    preset: str | None = None
    seed: Annotated[int, Field(ge=0)] = 0
    devices: Count
    hyper: dict[str, Any] = {}
    """The method's hyper-parameters; see `make_hyper`."""
    data: Data
    model: Model
    training: Training = Training()
    fleet: Fleet = Fleet()
    links: Links = Links()
    topology: Topology = Topology()
    stop: Stop
    evaluation: Evaluation = Evaluation()
    engine: Engine = Engine()
    record: Record = Record()

    @model_validator(mode="after")
    def _check(self) -> Self:
        every, seconds = self.evaluation.every, self._longest()
        if every < seconds / MOST_MEASUREMENTS:
            raise ValueError(
                f"evaluation.every = {every:g}: must be at least {seconds / MOST_MEASUREMENTS:g}, "
                f"or a run of about {seconds:g} virtual seconds has more than {MOST_MEASUREMENTS} measurements"
            )
        return self

    def _longest(self) -> float:
        """Virtual seconds until a stop condition on time or updates holds, roughly; 0 where nothing is known."""
        stop, fleet = self.stop, self.fleet
        updates = min(stop.updates, 1e300) * fleet.slowest if stop.updates and not fleet.speeds else None
        return min((seconds for seconds in (stop.virtual_seconds, updates) if seconds is not None), default=0.0)
