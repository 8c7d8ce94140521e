"""TextCNN (Kim, 2014): convolutions of several widths over word embeddings, maximum over time."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .options import whole

WIDTHS = (3, 4, 5)


class TextCNN(nn.Module):
    """Inputs [B, tokens] of word numbers (int64, below `vocabulary`)."""

    def __init__(self, classes: int, vocabulary: int, embedding: int, filters: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.convs = nn.ModuleList(nn.Conv1d(embedding, filters, width) for width in WIDTHS)
        self.out = nn.Linear(filters * len(WIDTHS), classes)

    def forward(self, x: Tensor) -> Tensor:
        words = self.embedding(x).transpose(1, 2)
        logits: Tensor = self.out(torch.cat([F.relu(conv(words)).amax(2) for conv in self.convs], 1))
        return logits


def textcnn(
    classes: int = 2,
    tokens: int = 256,
    *,
    vocabulary: int = 20_000,
    embedding: int = 50,
    filters: int = 32,
) -> TextCNN:
    """4.9 MMACs on 256 tokens. `tokens` changes nothing but the cost."""
    sizes = {"vocabulary": vocabulary, "embedding": embedding, "filters": filters}
    return TextCNN(classes, **{name: whole(name, value) for name, value in sizes.items()})
