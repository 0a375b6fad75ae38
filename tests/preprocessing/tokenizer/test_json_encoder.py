"""Encoder of tokenizer.json: the ids of tokenizers, by gigatoken or without it, for tokenizers of many kinds."""

import json
from itertools import pairwise, product
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.io.tokenizer_file import JsonTokenizer, open_tokenizer
from preprocessing.tokenizer.loading import EnginesDifferError, JsonEncoder, undone_flags
from tests.tokenizers_of_models import BEGIN, END, FAST, PROSE, SLOW, content_of

FRAGMENTS = [
    *" ".join(PROSE[:6]).split(" "),
    " ", "  ", "    ", "\n", "\n\n", "\r\n", "\t", "\0", "1", "234567", "½", "٣", "e\u0301",
    "é", "ﬁ", "\u212b", "\uac00", "\u1100\u1161", "\u0958", "'s", "'LL", "’ll", "'ſ", "İ", "▁", "▁▁", "<0x41>", "<s>",
    "</s>", "<unk>", END, BEGIN, "<|", "|>", "[SEP]", "水", "☃", "😀", "👩‍👧", "\u3000", "\u00a0", "\u2028", "\u200b",
    "\ufeff", "_", "...", "/", "x" * 70,
]  # fmt: skip
TEXTS = st.one_of(st.text(), st.lists(st.sampled_from(FRAGMENTS)).map("".join))


@pytest.fixture(scope="module", params=[*FAST, *SLOW])
def both(request, tmp_path_factory) -> tuple[JsonEncoder, tokenizers.Tokenizer]:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_text(content_of(request.param), encoding="utf-8")
    encoder = encoder_of(path)
    assert bool(encoder.fallback) == (request.param in SLOW)
    return encoder, tokenizers.Tokenizer.from_file(str(path))


def encoder_of(path: Path) -> JsonEncoder:
    found = open_tokenizer(path)
    assert isinstance(found, JsonTokenizer)
    return JsonEncoder(found)


def parts(found: tuple[np.ndarray, np.ndarray]) -> list[list[int]]:
    ids, offsets = found
    assert ids.dtype == np.int32 and offsets.dtype == np.int64
    return [ids[start:end].tolist() for start, end in pairwise(offsets)]


@given(st.lists(TEXTS, max_size=8))
def test_ids_are_those_of_tokenizers(both, texts: list[str]) -> None:
    encoder, reference = both
    assert parts(encoder.encode(texts)) == [reference.encode(text, add_special_tokens=False).ids for text in texts]


def test_an_end_follows_each_text_and_a_long_text_is_encoded_as_it_is(both) -> None:
    encoder, reference = both
    wanted = [[*reference.encode(text, add_special_tokens=False).ids, 1] for text in ("", "mill", "", "wheel")]
    assert parts(encoder.encode(["", "mill", "", "wheel"], 1)) == wanted
    long = " ".join(PROSE) * 50
    (found,) = encoder.encode_parts(long, 1)
    assert found.tolist() == [*reference.encode(long, add_special_tokens=False).ids, 1]


@pytest.mark.parametrize("text", ["a", "ab", "1", " ", "\n", ".", "水", "😀\u200d", "e\u0301\u0323", "\0", " \n", "'"])
def test_a_repeated_text_is_encoded_like_any_other(both, text: str) -> None:
    """Words of any length: none takes the square of its length, at which 100 kB would take minutes."""
    encoder, reference = both
    for repeated in (text * 999, text * 100_000):
        if not encoder.fallback or len(repeated) < 3000:
            wanted = reference.encode(repeated, add_special_tokens=False).ids
            assert parts(encoder.encode([repeated])) == [wanted]


FLAGS = st.fixed_dictionaries(
    {name: st.booleans() for name in ("single_word", "lstrip", "rstrip", "normalized", "special")}
)
CONTENTS = [
    "TOOL",
    "tool",
    "<|tool|>",
    "<|tool",
    "|>",
    " sp ace",
    "end ",
    "  ",
    "\n",
    "é!",
    "e\u0301",
    "mill",
    "水",
    "the",
    "T",
]
NORMALIZERS = [
    {"type": "NFC"}, {"type": "NFKC"}, {"type": "Lowercase"}, {"type": "Prepend", "prepend": "▁"},
    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}, None,
]  # fmt: skip


BETWEEN = ["a", "S", "_", "1", ".", " ", "  ", "\n", "\t", "\u00a0", "\u0301", "é", "水", "'s", ""]


@pytest.mark.parametrize("name", FAST)
@pytest.mark.parametrize("normalizer", ["own", {"type": "NFC"}, None], ids=str)
def test_each_flag_of_an_added_token_gives_the_ids_of_tokenizers(name: str, normalizer) -> None:
    base = json.loads(content_of(name))
    if normalizer != "own":
        base["normalizer"] = normalizer
    number = max([*base["model"]["vocab"].values(), *(token["id"] for token in base["added_tokens"])]) + 1
    for values in product([False, True], repeat=5):
        flags = dict(zip(("single_word", "lstrip", "rstrip", "normalized", "special"), values, strict=True))
        for token in ("TOOL", " sp ace", "end "):
            added = {"id": number, "content": token, **flags}
            written = json.dumps({**base, "added_tokens": [*base["added_tokens"], added]})
            texts = [f"{before}{token}{after}{token}" for before in BETWEEN for after in BETWEEN]
            reference = tokenizers.Tokenizer.from_str(written)
            expected = [reference.encode(text, add_special_tokens=False).ids for text in texts]
            encoder = JsonEncoder(JsonTokenizer(written, "tokenizer.json"))
            assert parts(encoder.encode(texts)) == expected, (flags, token)


