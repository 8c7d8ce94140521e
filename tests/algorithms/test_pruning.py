"""HRank, FedAP and HAP: what goes, how much of it, and when."""

from __future__ import annotations

from itertools import product
from math import log

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from aedfl.algorithms import fedap, hap, hrank
from aedfl.algorithms._pruning import lowest_go, outcome
from aedfl.context import SERVER
from aedfl.data import Dataset, Split
from aedfl.models.textcnn import textcnn
from aedfl.sparsity import ChannelGroups
from aedfl.sparsity.curvature import curvature
from aedfl.sparsity.objective import flat_loss
from aedfl.task import Task
from aedfl.training.plan import Plan

from .toy import Run, play


def two_layers(inputs: int = 3, hidden: int = 5, classes: int = 2, samples: int = 24) -> Task:
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(samples, inputs, generator=generator)
    split = Split(x, (x.sum(1) > 0).long())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = nn.Sequential(nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, classes))
    return Task(module, Dataset("two", split, split, classes))


@pytest.fixture(scope="module")
def task() -> Task:
    return two_layers()


@pytest.fixture(scope="module")
def groups(task: Task) -> ChannelGroups:
    return task.groups


def test_the_lowest_of_every_layer_go(groups: ChannelGroups) -> None:
    scores = torch.tensor([0.4, 0.1, 0.3, 0.9, 0.2])
    assert lowest_go(scores, groups, {"0": 0.4}).tolist() == [True, False, True, True, False]
    assert lowest_go(scores, groups, {"0": 0.0}).all()
    assert lowest_go(scores, groups, {"0": 1.0}).tolist() == [False, False, False, True, False], "one stays"


def test_outcome_counts_what_is_left(groups: ChannelGroups) -> None:
    """Five units of 3 + 1 + 2 entries; two of them go. The output's two biases are not prunable."""
    kept = torch.tensor([True, False, True, True, False])
    mask, same, rate, entries, macs = outcome(groups, kept)
    assert same is kept
    assert mask.view(-1)[:15].view(5, 3).all(1).tolist() == kept.tolist()
    assert rate.item() == pytest.approx(2 * 6 / 30)
    assert (entries.item(), macs.item()) == (3 * 6 + 2, 3 * 3 + 3 * 2)


def test_hrank_keeps_the_active(task: Task, groups: ChannelGroups) -> None:
    """A neuron's rank is the share of samples it is active on; 40 % of five are two."""
    rows = (np.arange(10), np.arange(10, 20))
    with torch.no_grad():
        active = [(F.relu(task.module[0](task.gather(torch.from_numpy(part))[0])) > 0).float().mean(0) for part in rows]
    share = torch.stack(active).mean(0)
    ((_, kept, *_),) = hrank.RankCut(task, 0.4).run([(task.start, rows)])
    gone = share.sort(stable=True).indices[:2]
    assert kept.tolist() == [unit not in gone for unit in range(5)]


def test_hap_scores_by_the_trace_of_each_units_hessian() -> None:
    """With every pattern of signs the trace is exact: beside a Hessian written out."""
    task = two_layers(inputs=1, hidden=2, classes=2, samples=6)
    x, y = task.gather(torch.arange(6))
    m = task.start
    objective = flat_loss(task.module, task.layout, x, y, F.cross_entropy, m)
    signs = torch.tensor([*product((-1.0, 1.0), repeat=len(m))])
    found = hap.sensitivity(m, signs, curvature(objective, m, chunk=64).hessian(signs), task.groups)
    diagonal = torch.autograd.functional.hessian(objective, m).diagonal()
    for unit in range(2):
        own = [unit, 2 + unit, 4 + unit, 6 + unit]  # weight, bias, and the two weights that read it
        expected = diagonal[own].sum() / 4 * (m[own] ** 2).sum()
        assert found[unit].item() == pytest.approx(expected.item(), rel=1e-4)


def test_hap_takes_the_lowest_of_the_whole_network(task: Task) -> None:
    ((_, kept, rate, *_),) = hap.TraceCut(task, 0.4, 100).run([(task.start, np.arange(20), (0, 1))])
    assert int((~kept).sum()) == 2
    assert rate.item() == pytest.approx(0.4)


def test_fedap_divergence_and_importance() -> None:
    """Labels (4, 0) and (0, 4): the overall shares are 1/2 each."""
    half = (1 * log(1 / 0.75) + 0.5 * log(0.5 / 0.75) + 0.5 * log(0.5 / 0.25)) / 2
    assert fedap.divergence([4, 0], [4, 4]) == pytest.approx(half)
    assert fedap.divergence([3, 3], [4, 4]) == pytest.approx(0.0)
    worth = fedap.importances({0: [4, 0], 1: [0, 4], 2: [6, 6]})
    assert worth[2] == pytest.approx(12 / 1e-4)
    assert worth[0] == worth[1] == pytest.approx(4 / (half + 1e-4))


