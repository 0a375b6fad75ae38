"""Benchmark input: documents sampled from a corpus, and pairs of a document and an edited copy."""

import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from gristmill.counts import Counts
from gristmill.errors import UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.documents import CORPUS_SUFFIXES, CorpusFile, Document
from gristmill.io.readers import plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

PAIR_CHARACTERS = 3000


def draw_sample(inputs: Sequence[Path], size: int) -> list[str]:
    """Sample texts with a total of about `size` bytes, with a fixed seed. Raises UsageError if there are none."""
    texts = [document.text for document in read_documents_of(inputs)]
    random.Random(0).shuffle(texts)
    drawn, total = [], 0
    for text in texts:
        if total < size and total + (length := utf8_size(text)) < 1.2 * size:
            drawn.append(text)
            total += length
    if not any(drawn):
        given = ", ".join(map(str, inputs)) or "nothing"
        raise UsageError(f"{given}: no document with text fits into --sample: give a corpus, or a larger --sample")
    return drawn


def read_documents_of(inputs: Sequence[Path]) -> Iterator[Document]:
    """Every document of corpus folders and files; malformed records are skipped."""
    for path in inputs:
        if not path.is_dir() and not (path.is_file() and path.name.endswith(CORPUS_SUFFIXES)):
            raise UsageError(
                f"{path}: give a folder, or a file named {', '.join('*' + end for end in CORPUS_SUFFIXES)}"
            )
        files = list_corpus(path) if path.is_dir() else [CorpusFile(path, path.name, path.stat().st_size)]
        with tempfile.TemporaryDirectory() as scratch:
            for part in (part for file in files for part in plan_slices(file)):
                yield from read_documents(part, Counts({}, []), Rejects(Path(scratch) / "rejects"))


def make_pairs(texts: Sequence[str], count: int) -> list[tuple[str, str]]:
    """Make `count` pairs of a document and a copy in which up to 40 % of the text is replaced or deleted."""
    draw = random.Random(1)
    whole = [text[:PAIR_CHARACTERS] for text in texts if len(text) >= 500]
    found = []
    for i in range(count if whole else 0):
        text = whole[i % len(whole)]
        found.append((text, _edit(text, draw.random() ** 2 * 0.4, whole, draw)))
    return found


def _edit(text: str, share: float, texts: Sequence[str], draw: random.Random) -> str:
    """Remove a fraction `share` of the text in spans; replace half of the spans by text of other documents."""
    spans = draw.randint(1, 4)
    for _ in range(spans):
        size = int(share * len(text) / spans)
        start = draw.randint(0, len(text) - size)
        other = draw.choice(texts)
        new = other[(at := draw.randint(0, max(0, len(other) - size))) : at + size] if draw.random() < 0.5 else ""
        text = text[:start] + new + text[start + size :]
    return text
