"""Encoder: the ids that SentencePiece gives, for models of all settings and any text."""

import io
from functools import cache
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st

from preprocessing.tokenizer.bpe import encode_texts
from preprocessing.tokenizer.encoder import Encoder

LOSSLESS = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
SYMBOLS = ["<sep>", "the mill", "\n\n", "▁▁▁", "水車"]
SETTINGS: dict[str, dict[str, Any]] = {
    "as train_tokenizer": {
        "byte_fallback": True, "add_dummy_prefix": False, "split_digits": True, "allow_whitespace_only_pieces": True,
        **LOSSLESS,
    },
    "dummy prefix": {"byte_fallback": True, **LOSSLESS},
    "dummy suffix": {"byte_fallback": True, "treat_whitespace_as_suffix": True, **LOSSLESS},
    "unknown characters": {"add_dummy_prefix": False, "character_coverage": 0.98, **LOSSLESS},
    "SentencePiece's own": {},
    "SentencePiece's own with bytes": {"byte_fallback": True, "normalization_rule_name": "nmt_nfkc_cf"},
    "pieces across spaces": {"split_by_whitespace": False, "byte_fallback": True, **LOSSLESS},
    "pieces of all scripts": {"split_by_unicode_script": False, "split_by_number": False},
    "unknown characters merged": {"add_dummy_prefix": False, "max_sentencepiece_length": 40, **LOSSLESS},
    "user-defined symbols": {"user_defined_symbols": SYMBOLS, "byte_fallback": True, **LOSSLESS},
    "a user-defined space": {"user_defined_symbols": ["▁"], "add_dummy_prefix": False, **LOSSLESS},
    "user-defined symbols rewritten": {"user_defined_symbols": [*SYMBOLS, "ｆ"]},
    "no piece for some characters of pieces": {"byte_fallback": True, **LOSSLESS},
    "unknown characters in pieces": LOSSLESS,
    "no vocabulary to speak of": {"vocab_size": 385, "byte_fallback": True, **LOSSLESS},
}  # fmt: skip
LEFT_TO_SENTENCEPIECE: dict[str, dict[str, Any]] = {
    "unigram": {"model_type": "unigram", "byte_fallback": True, **LOSSLESS},
    "unigram's own": {"model_type": "unigram"},
    "words": {"model_type": "word", "vocab_size": 60},
    "characters": {"model_type": "char", "vocab_size": 60},
    "spaces as they are": {},
    "a control character": {"control_symbols": ["x"]},
}
PROSE = [
    "the mill grinds grain into flour while water turns its wheel and nobody counts 12 or 7 sacks",
    "The miller's daughter said: “no, 1,024 sacks (or more) were ground in 1887!”   And then…",
    "мельница мелет зерно в муку, пока вода вращает колесо",
    "水車は水の力で回り、穀物を粉にする。水車小屋の中は静かだ。",
    "def grind(grain):    return flour(grain)  # 2 * x",
    "la farine était moulue; le café fermé où l’eau coule",
]
FRAGMENTS = [
    *" ".join(PROSE).split(" "), " ", "  ", "    ", "▁", "▁▁▁", "\n", "\n\n", "\t", "\0", "1", "23", "e\u0301", "é",
    "ﬁ", "ｆ", "<sep>", "<s>", "</s>", "<unk>", "<0x41>", "the mill", "ill", "水", "車", "☃", "😀", "x", "ё", "\u3000",
    "\u00a0", "\u200b", "⁇",
]  # fmt: skip
ADVERSARIAL = [
    "", " ", "  ", "▁", " ▁ ", "   the mill   ", "\ttabs\t\n\n\nlines\r\n", "\0\0the\0", "the mill" * 1000,
    "grind" * 20_000, "the " * 5000, " " * 5000, "a" * 63 + " " + "b" * 64 + " " + "c" * 65, "水車" * 3000, "☃" * 200,
    "☃ ☃☃ the☃", "\U0010ffff\ufffe\ue000\ufeff",
    "".join(map(chr, range(1, 0xD800))), "".join(map(chr, range(0x1F300, 0x1F700))),
]  # fmt: skip


def _piece(text: str) -> bytes:
    """First bytes of a piece in a model file: field 1, its size and text, and the number of the next field."""
    return bytes([10, len(text.encode())]) + text.encode() + b"\x15"


@cache
def model(name: str) -> sentencepiece.SentencePieceProcessor:
    lines = [" ".join(PROSE[i * j % len(PROSE)][i:] for j in range(1, 4)) for i in range(1, 40)]
    settings = {
        "model_type": "bpe", "vocab_size": 520, "hard_vocab_limit": False, **(SETTINGS | LEFT_TO_SENTENCEPIECE)[name]
    }  # fmt: skip
    written = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=written, minloglevel=2, **settings
    )
    proto = written.getvalue()
    if name == "spaces as they are":
        proto += b"\x1a\x02\x28\x00"  # normalizer_spec { escape_whitespaces: false }
    if name.endswith("pieces"):
        for piece, other in ("h\x01", "i\x02", "車龘", "▁龗"):  # the words that hold it stay
            assert _piece(piece) in proto
            proto = proto.replace(_piece(piece), _piece(other))
    return sentencepiece.SentencePieceProcessor(model_proto=proto)


@cache
def encoder(name: str) -> Encoder:
    return Encoder(model(name))


