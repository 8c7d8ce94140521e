"""A real Ray cluster of two workers: who works, who dies, and what is said."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from aedfl.errors import AedflError, UserError

Rows = list[tuple[Tensor, ...]]


@pytest.fixture(scope="module")
def pool(cluster: str) -> Iterator[Any]:
    import ray

    from aedfl.training.actors import Pool

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    pool = Pool(cluster)
    yield pool
    pool.close()


def nothing() -> Any:
    return SimpleNamespace(task=SimpleNamespace(device=torch.device("cpu")))


def who(_: Any, jobs: list[Any]) -> Rows:
    """Each job's number, and who did it."""
    return [(torch.tensor(number), torch.tensor(os.getpid())) for (number,) in jobs]


def fragile(path: Path, deaths: int, _: Any, jobs: list[Any]) -> Rows:
    """Kills its process at once, as often as told; the deaths are counted in a file."""
    count = len(path.read_text()) if path.exists() else 0
    if count < deaths and any(number == 1 for (number,) in jobs):
        path.write_text("x" * (count + 1))
        os.kill(os.getpid(), signal.SIGKILL)
    return who(_, jobs)


def refusing(_: Any, jobs: list[Any]) -> Rows:
    raise UserError("training.lr = 7: not with me")


def broken(_: Any, jobs: list[Any]) -> Rows:
    raise ZeroDivisionError("a bug")


def run(pool: Any, work: Any, count: int = 5) -> tuple[list[int], set[int]]:
    jobs = [(number,) for number in range(count)]
    rows = pool.run(pool.share(nothing), work, jobs, [1.0] * count)
    return [int(number) for number, _ in rows], {int(pid) for _, pid in rows}


def test_both_workers_work_and_results_come_in_order(pool: Any) -> None:
    numbers, workers = run(pool, who, 7)
    assert numbers == list(range(7)) and len(workers) == 2 and os.getpid() not in workers
    assert len(run(pool, who, 1)[1]) == 1 and run(pool, who, 0) == ([], set())


def test_a_dead_actor_is_replaced_and_its_jobs_are_run_again(pool: Any, tmp_path: Path) -> None:
    before, replaced = run(pool, who)[1], pool.replaced
    numbers, workers = run(pool, partial(fragile, tmp_path / "deaths", 1))
    assert numbers == list(range(5)) and (tmp_path / "deaths").read_text() == "x"
    assert len(workers) == 2 and len(workers & before) == 1
    assert pool.replaced == replaced + 1 and len(pool.actors) == 2


def test_an_actor_that_died_unseen_is_replaced_too(pool: Any) -> None:
    victim = min(run(pool, who)[1])
    os.kill(victim, signal.SIGKILL)
    numbers, workers = run(pool, who)
    assert numbers == list(range(5)) and len(workers) == 2 and victim not in workers


@pytest.mark.slow
def test_jobs_that_kill_every_actor_end_the_run_with_a_sentence(
    pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aedfl.training.actors.TRIES", 2)
    with pytest.raises(AedflError, match=r"Ray actors died with the same \d jobs in all of 2 tries: [^\n]+$"):
        run(pool, partial(fragile, tmp_path / "deaths", 99))
    assert (tmp_path / "deaths").read_text() == "xx"
    assert run(pool, who)[0] == list(range(5)), "the pool is of use afterwards"


@pytest.mark.slow
def test_where_there_is_no_room_for_a_new_actor_the_others_take_over(
    pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = sorted(run(pool, who)[1])
    with monkeypatch.context() as gone:
        gone.setattr(pool, "_free", lambda wanted: 0)
        os.kill(first, signal.SIGKILL)
        assert run(pool, who) == (list(range(5)), {second}) and len(pool.actors) == 1
        os.kill(second, signal.SIGKILL)
        with pytest.raises(AedflError, match="every Ray actor at .* has died, and there is no room for a new one"):
            run(pool, who)
    pool.actors += pool._start(2)


def test_errors_of_the_work_itself_are_not_tried_again(pool: Any) -> None:
    replaced = pool.replaced
    with pytest.raises(UserError, match=r"^training.lr = 7: not with me$"):
        run(pool, refusing)
    with pytest.raises(ZeroDivisionError, match="a bug"):
        run(pool, broken)
    assert pool.replaced == replaced


def test_too_few_resources_are_said_at_once(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from aedfl.training import actors

    monkeypatch.setattr(actors, "FREE_SECONDS", 0.0)
    with pytest.raises(UserError, match=r"has \d free cores of 2, but 3 are needed, one per actor"):
        actors.Pool(cluster, 3)
    with pytest.raises(UserError, match="has 0 free GPUs of 0, but 1 is needed, one per actor"):
        actors.Pool(cluster, None, "cuda")


def test_one_process_is_part_of_one_cluster(cluster: str) -> None:
    from aedfl.training.actors import connect

    with pytest.raises(UserError, match=f"connected to the Ray cluster at {cluster} already"):
        connect("192.0.2.1:6379")


@pytest.mark.parametrize("address", ["nonsense", "host:", ":6379", "ray://host:10001", "host:many"])
def test_an_address_that_is_none_is_refused(address: str) -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from aedfl.training.actors import _reach

    with pytest.raises(UserError, match=r"must be 'local', 'auto' or the head node's 'host:port'"):
        _reach(address)


def test_a_port_where_nobody_listens_is_said_without_ray_waiting() -> None:
    pytest.importorskip("ray", reason="the extra 'ray' is not installed")
    from aedfl.training.actors import _reach

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UserError, match=f"'{address}': no Ray cluster answers there: Connection refused"):
            _reach(address)
