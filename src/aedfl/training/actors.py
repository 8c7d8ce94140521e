"""Ray actors, one per GPU or core, and what happens when one of them dies. Needs the extra `ray`."""

from __future__ import annotations

import logging
import os
import socket
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_worker_niceness", "0")  # the actors of a cluster started here do the run's work
os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")  # `Pool` says it, not Ray on stdout

import ray
import torch
from ray import exceptions

from .. import __version__
from ..data.progress import progress
from ..errors import AedflError, UserError
from ..graph import Job
from .parcels import Rows, pack, split, to_host, unpack

log = logging.getLogger(__name__)

Make = Callable[[], Any]
"""Builds, inside an actor, what work is done with; its field `task` says on which device."""
Work = Callable[[Any, list[Job]], Rows]
"""A job's results must not depend on the other jobs of the call."""
Shared = tuple[str, list[Any]]
"""The name of a `Make`, and its reference in a list."""

LOST = (
    exceptions.RayActorError,
    exceptions.NodeDiedError,
    exceptions.ObjectLostError,
    exceptions.OutOfMemoryError,
    exceptions.WorkerCrashedError,
)
"""What is raised in the place of a result that died with its actor."""
TRIES = 4
"""How often jobs are run that take their actor with them, before they are to blame."""
REACH_SECONDS, START_SECONDS, FREE_SECONDS = 5.0, 300.0, 10.0
"""How long a cluster may take to answer, an actor to start, and resources of a dead actor to become free."""
BY_PATH = ("aedfl_method_", "aedfl_model_")
"""Modules that were loaded from a user's file: only their contents can travel."""


class Actor:
    """Lives in a process of its own, and builds what its work needs once."""

    def __init__(self) -> None:
        self._made: dict[str, Any] = {}

    def about(self) -> dict[str, str]:
        return versions()

    def run(self, name: str, made: list[Any], work: Work, jobs: Any) -> Any:
        """`made` holds the reference of a `Make`, in a list so that only the first call fetches it."""
        if name not in self._made:
            self._made[name] = ray.get(made[0])()
        shop = self._made[name]
        with torch.no_grad():
            return pack(to_host(work(shop, list(unpack(jobs, shop.task.device)))))


    def drop(self, name: str) -> None:
        self._made.pop(name, None)


def versions() -> dict[str, str]:
    """What must be the same on all machines."""
    return {"aedfl": __version__, "torch": torch.__version__.partition("+")[0]}


