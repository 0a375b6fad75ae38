"""Loading a tokenizer with the encoder that is fastest for it, and counting the tokens of texts."""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from gristmill.io.tokenizer_file import AnyTokenizer, SentencePieceTokenizer, open_tokenizer
from preprocessing.tokenizer.json_encoder import EnginesDifferError, JsonEncoder

if TYPE_CHECKING:
    from preprocessing.tokenizer.encoder import Encoder

LONG_TEXT = 1 << 16  # characters: a longer text is encoded in parts, which hold the memory that they need


def load_encoder(path: Path) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:
    """Load a tokenizer and its encoder, once per process, so that all slices share the word cache.

    Raises UsageError if `path` is no tokenizer.
    """
    return _load(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _load(path: Path, mtime_ns: int) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:  # noqa: ARG001
    """As new_encoder; cached until the modification time of the file changes."""
    return new_encoder(path)


def new_encoder(path: Path) -> tuple[AnyTokenizer, "Encoder | JsonEncoder"]:
    """Load a tokenizer and its encoder."""
    model = open_tokenizer(path)
    if not isinstance(model, SentencePieceTokenizer):
        return model, JsonEncoder(model)
    from preprocessing.tokenizer.encoder import Encoder  # here, as it imports numba

    return model, Encoder(model.model)


def count_tokens(tokenizer: Path, texts: Sequence[str]) -> int:
    """Tokens of texts, without those that begin and end documents. Raises UsageError as load_encoder."""
    encoder = load_encoder(tokenizer)[1]
    try:
        return _count(encoder, texts)
    except EnginesDifferError as error:
        assert isinstance(encoder, JsonEncoder)
        encoder.fallback = str(error)
        try:
            return _count(encoder, texts)
        finally:
            encoder.fallback = ""


def _count(encoder: "Encoder | JsonEncoder", texts: Sequence[str]) -> int:
    long = (text for text in texts if len(text) > LONG_TEXT)
    short = [text for text in texts if len(text) <= LONG_TEXT]
    return len(encoder.encode(short)[0]) + sum(len(ids) for text in long for ids in encoder.encode_parts(text))
