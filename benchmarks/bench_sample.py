"""Documents to measure on: read from a corpus, drawn at random, and paired with edited copies of themselves."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gristmill.counts import Counts
from gristmill.errors import UsageError
from gristmill.io.documents import SUFFIXES, CorpusFile, Document, list_corpus
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

PAIR_CHARACTERS = 3000


def draw_sample(inputs: Sequence[Path], size: int) -> list[str]:
    """Texts of about `size` bytes, in an order that is random and always the same. UsageError if there are none."""
    texts = [document.text for document in read_documents_of(inputs)]
    random.Random(0).shuffle(texts)
    drawn, total = [], 0
    for text in texts:
        if total < size and total + (length := utf8_size(text)) < 1.2 * size:
            drawn.append(text)
            total += length
    if not any(drawn):
        given = ", ".join(map(str, inputs)) or "nothing"
        raise UsageError(f"{given}: wanted documents with text to sign, and one that fits into --sample")
    return drawn


def read_documents_of(inputs: Sequence[Path]) -> Iterator[Document]:
    """Every document of corpus folders and files; malformed records are passed over."""
    for path in inputs:
        if not path.is_dir() and not (path.is_file() and path.name.endswith(SUFFIXES)):
            raise UsageError(f"{path}: wanted a folder, or a file named {', '.join('*' + end for end in SUFFIXES)}")
        files = list_corpus(path) if path.is_dir() else [CorpusFile(path, path.name, path.stat().st_size)]
        with tempfile.TemporaryDirectory() as scratch:
            for part in (part for file in files for part in plan_slices(file)):
                yield from read_documents(part, Counts({}, []), Rejects(Path(scratch) / "rejects"))


def make_pairs(texts: Sequence[str], many: int) -> list[tuple[str, str]]:
    """Documents beside copies of them in which spans were replaced or deleted: from few to half of the text."""
    draw = random.Random(1)
    whole = [text[:PAIR_CHARACTERS] for text in texts if len(text) >= 500]
    found = []
    for i in range(many if whole else 0):
        text = whole[i % len(whole)]
        found.append((text, _edit(text, draw.random() ** 2 * 0.4, whole, draw)))
    return found


def _edit(text: str, share: float, texts: Sequence[str], draw: random.Random) -> str:
    """Text with about `share` of its characters gone, half of the spans replaced by other documents' text."""
    spans = draw.randint(1, 4)
    for _ in range(spans):
        size = int(share * len(text) / spans)
        start = draw.randint(0, len(text) - size)
        other = draw.choice(texts)
        new = other[(at := draw.randint(0, max(0, len(other) - size))) : at + size] if draw.random() < 0.5 else ""
        text = text[:start] + new + text[start + size :]
    return text
