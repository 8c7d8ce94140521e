"""Keys and the numbers they give."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from aedfl.randomness import digest, generator, torch_seed

keys = st.lists(st.integers(-(2**70), 2**70) | st.text(st.characters(codec="ascii", min_codepoint=32)), min_size=1)


@given(keys, keys)
def test_different_keys_give_different_numbers(first: list[int | str], second: list[int | str]) -> None:
    assert (digest(*first) == digest(*second)) == (first == second)


def test_a_number_and_its_name_are_different_keys() -> None:
    assert digest(1, 2) != digest("1", 2) != digest(12) != digest(1, "2")


def test_numbers_are_the_same_on_every_machine() -> None:
    assert digest(0, 1, "batches") == 16349773479863590646
    assert generator(0, 1, "batches").integers(0, 1000, 4).tolist() == [741, 695, 57, 354]


def test_numpy_integers_are_the_same_key() -> None:
    assert digest(np.int64(3), "x") == digest(3, "x")


@given(keys)
def test_seeds_for_torch_leave_room_for_a_step(key: list[int | str]) -> None:
    assert 0 <= torch_seed(*key) < 2**62


def test_a_generator_starts_anew_every_time() -> None:
    assert generator(5, "a").random() == generator(5, "a").random() != generator(5, "b").random()


def test_neighbouring_keys_are_uncorrelated() -> None:
    drawn = np.array([generator(0, number, "x").random(50) for number in range(400)])
    assert drawn.mean() == pytest.approx(0.5, abs=0.01)
    assert abs(np.corrcoef(drawn[:-1].ravel(), drawn[1:].ravel())[0, 1]) < 0.03
