"""From a table or figure to its cells: setting, method, seed and what is changed, each with its config."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shlex
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from ..algorithms import METHODS, get
from ..errors import UserError
from ..experiment.complaints import unknown
from ..experiment.config import WITHOUT_EFFECT, RunConfig, load, make_hyper

FIRST_SEED = 1
"""Table seeds count from here; seed 0 was looked at while methods were developed."""

CHEAP = ("fedavg", "fedprox", "fednova", "safa", "sageflow", "dispfl")
"""Methods that work in rounds and so train about a third as often; they go last."""

QUICK = "quick"
"""Among changes, stands for all those that make a run small."""

OPTIONS = ("stop.virtual_seconds", "seed", "method", "engine.device", "data.directory")
PACE = ("record.", *(f"engine.{key}" for key in WITHOUT_EFFECT["engine"] or ()))
"""Keys that change how a run is computed and written, but not what comes out."""

Tuned = Mapping[str, Mapping[str, Any]]
"""Frozen keys of each method in one setting."""


@dataclass(frozen=True)
class Setting:
    """A data set with a model, as the paper's tables pair them."""

    name: str
    title: str
    preset: str
    end: float
    """Virtual seconds at which all methods stop."""
    at_once: int
    """Runs that share a GPU's memory."""
    config: Mapping[str, Any]
    """Keys over the preset's."""
    quick: Sequence[str] = ()
    """What `--quick` changes in this setting, besides what it changes in all."""
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Keys of single methods: what they may spend there. AEDFL's hold for its variants, too."""

    @property
    def target(self) -> float:
        return float(self.config["stop.target_accuracy"])

    def keys_of(self, method: str) -> Mapping[str, Any]:
        return self.methods.get(family(method), {})


@dataclass(frozen=True)
class Target:
    """A table or a figure."""

    name: str
    title: str
    settings: tuple[str, ...]
    methods: tuple[str, ...]
    seeds: int
    axis: str = ""
    measure: str = "table"
    values: Mapping[str, Sequence[str]] = field(default_factory=lambda: {"": ()})
    quick: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Values of the small version, where they are others."""
    ends: Mapping[str, float] = field(default_factory=dict)
    """Virtual seconds at which its runs stop, by setting, where that is earlier than in the setting's table."""

    @property
    def is_table(self) -> bool:
        return self.measure == "table"


@dataclass(frozen=True)
class Key:
    """What a record is found by."""

    setting: str
    method: str
    seed: int
    changes: tuple[str, ...] = ()
    """`key=value` over the setting, in the order given."""
    tuned: bool = False
    """Run with what tuning has found, be it the default."""

    def __str__(self) -> str:
        notes = [*(["tuned"] if self.tuned else []), *self.changes]
        return f"{self.setting} {self.method} seed {self.seed}" + (f" ({', '.join(notes)})" if notes else "")


@dataclass(frozen=True)
class Cell:
    """One run of a table or figure."""

    key: Key
    config: RunConfig
    target: str
    command: str
    """Runs this cell (and those of the seeds before it)."""

    @property
    def identity(self) -> str:
        return identity(self.config)


def identity(config: RunConfig) -> str:
    """Hash of all that a curve depends on; neither its length nor the machine.

    Hyper-parameters count with their values, also where those are a method's defaults. Other keys count where they
    are not at their default, so that records stay valid when a config gets a new key.
    """
    table = config.model_dump(mode="json", exclude_defaults=True, exclude={"preset", "stop", "record", "hyper"})
    engine: dict[str, Any] = {"precision": config.engine.precision, "trainer": config.engine.trainer}
    engine |= {} if config.engine.kernels else {"kernels": False}
    data = {key: value for key, value in table["data"].items() if key != "directory"}
    own = Path(config.method).read_text() if config.method.endswith(".py") else ""
    whole = {**table, "engine": engine, "data": data, "hyper": resolved_hyper(config), "own": own}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()


def resolved_hyper(config: RunConfig) -> dict[str, Any]:
    """All hyper-parameters of a run's method with their values."""
    hyper = make_hyper(get(config.method).hyper, config.hyper)
    known = dataclasses.is_dataclass(hyper) and not isinstance(hyper, type)
    return dataclasses.asdict(hyper) if known else {}


@cache
def settings() -> dict[str, Setting]:
    found = sorted((_here() / "settings").iterdir(), key=lambda file: file.name)
    tables = {file.name.removesuffix(".toml"): tomllib.loads(file.read_text()) for file in found}
    return {name: Setting(name, **table) for name, table in tables.items()}


@cache
def _targets() -> dict[str, Any]:
    return tomllib.loads((_here() / "targets.toml").read_text())


@cache
def targets() -> dict[str, Target]:
    return {name: _target(name, table) for name, table in _targets()["targets"].items()}


def titles() -> dict[str, str]:
    """Names of the methods as the paper writes them."""
    return dict(_targets()["titles"])


def title(method: str) -> str:
    return titles().get(method, method)


def setting(name: str) -> Setting:
    if name not in settings():
        raise UserError(unknown("setting", name, settings()))
    return settings()[name]


def target(name: str) -> Target:
    return targets()[name]


