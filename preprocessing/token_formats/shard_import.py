"""Import of token files as one of our shards: the ids are copied, or the file itself becomes the shard's .bin."""

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import msgspec
import numpy as np

from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.task import Result
from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.token_shards import SOURCES, ShardRecord, SourceRecord, idx_bytes, with_suffix, write_sources
from gristmill.storage.local import atomic_write, atomic_write_bytes
from preprocessing.token_formats.discovery import READERS
from preprocessing.token_formats.token_file import TokenFile
from preprocessing.token_formats.token_stream import Chunk, DocumentTally, cut_at_tokens

EMPTY = "empty"
Linked = Literal["", "hard", "symbolic"]


@dataclass(frozen=True)
class ImportRule:
    """How ids become documents. `begin` and `end` are the ids that begin and end one, -1: none.

    `is_stream`: rows, sequences and samples are pieces of one stream of tokens; these ids alone cut it into documents.
    """

    begin: int
    end: int
    vocab_size: int
    dtype: str
    is_stream: bool


class ImportReport(msgspec.Struct):
    """The result of an import: the shard, its sources, and how many documents begin and end with the ids given.

    `linked` says how the shard's .bin is the file itself.
    """

    shard: ShardRecord
    sources: dict[str, SourceRecord]
    begun: int = 0
    ended: int = 0
    linked: Linked = ""


def import_files(files: Sequence[TokenFile], rule: ImportRule, is_linked: bool, outputs: tuple[Path, ...]) -> Result:
    """Task: write the shard `outputs` (.bin, .idx, .sources) of some files; the value is its ImportReport.

    `is_linked`: there is one file, and it becomes the shard's .bin without a copy. Raises InputError for an id that the
    vocabulary does not have.
    """
    counts = Counts({}, [])
    prefix = outputs[0].with_suffix("")
    report = ImportReport(ShardRecord(prefix.name, 0, 0, 0, ""), {})
    dtype = np.dtype(rule.dtype)
    digest = hashlib.sha256()
    lengths = []
    numbers = []
    names = list(dict.fromkeys(file.source for file in files))
    outputs[0].unlink(missing_ok=True)  # or a link to the same file could not replace it
    with atomic_write(outputs[0]) as temporary, _target(temporary, is_linked).open("wb") as written:
        for file in files:
            tally = _copy_ids(file, rule, dtype, written, digest)
            lengths.append(tally.lengths)
            source = names.index(file.source)
            numbers.append(np.full(len(tally.lengths), source, np.uint32))
            _count(file.source, tally, dtype, report, counts)
        if is_linked:
            report.linked = _link(files[0].path, temporary)
    shard = report.shard
    shard.sha256 = digest.hexdigest()
    index = idx_bytes(np.concatenate([np.empty(0, np.int32), *lengths]), dtype)
    shard.idx_sha256 = hashlib.sha256(index).hexdigest()
    atomic_write_bytes(outputs[1], index)
    shard.sources = names
    assert with_suffix(prefix, SOURCES) == outputs[2]
    shard.sources_sha256 = write_sources(prefix, np.concatenate([np.empty(0, np.uint32), *numbers]), names)
    return Result(counts, report)


def _target(temporary: Path, is_linked: bool) -> Path:
    """Return where ids are written: nowhere if a link takes the place of the file."""
    if is_linked:
        return Path(os.devnull)
    return temporary


def _copy_ids(
    file: TokenFile, rule: ImportRule, dtype: np.dtype, written: BinaryIO, digest: "hashlib._Hash"
) -> DocumentTally:
    """Write and hash the ids of a file; return the lengths of its documents."""
    tally = DocumentTally(rule.begin, rule.end)
    for chunk in _read(file, rule):
        _require_known(chunk.ids, file, rule.vocab_size)
        tally.add(chunk)
        data = np.ascontiguousarray(chunk.ids, dtype).data
        written.write(data)
        digest.update(data)
    tally.close()
    return tally


def _read(file: TokenFile, rule: ImportRule) -> Iterator[Chunk]:
    chunks = READERS[file.layout](file)
    if rule.is_stream or file.layout == "raw":
        return cut_at_tokens(chunks, rule.begin, rule.end)
    return chunks


def _require_known(ids: np.ndarray, file: TokenFile, vocab_size: int) -> None:
    """Raise InputError for an id that is not of the vocabulary."""
    smallest = int(ids.min(initial=0))
    largest = int(ids.max(initial=0))
    if smallest < 0 or largest >= vocab_size:
        wrong = smallest if smallest < 0 else largest
        stored = ""
        also = ""
        if file.layout == "raw":
            stored = f" as {file.dtype}"
            also = ", or another --dtype"
        raise InputError(
            f"{file.path} read{stored}: expected ids from 0 to {vocab_size - 1:,}, got {wrong:,}; try the --tokenizer "
            f"or --vocab_size that it was made with{also}"
        )


def _count(source: str, tally: DocumentTally, dtype: np.dtype, report: ImportReport, counts: Counts) -> None:
    """Add the documents of a file to the report and to the counts, whose bytes are the bytes of the ids."""
    documents = len(tally.lengths)
    tokens = int(tally.lengths.sum(dtype=np.int64))
    for record in (report.shard, report.sources.setdefault(source, SourceRecord())):
        record.documents += documents
        record.tokens += tokens
    report.begun += tally.begun
    report.ended += tally.ended
    size = tokens * dtype.itemsize
    counts.add_read_file(source)
    counts.add(source, READ, size, documents + tally.empty)
    counts.add(source, WRITTEN, size, documents)
    if tally.empty:
        counts.add(source, EMPTY, 0, tally.empty)


def _link(original: Path, link: Path) -> Linked:
    """Make `link` the same file, or, where file systems or permissions do not allow that, a link to its path."""
    link.unlink(missing_ok=True)
    with wrap_read_errors(original):
        target = original.resolve(strict=True)
    try:
        link.hardlink_to(target)
    except OSError:
        link.symlink_to(target)
        return "symbolic"
    return "hard"
