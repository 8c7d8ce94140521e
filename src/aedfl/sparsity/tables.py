"""Index tables behind `ChannelGroups`: sums over units, and sizes as products of kept widths."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from aedfl.layout import Entry, Layout

Follows = Mapping[int, Tensor]


@dataclass(frozen=True)
class SegmentTable:
    """Sums over units in two steps: each tensor over all but one dimension, then a gather of those sums."""

    pieces: tuple[tuple[Entry, int], ...]
    """Tensors with the dimension that stays."""
    twice: Tensor
    """Entries that one unit holds through both dimensions, so counted once too often."""
    table: Tensor
    """For every unit the positions of its sums among the pieces, padded with a zero's; [count, width]."""

    @classmethod
    def of(
        cls,
        layout: Layout,
        follows: Callable[[Entry], Follows],
        owners: tuple[Tensor, Tensor],
        count: int,
    ) -> SegmentTable:
        trainable = [entry for entry in layout.entries if entry.trainable]
        dims = [(entry, dim, ids) for entry in trainable for dim, ids in follows(entry).items()]
        twice = _twice(trainable, follows)
        twice = twice.to(owners[0].device)
        units = torch.cat([ids for *_, ids in dims] + [owners[0][twice]])
        return cls(tuple((entry, dim) for entry, dim, _ in dims), twice, positions(units, count))

    def sums(self, values: Tensor) -> Tensor:
        """[..., parameters] to [..., count]."""
        pieces = [self._piece(values, entry, dim) for entry, dim in self.pieces]
        zero = values.new_zeros(*values.shape[:-1], 1)
        return torch.cat([*pieces, -values[..., self.twice], zero], -1)[..., self.table].sum(-1)

    @staticmethod
    def _piece(values: Tensor, entry: Entry, dim: int) -> Tensor:
        flat = values[..., entry.offset : entry.end]
        tensor = flat.reshape(*flat.shape[:-1], *entry.shape)
        others = [d - len(entry.shape) for d in range(len(entry.shape)) if d != dim]
        return tensor.sum(others) if others else tensor


def _twice(entries: Sequence[Entry], follows: Callable[[Entry], Follows]) -> Tensor:
    """Positions in the flat vector of entries whose two dimensions name the same unit, or none at all."""
    found = [torch.empty(0, dtype=torch.int64)]
    for entry in entries:
        if len(dims := list(follows(entry).items())) == 2:
            (a, left), (b, right) = dims
            same = left.cpu()[:, None] == right.cpu()[None, :]
            grid = torch.arange(entry.offset, entry.end).view(entry.shape)
            grid = grid.movedim((a, b), (0, 1)).flatten(2) if grid.dim() > 2 else grid[..., None]
            found.append(grid[same].reshape(-1))
    return torch.cat(found)


def positions(units: Tensor, count: int) -> Tensor:
    """Positions in `units` of each number below `count`, padded with `len(units)`: [count, most]."""
    order = units.sort(stable=True).indices
    lengths = torch.bincount(units, minlength=count + 1)[:count]
    starts = lengths.cumsum(0) - lengths
    column = torch.arange(int(lengths.max()) if count else 0, device=units.device)
    position = (starts[:, None] + column).clamp(max=max(len(units) - 1, 0))
    return order[position].where(column < lengths[:, None], len(units))


@dataclass(frozen=True)
class Products:
    """Amounts that shrink with two widths at once, such as a weight's size or a layer's cost."""

    left: Tensor
    right: Tensor
    """How much of each width every unit holds, [tensors, count]; with those never pruned, [tensors, 1]."""
    left_rest: Tensor
    right_rest: Tensor

    @classmethod
    def of(cls, follows: Sequence[Follows], count: int, device: torch.device) -> Products:
        blank = torch.full((1,), count, device=device)
        pairs = [[*dims.values(), blank, blank][:2] for dims in follows]
        held = torch.stack([torch.stack([_share(ids, count) for ids in pair]) for pair in pairs])
        return cls(held[:, 0, :count], held[:, 1, :count], held[:, 0, count], held[:, 1, count])

    def total(self, mask: Tensor, amounts: Tensor) -> Tensor:
        """Sum of the amounts [tensors], each scaled by the kept shares of its widths; float64 [...]."""
        kept = mask.to(torch.float64)
        left = kept @ self.left.T + self.left_rest
        right = kept @ self.right.T + self.right_rest
        return (left * right) @ amounts


def _share(ids: Tensor, count: int) -> Tensor:
    """The share of a width that each unit holds, the unpruned rest last; float64 [count + 1]."""
    return torch.bincount(ids, minlength=count + 1).to(torch.float64) / len(ids)
