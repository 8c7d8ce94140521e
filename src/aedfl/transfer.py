"""To an accelerator and back without waiting for what it is doing.

Python only asks for an accelerator's work, and is ahead of it. Whoever looks at a result waits until all work that was
asked for before is done, and meanwhile asks for no more. So copies to the host are begun at once and looked at later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
U = TypeVar("U")


class Event(Protocol):
    """A point in the accelerator's work, as `torch.cuda.Event`."""

    def query(self) -> bool:
        """True once it has been reached."""

    def synchronize(self) -> None:
        """Waits for it, and for nothing that comes after it."""


class Later(Generic[T]):
    """What `make` gives once the events have come; without events that is at any time.

    Holds on to whatever `make` needs until somebody has got the result.
    """

    def __init__(self, make: Callable[[], T], events: Sequence[Event] = ()) -> None:
        self._make: Callable[[], T] | None = make
        self.events = tuple(events)

    @property
    def ready(self) -> bool:
        """Whether `get` would give the result without waiting."""
        return all(event.query() for event in self.events)

    def get(self) -> T:
        if self._make is not None:
            for event in self.events:
                event.synchronize()
            self._made = self._make()
            self._make, self.events = None, ()
        return self._made

    def then(self, change: Callable[[T], U]) -> Later[U]:
        return Later(lambda: change(self.get()), self.events)


def away(tensor: Tensor) -> bool:
    """True if it lies on an accelerator, so that looking at it would wait for all work there."""
    return tensor.is_cuda


def arriving(tensors: Sequence[Tensor]) -> Later[list[Tensor]]:
    """The tensors in host memory, those from an accelerator by one copy per kind of number, which begins now."""
    found, events = list(tensors), list[Event]()
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        if away(tensor):
            kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    sources = [torch.cat([_flat(tensors[place]) for place in places]) for places in kinds.values()]
    for source, places in zip(sources, kinds.values(), strict=True):
        copy, event = begin_copy(source)
        events.append(event)
        parts = torch.split(copy, [tensors[place].numel() for place in places])
        for place, part in zip(places, parts, strict=True):
            found[place] = part if tensors[place].dim() == 1 else part.view(tensors[place].shape)

    def arrived() -> list[Tensor]:
        sources.clear()  # until now they had to stay where they were copied from
        return found

    return Later(arrived, events)


def _flat(tensor: Tensor) -> Tensor:
    """Most are flat already, and there may be thousands."""
    return tensor if tensor.dim() == 1 else tensor.flatten()


def begin_copy(source: Tensor) -> tuple[Tensor, Event]:
    """Pinned host memory, and when it will hold what the tensor of a GPU holds."""
    copy = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
    copy.copy_(source, non_blocking=True)
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(source.device))
    return copy, event


def sent(table: Tensor, device: torch.device) -> Tensor:
    """A host's tensor on the device."""
    return table if device.type != "cuda" else table.pin_memory().to(device, non_blocking=True)