@st.composite
def added_tokens(draw) -> list[dict[str, object]]:
    contents = draw(st.lists(st.sampled_from(CONTENTS), min_size=1, max_size=3, unique=True))
    return [{"content": content, **draw(FLAGS)} for content in contents]


@settings(max_examples=150, deadline=None)
@given(st.sampled_from([*FAST]), st.sampled_from(["own", *NORMALIZERS]), added_tokens(), st.data())
def test_ids_are_those_of_tokenizers_whatever_added_tokens_declare(name: str, normalizer, added, data) -> None:
    content = json.loads(content_of(name))
    if normalizer != "own":
        content["normalizer"] = normalizer
    known = {token["content"] for token in content["added_tokens"]}
    number = max([*content["model"]["vocab"].values(), *(token["id"] for token in content["added_tokens"])])
    for at, token in enumerate((token for token in added if token["content"] not in known), 1):
        content["added_tokens"].append({"id": content["model"]["vocab"].get(token["content"], number + at), **token})
    written = json.dumps(content)
    encoder = JsonEncoder(JsonTokenizer(written, "tokenizer.json"))
    reference = tokenizers.Tokenizer.from_str(written)
    own = [token["content"] for token in added]
    pieces = st.one_of(
        st.sampled_from([*own, *map(str.upper, own)]), st.sampled_from(BETWEEN), st.sampled_from(FRAGMENTS)
    )
    texts = data.draw(st.lists(st.lists(pieces, max_size=9).map("".join), min_size=9, max_size=9))
    assert parts(encoder.encode(texts)) == [reference.encode(text, add_special_tokens=False).ids for text in texts]


def test_flags_that_gigatoken_does_not_do_are_decided_by_the_file() -> None:
    """No text shows the difference, and it is not left to probes."""
    content = json.loads(content_of("Qwen"))
    assert not undone_flags(content)
    for flags, expected in (
        ({"single_word": True}, "single_word"),
        ({"normalized": True}, "normalized text"),
        ({"rstrip": True, "content": " x"}, "begins or ends with a space"),
        ({"lstrip": True, "rstrip": True, "special": True}, ""),
    ):
        token = {"id": 99999, "content": "x", **flags}
        assert expected in undone_flags({**content, "added_tokens": [*content["added_tokens"], token]})
        assert bool(undone_flags({**content, "added_tokens": [token]})) == bool(expected)


def test_special_tokens_are_probed() -> None:
    """Of 2,000, too; decoding leaves special tokens out, so that their text comes from the file."""
    content = json.loads(content_of("GPT-2"))
    number = max(content["model"]["vocab"].values()) + 1
    content["added_tokens"] += [
        {"id": number + at, "content": f"<|{at}|>", "special": True, "single_word": False, "lstrip": False,
         "rstrip": False, "normalized": False} for at in range(2000)
    ]  # fmt: skip
    encoder = JsonEncoder(JsonTokenizer(json.dumps(content), "tokenizer.json"))
    probed = "".join(encoder._probes())
    assert not encoder.fallback and sum(f"a<|{at}|>b" in probed for at in range(2000)) >= 400


def test_truncation_padding_and_dropout_of_the_file_change_no_id(tmp_path: Path) -> None:
    changed = tokenizers.Tokenizer.from_str(content_of("GPT-2"))
    changed.enable_truncation(3)
    changed.enable_padding(length=9)
    changed.model.dropout = 0.5
    changed.save(str(tmp_path / "tokenizer.json"))
    found = open_tokenizer(tmp_path / "tokenizer.json")
    wanted = tokenizers.Tokenizer.from_str(content_of("GPT-2")).encode(PROSE[0]).ids
    assert [found.encode(PROSE[0]) for _ in range(5)] == [wanted] * 5
    encoder = encoder_of(tmp_path / "tokenizer.json")
    assert parts(encoder.encode([PROSE[0]])) == [wanted]


def test_other_ids_of_gigatoken_are_found(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "tokenizer.json").write_text(content_of("GPT-2"), encoding="utf-8")
    encoder = encoder_of(tmp_path / "tokenizer.json")
    right = encoder._encode_fast
    monkeypatch.setattr(encoder, "_encode_fast", lambda texts: (right(texts)[0] ^ 1, right(texts)[1]))
    with pytest.raises(EnginesDifferError, match=r"other ids from token 0 on of a text that begins 'the mill"):
        encoder.encode(PROSE[:1])
    monkeypatch.setattr(JsonEncoder, "_encode_fast", lambda self, texts: (right(texts)[0] ^ 1, right(texts)[1]))
    made = encoder_of(tmp_path / "tokenizer.json")
    assert made.fallback.startswith("gigatoken does not encode as this tokenizer (other ids from token 0")
    assert parts(made.encode(PROSE)) == parts(right(PROSE))
