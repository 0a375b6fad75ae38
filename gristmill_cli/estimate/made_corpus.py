"""A corpus made of text of this machine, in documents of a given size, to measure where the real one is not here."""

import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from gristmill.io.writers import open_jsonl_writer
from gristmill_cli.harvest_corpus import harvest_corpus

_FILES = 16
_SOURCES = ("docs", "manual", "github")  # of the harvest: its licences are copies of one another
_KEPT = 0.7  # of the harvest, at least, is not licences


def make_corpus(folder: Path, size: int, document_bytes: int) -> Path:
    """Write a corpus of about `size` bytes of text, less if this machine has less, in documents of `document_bytes`.

    Texts of the machine are joined and cut. Raises UsageError if there is no text.
    """
    with tempfile.TemporaryDirectory(prefix="gristmill-harvest-") as name:
        harvest_corpus(Path(name), size / _KEPT / 1e6)
        texts = [each.text for each in read_corpus(Path(name)) if each.source in _SOURCES]
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
