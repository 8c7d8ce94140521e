"""A job's result on a CPU is the same, bit for bit, whatever else is in its batch and however padded."""

from __future__ import annotations

from collections.abc import Callable
from math import nan

import pytest
import torch
from torch import Tensor

from aedfl.rules.baseline import advantage, recent_mean, remember
from aedfl.rules.features import selector_features
from aedfl.rules.merge import merge
from aedfl.rules.network import FEATURES, PARAMETERS
from aedfl.rules.reduce import norm
from aedfl.rules.robust import clip_norms, coordinate_median, cosine_filter, trimmed_mean
from aedfl.rules.selector import log_prob_gradient, reinforce_step, select
from aedfl.rules.weights import control_gradient, control_step, importance, normalise, staleness

Job = dict[str, Tensor]
Rule = Callable[[Job], tuple[Tensor, ...]]
B, M, P = 23, 7, 3001


def weigh(job: Job) -> tuple[Tensor, ...]:
    ages = staleness(job["now"], job["arrival"])
    ages = torch.cat([torch.ones_like(ages[:, :1]), ages], 1)
    raw = importance(job["samples"], job["control"], ages, job["loss"])
    return raw[:, 0], normalise(raw, job["valid"])[:, 0]


def merged(job: Job) -> Tensor:
    return merge(job["vectors"], job["masks"], normalise(job["samples"], job["valid"]))


def learn_control(kind: str, masked: bool) -> Rule:
    def run(job: Job) -> tuple[Tensor, ...]:
        weights = normalise(job["samples"], job["valid"])
        masks = job["masks"] if masked else None
        slopes = control_gradient(
            job["gradient"],
            job["vectors"],
            weights,
            job["control"],
            masks,
            kind=kind,  # type: ignore[arg-type]
        )
        moved = control_step(job["control"], slopes, 0.05)
        return slopes[:, :4], moved[:, :4]

    return run


def seen(job: Job) -> Tensor:
    ages = staleness(job["now"], job["arrival"])
    return selector_features(job["used"], ages, job["loss"][:, 1:], job["loss"][:, 0], job["valid"], job["now"])


def choose(job: Job) -> tuple[Tensor, ...]:
    chosen = select(job["theta"], seen(job), job["valid"], job["uniforms"], epsilon=0.05)
    return chosen.choices[:, :4], chosen.probabilities[:, :4], chosen.log_prob


def reinforce(job: Job) -> tuple[Tensor, ...]:
    choices = job["uniforms"] < 0.5
    gradient = log_prob_gradient(job["theta"], seen(job), job["valid"], choices, 0.05)
    moved = reinforce_step(job["theta"], seen(job), job["valid"], choices, job["reward"], 0.1, 0.05)
    return gradient, moved


def baseline(job: Job) -> tuple[Tensor, ...]:
    window = remember(job["window"], job["reward"])
    return recent_mean(window), advantage(job["reward"], window, standardise=True)


RULES: dict[str, Rule] = {
    "weigh": weigh,
    "merge": lambda job: (merge(job["vectors"], None, normalise(job["samples"], job["valid"])),),
    "masked merge": lambda job: (merged(job),),
    "paper control": learn_control("paper", masked=False),
    "exact control": learn_control("exact", masked=False),
    "masked paper control": learn_control("paper", masked=True),
    "masked exact control": learn_control("exact", masked=True),
    "features": lambda job: (seen(job)[:, :4],),
    "select": choose,
    "reinforce": reinforce,
    "baseline": baseline,
    "norm": lambda job: (norm(job["gradient"]),),
    "clip norms": lambda job: (clip_norms(job["gradient"], job["vectors"], 0.5)[:, :4],),
    "trimmed mean": lambda job: (trimmed_mean(job["vectors"][:, 1:], job["valid"], 0.3),),
    "median": lambda job: (coordinate_median(job["vectors"][:, 1:], job["valid"]),),
    "cosine": lambda job: (cosine_filter(job["gradient"], job["vectors"][:, 1:], job["valid"])[:, :4],),
}
SLOTS = {"arrival", "used", "valid", "uniforms"}
SLOTS_AND_SELF = {"samples", "control", "loss", "vectors", "masks"}


@pytest.fixture(scope="module")
def jobs() -> Job:
    generator = torch.Generator().manual_seed(7)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "now": torch.randint(40, 60, (B,), generator=generator),
        "arrival": torch.randint(0, 60, (B, M), generator=generator),
        "used": uniform(B, M) < 0.5,
        "valid": uniform(B, M) < 0.7,
        "uniforms": uniform(B, M),
        "samples": 100 + 900 * uniform(B, M + 1),
        "control": 0.5 + uniform(B, M + 1),
        "loss": 3 * uniform(B, M + 1),
        "vectors": normal(B, M + 1, P),
        "masks": uniform(B, M + 1, P) < 0.7,
        "gradient": normal(B, P),
        "theta": 0.3 * normal(B, PARAMETERS),
        "reward": normal(B),
        "window": normal(B, 5),
    }


