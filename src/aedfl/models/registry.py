"""Models by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch import nn

from aedfl.errors import UserError

from .cnn import cnn
from .lenet5 import lenet5
from .mlp import mlp
from .options import whole
from .own import build_own
from .resnet8 import resnet8
from .textcnn import textcnn
from .vgg9 import vgg9

Builder = Callable[..., nn.Module]

IMAGE_MODELS: dict[str, tuple[Builder, int]] = {
    "lenet5": (lenet5, 16),
    "resnet8": (resnet8, 4),
    "vgg9": (vgg9, 8),
    "cnn": (cnn, 4),
}
"""Builders taking (classes, channels, size), each with the smallest side it can take."""

BUILDERS: dict[str, Builder] = {name: builder for name, (builder, _) in IMAGE_MODELS.items()} | {
    "textcnn": textcnn,
    "mlp": mlp,
}

NAMES = tuple(sorted(BUILDERS))
OWN = "own"
"""Stands in a config for a module that was given in Python."""


def build(
    name: str,
    input_shape: Sequence[int],
    classes: int,
    *,
    seed: int | None = None,
    words: int | None = None,
    **options: Any,
) -> nn.Module:
    """A new model for samples of `input_shape` (channels, side, side; or tokens) and `classes` outputs.

    `words` is how many tokens the data have; a model that takes a `vocabulary` gets it, unless an option says another.

    `name` is one of `NAMES`, or 'package.module:Class' or 'file.py:Class' for a user's own. With a `seed` the
    start values are a function of it, and PyTorch's global generator is left as it was; without one they
    come from that generator.
    """
    shape, classes = tuple(int(side) for side in input_shape), whole("classes", classes)
    with torch.random.fork_rng(devices=[], enabled=seed is not None):
        if seed is not None:
            torch.manual_seed(seed)
        if ":" in name:
            return build_own(name, shape, classes, words, **options)
        return _built_in(name, shape, classes, words, options)


def _built_in(
    name: str, shape: tuple[int, ...], classes: int, words: int | None, options: dict[str, Any]
) -> nn.Module:
    if name == OWN:
        given = "a torch.nn.Module that was given in Python (an object, not its class)"
        raise UserError(f"model {name!r} stands for {given}; there is none, allowed by name are {', '.join(NAMES)}")
    if name not in BUILDERS:
        raise UserError(f"model {name!r} is not known{_nearest(name, NAMES)}; allowed are {', '.join(NAMES)}")
    builder = BUILDERS[name]
    allowed = [p.name for p in inspect.signature(builder).parameters.values() if p.kind is p.KEYWORD_ONLY]
    for option in options:
        if option not in allowed:
            listed = ", ".join(allowed) or "none"
            raise UserError(f"model {name} has no option {option!r}{_nearest(option, allowed)}; it has: {listed}")
    if words is not None and "vocabulary" in allowed:
        options = {"vocabulary": words, **options}
    return builder(classes, *_arguments(name, shape), **options)


def _arguments(name: str, shape: tuple[int, ...]) -> tuple[Any, ...]:
    """What the builder takes after `classes`."""
    if name == "mlp":
        return (shape,)
    if name == "textcnn":
        if len(shape) != 1:
            raise UserError(f"model textcnn needs samples of shape (tokens,), not {shape}")
        return shape
    least = IMAGE_MODELS[name][1]
    if len(shape) != 3 or shape[1] != shape[2] or shape[1] < least:
        wanted = f"(channels, side, side) with a side of {least} or more"
        raise UserError(f"model {name} needs samples of shape {wanted}, not {shape}")
    return shape[:2]


def _nearest(word: str, known: Sequence[str]) -> str:
    """The hint in an error message, empty when nothing is near."""
    near = get_close_matches(word, known, 1)
    return f" (did you mean {near[0]!r}?)" if near else ""
