"""Lazy values and the queue that computes them."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from aedfl.graph import Job, Op, Queue, Value, resolve, values_in


@dataclass(frozen=True)
class Add(Op):
    """Jobs are (numbers,); the result is `extra` plus their sum. Every batch is noted."""

    extra: float = 0.0
    log: list[tuple[str, int]] = field(default_factory=list, compare=False)
    outputs: ClassVar[int] = 1
    name: ClassVar[str] = "add"

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        self.log.append((self.name, len(jobs)))
        return [(self.extra + sum(numbers, torch.zeros(())),) for (numbers,) in jobs]


@dataclass(frozen=True)
class Heavy(Add):
    heavy: ClassVar[bool] = True
    name: ClassVar[str] = "heavy"


def submit(queue: Queue, op: Op, *numbers: Any) -> Value:
    (value,) = queue.submit(op, (numbers,), [0])
    return value


def known(number: float) -> Value:
    return Value(torch.tensor(number))


def test_nothing_runs_before_it_is_needed() -> None:
    queue, op = Queue(), Add()
    value = submit(queue, op, known(1.0), known(2.0))
    assert not op.log and value.data is None
    queue.flush()
    assert op.log == [("add", 1)] and value.get().item() == 3.0


def test_a_value_that_is_not_computed_cannot_be_looked_at() -> None:
    value = submit(Queue(), Add(), known(1.0))
    with pytest.raises(RuntimeError, match="before it was computed"):
        value.get()


def test_nothing_runs_twice() -> None:
    queue, op = Queue(), Add()
    value = submit(queue, op, known(1.0))
    queue.flush()
    queue.flush()
    assert op.log == [("add", 1)] and value.get().item() == 1.0


def test_equal_ops_share_a_batch_and_others_do_not() -> None:
    queue, log = Queue(), []
    values = [submit(queue, Add(extra, log), known(1.0)) for extra in (0.0, 5.0, 0.0)]
    queue.flush()
    assert sorted(log) == [("add", 1), ("add", 2)]
    assert [value.get().item() for value in values] == [1.0, 6.0, 1.0]


def test_results_follow_their_dependencies() -> None:
    queue, op = Queue(), Add()
    a = submit(queue, op, known(1.0))
    b = submit(queue, op, a, known(10.0))
    c = submit(queue, op, a, b)
    queue.flush()
    assert c.get().item() == 12.0 and op.log == [("add", 1)] * 3


def test_heavy_jobs_wait_until_their_batch_is_as_large_as_it_can_be() -> None:
    """The second depends on light work; both run together after it."""
    queue, log = Queue(), []
    first = submit(queue, Heavy(log=log), known(1.0))
    light = submit(queue, Add(log=log), known(2.0))
    second = submit(queue, Heavy(log=log), light)
    queue.flush()
    assert log == [("add", 1), ("heavy", 2)] and queue.batches == [2]
    assert (first.get().item(), second.get().item()) == (1.0, 2.0)


def test_small_batches_wait_while_larger_ones_run() -> None:
    """One job of the second kind is ready at once, three need jobs of the first kind; all four run together."""
    queue, log = Queue(), []
    early = submit(queue, Add(5.0, log), known(1.0))
    first = [submit(queue, Add(0.0, log), known(float(number))) for number in range(3)]
    later = [submit(queue, Add(5.0, log), value) for value in first]
    queue.flush()
    assert log == [("add", 3), ("add", 4)]
    assert [value.get().item() for value in (early, *later)] == [6.0, 5.0, 6.0, 7.0]


def test_what_nobody_holds_never_runs() -> None:
    queue, op = Queue(), Add()
    kept = submit(queue, op, known(1.0))
    dropped = submit(queue, op, known(2.0))
    del dropped
    queue.flush()
    assert op.log == [("add", 1)] and kept.get().item() == 1.0


def test_what_only_abandoned_work_needs_never_runs() -> None:
    queue, op = Queue(), Add()
    upstream = submit(queue, op, known(2.0))
    downstream = submit(queue, op, upstream)
    del upstream, downstream
    queue.flush()
    assert not op.log


def test_what_others_still_need_runs_though_its_own_value_is_gone() -> None:
    queue, op = Queue(), Add()
    upstream = submit(queue, op, known(2.0))
    downstream = submit(queue, op, upstream)
    del upstream
    queue.flush()
    assert downstream.get().item() == 2.0


def test_inputs_are_let_go_once_the_result_is_there() -> None:
    queue, op = Queue(), Add()
    upstream = known(2.0)
    watch = weakref.ref(upstream)
    downstream = submit(queue, op, upstream)
    del upstream
    assert watch() is not None
    queue.flush()
    assert watch() is None and downstream.get().item() == 2.0


def test_work_asked_for_after_a_flush_builds_on_its_results() -> None:
    queue, op = Queue(), Add()
    first = submit(queue, op, known(2.0))
    queue.flush()
    second = submit(queue, op, first)
    queue.flush()
    assert second.get().item() == 2.0


def test_a_long_chain_is_no_deep_recursion() -> None:
    queue, op = Queue(), Add()
    value = known(0.0)
    for _ in range(5000):
        value = submit(queue, op, value, known(1.0))
    queue.flush()
    assert value.get().item() == 5000.0
    abandoned = value
    for _ in range(5000):
        abandoned = submit(queue, op, abandoned)
    del abandoned, value
    queue.flush()
    assert len(op.log) == 5000


def test_values_are_found_and_resolved_in_nested_arguments() -> None:
    a, b, c = known(1.0), known(2.0), known(3.0)
    nested = (a, "x", (None, [b], 4), {"key": (c,)})
    assert set(values_in(nested)) == {a, b, c}
    assert resolve((a, "x", (None, [b], 4))) == (a.data, "x", (None, (b.data,), 4))


@dataclass(frozen=True)
class Even(Heavy):
    """Likes batches of one size, or all alike; the second argument of a job is how long it takes."""

    size: int | None = None
    ran: list[list[float]] = field(default_factory=list, compare=False)
    asked: list[tuple[int, int]] = field(default_factory=list, compare=False)

    def at_once(self, left: int, rounds: int) -> int:
        self.asked.append((left, rounds))
        return self.size or -(-left // rounds)

    def length(self, job: Job) -> float:
        return float(job[1])

    def run(self, jobs: Sequence[Job]) -> list[tuple[Tensor, ...]]:
        self.ran.append([length for _, length in jobs])
        return super().run([(numbers,) for numbers, _ in jobs])


def lasting(queue: Queue, op: Op, length: float, *numbers: Any) -> Value:
    (value,) = queue.submit(op, (numbers, length), [0])
    return value


def test_heavy_jobs_that_can_wait_fill_up_later_batches() -> None:
    """A chain of three and three single jobs: two at a time instead of four, one and one."""
    queue, op = Queue(), Even()
    chain = lasting(queue, op, 1.0, known(1.0))
    singles = [lasting(queue, op, length, known(length)) for length in (5.0, 7.0, 6.0)]
    for _ in range(2):
        chain = lasting(queue, op, 1.0, submit(queue, Add(1.0), chain))
    queue.flush()
    assert op.asked == [(6, 3), (4, 2), (2, 1)] and queue.batches == [2, 2, 2]
    assert op.ran == [[1.0, 7.0], [6.0, 1.0], [5.0, 1.0]], "longest first, in the order they became ready"
    assert [value.get().item() for value in (chain, *singles)] == [3.0, 5.0, 7.0, 6.0]


def test_what_begins_the_longest_chain_never_waits() -> None:
    """Four jobs that a chain of two waits for: three rounds, not one more for each job."""
    queue, op = Queue(), Even(size=1)
    first = [lasting(queue, op, 0.0, known(float(number))) for number in range(4)]
    single = lasting(queue, op, 9.0, known(9.0))
    last = lasting(queue, op, 0.0, lasting(queue, op, 0.0, *first))
    queue.flush()
    assert op.ran == [[0.0] * 4, [0.0], [9.0, 0.0]]
    assert last.get().item() == 6.0 and single.get().item() == 9.0


def test_an_op_is_asked_about_its_own_jobs() -> None:
    queue, log = Queue(), []
    ops = Even(0.0, log), Even(1.0, log)
    values = [lasting(queue, op, 0.0, known(1.0)) for op in ops for _ in range(3 if op.extra else 2)]
    late = lasting(queue, ops[0], 0.0, values[0])
    queue.flush()
    assert ops[0].asked == [(3, 2), (1, 1)] and ops[1].asked == [(3, 1)]
    assert late.get().item() == 1.0


programs = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 30), max_size=3), st.booleans(), st.booleans()), max_size=30
)


@settings(max_examples=60, deadline=None)
@given(programs)
def test_any_graph_gives_what_eager_evaluation_gives(program: list[tuple[bool, list[int], bool, bool]]) -> None:
    """Jobs that depend on earlier ones at random, flushed and forgotten at random."""
    queue, log = Queue(), []
    values, expected = [known(1.0)], [1.0]
    for heavy, inputs, flush, forget in program:
        op = Heavy(1.0, log) if heavy else Add(2.0, log)
        chosen = [number % len(values) for number in inputs]
        value = submit(queue, op, *(values[number] for number in chosen))
        if not forget:
            values.append(value)
            expected.append(op.extra + sum(expected[number] for number in chosen))
        del value
        if flush:
            queue.flush()
    queue.flush()
    assert [value.get().item() for value in values] == pytest.approx(expected)


heavy_graphs = st.lists(
    st.tuples(st.sampled_from(["light", "short", "long"]), st.lists(st.integers(0, 40), max_size=2)), max_size=40
)


@settings(max_examples=100, deadline=None)
@given(heavy_graphs, st.integers(1, 6))
def test_jobs_that_wait_change_neither_results_nor_the_number_of_rounds(
    program: list[tuple[str, list[int]]], size: int
) -> None:
    """Against batches as large as they can be, which take as many rounds as the longest chain has heavy jobs."""
    found, depths = [], [0]
    for op in (Heavy(1.0), Even(1.0), Even(1.0, size=size)):
        queue, made, depths = Queue(), [known(1.0)], [0]
        for kind, inputs in program:
            chosen = [number % len(made) for number in inputs]
            needs = [made[number] for number in chosen]
            if kind == "light":
                made.append(submit(queue, Add(2.0), *needs))
            elif isinstance(op, Even):
                made.append(lasting(queue, op, float(kind == "long"), *needs))
            else:
                made.append(submit(queue, op, *needs))
            depths.append((kind != "light") + max((depths[number] for number in chosen), default=0))
        queue.flush()
        found.append((queue.batches, [value.get().item() for value in made]))
    (eager, expected), *others = found
    assert len(eager) == max(depths)
    for batches, results in others:
        assert results == expected
        assert len(batches) == len(eager) and sum(batches) == sum(eager)
