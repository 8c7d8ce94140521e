"""Options against bad neighbours: what is done to a model that has come, before a program sees it.

They act on whole models in the order given here. `cosine` keeps out a model that has moved away from the common start
in another direction than the own one. `clip` pulls a model that is too far from the own one towards it. `trimmed` and
`median` put in the place of a neighbour's model the trimmed mean, or the median, over the own model and the
newest of every neighbour, parameter by parameter: a few bad ones among them then have no say. A server's models are
taken as they are: whoever does not trust the server should not take part.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from ..context import SERVER, Message, Model
from ..graph import Value
from ..rules.robust import clip_norms, coordinate_median, cosine_filter, trimmed_mean

Rule = Literal["none", "trimmed", "median"]


@dataclass(frozen=True)
class Robust:
    """The settings; by default nothing is done."""

    cosine: float | None = None
    """Least cosine between a neighbour's change since the start and the own one; -1 to 1."""
    clip: float | None = None
    """Largest distance of a neighbour's model from the own one, in units of the own one's norm."""
    rule: Rule = "none"
    trim: float = 0.34
    """Share that `trimmed` leaves out at either end; below 1/2."""

    @property
    def active(self) -> bool:
        return self.cosine is not None or self.clip is not None or self.rule != "none"


class Gate:
    """Remembers the newest model of every neighbour, and says what a program gets to see of a new one."""

    def __init__(self, robust: Robust, start: Tensor, trusting: bool = False) -> None:
        self.robust, self._start, self._trusting = robust, start, trusting
        self._held: dict[int, Model] = {}
        self._staying: frozenset[int] | None = None

    def forget(self, staying: Iterable[int]) -> None:
        """Neighbours that are gone have no say any more. Called from another thread than the rest."""
        self._staying = frozenset(staying)

    def __call__(self, message: Message, own: Model) -> Message | None:
        """The message with a model that may be merged; None to keep it out."""
        if message.model is None or message.source == SERVER:
            return message
        robust = self.robust
        mine, given = own.vector.get(), _filled(message.model, own.vector.get())
        if robust.cosine is not None and not self._agrees(mine, given, robust.cosine):
            return None
        if robust.clip is not None:
            given = clip_norms(mine[None], given[None, None], robust.clip)[0, 0]
        model = replace(message.model, vector=Value(_masked(given, message.model)))
        if robust.rule != "none":
            staying = self._staying
            self._held = {k: held for k, held in self._held.items() if staying is None or k in staying}
            self._held[message.source] = model
            model = replace(model, vector=Value(_masked(self._middle(mine), model)))
        return replace(message, model=model)

    def _agrees(self, mine: Tensor, given: Tensor, threshold: float) -> bool:
        """Before its own first update a device has nothing to compare with, and takes nothing; a server must."""
        change, other = mine - self._start, given - self._start
        if not bool(change.any()):
            return self._trusting
        valid = torch.ones(1, 1, dtype=torch.bool)
        return bool(cosine_filter(change[None], other[None, None], valid, threshold)[0, 0])

    def _middle(self, mine: Tensor) -> Tensor:
        """Of two opinions there is no middle that one of them could not move at will: the own one counts then."""
        if len(self._held) < 2:
            return mine
        stack = torch.stack([mine, *(_gaps(model) for model in self._held.values())])[None]
        valid = torch.ones(1, stack.shape[1], dtype=torch.bool)
        if self.robust.rule == "median":
            return coordinate_median(stack, valid)[0]
        return trimmed_mean(stack, valid, self.robust.trim)[0]


def _filled(model: Model, own: Tensor) -> Tensor:
    """Where the neighbour's model is pruned it has no opinion: the own values stand there."""
    return model.vector.get() if model.mask is None else torch.where(model.mask.get(), model.vector.get(), own)


def _gaps(model: Model) -> Tensor:
    """Pruned entries as NaN, which the rules count as absent."""
    vector = model.vector.get()
    return vector if model.mask is None else torch.where(model.mask.get(), vector, torch.nan)


def _masked(vector: Tensor, model: Model) -> Tensor:
    return vector if model.mask is None else torch.where(model.mask.get(), vector, 0.0)
