"""Reviews as token ids: the same text and vocabulary give the same ids on any machine."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

PAD, UNKNOWN = 0, 1
RESERVED = ("<pad>", "<unknown>")
VOCABULARY = 8_000
LENGTH = 256

_BREAK = re.compile(r"<br\s*/?>")
_WORD = re.compile(r"\w+(?:'\w+)*")


def tokenise(text: str) -> list[str]:
    """Lower-case words; HTML line breaks and punctuation go, an apostrophe inside a word stays."""
    return _WORD.findall(_BREAK.sub(" ", text.lower()))


def build_vocabulary(texts: Iterable[str], size: int = VOCABULARY) -> list[str]:
    """The reserved names, then the most frequent words, ties in alphabetical order: an id is a place here."""
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(tokenise(text))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return [*RESERVED, *(word for word, _ in ranked[:size])]


def encode(texts: Sequence[str], vocabulary: Sequence[str], length: int = LENGTH) -> NDArray[np.integer]:
    """Ids [n, length] of the first `length` words, padded at the end; int16 where the ids fit, else int32."""
    index = {word: number for number, word in enumerate(vocabulary)}
    small = len(vocabulary) <= np.iinfo(np.int16).max
    ids: NDArray[np.integer] = np.full((len(texts), length), PAD, dtype=np.int16 if small else np.int32)
    for row, text in enumerate(texts):
        words = tokenise(text)[:length]
        ids[row, : len(words)] = [index.get(word, UNKNOWN) for word in words]
    return ids
