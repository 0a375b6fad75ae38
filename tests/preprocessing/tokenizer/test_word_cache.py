"""Word cache: its size, and no writes beyond it."""

import io
import random

import numpy as np
import pytest
import sentencepiece

from preprocessing.tokenizer.bpe import WordCache, new_word_cache
from preprocessing.tokenizer.encoder import Encoder
from tests.preprocessing.tokenizer.test_bpe import model_of

GUARD = 1 << 8  # rows


@pytest.mark.parametrize("size", [0, 1, 4096, 5000, 1 << 20, 32 << 20])
def test_cache_size(size: int) -> None:
    taken = sum(array.nbytes for array in new_word_cache(size) if array.base is None)
    assert size // 2 <= taken <= size + 2048


def guarded(cache: WordCache) -> tuple[WordCache, np.ndarray]:
    """The same cache with guard bytes after its rows, to see writes beyond them."""
    wide = np.zeros((len(cache.rows) + GUARD, 8), np.uint64)
    rows = wide[: len(cache.rows)]
    wide[len(rows) :] = 99
    return cache._replace(rows=rows, ids=rows.view(np.int32)), wide[len(rows) :]


@pytest.mark.parametrize("longest", [16, 2])
def test_long_words_stay_within_the_cache(longest: int) -> None:
    """Words of two letters in any order, which cannot be split, in pieces of 16 letters or of two."""
    chance = random.Random(0)
    units = ["".join(chance.choices("ab", k=16)) for _ in range(6)]
    words = [first + second + third for first in units for second in units for third in units]
    trained = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(units * 20), model_writer=trained, vocab_size=380, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", hard_vocab_limit=False, remove_extra_whitespaces=False,
        max_sentencepiece_length=longest, minloglevel=2,
    )  # fmt: skip
    model = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    encoder = Encoder(model, cache_bytes=0)
    assert not encoder.fallback
    encoder._cache, guard = guarded(encoder._cache)
    ids, _ = encoder.encode([" ".join(words)])
    assert ids.tolist() == model.encode(" ".join(words))
    assert (guard == 99).all()


def test_texts_longer_than_what_is_cut_together() -> None:
    """Words of over 16,384 bytes, and characters of two and three bytes at each place beside that many."""
    model = sentencepiece.SentencePieceProcessor(
        model_proto=model_of({"a": 0, "é": 0, "水": 0, "▁": 0, "ab": 1, "ba": 2, "b": 0})
    )
    texts = [
        "ab" * 20_000 + " a ab",
        *("a" * i + "é水 " * 4000 for i in range(6)),
        *("é" * i for i in range(8190, 8194)),
    ]
    ids, offsets = Encoder(model).encode(texts)
    assert [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(texts))] == model.encode(texts)
