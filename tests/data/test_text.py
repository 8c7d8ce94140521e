import numpy as np

from aedfl.data.text import build_vocabulary, encode, tokenise


def test_words_are_lower_case_without_breaks_and_punctuation() -> None:
    assert tokenise("It's GREAT!<br /><br />Don't -- miss, 'it'. Café 9/10") == (
        ["it's", "great", "don't", "miss", "it", "café", "9", "10"]
    )
    assert tokenise("") == []


def test_most_frequent_first_and_ties_alphabetical() -> None:
    assert build_vocabulary(["b a c b", "a d b"], size=3) == ["<pad>", "<unknown>", "b", "a", "c"]


def test_ids_are_cut_padded_and_unknown() -> None:
    words = build_vocabulary(["a a b"])
    ids = encode(["b a", "a x a b a", ""], words, length=4)
    assert ids.tolist() == [[3, 2, 0, 0], [2, 1, 2, 3], [0, 0, 0, 0]]
    assert ids.dtype == np.int16
    assert encode(["a"], [str(i) for i in range(40_000)], 2).dtype == np.int32


def test_words_that_look_reserved_are_just_words() -> None:
    words = build_vocabulary(["<pad> <unknown> pad"])
    assert encode(["pad"], words, 1).tolist() == [[words.index("pad")]]
    assert words.index("pad") > 1