def parts(found: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, offsets = found
    assert offsets[0] == 0 and offsets[-1] == len(ids)
    return [ids[start:end].tolist() for start, end in pairwise(offsets)]


any_text = st.lists(st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS), max_size=40).map("".join)), max_size=6)


@pytest.mark.parametrize("name", SETTINGS | LEFT_TO_SENTENCEPIECE)
@given(texts=any_text)
def test_ids_of_any_text_equal_sentencepiece(name: str, texts: list[str]) -> None:
    assert parts(encoder(name).encode(texts)) == model(name).encode(texts)


@pytest.mark.parametrize("name", SETTINGS | LEFT_TO_SENTENCEPIECE)
def test_ids_of_odd_texts_equal_sentencepiece(name: str) -> None:
    texts = [*ADVERSARIAL, *PROSE, "\n".join(PROSE * 20)]
    assert parts(encoder(name).encode(texts)) == model(name).encode(texts)
    assert parts(encoder(name).encode(texts[::-1])) == model(name).encode(texts[::-1])


@pytest.mark.parametrize("size", [1, 7])
@pytest.mark.parametrize("name", SETTINGS | {"unigram": {}})
def test_the_parts_of_a_text_have_the_ids_of_the_whole(name: str, size: int) -> None:
    texts = [*ADVERSARIAL[:-2], *PROSE, " ".join(FRAGMENTS), "".join(FRAGMENTS[::-1])]
    for text in (text for text in texts if len(text) <= 20_000 * size):  # longer ones in many parts take seconds
        found = [ids.tolist() for ids in encoder(name).encode_parts(text, 2, size)]
        assert sum(found, []) == [*model(name).encode([text])[0], 2]
        assert len(found) > 1 or name in ("unigram", "pieces across spaces") or text != PROSE[1] or "user" in name


@pytest.mark.parametrize("name", SETTINGS)
def test_no_fallback(name: str) -> None:
    """The compiled encoder is used; the fallback would give the same ids."""
    assert encoder(name).fallback == ""


@pytest.mark.parametrize("name", LEFT_TO_SENTENCEPIECE)
def test_fallback(name: str) -> None:
    assert encoder(name).fallback


@pytest.mark.parametrize("cache", [0, 4096, 100_000])
@pytest.mark.parametrize("name", ["as train_tokenizer", "unknown characters"])
def test_cache_size_does_not_change_ids(name: str, cache: int) -> None:
    """Words of one to 36 letters, of few ids and of many, more of them than the cache has rows."""
    small = Encoder(model(name), cache)
    syllables = sorted({word[:2] for word in PROSE[0].split(" ")})
    words = ["".join(some) for some in product(syllables, repeat=3)]
    texts = [" ".join(words), " ".join(word[:3] for word in words), " ".join(word * 6 for word in words)]
    for _ in range(2):
        assert parts(small.encode(texts)) == model(name).encode(texts)
    for word in " ".join(texts).split(" "):
        assert small.encode([word])[0].tolist() == model(name).encode(word)


@pytest.mark.parametrize("name", ["as train_tokenizer", "user-defined symbols", "unigram"])
def test_end_id_follows_each_text(name: str) -> None:
    texts = ["the mill", "", "☃", "a <sep> b", ""]
    wanted = [[*ids, 2] for ids in model(name).encode(texts)]
    assert parts(encoder(name).encode(texts, end_id=2)) == wanted


def test_unknown_characters_do_not_merge_across_texts() -> None:
    name = "unknown characters"
    unknown = model(name).unk_id()
    assert parts(encoder(name).encode(["☃☃", "☃", "", "☃"])) == [[unknown], [unknown], [], [unknown]]
    assert parts(encoder(name).encode(["☃", "☃"], end_id=unknown)) == [[unknown, unknown]] * 2


@pytest.mark.parametrize("name", ["as train_tokenizer", "unigram"])
def test_no_texts(name: str) -> None:
    ids, offsets = encoder(name).encode([])
    assert ids.tolist() == [] and offsets.tolist() == [0]
    assert ids.dtype == np.int32 and offsets.dtype == np.int64


def test_empty_texts_need_no_other_kernel() -> None:
    encode_once = encoder("as train_tokenizer").encode
    encode_once(["a b", "c"])
    compiled = len(encode_texts.signatures)  # type: ignore[attr-defined]
    assert parts(encode_once(["", ""], end_id=1)) == [[1], [1]] and compiled > 0
    encode_once([])
    assert len(encode_texts.signatures) == compiled  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["as train_tokenizer", "unigram"])
def test_begin_and_end_of_a_configured_processor_are_left_out(name: str) -> None:
    proto = model(name).serialized_model_proto()
    marking = sentencepiece.SentencePieceProcessor(model_proto=proto, add_bos=True, add_eos=True, reverse=True)
    assert marking.encode("the mill")[-1] == 2
    assert parts(Encoder(marking).encode(["the mill"])) == model(name).encode(["the mill"])


@pytest.mark.parametrize("name", ["as train_tokenizer", "SentencePiece's own", "unigram"])
def test_lone_surrogate_is_rejected(name: str) -> None:
    with pytest.raises(UnicodeEncodeError):
        encoder(name).encode(["a", "\ud800"])
    assert parts(encoder(name).encode(["the mill"])) == model(name).encode(["the mill"])
