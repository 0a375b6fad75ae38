"""Vocabulary: what is read from the model file is what SentencePiece's own interface and the trainer say."""

import io
from typing import Any

import pytest
import sentencepiece

from preprocessing.tokenizer.vocabulary import Algorithm, Kind, Vocabulary, read_vocabulary

LINES = ["the mill grinds grain into flour while water turns its wheel", "水車は水の力で回り、穀物を粉にする"] * 9
SETTINGS: list[tuple[dict[str, Any], Vocabulary]] = [
    ({}, Vocabulary(charsmap=True)),
    (
        {"model_type": "bpe", "normalization_rule_name": "identity", "add_dummy_prefix": False},
        Vocabulary(algorithm=Algorithm.BPE, dummy_prefix=False),
    ),
    (
        {"model_type": "char", "remove_extra_whitespaces": False, "treat_whitespace_as_suffix": True},
        Vocabulary(algorithm=Algorithm.CHAR, charsmap=True, remove_extra_spaces=False, space_as_suffix=True),
    ),
]


def train(**settings: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    settings = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **settings)
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize(("settings", "wanted"), SETTINGS)
def test_settings_are_the_trainers(settings: dict[str, Any], wanted: Vocabulary) -> None:
    found = read_vocabulary(train(**settings).serialized_model_proto())
    found.pieces, found.scores, found.kinds = [], [], []
    assert found == wanted


def test_pieces_are_those_of_the_model() -> None:
    model = train(model_type="bpe", byte_fallback=True, user_defined_symbols=["<sep>"], control_symbols=["<mask>"])
    found = read_vocabulary(model.serialized_model_proto())
    ids = range(model.vocab_size())
    assert found.pieces == [model.id_to_piece(i) for i in ids]
    assert found.scores == [model.get_score(i) for i in ids]
    for kind, is_kind in (
        (Kind.UNKNOWN, model.is_unknown),
        (Kind.CONTROL, model.is_control),
        (Kind.BYTE, model.is_byte),
    ):
        assert found.of_kind(kind) == [model.id_to_piece(i) for i in ids if is_kind(i)]
    assert found.of_kind(Kind.USER_DEFINED) == ["<sep>"]
