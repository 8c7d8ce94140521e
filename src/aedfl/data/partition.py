"""Who holds which samples: pure functions of the labels and a seed.

Every sample goes to exactly one device, and no device is empty.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..errors import UserError
from ..randomness import generator
from .names import unknown

Indices = NDArray[np.int64]
SCHEMES = ("iid", "dirichlet", "shards", "lognormal")
BINS = 10


def partition(
    labels: Any,
    devices: int,
    scheme: str = "dirichlet",
    seed: int = 0,
    *,
    alpha: float = 0.5,
    sigma: float = 0.1,
    shards: int = 2,
) -> list[Indices]:
    """Sample numbers of each device, in ascending order.

    labels: [n], tensor or array; float targets are put into ten bins of equal size first.
    iid: shuffled, equal sizes. lognormal: shuffled, sizes lognormal around n/devices with `sigma`.
    dirichlet: lognormal sizes, label shares of each device from Dirichlet(`alpha`).
    shards: sorted by label and cut into pieces of equal size, `shards` random ones for each device.
    """
    groups = _groups(np.asarray(labels))
    _check(len(groups), devices, scheme, alpha, sigma, shards)
    rng = generator(seed, "partition", scheme)
    if scheme == "iid":
        parts = np.array_split(rng.permutation(len(groups)), devices)
    elif scheme == "shards":
        parts = _shards(groups, devices, shards, rng)
    else:
        sizes = lognormal_sizes(len(groups), devices, sigma, rng)
        if scheme == "lognormal":
            parts = np.split(rng.permutation(len(groups)), np.cumsum(sizes)[:-1])
        else:
            parts = _dirichlet(groups, sizes, alpha, rng)
    return [np.sort(part) for part in parts]


def hold_out(indices: Indices, share: float, seed: int, device: int) -> tuple[Indices, Indices]:
    """One device's samples as (training, held out).

    At least one sample is for training; at least one is held out if `share` > 0 and there are two.
    """
    indices = np.asarray(indices, dtype=np.int64)
    order = generator(seed, "hold out", device).permutation(len(indices))
    cut = _share_of(len(indices), share)
    return np.sort(indices[order[cut:]]), np.sort(indices[order[:cut]])


def split_validation(n: int, share: float, seed: int) -> tuple[Indices, Indices]:
    """Numbers 0 to n - 1 as (training, validation), both ascending; the same rule as `hold_out`."""
    order = generator(seed, "validation").permutation(n)
    cut = _share_of(n, share)
    return np.sort(order[cut:]), np.sort(order[:cut])


def _share_of(n: int, share: float) -> int:
    if not 0 <= share < 1:
        raise UserError(f"the share of samples to hold out is {share}: it must be at least 0 and less than 1")
    return min(max(round(share * n), int(share > 0)), max(n - 1, 0))


def lognormal_sizes(samples: int, devices: int, sigma: float, rng: np.random.Generator) -> Indices:
    """Sizes [devices] of at least 1 with the sum `samples`, proportional to exp(sigma * normal)."""
    logs = sigma * rng.standard_normal(devices)
    weights = np.exp(logs - logs.max())
    order = np.argsort(weights, kind="stable")
    ascending = weights[order]
    # The k lightest devices get one sample each, for the least k that leaves all others at least one too.
    rest = np.cumsum(ascending[::-1])[::-1]
    k = int(np.argmax(ascending * (samples - np.arange(devices)) >= rest * (1 - 1e-12)))
    ideal = np.ones(devices)
    ideal[order[k:]] = np.maximum(ascending[k:] * (samples - k) / rest[k], 1)
    sizes = np.floor(ideal).astype(np.int64)
    short = samples - int(sizes.sum())
    sizes[np.argsort(sizes - ideal, kind="stable")[:short]] += 1
    return sizes


def _groups(labels: NDArray[Any]) -> Indices:
    """Labels, or bins of float targets, numbered from 0; of several targets the first one counts."""
    values = labels[:, 0] if labels.ndim == 2 else labels
    if values.ndim != 1 or len(values) == 0:
        raise UserError(f"labels have shape {labels.shape}: one for each sample is needed")
    if np.issubdtype(values.dtype, np.floating):
        if not np.isfinite(values).all():
            raise UserError("the targets hold values that are not finite numbers")
        edges = np.quantile(values, np.arange(1, BINS) / BINS)
        values = np.searchsorted(edges, values, side="right")
    return np.unique(values, return_inverse=True)[1].astype(np.int64)


def _check(samples: int, devices: int, scheme: str, alpha: float, sigma: float, shards: int) -> None:
    if scheme not in SCHEMES:
        raise unknown("partition scheme", scheme, SCHEMES)
    if devices < 1:
        raise UserError(f"devices = {devices}: at least one is needed")
    if devices > samples:
        raise UserError(f"devices = {devices}, but there are only {samples} samples: each needs at least one")
    if not 0 < alpha < np.inf:
        raise UserError(f"alpha = {alpha}: it must be a number above 0")
    if not 0 <= sigma < np.inf:
        raise UserError(f"sigma = {sigma}: it must be a number of at least 0")
    if shards < 1 or (scheme == "shards" and devices * shards > samples):
        raise UserError(f"shards = {shards} for {devices} devices: allowed are 1 to {samples // devices}")


def _by_label(groups: Indices, rng: np.random.Generator) -> Indices:
    """All sample numbers sorted by label, in random order within a label."""
    order = rng.permutation(len(groups))
    return order[np.argsort(groups[order], kind="stable")]


def _shards(groups: Indices, devices: int, shards: int, rng: np.random.Generator) -> list[Indices]:
    pieces = np.array_split(_by_label(groups, rng), devices * shards)
    dealt = rng.permutation(devices * shards).reshape(devices, shards)
    return [np.concatenate([pieces[k] for k in mine]) for mine in dealt]


def _dirichlet(groups: Indices, sizes: Indices, alpha: float, rng: np.random.Generator) -> list[Indices]:
    """Devices draw without replacement, one after the other, from the labels that are left."""
    order = _by_label(groups, rng)
    left = np.bincount(groups)
    ends = np.cumsum(left)
    parts = []
    for size in sizes:
        counts = _draw(int(size), _log_shares(alpha, len(left), rng), left, rng)
        starts = ends - left
        spans = [order[starts[g] : starts[g] + counts[g]] for g in np.flatnonzero(counts)]
        parts.append(np.concatenate(spans))
        left = left - counts
    return parts


def _log_shares(alpha: float, labels: int, rng: np.random.Generator) -> NDArray[np.float64]:
    """Logarithms of Dirichlet shares, up to a constant.

    Gamma(alpha) = Gamma(alpha + 1) * U^(1/alpha). As logarithms they stay in order and finite for any
    alpha, so that shares can be renormalised over whatever labels are left.
    """
    uniform = 1 - rng.random(labels)
    return np.log(rng.standard_gamma(alpha + 1, labels)) + np.log(uniform) / max(alpha, 1e-300)


def _draw(size: int, logs: NDArray[np.float64], left: Indices, rng: np.random.Generator) -> Indices:
    """How many of each label: as drawing labels one by one, shares renormalised when a label runs out.

    What a label cannot give is drawn again among the others. A round that does not finish uses a label up,
    so there are never more rounds than labels.
    """
    counts = np.zeros_like(left)
    while (missing := size - int(counts.sum())) > 0:
        able = np.flatnonzero(counts < left)
        shares = np.exp(logs[able] - logs[able].max())
        counts[able] += rng.multinomial(missing, shares / shares.sum())
        np.minimum(counts, left, out=counts)
    return counts
