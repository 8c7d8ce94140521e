"""The simulated context keeps the contract, whatever the batching, and when it is replayed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from aedfl.context import SERVER, Program
from contract.harness import Harness, Notes, noting
from contract.suite import CHECKS
from sim.worlds import world


class SimHarness:
    """Every run is done twice: live, and again as a resumed run replays it, without any training."""

    unit = 1.0

    def __init__(self, lookahead: int) -> None:
        self.lookahead = lookahead

    def run(
        self,
        device: Program,
        *,
        server: Program | None = None,
        changes: Mapping[int, Sequence[tuple[float, str]]] | None = None,
        units: float = 30.0,
        **settings: Any,
    ) -> Notes:
        journal: list[Any] = []
        live, replayed = (
            self._run(device, server, units, journal, replay, changes=changes, **settings) for replay in (False, True)
        )
        assert live == replayed
        return live

    def _run(
        self, device: Program, server: Program | None, units: float, journal: list[Any], replay: bool, **settings: Any
    ) -> Notes:
        notes: Notes = {}
        programs = (noting(device, notes), server and noting(server, notes))
        made = world(*programs, lookahead=self.lookahead, **settings)
        if replay:
            made.sim.work.replaying = True
            made.sim.journal.answers = iter(journal)
        else:
            made.sim.journal.record = journal.append
        made.run(units * self.unit)
        assert not replay or next(made.sim.journal.answers, None) is None
        return {index: notes.get(index, []) for index in range(SERVER if server else 0, made.sim.devices)}


@pytest.mark.parametrize("lookahead", [1, 256])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_simulated_context_keeps_the_contract(check: Callable[[Harness], None], lookahead: int) -> None:
    check(SimHarness(lookahead))