def part(jobs: Job, rows: list[int]) -> Job:
    return {name: tensor[rows] for name, tensor in jobs.items()}


def padded(jobs: Job, extra: int) -> Job:
    """Empty slots at the end: not valid, and full of what happened to be in memory."""

    def pad(name: str, tensor: Tensor) -> Tensor:
        if name not in SLOTS | SLOTS_AND_SELF:
            return tensor
        blank = torch.zeros(tensor.shape[0], extra, *tensor.shape[2:], dtype=tensor.dtype)
        if name in {"vectors", "loss", "samples"}:
            blank += nan
        return torch.cat([tensor, blank], 1)

    return {name: pad(name, tensor) for name, tensor in jobs.items()}


def same(left: tuple[Tensor, ...], right: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_the_rest_of_the_batch_does_not_matter(jobs: Job, name: str, threads: int) -> None:
    together = RULES[name](jobs)
    torch.set_num_threads(threads)
    for rows in ([0], [B - 1], [4, 9], [20, 3, 11], list(range(B))[::-1], list(range(17)) * 3):
        alone = RULES[name](part(jobs, rows))
        assert same(alone, tuple(t[rows] for t in together)), rows


@pytest.mark.parametrize("name", sorted(set(RULES) - {"baseline", "norm"}))
def test_padding_does_not_matter(jobs: Job, name: str) -> None:
    some = part(jobs, [2, 8, 13])
    expected = RULES[name](some)
    for extra in (1, 2, 9):
        assert same(RULES[name](padded(some, extra)), expected), extra


@pytest.mark.parametrize("slots", [1, 5, 6, 7, 8, 12])
def test_padding_does_not_matter_to_what_the_selector_learns(slots: int) -> None:
    """However many neighbours there are: sums of eight numbers and more are made in lanes."""
    generator = torch.Generator().manual_seed(slots)
    theta, features = (torch.randn(*shape, generator=generator) for shape in ((4, PARAMETERS), (4, slots, FEATURES)))
    features, choices = features.double(), torch.rand(4, slots, generator=generator) < 0.5
    valid = torch.ones(4, slots, dtype=torch.bool)
    for kind in (torch.float32, torch.float64):
        expected = log_prob_gradient(theta.to(kind), features.to(kind), valid, choices, 0.05)
        for extra in (1, 2, 6, 9):
            wide = [
                torch.cat([t, torch.zeros(4, extra, *t.shape[2:], dtype=t.dtype)], 1)
                for t in (features, valid, choices)
            ]
            found = log_prob_gradient(theta.to(kind), wide[0].to(kind), wide[1], wide[2], 0.05)
            assert torch.equal(found, expected), extra


def test_masks_that_keep_everything_are_like_no_masks(jobs: Job) -> None:
    full = jobs | {"masks": torch.ones_like(jobs["masks"])}
    assert same(RULES["masked merge"](full), RULES["merge"](full))
    for kind in ("paper", "exact"):
        assert same(RULES[f"masked {kind} control"](full), RULES[f"{kind} control"](full))


def test_where_the_padding_lies_does_not_matter_to_the_selector(jobs: Job) -> None:
    features, valid = seen(jobs), jobs["valid"]
    order = torch.tensor([7, 0, 8, 1, 2, 3, 9, 4, 5, 6])
    wide = [torch.cat([t, torch.zeros_like(t[:, :3])], 1)[:, order] for t in (features, valid, jobs["uniforms"])]
    expected = select(jobs["theta"], features, valid, jobs["uniforms"])
    actual = select(jobs["theta"], wide[0], wide[1], wide[2])
    kept = order < M
    assert torch.equal(actual.choices[:, kept], expected.choices)
    assert torch.equal(actual.probabilities[:, kept], expected.probabilities)
    assert torch.equal(actual.log_prob, expected.log_prob)


def test_shapes_are_all_there_is_to_know_on_another_device() -> None:
    """No rule mixes devices or asks for a number in the middle: everything runs on tensors without data."""
    with torch.device("meta"):
        theta, features = torch.empty(3, PARAMETERS), torch.empty(3, 4, FEATURES)
        valid, uniforms = torch.empty(3, 4, dtype=torch.bool), torch.empty(3, 4)
        vectors, weights = torch.empty(3, 5, P), torch.empty(3, 5)
        masks = torch.empty(3, 5, P, dtype=torch.bool)
    chosen = select(theta, features, valid, uniforms)
    moved = reinforce_step(theta, features, valid, chosen.choices, uniforms[:, 0], 0.1)
    merged_model = merge(vectors, masks, normalise(weights, valid))
    slopes = control_gradient(merged_model, vectors, weights, weights, masks, kind="exact")
    assert moved.shape == theta.shape and merged_model.shape == (3, P) and slopes.shape == (3, 5)
    assert all(t.device.type == "meta" for t in (*chosen, moved, merged_model, slopes))
