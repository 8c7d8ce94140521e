"""Jobs on their way: who gets which, and that nothing changes on the road."""

from __future__ import annotations

import pickle

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from aedfl.training.parcels import pack, split, to_host, unpack

CPU = torch.device("cpu")
COSTS = st.lists(st.floats(0.0, 1e9), max_size=60)


@given(COSTS, st.integers(1, 9))
def test_every_job_goes_to_one_part_and_no_part_has_much_more_than_its_share(costs: list[float], parts: int) -> None:
    shares = split(costs, parts)
    assert sorted(number for share in shares for number in share) == list(range(len(costs)))
    assert len(shares) == min(parts, len(costs)) and all(shares)
    assert all(share == sorted(share) for share in shares)
    loads = [sum(costs[number] for number in share) for share in shares]
    assert max(loads, default=0.0) <= (sum(costs) / parts + max(costs, default=0.0)) * (1 + 1e-9)


def test_a_costly_job_has_a_part_of_its_own() -> None:
    assert split([1.0, 1.0, 9.0, 1.0], 2) == [[2], [0, 1, 3]]
    assert split([2.0, 2.0, 2.0], 5) == [[0], [1], [2]]
    assert split([], 3) == []
    assert split([0.0, 0.0, 0.0], 2) == [[0, 2], [1]]


def test_what_is_unpacked_is_what_was_packed() -> None:
    whole = torch.arange(6.0)
    job = (whole, whole[1:4:2], torch.tensor(True), None, np.arange(3), ("key", 1), 0.5, (torch.tensor(2.5), 7))
    one, two = unpack(pickle.loads(pickle.dumps(pack([job, (whole,)]))), CPU)
    assert [type(part) for part in one] == [type(part) for part in job]
    for found, part in zip((*one[:3], one[7][0]), (*job[:3], torch.tensor(2.5)), strict=True):
        assert torch.equal(found, part) and found.dtype == part.dtype
    assert one[4].tolist() == [0, 1, 2] and one[5:7] == (("key", 1), 0.5) and one[7][1] == 7
    assert two[0] is one[0], "a tensor of two jobs is one tensor at the other end too"


def test_a_tensor_of_many_jobs_travels_once() -> None:
    model = torch.randn(10_000)
    alone, many = (len(pickle.dumps(pack([(model,)] * count))) for count in (1, 50))
    assert alone > model.nbytes and many < alone + 2_000


def test_shared_memory_is_read_in_place_unless_a_copy_is_asked_for() -> None:
    packed = pack([(torch.zeros(4),)])
    packed[0][0].array.flags.writeable = False
    ((here,),) = unpack(packed, CPU)
    ((copy,),) = unpack(packed, CPU, copy=True)
    assert here.data_ptr() == packed[0][0].array.ctypes.data
    copy += 1
    assert here.tolist() == [0.0] * 4 and copy.tolist() == [1.0] * 4


def test_results_on_a_cpu_are_left_as_they_are() -> None:
    rows = [(torch.ones(2), torch.ones(())), (torch.ones(3), torch.ones(()))]
    assert to_host(rows) is rows and to_host([]) == []