def _target(name: str, table: Mapping[str, Any]) -> Target:
    lists = {key: tuple(table[key]) for key in ("settings", "methods")}
    return Target(name, **{**table, **lists})


def _here() -> Any:
    return files("aedfl.reproduce")


@dataclass(frozen=True)
class Wish:
    """What a person asks of a target beyond its own definition."""

    settings: tuple[str, ...] = ()
    methods: tuple[str, ...] = ()
    seeds: int | None = None
    overrides: tuple[str, ...] = ()
    quick: bool = False
    until: float | None = None
    data: str | None = None
    device: str | None = None

    @property
    def options(self) -> list[str]:
        """The part of a command that says what is run, besides settings, methods and seeds."""
        until = [] if self.until is None else ["--until", f"{self.until:g}"]
        sets = [part for override in self.overrides for part in ("--set", override)]
        return [*(["--quick"] if self.quick else []), *until, *sets]

    def narrow(self, base: Target) -> Target:
        """The target with the settings, methods and seeds that were asked for."""
        for name in self.settings:
            setting(name)
        for method in self.methods:
            get(method)
        methods = base.methods
        if self.quick and base.name != "fig-ablation":
            methods = tuple(method for method in methods if method in _targets()["quick_methods"])
        return dataclasses.replace(
            base,
            settings=self.settings or base.settings,
            methods=self.methods or methods,
            seeds=self.seeds or (1 if self.quick else base.seeds),
            values=(self.quick and base.quick) or base.values,
        )

    def end(self, name: str, aim: Target | None = None) -> float:
        """Virtual seconds to which the cells of a setting are run."""
        own = setting(name).end if aim is None else aim.ends.get(name, setting(name).end)
        return self.until or (float(_targets()["quick_end"]) if self.quick else own)

    def changes(self, swept: Sequence[str]) -> tuple[str, ...]:
        """What sets a cell apart from its setting."""
        own = [override for override in self.overrides if not _is(override, PACE)]
        return (*((QUICK,) if self.quick else ()), *swept, *own)

    @property
    def pace(self) -> list[str]:
        """Overrides that change how a run is computed, but not what comes out."""
        for override in self.overrides:
            if _is(override, OPTIONS):
                raise UserError(f"--set {override}: use --until, --seeds, --methods, --data or --device for that")
        return [override for override in self.overrides if _is(override, PACE)]


def _is(override: str, keys: tuple[str, ...]) -> bool:
    return override.partition("=")[0].strip().startswith(keys)


def cells(base: Target, wish: Wish, tuned: Mapping[str, Tuned]) -> list[Cell]:
    """All cells of a target, setting by setting; within one, those that take longest first."""
    aim = wish.narrow(base)
    found = []
    for name in aim.settings:
        inside = [
            cell(name, method, FIRST_SEED + seed, wish, swept, base.name, tuned.get(name, {}))
            for method in aim.methods
            for swept in aim.values.values()
            for seed in range(aim.seeds)
        ]
        found += sorted(inside, key=lambda cell: cell.key.method in CHEAP)
    return found


def cell(name: str, method: str, seed: int, wish: Wish, swept: Sequence[str], target_name: str, tuned: Tuned) -> Cell:
    """One run of a target, with what tuning has found for its method there."""
    changes, aim = wish.changes(swept), targets().get(target_name)
    frozen, end = frozen_for(method, tuned), wish.end(name, aim)
    config = configure(name, method, seed, frozen or {}, changes, dataclasses.replace(wish, until=end))
    asked = ["--settings", name, "--methods", method, "--seeds", str(seed - FIRST_SEED + 1)]
    command = shlex.join(["aedfl", "reproduce", target_name, *asked, *wish.options])
    return Cell(Key(name, method, seed, changes, frozen is not None), config, target_name, command)


def frozen_for(method: str, tuned: Tuned) -> dict[str, Any] | None:
    """A method's tuned keys; AEDFL's variants share AEDFL's."""
    found = tuned.get(family(method))
    return None if found is None else dict(found)


def family(method: str) -> str:
    """The method whose trials a method shares."""
    return "aedfl" if method in METHODS and method.startswith("aedfl") else method


def configure(
    name: str, method: str, seed: int, frozen: Mapping[str, Any], changes: Iterable[str], wish: Wish
) -> RunConfig:
    """The config of a run: preset, then the setting's keys, then the method's there, then frozen ones, then changes."""
    given = setting(name)
    if get(method).server is not None:
        changes = [change for change in changes if not change.startswith("topology.")]
    small = (*_targets()["quick"], *given.quick) if wish.quick else ()
    changed = [change for change in changes if change != QUICK]
    keys = {**given.config, **given.keys_of(method), **frozen}
    overrides = [*assignments(keys), *small, *changed, *wish.pace]
    where = {"data.directory": wish.data, "engine.device": wish.device}
    end = {"stop.virtual_seconds": wish.end(name), "record.updates": False}
    return load(given.preset, overrides, method=method, seed=seed, **end, **where)


def assignments(keys: Mapping[str, Any]) -> list[str]:
    """`key=value` as `load` reads it."""
    return [f"{key}={json.dumps(value)}" for key, value in keys.items()]
