from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from gristmill.io.token_shards import TokenizerRecord
from training.checkpoint.record import CheckpointRecord, read_record, require_same_model
from training.model.model_config import ModelConfig

MODEL = ModelConfig(layers=1, width=8, heads=2).resolve(30, 8)
TOKENIZER = TokenizerRecord("t.model", "abc", 30, 2)


def record(model: ModelConfig = MODEL, tokenizer: TokenizerRecord = TOKENIZER) -> CheckpointRecord:
    return CheckpointRecord(
        step=1,
        updates=1,
        processes=1,
        layout={},
        stability={},
        unigram_loss=1.0,
        model=asdict(model),
        tokenizer=tokenizer,
    )


@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.1, "init_std": 0.1}, {"context": 99}, {"preset": "gpt2"}], ids=str
)
def test_the_same_model_is_accepted(changes: dict[str, Any]) -> None:
    require_same_model(record(), replace(MODEL, **changes), TOKENIZER)
    require_same_model(record(tokenizer=TokenizerRecord("", "", 30, 2)), MODEL, TOKENIZER)  # theirs is not known


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"rope_base": 500.0}, "model.rope_base 10000.0 there and 500.0 here"),
        ({"norm_eps": 1e-6, "heads": 4}, r"model.heads 2 there and 4 here; model.norm_eps 1e-05 there and 1e-06 here"),
    ],
)
def test_another_model_is_an_error_that_names_the_difference(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        require_same_model(record(), replace(MODEL, **changes), TOKENIZER)


def test_another_tokenizer_is_an_error() -> None:
    with pytest.raises(UsageError, match="tokenizer abc there and xyz here"):
        require_same_model(record(), MODEL, TokenizerRecord("t.model", "xyz", 30, 2))


def test_learned_positions_fix_the_context_length() -> None:
    learned = ModelConfig(preset="gpt2", layers=1, width=8, heads=2).resolve(30, 8)
    with pytest.raises(UsageError, match=r"model\.context 8 there and 9 here"):
        require_same_model(record(learned), replace(learned, context=9), TOKENIZER)


def test_a_record_that_is_not_there_is_missing(tmp_path: Path) -> None:
    assert read_record(tmp_path) == (None, "record.json is missing")
