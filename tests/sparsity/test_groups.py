"""What is found in a module, and the arithmetic on it: masks, sums over units, sizes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from aedfl.errors import UserError
from aedfl.models import build, count_macs, lenet5
from aedfl.sparsity import ChannelGroups, shrink

LAYERS = {
    "lenet5": {"conv1": 6, "conv2": 16, "fc1": 120, "fc2": 84},
    "resnet8": {
        "stem+block1.conv2": 4,
        "block1.conv1": 4,
        "block2.conv1": 8,
        "block2.conv2+block2.shortcut.0": 8,
        "block3.conv1": 16,
        "block3.conv2+block3.shortcut.0": 16,
    },
    "textcnn": {"embedding": 50, "convs.0": 32, "convs.1": 32, "convs.2": 32},
    "mlp": {"hidden.0": 64, "hidden.1": 32},
    "cnn": {"conv1": 8, "conv2": 16, "fc": 32},
    "residual": {"stem+b": 6, "a": 8, "down+skip": 10},
    "concat": {"left": 5, "right": 4, "both+again": 6},
    "depthwise": {"expand": 4, "project": 6},
    "loop": {"first+loop": 6},
}


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name: str, made) -> None:
    groups = made(name).groups
    assert {layer: units.stop - units.start for layer, units in groups.layers.items()} == LAYERS[name]
    assert groups.count == sum(LAYERS[name].values())
    assert groups.skipped == {"out": "it is an output"}


def members(groups: ChannelGroups) -> Tensor:
    """Which unit holds which entry, bool [count, size], straight from the layers' sides."""
    held = torch.zeros(groups.count, groups.layout.size, dtype=torch.bool)
    for entry in groups.layout.entries:
        view = held[:, entry.offset : entry.end].view(groups.count, *entry.shape)
        for dim, ids in groups.follows(entry).items():
            for index, unit in enumerate(ids.tolist()):
                if unit < groups.count:
                    view[unit].select(dim, index).fill_(True)
    return held


def test_a_unit_of_lenet_holds_its_filter_its_bias_and_its_block_of_the_next_layer(made) -> None:
    groups = made("lenet5").groups
    unit = groups.layers["conv2"].start + 3
    held = groups.layout.views(members(groups)[unit].float())
    assert held["conv2.weight"][3].all() and held["conv2.weight"].sum() == 6 * 25
    assert held["conv2.bias"].nonzero().tolist() == [[3]]
    assert held["fc1.weight"][:, 3 * 16 : 4 * 16].all() and held["fc1.weight"].sum() == 120 * 16
    assert groups.sizes[unit] == 6 * 25 + 1 + 120 * 16
    assert held["fc2.weight"].sum() == held["conv1.weight"].sum() == 0


def test_a_unit_of_resnet_is_a_whole_group_of_its_norms(made) -> None:
    groups = made("resnet8").groups
    held = groups.layout.views(members(groups)[groups.layers["stem+block1.conv2"].start + 1].float())
    for name in ("norm.weight", "norm.bias", "block1.norm2.weight"):
        assert held[name].nonzero().flatten().tolist() == [4, 5, 6, 7]
    assert held["stem.weight"].sum() == 4 * 27
    assert held["block1.conv1.weight"][:, 4:8].all() and held["block2.shortcut.0.weight"][:, 4:8].all()


def test_expand_keeps_what_all_units_keep(small_case, random_mask) -> None:
    groups = small_case.groups
    masks = random_mask(groups, 1, 4)
    removed = (~masks).float() @ members(groups).float() > 0
    assert torch.equal(groups.expand(masks), ~removed)
    assert torch.equal(groups.expand(masks[2]), ~removed[2])
    assert groups.expand(groups.full()).all()


