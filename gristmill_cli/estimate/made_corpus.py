"""A corpus made of text of this machine, in documents of a given size, to measure where the real one is not here."""

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from gristmill.io.writers import open_jsonl_writer
from gristmill_cli.harvest.harvest_corpus import harvest_corpus

_FILES = 16
_SOURCES = ("docs", "manual", "github")  # of the harvest: its licences are copies of one another
_KEPT = 0.7  # of the harvest, at least, is not licences


def machine_texts(size: int) -> list[str]:
    """Texts of this machine, about `size` bytes, or less if it has less."""
    with tempfile.TemporaryDirectory(prefix="gristmill-harvest-") as name:
        harvest_corpus(Path(name), size / _KEPT / 1e6)
        return [each.text for each in read_corpus(Path(name)) if each.source in _SOURCES]


def write_made_corpus(folder: Path, texts: Sequence[str], size: int, document_bytes: int) -> Path:
    """Write a corpus of at most `size` bytes of text, joined and cut into documents of `document_bytes`.

    Raises UsageError if there is no text.
    """
    documents = list(_cut("\n\n".join(texts).encode()[:size], document_bytes))
    if not documents:
        raise UsageError("this machine has no text to measure with: give a corpus instead of --documents and --bytes")
    for number in range(min(_FILES, len(documents))):
        with open_jsonl_writer(folder / "made" / f"{number:02}.jsonl") as sink:
            for text in documents[number::_FILES]:
                sink.write(msgspec.json.encode({"text": text}) + b"\n")
    return folder


def _cut(text: bytes, size: int) -> Iterator[str]:
    for start in range(0, len(text), size):
        yield text[start : start + size].decode(errors="ignore")