def test_fedap_layer_shares_by_one_threshold() -> None:
    """Magnitudes 1 … 9 in the first layer, 10 … in the second: a quarter of all cuts through the first only."""
    with torch.random.fork_rng(devices=[]):
        module = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    groups = ChannelGroups.of(module, torch.zeros(1, 2))
    vector = torch.arange(1.0, groups.layout.size + 1) * torch.tensor([1.0, -1.0]).repeat(20)[: groups.layout.size]
    prunable = 9 + 16 + 8
    shares = fedap.layer_shares(vector, groups, 8.5 / prunable)
    assert shares == pytest.approx({"0": 8 / 9, "2": 0.0})
    assert fedap.layer_shares(vector, groups, 0.0) == {"0": 0.0, "2": 0.0}
    assert fedap.layer_shares(vector, groups, 1.0) == {"0": 1.0, "2": 1.0}


def test_fedap_merges_rates_by_importance(task: Task, groups: ChannelGroups) -> None:
    rows = (np.arange(10),)
    rates = (torch.tensor(0.1), torch.tensor(0.7))
    ((_, kept, *_),) = fedap.AdaptiveCut(task).run([(task.start, rows, rates, (3.0, 1.0))])
    shares = fedap.layer_shares(task.start, groups, (3 * 0.1 + 0.7) / 4)
    assert int((~kept).sum()) == int(shares["0"] * 5 + 1e-9)


METHODS = {
    "hrank": {"update": 2, "batches": 2},
    "hap": {"update": 2, "probes": 20},
    "fedap": {"update": 2},
}


def pruned(method: str, seed: int = 0) -> Run:
    task = two_layers(hidden=10)
    rows = [np.arange(8 * device, 8 * device + 8) for device in range(3)]
    return play(
        method, [(0.0, 0.0)] * 3, task=(task, rows), hyper=METHODS[method], updates=5, plan=Plan(2, 4, 0.2), seed=seed
    )


@pytest.mark.parametrize("method", ["hrank", "hap"])
def test_a_model_is_cut_once_and_stays_so(method: str) -> None:
    run = pruned(method)
    for device in range(3):
        # The clock learns the new size one update after the cut.
        assert [row.model.size.macs for row in run.device(device)] == [50, 50, 50, 30, 30]
        cut = run.device(device)[2].model.mask
        assert cut is not None
        assert all(torch.equal(row.model.mask.get(), cut.get()) for row in run.device(device)[2:] if row.model.mask)
        rates = [row.metric("prune_rate") for row in run.device(device)]
        assert rates == pytest.approx([0.0, 0.0, 0.4, 0.4, 0.4])


def test_fedap_tells_its_neighbours() -> None:
    run = pruned("fedap")
    kinds = [row.metrics.get("raw_rate") is not None for row in run.device(0)]
    assert kinds == [False, False, True, False, False]
    assert SERVER not in {row.index for row in run.rows}
    assert run.sim.network.edges[0, 1][0] >= 2


@pytest.fixture(scope="module")
def reviews() -> Task:
    """A TextCNN; its embeddings are ten times as large as its filters' weights."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randint(0, 60, (40, 20), generator=generator)
    split = Split(x, (x < 30).float().mean(1).round().long())
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        module = textcnn(2, 20, vocabulary=60, embedding=6, filters=8)
    return Task(module, Dataset("reviews", split, split, 2))


def test_filters_are_all_units_but_an_embeddings_columns(task: Task, reviews: Task) -> None:
    assert task.filters is task.groups, "nothing to leave out"
    assert list(reviews.groups.layers) == ["embedding", *reviews.filters.layers]
    assert reviews.filters.count == 3 * 8
    kept = reviews.filters.full()
    kept[::2] = False
    table = next(entry for entry in reviews.layout.entries if entry.name == "embedding.weight")
    mask = reviews.filters.expand(kept)
    assert mask[table.offset : table.end].all()
    wide = reviews.groups.full()
    wide[6:] = kept
    assert torch.equal(mask, reviews.groups.expand(wide)), "the same filters in both numberings"
    assert reviews.filters.macs(kept) == reviews.groups.macs(wide)


def test_no_baseline_takes_all_filters_of_a_network_with_an_embedding(reviews: Task) -> None:
    rows = np.arange(40)
    ranks = hrank.RankCut(reviews, 0.5).one(reviews.start, [rows])
    adaptive = fedap.AdaptiveCut(reviews).one(reviews.start, [rows], [torch.tensor(0.5)], [1.0])
    traces = hap.TraceCut(reviews, 0.5, 20).one(reviews.start, rows, (0, 0))
    for mask, kept, *_, macs in (ranks, adaptive, traces):
        assert 0.3 <= kept.float().mean() <= 0.7
        assert macs.item() == pytest.approx(reviews.macs * kept.float().mean().item(), rel=0.15)
        assert mask[: 60 * 6].all(), "the table stays"
