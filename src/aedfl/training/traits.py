"""What a module does that a back end must know of; found out by running a copy of it on a few samples."""

from __future__ import annotations

from contextlib import contextmanager
from copy import deepcopy
from threading import RLock
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from collections.abc import Iterator


PROCESS = RLock()
"""Held by a thread while it changes settings of PyTorch that hold for the whole process, or relies on them."""


@contextmanager
def _trial(module: nn.Module, x: Tensor) -> Iterator[nn.Module]:
    """A copy in training mode, without gradients; torch's generators are afterwards as they were."""
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad(), _in_full_precision():
        yield deepcopy(module).train()


@contextmanager
def _in_full_precision() -> Iterator[None]:
    """In TF32 a sample's outputs differ in the third digit with the size of its batch, which looks like mixing."""
    convolutions, products = torch.backends.cudnn, torch.backends.cuda.matmul
    before = convolutions.allow_tf32, products.allow_tf32
    convolutions.allow_tf32 = products.allow_tf32 = False
    try:
        yield
    finally:
        convolutions.allow_tf32, products.allow_tf32 = before


def draws_randomness(module: nn.Module, x: Tensor) -> bool:
    """True if a forward pass draws numbers from torch's global generators (a functional dropout, say)."""
    with _trial(module, x) as twin:
        before = _positions(x)
        twin(x)
        return any(not torch.equal(a, b) for a, b in zip(before, _positions(x), strict=True))


def _positions(x: Tensor) -> list[Tensor]:
    return [torch.random.get_rng_state(), *([torch.cuda.get_rng_state(x.device)] if x.is_cuda else [])]


def replaces_buffers(module: nn.Module, x: Tensor) -> bool:
    """True if a forward pass puts new tensors in the place of buffers, instead of writing into them."""
    with _trial(module, x) as twin:
        before = dict(twin.named_buffers())
        twin(x)
        return any(buffer is not before.get(name) for name, buffer in twin.named_buffers())


def mixes_samples(module: nn.Module, x: Tensor) -> bool:
    """True if what the module says of a sample depends on the others in the batch (batch statistics)."""
    if any(isinstance(layer, nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
        return True
    with _trial(module, x) as twin:
        alone, together = twin(x), twin(torch.cat([x, x[:1], x[:1]]))
        return not torch.allclose(alone, together[: len(x)], rtol=1e-3, atol=1e-5, equal_nan=True)


def refuses_one_sample(module: nn.Module, x: Tensor) -> bool:
    """True if the module cannot be trained on a single sample, which has no variance."""
    with _trial(module, x) as twin:
        try:
            twin(x[:1])
        except ValueError:
            return True
    return False


def widest(module: nn.Module, x: Tensor) -> int:
    """Most numbers that stand for one sample anywhere between the layers of a module."""
    return max(_sizes(module, x))


def spread(module: nn.Module, x: Tensor) -> int:
    """Numbers that stand for one sample between the layers, all together."""
    return sum(_sizes(module, x))


def _sizes(module: nn.Module, x: Tensor) -> list[int]:
    """Numbers per sample that go in, and that come out of every layer."""
    sizes = [x.numel()]

    def note(_: nn.Module, __: object, output: object) -> None:
        if isinstance(output, Tensor):
            sizes.append(output.numel())

    twin = deepcopy(module).eval()
    for layer in twin.modules():
        layer.register_forward_hook(note)
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
        twin(x)
    return [size // len(x) for size in sizes]


def channels_last(x: Tensor) -> Tensor:
    """Images [B, C, H, W] with the channels of a pixel side by side; anything else as it is.

    With one channel both orders are the same in memory, and the strides alone tell a convolution which one is meant.
    """
    if x.dim() != 4:
        return x
    if x.shape[1] == 1:
        rows, columns = x.shape[2:]
        return x.contiguous().as_strided(x.shape, (rows * columns, 1, columns, 1))
    return x.contiguous(memory_format=torch.channels_last)


def likes_channels_last(module: nn.Module, x: Tensor) -> bool:
    """True for image networks that say the same whatever the order in memory; `view` in a module may refuse it."""
    if x.dim() != 4 or not any(isinstance(layer, nn.Conv2d) for layer in module.modules()):
        return False
    with torch.random.fork_rng(devices=[x.device] if x.is_cuda else []), torch.no_grad():
        twin = deepcopy(module).eval()
        try:
            return torch.allclose(twin(x), twin(channels_last(x)), rtol=1e-3, atol=1e-5, equal_nan=True)
        except RuntimeError:
            return False