def test_sums_count_each_entry_once_per_unit(small_case) -> None:
    groups, count = small_case.groups, small_case.layout.parameters
    values = torch.randn(2, 3, count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted = values @ members(groups)[:, :count].T.double()
    torch.testing.assert_close(groups.sums(values), wanted)
    torch.testing.assert_close(groups.sizes, members(groups)[:, :count].sum(1).float())


def test_spread_is_the_transpose_of_sums(small_case) -> None:
    groups, count = small_case.groups, small_case.layout.parameters
    values = torch.randn(3, groups.count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.testing.assert_close(groups.spread(values), values @ members(groups)[:, :count].double())


def test_sizes_and_costs_are_those_of_the_smaller_network(case, random_mask) -> None:
    groups = case.groups
    masks = torch.cat([random_mask(groups, 2, 3), random_mask(groups, 3, 1, share=0.1), groups.full(1)])
    entries, parameters, macs = groups.kept_entries(masks), groups.kept_parameters(masks), groups.macs(masks)
    for row, mask in enumerate(masks):
        small = shrink(case.module, groups, case.vector, mask)
        assert entries[row] == small.layout.size == groups.expand(mask).sum()
        assert parameters[row] == small.layout.parameters
        assert macs[row] == groups.macs(mask) == count_macs(small.module, case.x)


def test_kept_units(made) -> None:
    groups = made("cnn").groups
    masks = groups.full(2)
    masks[1, groups.layers["conv2"].start] = False
    kept = {name: count.tolist() for name, count in groups.kept_units(masks).items()}
    assert kept == {"conv1": [8, 8], "conv2": [16, 15], "fc": [32, 32]}


@pytest.mark.parametrize("name", ["lenet5", "resnet8", "resnet8-batch", "residual"])
def test_masked_channels_are_zero_all_the_way(name: str, made, random_mask) -> None:
    """Convolution, norm and activation give zero there, so nothing leaks into what is kept."""
    case = made(name)
    groups, seen = case.groups, {}
    mask = random_mask(groups, 5)
    kept = torch.cat([mask, torch.ones(1, dtype=torch.bool)])
    hooks = [
        case.module.get_submodule(site).register_forward_hook(lambda _m, _i, out, site=site: seen.update({site: out}))
        for site in groups.sites
    ]
    case.module.eval()
    functional_call(case.module, case.layout.views(case.vector * groups.expand(mask)), (case.x,))
    for hook in hooks:
        hook.remove()
    for site, output in seen.items():
        gone = ~kept[groups.sites[site].sides["out"]]
        assert not output[:, gone].any()
        assert output[:, ~gone].any()


class Frozen(nn.Module):
    """Layers that cannot be narrowed: before a LayerNorm, at a fixed reshape, added to the input, in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.to_input = nn.Conv2d(4, 4, 3, padding=1)
        self.grouped, self.before = nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.Conv2d(4, 8, 1)
        self.fixed, self.free = nn.Conv2d(8, 6, 1), nn.Linear(6 * 25, 10)
        self.normed, self.norm = nn.Linear(10, 12), nn.LayerNorm(12)
        self.out = nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(x + self.to_input(x))
        x = F.relu(self.fixed(self.grouped(self.before(x))))
        x = F.relu(self.free(x.view(-1, 6 * 5 * 5)))
        y: Tensor = self.out(self.norm(self.normed(x)))
        return y


def test_what_cannot_be_taken_out_is_not_offered() -> None:
    groups = ChannelGroups.of(Frozen(), torch.zeros(1, 4, 5, 5))
    assert list(groups.layers) == ["free"]
    assert set(groups.skipped) == {"to_input", "before", "fixed", "normed", "out"}
    assert "LayerNorm" in groups.skipped["normed"]
    assert groups.skipped["fixed"] == "taking its channels out changes the outputs"


class Recurrent(nn.Module):
    """An LSTM and attention between layers that can be pruned; an activation with one slope for all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.act = nn.Linear(4, 6), nn.PReLU()
        self.lstm, self.attention = nn.LSTM(6, 8, batch_first=True), nn.MultiheadAttention(8, 2, batch_first=True)
        self.last, self.out, self.end = nn.Linear(8, 5), nn.Linear(5, 2), nn.PReLU()

    def forward(self, x: Tensor) -> Tensor:
        x = self.lstm(self.act(self.first(x)))[0]
        x = self.attention(x, x, x)[0]
        y: Tensor = self.out(self.end(self.last(x.mean(1))))
        return y


def test_recurrent_and_attention_layers_stay_whole() -> None:
    groups = ChannelGroups.of(Recurrent(), torch.zeros(1, 3, 4))
    assert list(groups.layers) == ["last"]
    assert "LSTM" in groups.skipped["first"]


def test_a_misfit_is_said_in_one_sentence() -> None:
    with pytest.raises(UserError, match="Linear cannot be traced for pruning"):
        ChannelGroups.of(nn.Linear(3, 2), torch.zeros(1, 4))


@torch.no_grad()
def test_works_where_gradients_are_switched_off(made) -> None:
    case = made("cnn")
    assert ChannelGroups.of(case.module, case.x[:1]).layers == case.groups.layers


def test_nothing_to_prune() -> None:
    groups = ChannelGroups.of(nn.Linear(3, 2), torch.zeros(1, 3))
    assert groups.count == 0 and groups.expand(groups.full()).all()
    assert groups.sums(torch.ones(8)).shape == (0,)
    assert groups.macs(groups.full()) == 6


def test_the_module_is_left_as_it_was() -> None:
    module = build("resnet8", (3, 16, 16), 10, norm="batch").train()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    ChannelGroups.of(module, torch.zeros(1, 3, 16, 16))
    assert module.training and not any(m._forward_hooks for m in module.modules())
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


GROUPS = ChannelGroups.of(lenet5(10, 1, 28), torch.zeros(1, 1, 28, 28))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.booleans(), min_size=GROUPS.count, max_size=GROUPS.count), st.integers(0, GROUPS.count - 1))
def test_removing_one_unit_more_only_shrinks(flags: list[bool], unit: int) -> None:
    mask = torch.tensor(flags)
    less = mask.clone()
    less[unit] = False
    assert not (GROUPS.expand(less) & ~GROUPS.expand(mask)).any()
    both: Callable[[Tensor], Tensor] = lambda m: torch.stack([GROUPS.macs(m), GROUPS.kept_parameters(m)])  # noqa: E731
    assert (both(less) <= both(mask)).all()
    assert GROUPS.kept_parameters(mask) == GROUPS.expand(mask).sum()
