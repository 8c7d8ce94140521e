"""Indices, neighbours as devices come and go, restarts, and what is said to those who do not fit."""

from __future__ import annotations

import asyncio
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from aedfl.context import SERVER
from aedfl.errors import UserError
from aedfl.experiment.sections import Topology
from aedfl.net.coordinator import Coordinator
from aedfl.net.credentials import Plaintext
from aedfl.net.kit import gather, serve
from aedfl.net.ledger import Ledger
from aedfl.net.link import CoordinatorAway, Refused
from aedfl.net.members import graph
from aedfl.net.places import advertised, check_address
from aedfl.task import Task
from net.cluster import PATIENCE, cluster, config, evaluator, kit
from sim.worlds import tiny_task

KINDS = st.sampled_from(["exponential", "ring", "random", "torus"])


@given(st.sets(st.integers(0, 50), min_size=1, max_size=12), KINDS)
def test_the_graph_is_that_of_its_kind_over_whoever_is_there(there: set[int], kind: Any) -> None:
    made = graph(there, Topology(kind=kind), seed=1)
    places = graph(range(len(there)), Topology(kind=kind), seed=1)
    order = sorted(there)
    for place, index in enumerate(order):
        sources, targets = made.neighbours(index)
        assert sources == tuple(order[j] for j in places.neighbours(place)[0])
        assert set(sources) | set(targets) <= there - {index}
        assert all(index in made.neighbours(j)[1] for j in sources)
    if len(there) > 1:
        assert all(made.neighbours(index)[0] for index in there), "nobody is cut off"


def test_a_graph_from_a_file_keeps_its_edges(tmp_path: Path) -> None:
    (tmp_path / "edges.csv").write_text("0,1\n1,2\n2,0\n")
    made = graph([0, 2], Topology(kind="file", path=str(tmp_path / "edges.csv")), seed=0)
    assert made.edges() == [(2, 0)]


def test_a_degree_that_is_too_large_gives_way() -> None:
    assert graph([3, 4], Topology(kind="random", degree=4), seed=0).edges() == [(4, 3), (3, 4)]


