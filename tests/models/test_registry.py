"""Models by name: the built-in ones, a user's own, and what is said about a mistake."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from aedfl.errors import UserError
from aedfl.layout import Layout
from aedfl.models import NAMES, build

OWN = """
import torch
from torch import nn

class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(4, 3)
    def forward(self, x):
        return self.out(x.flatten(1))

class Sized(nn.Module):
    def __init__(self, classes, input_shape, hidden=5):
        super().__init__()
        self.hidden, self.out = nn.Linear(input_shape[0], hidden), nn.Linear(hidden, classes)
    def forward(self, x):
        return self.out(self.hidden(x))

class Needy(nn.Module):
    def __init__(self, colour):
        super().__init__()

def not_a_module():
    return 3
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_a_seed_fixes_the_start_values_and_nothing_else() -> None:
    def flat(seed: int | None) -> torch.Tensor:
        module = build("cnn", (1, 8, 8), 10, seed=seed)
        return Layout.of(module).flatten(module)

    before = torch.random.get_rng_state()
    assert torch.equal(flat(1), flat(1))
    assert not torch.equal(flat(1), flat(2))
    assert torch.equal(before, torch.random.get_rng_state())


def test_options_reach_the_model() -> None:
    module = build("mlp", (2, 3), 4, hidden=[7])
    assert [tuple(p.shape) for p in module.parameters()] == [(7, 6), (7,), (4, 7), (4,)]
    norms = {type(m) for m in build("resnet8", (3, 32, 32), 10, norm="batch").modules()}
    assert nn.BatchNorm2d in norms and nn.GroupNorm not in norms


@pytest.mark.parametrize(
    ("name", "shape", "options", "said"),
    [
        ("resnet9", (3, 32, 32), {}, "did you mean 'resnet8'"),
        ("transformer", (3, 32, 32), {}, ", ".join(NAMES)),
        ("mlp", (1, 8, 8), {"hiden": 3}, "did you mean 'hidden'"),
        ("lenet5", (1, 28, 28), {"width": 3}, "it has: none"),
        ("lenet5", (28, 28), {}, "(channels, side, side)"),
        ("lenet5", (1, 28, 32), {}, "not (1, 28, 32)"),
        ("lenet5", (1, 8, 8), {}, "16 or more"),
        ("textcnn", (3, 32, 32), {}, "(tokens,)"),
        ("resnet8", (3, 32, 32), {"norm": "layer"}, "allowed are group, batch, none"),
        ("resnet8", (3, 32, 32), {"group_channels": 5}, "does not divide"),
        ("resnet8", (3, 32, 32), {"group_channels": 0}, "group_channels = 0: must be a whole number from 1"),
        ("mlp", (1, 8, 8), {"hidden": -1}, "hidden = -1: must be a list of whole numbers from 1"),
        ("mlp", (1, 8, 8), {"hidden": 5}, "hidden = 5: must be a list of whole numbers from 1"),
        ("mlp", (1, 8, 8), {"hidden": [8, 0]}, "hidden = [8, 0]: must be a list"),
        ("mlp", (1, 8, 8), {"hidden": [10**20]}, "from 1 to 10000000"),
        ("cnn", (1, 8, 8), {"hidden": -1}, "hidden = -1: must be a whole number from 1"),
        ("cnn", (1, 8, 8), {"hidden": True}, "hidden = True: must be a whole number from 1"),
        ("cnn", (1, 8, 8), {"widths": "a"}, "widths = 'a': must be a list of 2 whole numbers from 1"),
        ("cnn", (1, 8, 8), {"widths": [8]}, "widths = [8]: must be a list of 2"),
        ("cnn", (1, 8, 8), {"widths": [0, 0]}, "widths = [0, 0]: must be a list of 2"),
        ("textcnn", (256,), {"vocabulary": -3}, "vocabulary = -3: must be a whole number from 1"),
        ("textcnn", (256,), {"filters": 2.5}, "filters = 2.5: must be a whole number from 1"),
        ("own", (3,), {}, "model 'own' stands for a torch.nn.Module that was given in Python"),
        (":Net", (3,), {}, "model ':Net' is not known; write 'package.module:Class'"),
        ("..net:Net", (3,), {}, "model '..net:Net' is not known"),
        ("net.py:", (3,), {}, "model 'net.py:' is not known"),
        ("nowhere.at.all:Net", (3,), {}, "cannot be imported"),
        ("nowhere.py:Net", (3,), {}, "does not exist"),
    ],
)
def test_mistakes_are_named(name: str, shape: tuple[int, ...], options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        build(name, shape, 10, **options)
    assert said in str(error.value)


@pytest.mark.parametrize("name", ["mlp", "torch.nn:Identity"])
@pytest.mark.parametrize("classes", [0, -1])
def test_there_is_something_to_tell_apart(name: str, classes: int) -> None:
    with pytest.raises(UserError, match=f"^classes = {classes}: must be a whole number from 1 "):
        build(name, (1, 8, 8), classes)


def test_own_model_from_a_file(own: Path) -> None:
    assert build(f"{own}:Plain", (2, 2), 3)(torch.zeros(5, 2, 2)).shape == (5, 3)
    module = build(f"{own}:Sized", (6,), 7, hidden=9)
    assert module(torch.zeros(5, 6)).shape == (5, 7)
    assert len(next(iter(module.parameters()))) == 9


def test_own_model_from_a_package() -> None:
    assert isinstance(build("torch.nn:Identity", (3,), 2), nn.Identity)


@pytest.mark.parametrize(
    ("attribute", "options", "said"),
    [
        ("Missing", {}, "has no class 'Missing'"),
        ("Needy", {}, "colour"),
        ("Sized", {"depth": 3}, "depth"),
        ("not_a_module", {}, "not a torch.nn.Module"),
    ],
)
def test_mistakes_in_own_models(own: Path, attribute: str, options: dict[str, object], said: str) -> None:
    with pytest.raises(UserError) as error:
        build(f"{own}:{attribute}", (3,), 2, **options)
    assert said in str(error.value)
