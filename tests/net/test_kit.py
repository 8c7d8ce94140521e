"""What devices and servers bring: all build the network that the simulator builds."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from aedfl.data import Dataset, Split
from aedfl.errors import UserError
from aedfl.experiment.config import RunConfig, load
from aedfl.experiment.workshop import module_for
from aedfl.models.textcnn import TextCNN
from aedfl.net import kit

WORDS, LENGTH = 37, 256


@pytest.fixture
def reviews(monkeypatch: pytest.MonkeyPatch) -> Dataset:
    """A public set of few words in the place of IMDb."""
    x = torch.arange(8 * LENGTH).reshape(8, LENGTH) % WORDS
    split = Split(x, torch.arange(8) % 2)
    found = Dataset("imdb", split, split, 2, vocabulary=WORDS)
    monkeypatch.setattr(kit, "load_named", lambda name, directory=None: found)
    return found


def config(*changes: str) -> RunConfig:
    return load("imdb-textcnn", ["devices=2", "data.partition=iid", *changes])


def words_of(found: kit.Kit) -> int:
    assert isinstance(found.task.module, TextCNN)
    return found.task.module.embedding.num_embeddings


def test_words_of_a_public_set_are_the_models_on_devices_servers_and_in_the_simulator(reviews: Dataset) -> None:
    simulated = module_for(config(), reviews)
    device, server = kit.gather(config()), kit.blank(config())
    assert words_of(device) == words_of(server) == WORDS
    assert torch.equal(device.start, server.start)
    assert torch.equal(device.start, device.task.layout.flatten(simulated))


def test_a_devices_own_words_do_not_change_the_model_of_all(tmp_path: Path) -> None:
    rows = [[number % WORDS] * LENGTH for number in range(8)]
    pq.write_table(pa.table({"text": rows, "label": [0, 1] * 4}), tmp_path / "own.parquet")
    for words in (50, WORDS):
        own = kit.gather(config(f"model.options.vocabulary={words}"), data=str(tmp_path / "own.parquet"))
        assert words_of(own) == words


def test_a_word_that_the_model_does_not_have_is_named(tmp_path: Path) -> None:
    rows = [[number] * LENGTH for number in range(8)]
    pq.write_table(pa.table({"text": rows, "label": [0, 1] * 4}), tmp_path / "own.parquet")
    with pytest.raises(UserError, match="have token 7, but the model has 5 words, counted from 0; .*model.options"):
        kit.gather(config("model.options.vocabulary=5"), data=str(tmp_path / "own.parquet"))


def test_a_server_without_data_keeps_what_is_known_of_them(reviews: Dataset) -> None:
    empty = kit.blank(config()).task.dataset
    assert len(empty.train) == len(empty.test) == 1
    for name in ("name", "classes", "scale", "class_names", "vocabulary"):
        assert getattr(empty, name) == getattr(reviews, name)


def test_a_model_of_ones_own_gets_the_words_if_it_asks_for_them(reviews: Dataset, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def __init__(self, classes, vocabulary):\n"
        "        super().__init__(nn.Embedding(vocabulary, 2), nn.Flatten(), nn.Linear(512, classes))\n"
        "class Plain(nn.Sequential):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__(nn.Embedding(50, 2), nn.Flatten(), nn.Linear(512, classes))\n"
        "        self[0].positions = nn.Embedding(3, 2)  # fewer than words, and none of them\n"
    )
    for name, words in (("Net", WORDS), ("Plain", 50)):
        found = kit.gather(config(), model=f"{tmp_path / 'net.py'}:{name}").task.module
        assert isinstance(found, torch.nn.Sequential) and isinstance(found[0], torch.nn.Embedding)
        assert found[0].num_embeddings == words
