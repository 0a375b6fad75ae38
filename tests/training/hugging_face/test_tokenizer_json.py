"""tokenizer.json gives the ids and the texts of the SentencePiece model that it was made from."""

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import transformers

from gristmill.errors import UsageError
from gristmill.io.vocabulary import read_vocabulary
from tests.training.conftest import sentences
from training.hugging_face.tokenizer_json import tokenizer_config, tokenizer_json

BEGIN = 1
END = 2
ODD = [
    "", "a", " a", "  the  mill ", "the\n\nmill\tturns\r\n\0", "mill 1234 mills", "héllo 水車 🙂 e\u0301 \u2581 \ufffd",
    "aaaaaaa", " " * 9, "\u00a0x\u3000y", "\u200b\ufeff", "THE MILL", "the" * 50,
]  # fmt: skip
RESERVED = ["</s> <s> <unk>", "<0x0A><0xFF>", "<<unk>>", "a<s>b</s></s></<unk> <0x41>0x41>"]


def train(more: Sequence[str] = (), **settings: Any) -> sentencepiece.SentencePieceProcessor:
    """As the stage train_tokenizer trains them, with other settings."""
    written = io.BytesIO()
    lossless = {
        "byte_fallback": True, "split_digits": True, "normalization_rule_name": "identity", "add_dummy_prefix": False,
        "remove_extra_whitespaces": False, "allow_whitespace_only_pieces": True, "hard_vocab_limit": False,
    }  # fmt: skip
    texts = iter(sentences(0, 300) + ["if x:", "    y = 2024", "        z = 水車は水の力で回り"] * 5 + [*more])
    settings = {"vocab_size": 600, "model_type": "bpe", "minloglevel": 2} | lossless | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=texts, model_writer=written, **settings)
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def load(
    model: sentencepiece.SentencePieceProcessor, folder: Path, before: Sequence[int] = (END,)
) -> transformers.PreTrainedTokenizerFast:
    vocabulary = read_vocabulary(model.serialized_model_proto())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(vocabulary, END, before)))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(vocabulary, END, BEGIN, 10**6)))
    return transformers.AutoTokenizer.from_pretrained(folder)


def texts() -> list[str]:
    """Texts with words, parts of words, spaces and characters that the vocabulary does not have, in any order."""
    random = np.random.default_rng(3)
    parts = [*sentences(5, 5), *["the", "mill", "grinds\n\t", "0123é水🙂"], " ", "  ", "\n", *ODD]
    return ODD + RESERVED + ["".join(random.choice(parts, 6)) for _ in range(300)] + sentences(6, 100)


@pytest.mark.parametrize("settings", [{}, {"add_dummy_prefix": True}, {"byte_fallback": False}], ids=str)
def test_ids_and_texts_are_those_of_sentencepiece(tmp_path: Path, settings: dict[str, Any]) -> None:
    model = train(**settings)
    found = load(model, tmp_path)
    for text in texts():
        ids = model.encode(text)
        assert found(text, add_special_tokens=False).input_ids == ids, repr(text)
        assert found.decode(ids) == model.decode(ids) or 0 in ids, repr(text)  # SentencePiece writes ⁇ for unknown


def test_ids_of_a_unigram_model_are_those_of_sentencepiece_but_for_equal_scores(tmp_path: Path) -> None:
    model = train(model_type="unigram")
    found = load(model, tmp_path)
    for text in texts():
        ids, theirs = model.encode(text), found(text, add_special_tokens=False).input_ids
        assert found.decode(theirs) == model.decode(ids)
        assert sorted(ids) == sorted(theirs) or score(model, ids) == pytest.approx(score(model, theirs), rel=1e-6)


def test_a_control_piece_in_a_text_is_text_also_where_pieces_cross_all_of_its_places(tmp_path: Path) -> None:
    """Pages about SentencePiece, whose vocabulary has parts of "<s>" side by side."""
    model = train(
        model_type="unigram", more=["<s", "s>", "x<s", "s>x", "<s <s", "s> s>"] * 200, split_by_unicode_script=False
    )
    assert {"<s", "s>"} <= {model.id_to_piece(i) for i in range(model.vocab_size())}
    found = load(model, tmp_path)
    for text in ("<s>", "the <s>mill</s> <<s>>", "<s><s>"):
        ids = found(text, add_special_tokens=False).input_ids
        assert not {0, 1, 2} & {*ids} and found.decode(ids) == text


def score(model: sentencepiece.SentencePieceProcessor, ids: list[int]) -> float:
    return sum(model.get_score(i) for i in ids)


def test_a_text_begins_with_the_end_of_document(tmp_path: Path) -> None:
    """As in training, where a document follows the end of another; it also ends what is generated."""
    model = train()
    found = load(model, tmp_path)
    ids = model.encode("the mill")
    assert found("the mill").input_ids == [END, *ids]
    assert found.decode([END, *ids, END], skip_special_tokens=True) == "the mill"
    assert (found.bos_token_id, found.eos_token_id, found.unk_token_id) == (BEGIN, END, 0)
    assert len(found) == model.vocab_size()
    assert load(model, tmp_path, [END, BEGIN])("the mill").input_ids == [END, BEGIN, *ids]
    assert load(model, tmp_path, [])("the mill").input_ids == ids


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"normalization_rule_name": "nfkc"}, "it normalises texts"),
        ({"remove_extra_whitespaces": True}, "it normalises texts"),
        ({"model_type": "char"}, "neither a BPE nor a Unigram"),
        ({"user_defined_symbols": ["<x>"]}, "user-defined"),
        ({"treat_whitespace_as_suffix": True}, "before words"),
    ],
)
def test_what_cannot_have_the_same_ids_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UsageError, match=f"cannot be written as tokenizer.json with the same ids: .*{reason}"):
        tokenizer_json(read_vocabulary(train(**settings).serialized_model_proto()), END, [END])
