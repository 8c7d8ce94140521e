"""Configs: what is read is what is written, and every mistake gets its sentence."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aedfl.algorithms import METHODS
from aedfl.errors import UserError
from aedfl.experiment import config as c

PAPER = {
    "emnist-lenet": ("emnist-letters", "lenet5", 0.9),
    "cifar10-lenet": ("cifar10", "lenet5", 0.5),
    "cifar10-resnet8": ("cifar10", "resnet8", 0.6),
    "cifar10-vgg9": ("cifar10", "vgg9", 0.58),
    "tiny-vgg9": ("tiny-imagenet", "vgg9", 0.17),
    "tiny-resnet8": ("tiny-imagenet", "resnet8", 0.17),
    "imdb-textcnn": ("imdb", "textcnn", 0.65),
}


def test_every_preset_has_a_description_and_survives_a_round_trip() -> None:
    assert set(c.presets()) == {"digits", *PAPER}
    for name, description in c.presets().items():
        config = c.load(name)
        assert len(description) > 20 and config.preset == name
        assert c.from_toml(c.to_toml(config)) == config


@pytest.mark.parametrize("name", PAPER)
def test_presets_have_the_papers_settings(name: str) -> None:
    config = c.load(name)
    assert (config.data.name, config.model.name, config.stop.target_accuracy) == PAPER[name]
    assert (config.devices, config.data.partition, config.data.alpha) == (100, "dirichlet", 0.5)
    t = config.training
    assert (t.lr, t.lr_decay, t.batch_size, t.epochs) == (0.03, 0.001, 50, 4)


def test_overrides_are_typed_dotted_and_beaten_by_arguments() -> None:
    values = "training.lr=0.1 links.bandwidth=inf hyper.mu=0.5 hyper.kind=exact seed=3 model.name=mlp"
    more = "model.options={hidden=[64]} stop.virtual_seconds=none stop.updates=7"
    config = c.load("digits", [*values.split(), *more.split()], seed=9)
    assert (config.training.lr, config.links.bandwidth, config.seed) == (0.1, float("inf"), 9)
    assert config.hyper == {"mu": 0.5, "kind": "exact"}
    assert config.model.options == {"hidden": [64]}
    assert (config.stop.virtual_seconds, config.stop.updates) == (None, 7)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("training.lr_deca=1", ["'lr_deca'", "[training]", "'lr_decay'"]),
        ("trainig.lr=1", ["'trainig'", "'training'"]),
        ("lr=1", ["'lr'", "'training.lr'"]),
        ("stop.qqq=1", ["'qqq'", "virtual_seconds", "target_accuracy"]),
        ("devices=0", ["devices = 0", "greater than or equal to 1"]),
        ("devices=true", ["devices = true", "integer"]),
        ("devices=2.5", ["devices = 2.5", "integer"]),
        ("stop.target_accuracy=2.0", ["stop.target_accuracy = 2.0", "less than or equal to 1"]),
        ("training.lr=nan", ["training.lr = nan"]),
        ("training.batch_size=99999999999999999999", ["training.batch_size = 99999999999999999999", "2147483648"]),
        ("evaluation.every=1e-12", ["evaluation.every = 1e-12", "at least", "1000000000 measurements"]),
        ("training.lr=fast", ["training.lr = 'fast'", "number"]),
        ("data.partition=dirichle", ["data.partition = 'dirichle'", "'iid'", "'shards'"]),
        ("data.held_out=0.9", ["data.held_out = 0.9", "less than 0.9"]),
        ("links.loss=1", ["links.loss = 1", "less than 1"]),
        ("fleet.mean_up=3", ["[fleet]", "mean_up", "mean_down"]),
        ("fleet.slowest=0.5", ["[fleet]", "slowest", "fastest"]),
        ("topology.kind=file", ["[topology]", "path"]),
        ("stop.virtual_seconds=none", ["[stop]", "virtual_seconds", "updates"]),
        ("seed=-1", ["seed = -1"]),
        ("seed.x=1", ["seed"]),
        ("training=3", ["[training]", "section", "3"]),
        ('record.trackers=["tensorbored"]', ["tensorbored", "'tensorboard'"]),
        ("nonsense", ["'nonsense'", "key=value"]),
    ],
)
def test_a_mistake_gives_one_sentence_with_key_value_and_limits(override: str, words: list[str]) -> None:
    with pytest.raises(UserError) as caught:
        c.load("digits", [override])
    message = str(caught.value)
    assert "\n" not in message and "pydantic" not in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize(
    ("stop", "least"),
    [
        ({"virtual_seconds": 2e9}, 2.0),
        ({"updates": 10**8}, 1.5),
        ({"virtual_seconds": 1e30, "updates": 10**8}, 1.5),
        ({"virtual_seconds": 2e9, "updates": 10**400}, 2.0),
    ],
)
def test_a_run_is_not_measured_for_ever(stop: dict[str, float], least: float) -> None:
    table = {"devices": 2, "data": {"name": "x"}, "model": {"name": "mlp"}, "stop": stop}
    assert c.validate({**table, "evaluation": {"every": least}}).evaluation.every == least
    with pytest.raises(UserError, match=f"evaluation.every = {0.9 * least:g}: must be at least {least:g}"):
        c.validate({**table, "evaluation": {"every": 0.9 * least}})


def test_missing_keys_and_sections_are_named() -> None:
    with pytest.raises(UserError, match=r"section \[data\] is missing|key 'devices' is missing"):
        c.load(None, ["seed=1"])
    with pytest.raises(UserError, match="key 'model.name' is missing"):
        c.validate({"devices": 2, "data": {"name": "x"}, "model": {}, "stop": {"updates": 1}})


def test_a_source_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="unknown preset 'digit'; did you mean 'digits'"):
        c.load("digit")
    with pytest.raises(UserError, match="none.toml': No such file"):
        c.load(tmp_path / "none.toml")
    (tmp_path / "bad.toml").write_text("devices = = 3")
    with pytest.raises(UserError, match=r"bad.toml' is not valid TOML.*line 1"):
        c.load(tmp_path / "bad.toml")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not a text file"):
        c.load(tmp_path / "bytes.toml")


def test_a_file_says_only_what_differs_from_its_preset(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('preset = "digits"\ndevices = 5\n[fleet]\ntrace = "trace.csv"\n[training]\nlr = 0.2\n')
    config = c.load(path)
    base = c.load("digits")
    assert (config.devices, config.training.lr, config.preset) == (5, 0.2, "digits")
    assert config.training.batch_size == base.training.batch_size and config.stop == base.stop
    assert config.fleet.trace == str(tmp_path / "trace.csv")


def test_another_method_or_model_does_not_inherit_options(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    text = 'preset = "digits"\nmethod = "a"\nhyper = {x = 1, y = 2}\n'
    path.write_text(text + '[model]\nname = "cnn"\noptions = {width = 8, k = 1}\n')
    same = c.load(path, ["hyper.y=3", "model.options.k=2"])
    assert same.hyper == {"x": 1, "y": 3} and same.model.options == {"width": 8, "k": 2}
    other = c.load(path, ["model.name=mlp"], method="b")
    assert other.hyper == {} and other.model.options == {}


def test_a_resolved_file_loads_as_the_same_config(tmp_path: Path) -> None:
    overrides = ["stop.virtual_seconds=none", "stop.updates=4", "fleet.trace=t.csv"]
    config = c.load("cifar10-lenet", overrides, method="x.py")
    path = tmp_path / "config.toml"
    path.write_text(c.to_toml(config))
    assert c.load(path) == config
    assert Path(config.method).is_absolute() and config.fleet.trace == str(Path.cwd() / "t.csv")


words = st.text(max_size=12).filter(lambda text: text != "none")
leaves = st.one_of(st.booleans(), st.integers(-(2**60), 2**60), st.floats(allow_nan=False), words)
nested = st.lists(leaves, max_size=3) | st.dictionaries(words, leaves, max_size=3)
tables = st.dictionaries(words, leaves | nested, max_size=5)


@settings(deadline=None)
@given(hyper=tables, seed=st.integers(0, 2**62), rate=st.floats(1e-300, 1e300), name=words)
def test_anything_that_fits_survives_a_round_trip(hyper: dict[str, object], seed: int, rate: float, name: str) -> None:
    config = c.validate(
        {
            "devices": 3,
            "seed": seed,
            "hyper": hyper,
            "data": {"name": name},
            "model": {"name": "mlp", "options": hyper},
            "training": {"lr": rate},
            "stop": {"updates": 1},
        }
    )
    assert c.from_toml(c.to_toml(config)) == config


def test_the_hash_sees_what_matters_and_nothing_else() -> None:
    base = c.config_hash(c.load("digits"))
    same = "record.updates=false engine.threads=1 engine.lookahead=9 data.directory=x engine.cache_budget_mib=9"
    different = "seed=1 training.lr=0.7 hyper.a=1 stop.updates=3 engine.precision=bf16 evaluation.every=2"
    assert {c.config_hash(c.load("digits", [key])) for key in same.split()} == {base}
    assert len({c.config_hash(c.load("digits", [key])) for key in different.split()} | {base}) == 7


def test_the_hash_sees_the_content_of_a_trace_and_not_its_place(tmp_path: Path) -> None:
    for name, text in (("a.csv", "1"), ("b.csv", "1"), ("c.csv", "2")):
        (tmp_path / name).write_text(text)
    a, b, other = (c.config_hash(c.load("digits", [f"fleet.trace={tmp_path}/{name}.csv"])) for name in "abc")
    assert a == b != other


@dataclasses.dataclass(frozen=True)
class Hyper:
    mu: float = 0.1
    steps: int = 4
    rule: Literal["paper", "exact"] = "paper"
    cap: float | None = 1.0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError("steps must be at least 1")


def test_hyper_parameters_are_coerced_to_their_fields() -> None:
    made = c.make_hyper(Hyper(), {"mu": 1, "rule": "exact", "cap": "none"})
    assert made == Hyper(1.0, 4, "exact", None) and isinstance(made.mu, float)
    assert c.make_hyper(Hyper(), {}) == Hyper()


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"step": 1}, "unknown hyper-parameter 'step'; did you mean 'steps'"),
        ({"mu": "much"}, "hyper.mu = 'much': must be a valid number"),
        ({"steps": 1.5}, "hyper.steps = 1.5: must be a valid integer"),
        ({"steps": True}, "hyper.steps = true: must be a number"),
        ({"rule": "none"}, "hyper.rule = 'none': must be 'paper' or 'exact'"),
        ({"steps": 0}, "hyper: steps must be at least 1"),
    ],
)
def test_a_wrong_hyper_parameter_is_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        c.make_hyper(Hyper(), overrides)


@pytest.mark.parametrize("name", sorted(METHODS))
def test_no_method_takes_a_negative_number(name: str) -> None:
    hyper = METHODS[name].hyper
    for field in dataclasses.fields(hyper):
        value = getattr(hyper, field.name)
        if type(value) in (int, float):
            assert c.make_hyper(hyper, {field.name: value}) == hyper, "what it is by default is allowed"
            with pytest.raises(UserError, match=f"hyper.{field.name} = -1: must be greater than or equal to [01]"):
                c.make_hyper(hyper, {field.name: -1})


def test_a_share_is_not_above_one() -> None:
    with pytest.raises(UserError, match=r"hyper.max_rate = 1.5: must be less than or equal to 1"):
        c.make_hyper(METHODS["aedfl"].hyper, {"max_rate": 1.5})


def test_a_method_without_hyper_parameters_says_so() -> None:
    with pytest.raises(UserError, match="hyper.mu: this method has no hyper-parameters"):
        c.make_hyper(None, {"mu": 1})


def test_keys_of_something_that_is_a_value_are_not_lost() -> None:
    with pytest.raises(UserError, match=r"override 'method.momentum': 'method' is set to a value, 'aedfl'"):
        c.load("digits", ["method.momentum=0"], method="aedfl")
