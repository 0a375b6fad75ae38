"""Vocabulary: what is parsed from the model file equals what SentencePiece's interface and trainer report."""

import io
from typing import Any

import pytest
import sentencepiece

from gristmill.io.vocabulary import ModelType, PieceType, Vocabulary, read_vocabulary

LINES = ["the mill grinds grain into flour while water turns its wheel", "水車は水の力で回り、穀物を粉にする"] * 9
SETTINGS: list[tuple[dict[str, Any], Vocabulary]] = [
    ({}, Vocabulary(has_charsmap=True)),
    (
        {"model_type": "bpe", "normalization_rule_name": "identity", "add_dummy_prefix": False},
        Vocabulary(model_type=ModelType.BPE, add_dummy_prefix=False),
    ),
    (
        {"model_type": "char", "remove_extra_whitespaces": False, "treat_whitespace_as_suffix": True},
        Vocabulary(
            model_type=ModelType.CHAR,
            has_charsmap=True,
            remove_extra_whitespaces=False,
            treat_whitespace_as_suffix=True,
        ),
    ),
]


def train(**settings: Any) -> sentencepiece.SentencePieceProcessor:
    written = io.BytesIO()
    settings = {"vocab_size": 400, "hard_vocab_limit": False, "minloglevel": 2} | settings
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(LINES), model_writer=written, **settings)
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


@pytest.mark.parametrize(("settings", "wanted"), SETTINGS)
def test_settings(settings: dict[str, Any], wanted: Vocabulary) -> None:
    found = read_vocabulary(train(**settings).serialized_model_proto())
    found.pieces, found.scores, found.types = [], [], []
    assert found == wanted


def test_pieces_scores_and_types() -> None:
    model = train(model_type="bpe", byte_fallback=True, user_defined_symbols=["<sep>"], control_symbols=["<mask>"])
    found = read_vocabulary(model.serialized_model_proto())
    ids = range(model.vocab_size())
    assert found.pieces == [model.id_to_piece(i) for i in ids]
    assert found.scores == [model.get_score(i) for i in ids]
    for piece_type, is_type in (
        (PieceType.UNKNOWN, model.is_unknown),
        (PieceType.CONTROL, model.is_control),
        (PieceType.BYTE, model.is_byte),
    ):
        assert found.of_type(piece_type) == [model.id_to_piece(i) for i in ids if is_type(i)]
    assert found.of_type(PieceType.USER_DEFINED) == ["<sep>"]