def test_late_comers_and_leavers_change_the_neighbours_of_all(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            made.start(2)
            await made.until(lambda: made.nodes[0].context.in_neighbours == (1, 2))
            await made.until(lambda: made.updates(2) and made.received(2))
            assert made.nodes[2].index == 2 and made.nodes[0].context.devices == 3
            async with made.link("device-1") as link:
                await link.leave("device-1")
            await asyncio.wait_for(made.tasks.pop(1), PATIENCE)
            assert (tmp_path / "d1" / "model.safetensors").exists(), "it ends with its model"
            await made.until(lambda: made.nodes[0].context.in_neighbours == (2,))
            received = made.received(2)
            await made.until(lambda: made.received(2) > received + 2)
            made.start(1)
            await made.until(lambda: made.nodes[0].context.in_neighbours == (1, 2))
            assert made.nodes[1].index == 1, "whoever comes back has the old index"

    asyncio.run(test())


def test_neighbours_do_not_change_within_a_local_update(tmp_path: Path) -> None:
    """The device has heard of the new one, but goes on with the old neighbours until its update is published."""
    steps = asyncio.Queue[None]()

    async def stepwise(ctx: Any, _: Any) -> None:
        while ctx.running:
            if ctx.index == 0:
                await steps.get()
            else:
                await ctx.sleep(0.05)
            ctx.publish(ctx.initial())

    async def test() -> None:
        steps.put_nowait(None)
        async with cluster(tmp_path, tls=False, program=stepwise) as made:
            node = made.nodes[0]
            made.start(2)
            await made.until(lambda: list(node.member.view.neighbours.sources) == [1, 2])
            assert node.context.in_neighbours == (1,) and node.context.update == 1
            steps.put_nowait(None)
            await made.until(lambda: node.context.update == 2)
            assert node.context.in_neighbours == (1, 2)

    asyncio.run(test())


def test_a_device_that_is_silent_for_too_long_has_left(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            made.coordinator.forget = 0.8
            await made.kill(1)
            await made.until(lambda: made.nodes[0].context.in_neighbours == ())
            made.start(1)
            await made.until(lambda: made.nodes[0].context.in_neighbours == (1,))
            assert made.nodes[1].index == 1

    asyncio.run(test())


def test_those_who_have_ended_do_not_wait_for_ever_for_one_that_is_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("aedfl.net.roster.PATIENCE", 1.0)

    async def test() -> None:
        stop = {"virtual_seconds": "none", "updates": 8, "target_accuracy": "none"}
        async with cluster(tmp_path, tls=False, stop=stop) as made:
            await made.kill(1)
            summary = await asyncio.wait_for(made.tasks.pop(0), PATIENCE)
            assert summary["updates"] == 8 and made.coordinator.over
            made.start(1)
            again = await asyncio.wait_for(made.tasks.pop(1), PATIENCE)
            assert again["updates"] < 8, "it comes back to a run that is over, and ends with what it has"

    asyncio.run(test())


def test_the_coordinator_comes_back_as_it_was(tmp_path: Path) -> None:
    """Training goes on without it; late comers wait for it."""

    async def test() -> None:
        async with cluster(tmp_path) as made:
            run, port, elapsed = made.coordinator.run, made.port, made.coordinator.clock.now
            await made.coordinator.close()
            updates, received = made.updates(0), made.received(0)
            await made.until(lambda: made.updates(0) > updates + 3 and made.received(0) > received + 3)
            await made.until(lambda: made.nodes[0].member.trouble)
            await made.coordinate(f"127.0.0.1:{port}")
            assert made.coordinator.run == run and made.coordinator.clock.now >= elapsed
            await made.until(lambda: not made.nodes[0].member.trouble and not made.nodes[1].member.trouble)
            assert [node.index for node in made.nodes.values()] == [0, 1]
            await made.until(lambda: {m.state for m in made.coordinator.status().view.members} == {"here"})

    asyncio.run(test())


def test_a_coordinator_that_lost_its_ledger_gives_the_old_indices_back(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            await made.coordinator.close()
            run = made.coordinator.run
            for path in (tmp_path / "c").glob("ledger*"):
                path.unlink()
            token, made.token = made.token, ""
            fresh = Coordinator(made.config, tmp_path / "c", Plaintext("coordinator"), beat=0.1)
            fresh.ledger.set("run", run)
            fresh.run = run
            fresh.ledger._db.execute("INSERT INTO tokens VALUES (?, 9e9, 9)", (_digest(token),))
            made.coordinator = fresh
            await fresh.start(f"127.0.0.1:{made.port}")
            await made.until(lambda: len(fresh.roster.entries) == 2)
            assert {name: entry.index for name, entry in fresh.roster.entries.items()} == {"device-0": 0, "device-1": 1}

    asyncio.run(test())


def _digest(token: str) -> str:
    from aedfl.net.ledger import _digest as digest

    return digest(token)


def test_a_run_does_not_change_its_rules_on_the_way(tmp_path: Path) -> None:
    Coordinator(config(2), tmp_path, Plaintext("c")).ledger.close()
    with pytest.raises(UserError, match="other settings"):
        Coordinator(config(3), tmp_path, Plaintext("c"))
    assert Coordinator(None, tmp_path, Plaintext("c")).config.devices == 2
    with pytest.raises(UserError, match="holds no run yet"):
        Coordinator(None, tmp_path / "new", Plaintext("c"))


def test_a_second_device_of_the_same_name_is_refused_while_the_first_is_there(tmp_path: Path) -> None:
    async def test() -> None:
        async with cluster(tmp_path) as made:
            with pytest.raises(UserError, match="device-1 takes part already, at 127.0.0.1:.* stop that device first"):
                await made.node(1, folder=tmp_path / "second").run()
            updates = made.updates(1)
            await made.until(lambda: made.updates(1) > updates + 1)
            with pytest.raises(UserError, match="in use by another device process"):
                made.node(1)
            await made.kill(1)
            await made.until(lambda: not made.coordinator.roster.here("device-1"))
            made.start(1, folder=tmp_path / "second")
            await made.until(lambda: made.updates(1))
            assert made.nodes[1].index == 1, "a device that was set up anew takes its place once it is silent"

    asyncio.run(test())


def test_those_who_do_not_fit_are_told_why(tmp_path: Path) -> None:
    wider = Task(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), tiny_task().dataset)
    evaluator(wider)

    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            async with made.link("device-2") as link:
                with pytest.raises(Refused, match="speaks protocol 1, the coordinator 2; install the same"):
                    await link.join(made.join_request("device-2", protocol=1))
                with pytest.raises(Refused, match="the model of device-2 has 99 values in another layout than"):
                    await link.join(made.join_request("device-2", parameters=99))

            with pytest.raises(UserError, match="another layout than the run's with 15; start it with the run's model"):
                await made.node(2, prepare=lambda settings: kit(settings, wider)).run()
            with pytest.raises(UserError, match="belongs to run"):
                (tmp_path / "old").mkdir()
                old = '{"run": "other", "index": 2, "beat": 1, "settings": "", "view": {}}'
                (tmp_path / "old" / "membership.json").write_text(old)
                await made.node(2, folder=tmp_path / "old").run()
            made.port += 1
            with pytest.raises(CoordinatorAway, match="nothing listens there; check host and port"):
                await made.node(2, folder=tmp_path / "x").run()
            made.port -= 1
            updates = made.updates(0)
            await made.until(lambda: made.updates(0) > updates + 1)

    asyncio.run(test())


@pytest.mark.parametrize("address", ["localhost", ":1", "host:port", "host:99999", ""])
def test_an_address_is_host_and_port(address: str) -> None:
    with pytest.raises(UserError, match="is not HOST:PORT"):
        check_address(address)


@pytest.mark.parametrize(("listen", "advertise"), [("0.0.0.0:1", ""), ("[::]:0", "")])
def test_every_address_of_a_machine_is_no_address_for_others(listen: str, advertise: str) -> None:
    with pytest.raises(UserError, match="add --advertise"):
        advertised(listen, advertise)
    assert advertised(listen, "192.0.2.1:7701") == "192.0.2.1:7701"


def test_a_ledger_that_cannot_be_written_is_said_and_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Devices go on, the coordinator goes on looking, and when there is room again all is as before."""

    async def test() -> None:
        async with cluster(tmp_path, tls=False) as made:
            real = Ledger.set

            def full(self: Ledger, key: str, value: str) -> None:
                raise sqlite3.OperationalError("database or disk is full")

            monkeypatch.setattr(Ledger, "set", full)
            made.start(2)
            await made.until(lambda: made.tasks[2].done())
            with pytest.raises(CoordinatorAway, match="cannot write its ledger: database or disk is full"):
                made.tasks.pop(2).result()
            updates = made.updates(0)
            await made.until(lambda: made.updates(0) > updates + 2)
            monkeypatch.setattr(Ledger, "set", real)
            elapsed = float(made.coordinator.ledger.get("elapsed"))
            await made.until(lambda: float(made.coordinator.ledger.get("elapsed")) > elapsed)
            made.start(2)
            await made.until(lambda: made.updates(2))

    asyncio.run(test())


def test_data_that_do_not_fit_are_named(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    settings = config(2)
    with pytest.raises(UserError, match="is neither a file nor one of digits"):
        gather(settings, data=str(tmp_path / "none.parquet"))
    pq.write_table(pa.table({"a": [1.0, 2.0, 3.0], "label": [0, 1, 1]}), tmp_path / "flat.parquet")
    with pytest.raises(UserError, match=r"needs samples of shape \(channels, side, side\)"):
        gather(settings, data=str(tmp_path / "flat.parquet"))
    pq.write_table(pa.table({"a": [1.0, 2.0]}), tmp_path / "bare.parquet")
    with pytest.raises(UserError, match="no target column"):
        gather(settings, data=str(tmp_path / "bare.parquet"))
    flat = gather(settings, data=str(tmp_path / "flat.parquet"), model="mlp", classes=4)
    assert flat.task.output_size == 4 and len(flat.part(7).rows) == 2


def test_a_server_has_public_samples_if_its_method_needs_some(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    assert not len(serve(config(2, method="fedavg")).part(SERVER).rows)
    settings = config(2, method="sageflow")
    public = serve(settings).part(SERVER).rows
    everybody = gather(settings).rows
    assert everybody is not None and len(public) == len(everybody.public) > 0
    assert not {*public.tolist()} & {row for own in everybody.train for row in own.tolist()}
    pq.write_table(pa.table({"a": [1.0, 2.0, 3.0, 4.0], "label": [0, 1, 1, 0]}), tmp_path / "public.parquet")
    own = serve(settings, data=str(tmp_path / "public.parquet"), model="mlp").part(SERVER)
    assert len(own.rows) == 4 - 1 and not len(own.held), "one of four is kept aside for testing"
    with pytest.raises(UserError, match="sageflow needs public samples at the server; give it a file"):
        serve(settings, shape=(1, 8, 8), classes=10)


def test_a_public_set_is_dealt_out_to_as_many_as_were_planned() -> None:
    dealt = gather(config(2))
    with pytest.raises(UserError, match="deals digits out to 2 devices, and this is number 2"):
        dealt.part(2)


def test_what_pruning_imports_is_there_before_a_device_joins() -> None:
    """PyTorch's compiler takes seconds to import; in the middle of a run the device would stand still for so long."""
    code = """
import sys, torch
from types import SimpleNamespace
from aedfl.net.node import Node
node = Node.__new__(Node)
node.config = None
task = SimpleNamespace(macs=1, filters=1, draws_randomness=False, least_batch=1)
node._prepare = lambda _: SimpleNamespace(task=task)
node._prepared()
before = set(sys.modules)
torch.func.vjp(torch.func.grad_and_value(lambda x: (x * x).sum()), torch.ones(3), has_aux=True)
print(len(set(sys.modules) - before))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "0", done.stderr
