"""BPE merging with random vocabularies, against SentencePiece."""

import struct
from itertools import product

import numpy as np
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from gristmill.io.vocabulary import ModelType, PieceType
from preprocessing.tokenizer.bpe import MAX_SCAN_BYTES
from preprocessing.tokenizer.encoder import Encoder

ALPHABET = "ab▁é水"
vocabularies = st.dictionaries(st.text(ALPHABET, min_size=1, max_size=6), st.integers(-3, 3), max_size=30)
texts = st.lists(st.text(ALPHABET.replace("▁", " ") + "☃", max_size=30), max_size=8)


def field(number: int, value: bytes | int) -> bytes:
    """A field of a protocol-buffer message, of bytes or an integer below 128."""
    if isinstance(value, int):
        return bytes([number << 3, value])
    assert len(value) < 128
    return bytes([number << 3 | 2, len(value)]) + value


def piece(text: str, score: float, piece_type: PieceType) -> bytes:
    return field(1, field(1, text.encode()) + b"\x15" + struct.pack("<f", score) + field(3, piece_type))


def model_of(vocabulary: dict[str, int]) -> bytes:
    """A BPE model without normalisation, with the given pieces and scores."""
    pieces = [piece(text, score, PieceType.NORMAL) for text, score in vocabulary.items()]
    trainer = field(2, field(3, ModelType.BPE))
    normalizer = field(3, field(3, 0) + field(4, 0))
    return b"".join([piece("<unk>", 0, PieceType.UNKNOWN), *pieces, trainer, normalizer])


@given(vocabulary=vocabularies, found=texts)
def test_ids_for_any_vocabulary_equal_sentencepiece(vocabulary: dict[str, int], found: list[str]) -> None:
    """Equal scores, pieces that no merge makes, short words (by scan) and repeated texts (by heap)."""
    model = sentencepiece.SentencePieceProcessor(model_proto=model_of(vocabulary))
    found += [text * (MAX_SCAN_BYTES // len(text) + 1) for text in found if text]
    encoder = Encoder(model)
    ids, offsets = encoder.encode(found)
    assert not encoder.fallback
    assert [ids[offsets[i] : offsets[i + 1]].tolist() for i in range(len(found))] == model.encode(found)


def test_unused_pieces_fall_back_to_sentencepiece() -> None:
    proto = model_of({"a": 0, "b": 0, "ab": 1}) + piece("abab", 2, PieceType.UNUSED)
    model = sentencepiece.SentencePieceProcessor(model_proto=proto)
    encoder = Encoder(model)
    assert encoder.fallback
    assert encoder.encode(["ababab"])[0].tolist() == model.encode("ababab") == [3, 3, 3]


def test_words_with_equal_hashes_are_distinguished() -> None:
    """Among 150,000 words of one length, some share the 31 bits of hash that are stored."""
    model = sentencepiece.SentencePieceProcessor(
        model_proto=model_of({text: i for i, text in enumerate([*"abcd", *map("".join, product("abcd", repeat=2))])})
    )
    letters = np.random.default_rng(1).choice(list("abcd"), (150_000, 16))
    text = " ".join(map("".join, letters.tolist()))
    ids, _ = Encoder(model).encode([text])
    assert ids.tolist() == model.encode(text)
