"""The samples of an estimate: documents of the corpus as normalisation would write them, and what the rest is like."""

import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path

from gristmill.counts import Counts
from gristmill.engine.execution.staging import local_copies
from gristmill.errors import DamagedFile, InputError, TooManyMalformed
from gristmill.io.documents import (
    LINE_FORMATS,
    ONE_SLICE,
    CorpusFile,
    Document,
    normal_name,
    parse_name,
    slices_at,
    total_size,
)
from gristmill.io.readers import SLICE_BYTES, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.wording import count_of
from gristmill_cli.estimates.costs import Extent
from gristmill_cli.run_check import scan_inputs
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.pipeline import FIRST_STAGE

_SMALL_SHARE = 4  # the small sample is this part of the large one
_FILES = 4  # of a source and format that are sampled


@dataclass(frozen=True)
class RawCost:
    """Cost of reading the raw corpus beyond that of JSON lines, which samples are: core seconds and bytes."""

    core_seconds: float
    read: float

    def times(self, factor: float) -> "RawCost":
        """Return the cost of so many times the corpus."""
        return RawCost(factor * self.core_seconds, factor * self.read)


class ReadingTime:
    """Adds up the processor time of reading documents, and the bytes of their texts."""

    def __init__(self) -> None:
        self._seconds = 0.0
        self._text = 0
        self._has_begun = False

    def watch(self, documents: Iterator[Document]) -> Iterator[Document]:
        """Yield the documents. The first of all is not counted, as libraries are loaded for it."""
        while True:
            began = time.process_time()
            document = next(documents, None)
            seconds = time.process_time() - began
            if document is None:
                return
            if self._has_begun:
                self._seconds += seconds
                self._text += document.read_bytes
            self._has_begun = True
            yield document

    @property
    def seconds_a_byte(self) -> float:
        """Return the seconds for each byte of text; 0 if at most one document was read."""
        return self._seconds / max(1, self._text)


def write_samples(corpus: Path, config: RunConfig, size: int, folder: Path) -> tuple[Extent, RawCost]:
    """Write the small and the large sample, as normalisation would write them but for the text.

    Return how large the corpus is, and what reading it takes beyond its sample, as far as some files tell. Of each
    source and format some files, spread evenly, are read to their end: what a byte on disk has of text and documents
    there, it has in the others.
    """
    files = scan_inputs(config, corpus).files
    refused = Counts({}, [])
    kinds = defaultdict[tuple[str, str], list[CorpusFile]](list)
    for file in files:
        kinds[file.source, _suffix(file.name)].append(file)
    total = total_size(files)
    documents = 0.0
    text = 0.0
    sampled = 0
    more_seconds = 0.0
    for number, ((source, suffix), of_kind) in enumerate(kinds.items()):
        on_disk = total_size(of_kind)
        quota = ceil(size * on_disk / max(1, total))
        lines = list[bytes]()
        count = 0
        count_bytes = 0
        read = 0
        reading = ReadingTime()
        chosen = of_kind[:: ceil(len(of_kind) / _FILES)]
        for file in chosen:
            left = quota / len(chosen)
            for document in reading.watch(documents_of(file, refused)):
                count += 1
                count_bytes += document.read_bytes
                if left > 0:
                    document.rename_text(config.text_column)
                    lines.append(document.to_json())
                    sampled += document.read_bytes
                    left -= len(lines[-1])
            read += file.size
        text_of_kind = count_bytes * on_disk / max(1, read)
        documents += count * on_disk / max(1, read)
        text += text_of_kind
        name = f"{source}/{normal_name(f'{number:04}{suffix}')}"
        for sample, share in (("small", _SMALL_SHARE), ("large", 1)):
            with open_jsonl_writer(folder / sample / name) as sink:
                sink.write(b"".join(lines[::share]))
        if not _is_lines(suffix):
            again = _read_again(folder / "large" / name, name, config.text_column)
            more_seconds += text_of_kind * max(0.0, reading.seconds_a_byte - again.seconds_a_byte)
    _note_refused(refused, config.max_malformed)
    if not sampled:
        raise InputError(f"{corpus}: expected a corpus with documents, got none in {count_of(len(files), 'file')}")
    slices = sum(max(1, ceil(file.size / SLICE_BYTES)) for file in files)
    extent = Extent(round(documents), round(text), len(files), slices)
    return extent, RawCost(more_seconds, total - disk_bytes(folder / "large") * text / sampled)


def _suffix(name: str) -> str:
    """Return all of a file's suffix, such as .jsonl.zst."""
    parts = parse_name(name)
    assert parts is not None, name
    return name.removeprefix(parts.stem).lower()


def _is_lines(suffix: str) -> bool:
    """Return whether files with this suffix are read as samples are: JSON lines in a compression that is written."""
    parts = parse_name(f"a{suffix}")
    assert parts is not None, suffix
    return parts.format in LINE_FORMATS and parts.compression in ("", "gz", "zst")


def _read_again(path: Path, name: str, text_column: str) -> ReadingTime:
    """Return what reading a sample takes."""
    reading = ReadingTime()
    file = CorpusFile(path, name, path.stat().st_size, text_column)
    for _ in reading.watch(documents_of(file, Counts({}, []))):
        pass
    return reading


def documents_of(file: CorpusFile, refused: Counts) -> Iterator[Document]:
    """Yield the documents of a file; a remote file is fetched.

    All that is read, and what is malformed, is counted in `refused`.
    """
    try:
        with local_copies([file.path]) as (path,), tempfile.TemporaryDirectory() as folder:
            (part,) = slices_at(replace(file, path=path), ONE_SLICE)
            yield from read_documents(part, refused, Rejects(Path(folder) / "malformed"))
    except DamagedFile as error:
        print(f"note: left out, as `gristmill run` does: {error}", file=sys.stderr)


def _note_refused(counts: Counts, max_malformed: float) -> None:
    try:
        counts.check_malformed(FIRST_STAGE, max_malformed)
    except TooManyMalformed as error:
        print(f"note: `gristmill run` would refuse this corpus. {error}", file=sys.stderr)


def disk_bytes(folder: Path) -> int:
    """Return the bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
