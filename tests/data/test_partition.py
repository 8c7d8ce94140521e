import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.data import SCHEMES, hold_out, partition, split_validation
from aedfl.data.partition import lognormal_sizes
from aedfl.errors import UserError
from aedfl.randomness import generator

alphas = st.sampled_from([1e-300, 1e-6, 0.01, 0.5, 1.0, 100.0, 1e6, 1e300])
sigmas = st.sampled_from([0.0, 0.1, 1.0, 20.0])


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, int]:
    samples = draw(st.integers(1, 120))
    labels = draw(st.lists(st.integers(-3, 9), min_size=samples, max_size=samples))
    return np.array(labels), draw(st.integers(1, samples))


@given(
    problem=problems(), scheme=st.sampled_from(SCHEMES), alpha=alphas, sigma=sigmas, seed=st.integers(-9, 9)
)
@settings(max_examples=300, deadline=None)
def test_every_sample_once_nobody_empty_same_again(problem, scheme, alpha, sigma, seed) -> None:
    labels, devices = problem
    shards = 1 + seed % 2 if 2 * devices <= len(labels) else 1
    options = {"alpha": alpha, "sigma": sigma, "shards": shards}
    parts = partition(labels, devices, scheme, seed, **options)
    assert len(parts) == devices
    assert all(len(part) > 0 for part in parts)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(labels)))
    again = partition(torch.from_numpy(labels), devices, scheme, seed, **options)
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_seeds_and_schemes_differ() -> None:
    labels = np.arange(200) % 10
    assert not np.array_equal(partition(labels, 4, "iid", 0)[0], partition(labels, 4, "iid", 1)[0])
    assert not np.array_equal(partition(labels, 4, "iid", 0)[0], partition(labels, 4, "lognormal", 0)[0])


def label_entropy(labels: np.ndarray, part: np.ndarray) -> float:
    shares = np.bincount(labels[part], minlength=10) / len(part)
    return float(-(shares[shares > 0] * np.log(shares[shares > 0])).sum())


def test_dirichlet_skew_follows_alpha() -> None:
    labels = np.arange(20_000) % 10
    mean = {
        alpha: np.mean([label_entropy(labels, p) for p in partition(labels, 50, "dirichlet", 3, alpha=alpha)])
        for alpha in (1e-6, 0.1, 0.5, 100.0)
    }
    # Expected entropy of Dirichlet(a) over 10 labels: psi(10a + 1) - psi(a + 1): 0.85 for 0.1, 1.67 for 0.5.
    assert mean[1e-6] < 0.3
    assert 0.6 < mean[0.1] < 1.0
    assert 1.45 < mean[0.5] < 1.8
    assert mean[100.0] > 2.25


def test_first_devices_shares_are_dirichlet() -> None:
    """The first device draws from all labels: over seeds, the variance of a share is that of the formula."""
    labels = np.arange(3000) % 3
    firsts = [partition(labels, 30, "dirichlet", seed, alpha=0.5)[0] for seed in range(400)]
    shares = np.array([np.mean(labels[part] == 0) for part in firsts])
    assert shares.mean() == pytest.approx(1 / 3, abs=0.04)
    assert shares.var() == pytest.approx((1 / 3) * (2 / 3) / (3 * 0.5 + 1), rel=0.15)  # plus 1 % of sampling


def test_sizes_are_lognormal() -> None:
    sizes = lognormal_sizes(5_000_000, 5000, 0.1, generator(0, "test"))
    assert sizes.sum() == 5_000_000
    logs = np.log(sizes / 1000)
    assert logs.std() == pytest.approx(0.1, rel=0.05)
    assert (
        abs(((logs - logs.mean()) ** 3).mean() / logs.std() ** 3) < 0.15
    )  # no skew left after the logarithm
    assert np.array_equal(
        np.sort([len(p) for p in partition(np.zeros(9999), 100, "lognormal", 5)]),
        np.sort(lognormal_sizes(9999, 100, 0.1, generator(5, "partition", "lognormal"))),
    )


def test_iid_sizes_are_equal() -> None:
    assert {len(part) for part in partition(np.zeros(103), 10, "iid")} == {10, 11}


def test_shards_hold_few_labels() -> None:
    labels = np.repeat(np.arange(10), 100)
    parts = partition(labels, 50, "shards", shards=2)
    assert all(len(part) == 20 and len(np.unique(labels[part])) <= 2 for part in parts)


def test_float_targets_are_binned() -> None:
    targets = np.linspace(0, 1, 1000) ** 3
    for scheme in ("dirichlet", "shards"):
        parts = partition(targets, 20, scheme, alpha=0.05)
        assert sorted(np.concatenate(parts).tolist()) == list(range(1000))
        ranks = np.mean([np.std(part) for part in parts])
        assert ranks < 230  # 289 for samples drawn at random
    assert len(partition(torch.rand(30, 2), 3, "dirichlet")) == 3


@pytest.mark.parametrize("alpha", [1e-6, 0.5, 1e6])
def test_ten_thousand_devices_take_seconds(alpha: float) -> None:
    labels = generator(0, "labels").integers(0, 10, 50_000)
    start = time.perf_counter()
    parts = partition(labels, 10_000, "dirichlet", alpha=alpha)
    assert time.perf_counter() - start < 10
    assert min(map(len, parts)) >= 1


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"devices": 11}, "devices = 11, but there are only 10 samples"),
        ({"devices": 0}, "at least one"),
        ({"scheme": "dirichlett"}, "did you mean 'dirichlet'"),
        ({"alpha": 0.0}, "alpha = 0.0"),
        ({"alpha": float("nan")}, "alpha = nan"),
        ({"sigma": -1.0}, "sigma = -1.0"),
        ({"scheme": "shards", "shards": 6}, "shards = 6 for 2 devices: allowed are 1 to 5"),
        ({"labels": np.array([])}, "shape (0,)"),
        ({"labels": np.array([1.0, np.nan])}, "not finite"),
    ],
)
def test_mistakes_are_one_sentence(change: dict[str, object], words: str) -> None:
    arguments = {"labels": np.arange(10) % 2, "devices": 2, **change}
    with pytest.raises(UserError) as error:
        partition(**arguments)
    assert words in str(error.value)
    assert "\n" not in str(error.value)


@given(n=st.integers(1, 60), share=st.floats(0, 0.999), seed=st.integers(0, 5), device=st.integers(0, 5))
def test_hold_out_keeps_a_sample_for_each_side(n: int, share: float, seed: int, device: int) -> None:
    indices = np.arange(n) * 3 + 1
    train, held = hold_out(indices, share, seed, device)
    assert sorted([*train, *held]) == indices.tolist()
    assert len(train) >= 1
    assert (len(held) >= 1) == (share > 0 and n > 1)
    assert np.array_equal(train, hold_out(indices, share, seed, device)[0])


def test_hold_out_differs_between_devices_and_counts_right() -> None:
    held = hold_out(np.arange(100), 0.2, 0, 0)[1]
    assert len(held) == 20
    assert not np.array_equal(held, hold_out(np.arange(100), 0.2, 0, 1)[1])


def test_validation_split() -> None:
    train, validation = split_validation(50, 0.1, 7)
    assert len(validation) == 5
    assert sorted([*train, *validation]) == list(range(50))
    with pytest.raises(UserError, match=r"1.0: it must be"):
        split_validation(50, 1.0, 7)