class Pool:
    """As many actors as the cluster has free GPUs (or, without GPUs, cores), or fewer if so `wanted`."""

    def __init__(self, address: str, wanted: int | None = None, device: str = "auto") -> None:
        connect(address)
        self.address = address
        has = ray.cluster_resources()
        self.device = ("cuda" if has.get("GPU") else "cpu") if device == "auto" else device
        self.replaced = 0
        self._number = count()
        self._needs = {"num_cpus": 0, "num_gpus": 1} if self.device == "cuda" else {"num_cpus": 1}
        free = self._free(wanted or int(has.get(self._resource, 0)))
        if free < (wanted or 1):
            unit = "GPUs" if self.device == "cuda" else "cores"
            raise UserError(
                f"engine.ray = '{address}' has {free} free {unit} of {has.get(self._resource, 0):.0f}, "
                f"but {wanted or 1} {'is' if (wanted or 1) == 1 else 'are'} needed, one per actor"
            )
        self.actors = self._start(wanted or free)

    @property
    def _resource(self) -> str:
        return "GPU" if self.device == "cuda" else "CPU"

    def _free(self, wanted: int) -> int:
        """Free GPUs or cores; what was given back a moment ago takes a moment to be seen."""
        until = time.monotonic() + FREE_SECONDS
        while True:
            free = int(ray.available_resources().get(self._resource, 0))
            if free >= wanted or time.monotonic() > until:
                return free
            time.sleep(0.1)

    def _start(self, number: int) -> list[Any]:
        actors = [self._new() for _ in range(number)]
        waiting = [actor.about.remote() for actor in actors]
        until = time.monotonic() + START_SECONDS
        with progress(f"starting {number} Ray actors", number) as advance:
            while waiting:
                done, waiting = ray.wait(waiting, timeout=max(0.0, until - time.monotonic()))
                if not done:
                    raise AedflError(f"{len(waiting)} of {number} Ray actors did not start in {START_SECONDS:g} s")
                _check(done[0])
                advance(1)
        return actors

    def _new(self) -> Any:
        return ray.remote(**self._needs)(Actor).remote()

    def share(self, make: Make) -> Shared:
        """Puts a `Make` where every actor can fetch it: once per machine, arrays in shared memory."""
        _carry_users_modules()
        return str(next(self._number)), [ray.put(make)]

    def run(self, shared: Shared, work: Work, jobs: Sequence[Job], costs: Sequence[float]) -> Rows:
        """The results of `jobs`, in their order, from all actors; what dies with one is run again."""
        _carry_users_modules()
        shares = split(costs, len(self.actors))
        parcels = [pack([jobs[number] for number in share]) for share in shares]
        tries = [0] * len(shares)
        waiting: dict[Any, tuple[int, Any]] = {}

        def send(part: int, actor: Any) -> None:
            tries[part] += 1
            waiting[actor.run.remote(*shared, work, parcels[part])] = part, actor

        for part in range(len(shares)):
            send(part, self.actors[part])
        results: dict[int, tuple[Any, ...]] = {}
        while waiting:
            (done,), _ = ray.wait(list(waiting))
            part, actor = waiting.pop(done)
            try:
                rows = unpack(ray.get(done), torch.device("cpu"), copy=True)
            except exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, AedflError) else error) from None
            except LOST as error:
                send(part, self._instead(actor, tries[part], len(shares[part]), error))
            else:
                results.update(zip(shares[part], rows, strict=True))
        return [results[number] for number in range(len(jobs))]

    def _instead(self, dead: Any, tries: int, jobs: int, error: Exception) -> Any:
        """A new actor in the place of a dead one, or another one where there is no room for it any more."""
        if tries >= TRIES:
            raise AedflError(f"Ray actors died with the same {jobs} jobs in all of {tries} tries: {_line(error)}")
        ray.kill(dead)
        log.warning("a Ray actor died; its %d jobs are run again", jobs)
        if dead in self.actors:
            self.actors.remove(dead)
            if self._free(1):
                self.actors += self._start(1)
                self.replaced += 1
        if not self.actors:
            raise AedflError(f"every Ray actor at {self.address} has died, and there is no room for a new one")
        return self.actors[-1]

    def drop(self, shared: Shared) -> None:
        """The work that needed it is done."""
        for actor in self.actors:
            actor.drop.remote(shared[0])

    def close(self) -> None:
        """Gives the GPUs or cores back."""
        for actor in self.actors:
            ray.kill(actor)
        self.actors = []


def connect(address: str) -> None:
    """Joins the cluster at `address`; 'local' starts one here, 'auto' finds the one that runs here.

    A process is part of one cluster at a time, and stays so until it ends.
    """
    if ray.is_initialized():
        here = ray.get_runtime_context().gcs_address
        if address not in ("local", "auto", here):
            raise UserError(f"engine.ray = '{address}': this process is connected to the Ray cluster at {here} already")
        return
    if address not in ("local", "auto"):
        _reach(address)
    options = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    except (ConnectionError, RuntimeError, SystemExit) as error:
        hint = "" if address == "auto" else "; is it a head node's port, and is RAY_AUTH_TOKEN the cluster's token?"
        raise UserError(f"engine.ray = '{address}': no Ray cluster was joined: {_line(error)}{hint}") from error


def _reach(address: str) -> None:
    """Ray itself would try for two minutes and then end the process."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or "/" in address:
        raise UserError(f"engine.ray = '{address}': must be 'local', 'auto' or the head node's 'host:port'")
    try:
        socket.create_connection((host, int(port)), REACH_SECONDS).close()
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UserError(f"engine.ray = '{address}': no Ray cluster answers there: {reason}") from None


def _carry_users_modules() -> None:
    """A class of a user's file, a model's or an op's, goes by value: no other process can import it."""
    for name, module in list(sys.modules.items()):
        if name.startswith(BY_PATH):
            ray.cloudpickle.register_pickle_by_value(module)


def _check(started: Any) -> None:
    """An actor that came up, with the versions that are here."""
    try:
        there, here = ray.get(started), versions()
    except LOST as error:
        raise AedflError(f"a Ray actor did not start; aedfl must be installed on every node: {_line(error)}") from error
    for name, wanted in here.items():
        if there[name] != wanted:
            raise UserError(f"a node of the Ray cluster has {name} {there[name]}, but here it is {wanted}")


def _line(error: BaseException) -> str:
    """The last line of an error's text that says something."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].partition(". ")[0] if lines else type(error).__name__
