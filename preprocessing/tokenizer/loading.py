"""Loading a SentencePiece model: what the tokenizing stage needs to know of it, and its encoder."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import sentencepiece

from gristmill.counts import Counts
from gristmill.engine.task import Result
from gristmill.errors import UsageError
from gristmill.storage.local import sha256_file

if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder


class TokenizerFacts(msgspec.Struct):
    """What the stage needs to know of a model; `fallback` is the reason that SentencePiece itself encodes, if any.

    Without byte pieces, a character that is in no piece becomes the unknown id.
    """

    sha256: str
    vocab_size: int
    end_of_document: int
    fallback: str
    has_bytes: bool = True


def read_tokenizer(tokenizer: Path) -> Result:
    """Task: load a SentencePiece model; the value is its TokenizerFacts. UsageError if it cannot be used."""
    model, encoder = load_encoder(tokenizer)
    has_bytes = any(map(model.IsByte, range(model.vocab_size())))
    facts = TokenizerFacts(sha256_file(tokenizer), model.vocab_size(), model.eos_id(), encoder.fallback, has_bytes)
    return Result(Counts({}, []), facts)


def load_encoder(path: Path) -> tuple[sentencepiece.SentencePieceProcessor, "Encoder"]:
    """Load a SentencePiece model and its encoder, once per process, so that all slices share the word cache.

    Raises UsageError if `path` is no SentencePiece model, or one without an end-of-sentence piece.
    """
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load(path: Path, mtime_ns: int) -> tuple[sentencepiece.SentencePieceProcessor, "Encoder"]:  # noqa: ARG001
    """Load a model and its encoder; cached until the modification time of the file changes."""
    from preprocessing.tokenizer.encoder import Encoder  # here, as it imports numba

    model = sentencepiece.SentencePieceProcessor()
    try:
        model.Load(str(path))
    except (RuntimeError, OSError) as error:
        raise UsageError(f"{path} is not a SentencePiece model; train_tokenizer writes one") from error
    if model.eos_id() < 0:
        raise UsageError(f"{path} has no end-of-sentence piece to end documents with: train it with one (eos_id)")
    return model, Encoder(model)
