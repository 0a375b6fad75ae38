"""Rows of tokens: each document of a mix is encoded once, and its tokens are scattered and shuffled as lines are.

A row's line is the ids of a document, with those that begin and end it, as the bytes of the shards' dtype. A document
on which the tokenizer fails, or ends the process, has no row.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import HELD_OUT, READ, WRITTEN, Counts
from gristmill.engine.execution.worker_deaths import note_no_place, note_place
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet, Result
from gristmill.errors import InputError
from gristmill.io.documents import Document, Slice, folder_of, label_of
from gristmill.io.readers import read_chosen
from gristmill.io.token_shards import (
    ShardRecord,
    SourceRecord,
    TokenShardWriter,
    token_dtype,
    write_sources,
)
from gristmill.io.vocabulary import ESCAPED_SPACE
from gristmill.text import utf8_size
from preprocessing.mixing.decided_corpus import GroupDecisions
from preprocessing.mixing.decisions import HELD_OUT_COPY, DecidedFile
from preprocessing.mixing.sampling import random_numbers
from preprocessing.mixing.shuffle_buckets import (
    NUMBERS,
    Scatter,
    Share,
    line_offsets,
    numbers_of,
    open_scatter,
    write_bucket_file,
)
from preprocessing.mixing.split import lines_in_order, ordered_rows
from preprocessing.tokenizer.loading import LONG_TEXT, load_encoder, with_one_engine
from preprocessing.tokenizer.safe_encoder import FailedDocument, ReadDocument, SafeEncoder, TokenizerFailed
from preprocessing.tokenizer.shard_files import ShardReport, shard_prefix

COMPRESSION = 1  # of ids: a higher level saves little, and takes most of the time
_BATCH_CHARACTERS = 1 << 20  # of texts that are encoded together
# Bits of the column `holdout` of a row of tokens.
_IS_HELD_OUT = 1
_IS_LOSSY = 2


class EncodedGroup(msgspec.Struct):
    """Result of a task that encodes: bytes of all rows, and the documents that have none.

    `differed` says where gigatoken and tokenizers did not agree.
    """

    row_bytes: int
    differed: str = ""
    failed: list[FailedDocument] = []


def encode_group(
    group: SliceGroup,
    decisions: GroupDecisions,
    tokenizer: Path,
    begin: int,
    end: int,
    seed: int,
    buckets: int,
    output: Path,
) -> Result:
    """Task: encode the documents of a group that are in the mix, and write a row for each copy to a bucket file.

    `begin` and `end` are the ids that begin and end each document; -1: none. The counts are those of the documents that
    have no tokens, as many as there are copies of them. The value is an EncodedGroup.
    """
    model, encoder = load_encoder(tokenizer)
    is_lossy = model.kind == "sentencepiece"

    def work() -> Result:
        counts = Counts({}, [])
        safe = SafeEncoder(encoder, begin, end, counts)
        rows = _RowEncoder(safe, token_dtype(model.vocab_size), seed, is_lossy, counts)
        size = rows.write(decisions.load(group), buckets, output)
        return Result(counts, EncodedGroup(size, failed=safe.failed))

    encoded, differed = with_one_engine(encoder, work)
    encoded.value.differed = differed
    return encoded


class _RowEncoder:
    """Encodes documents into rows; counts the documents that have none."""

    def __init__(self, encoder: SafeEncoder, dtype: np.dtype, seed: int, is_lossy: bool, counts: Counts) -> None:
        self._encoder = encoder
        self._dtype = dtype
        self._seed = seed
        self._is_lossy = is_lossy
        self._counts = counts

    def write(self, decided: Iterable[tuple[Slice, DecidedFile]], buckets: int, output: Path) -> int:
        """Write the bucket file of slices, given the decisions on each; return the bytes of all rows."""
        with (
            write_bucket_file(output, COMPRESSION) as writer,
            open_scatter(lambda rows: partition_of(numbers_of(rows, "draw"), buckets), writer.write, output) as scatter,
        ):
            for part, decided_file in decided:
                self._add_slice(scatter, part, decided_file)
        return sum(frame.line_bytes for frame in writer.frames)

    def _add_slice(self, scatter: Scatter, part: Slice, decided: DecidedFile) -> None:
        documents = read_chosen(part, decided.rows.tolist(), only_text=True)
        failed_before = len(self._encoder.failed)
        done = 0
        for batch in batched(documents, size=_BATCH_CHARACTERS, size_of=lambda document: len(document.text)):
            for documents_together, is_long in _encoded_together(batch):
                chosen = slice(done, done + len(documents_together))
                _reject_changed(part, documents_together, decided, chosen)
                rows = _Rows(part, documents_together, decided, chosen, self._flags(documents_together))
                if is_long:
                    self._add_long(scatter, rows)
                else:
                    self._add_short(scatter, rows)
                note_place(part.label, rows.documents[0].key.row)  # about there, whatever ends the process now
                done = chosen.stop
                del documents_together, rows
            del batch  # a large document is gone before its frame is written, and the next is read
            scatter.write_full()
        note_no_place()
        failed = self._encoder.failed[failed_before:]
        if failed:
            _read_ids(part, failed)

    def _flags(self, documents: Sequence[Document]) -> NDArray[np.uint64]:
        """Return _IS_LOSSY for each document of which the tokens do not restore the text, else 0."""
        if not self._is_lossy:
            return np.zeros(len(documents), np.uint64)
        return np.array([_IS_LOSSY * (ESCAPED_SPACE in document.text) for document in documents], np.uint64)

    def _add_short(self, scatter: Scatter, rows: "_Rows") -> None:
        """Add the rows of documents that are encoded together."""
        encoded = self._encoder.encode(rows.read)
        for number, reason in encoded.failed.items():
            rows.leave_out(number, reason, self._counts)
        data = np.ascontiguousarray(encoded.ids, self._dtype).data.cast("B")
        ends = (encoded.offsets * self._dtype.itemsize).tolist()
        sizes = np.diff(encoded.offsets) * self._dtype.itemsize
        for copy in range(rows.max_copies):
            chosen = np.flatnonzero(rows.copies > copy)
            numbers = rows.numbers(copy, chosen, self._seed)
            if len(chosen) == len(rows.documents):
                scatter.add(numbers, sizes, [data])
            else:
                scatter.add(numbers, sizes[chosen], (data[ends[i] : ends[i + 1]] for i in chosen.tolist()))

    def _add_long(self, scatter: Scatter, rows: "_Rows") -> None:
        """Add the rows of one long document, which is encoded in parts, for each copy anew: they may not fit memory."""
        (document,) = rows.read
        reason = self._encoder.death(document)
        if reason:
            rows.leave_out(0, reason, self._counts)
        for copy in range(rows.max_copies):
            parts = self._encoder.encode_parts(document)
            pieces = (np.ascontiguousarray(ids, self._dtype).data.cast("B") for ids in parts)
            try:
                scatter.add_long(rows.numbers(copy, np.zeros(1, np.int64), self._seed), pieces)
            except TokenizerFailed as error:
                if copy:
                    raise  # there are rows of it
                rows.leave_out(0, self._encoder.leave_out(document, error), self._counts)
                break


def _encoded_together(batch: Sequence[Document]) -> Iterator[tuple[list[Document], bool]]:
    """Yield runs of documents that are encoded together, and whether one is a long document, which is alone."""
    for is_long, documents in groupby(batch, lambda document: len(document.text) > LONG_TEXT):
        if not is_long:
            yield list(documents), False
            continue
        for document in documents:
            yield [document], True


def _read_ids(part: Slice, failed: Sequence[FailedDocument]) -> None:
    """Note the own ids of documents of a slice, of which only the texts were read."""
    with_fields = read_chosen(part, [document.row for document in failed])
    for document, read in zip(failed, with_fields, strict=True):
        document.id = read.own_id


def _reject_changed(part: Slice, documents: Sequence[Document], decided: DecidedFile, chosen: slice) -> None:
    """Raise InputError if a document is not as long as the one that was decided on: rows have moved."""
    for document, size in zip(documents, decided.sizes[chosen].tolist(), strict=True):
        size_now = utf8_size(document.text)
        if size_now != size:
            raise InputError(
                f"{part.path} line {document.key.row + 1}: expected {size:,} bytes of text in the mix, got "
                f"{size_now:,}: the file is not the one that was decided on. Run the stages that wrote it, and decide, "
                "again"
            )


class _Rows:
    """Documents (n) of a slice, and what was decided on them."""

    def __init__(
        self,
        part: Slice,
        documents: Sequence[Document],
        decided: DecidedFile,
        chosen: slice,
        flags: NDArray[np.uint64],
    ) -> None:
        copies = decided.copies[chosen]
        is_held_out = copies == HELD_OUT_COPY
        self.documents = documents
        self.copies = np.where(is_held_out, 1, copies)
        self._part = part
        self._rows = decided.rows[chosen]
        self._sizes = decided.sizes[chosen]
        self._bands = decided.bands[chosen]
        self._flags = flags | np.where(is_held_out, _IS_HELD_OUT, 0).astype(np.uint64)

    @property
    def max_copies(self) -> int:
        return int(self.copies.max(initial=0))

    @property
    def read(self) -> list[ReadDocument]:
        """Return the documents, each with the slice."""
        return [ReadDocument(self._part, document) for document in self.documents]

    def leave_out(self, number: int, reason: str, counts: Counts) -> None:
        """Count a document under the reason for which it has no tokens, as often as it is in the mix."""
        copies = int(self.copies[number])
        size = int(self._sizes[number]) * copies
        counts.add(self._part.source, READ, size, copies)
        counts.add(self._part.source, reason, size, copies)
        self.copies[number] = 0

    def numbers(self, copy: int, chosen: NDArray[np.int64], seed: int) -> pa.RecordBatch:
        """Return the numbers (NUMBERS) of a copy of the `chosen` documents, as pass 1 gives them."""
        name = self._part.name
        rows = self._rows[chosen]
        labels = [label_of(self._part.source, band) for band in self._bands[chosen].tolist()]
        columns = [
            random_numbers(seed, f"part {copy}", name, rows),
            random_numbers(seed, f"order {copy}", name, rows),
            self._flags[chosen],
            self._sizes[chosen],
            labels,
        ]
        return pa.record_batch(columns, schema=NUMBERS)


def write_token_shard(
    shares: Sequence[Share],
    files: Sequence[FileSet],
    sources: list[str],
    dtype: str,
    train: Path,
    holdout: Path,
    memory: int,
) -> Result:
    """Task: shuffle the parts of a shard, one after another, and write tokens to `train` or to `holdout` (.bin).

    `memory` is that of ordered_rows. The value is the ShardReport of both.
    """
    counts = Counts({}, [])
    with (
        _PartWriter(train, sources, dtype, counts) as in_train,
        _PartWriter(holdout, sources, dtype, counts) as held_out,
    ):
        for share, of_part in zip(shares, files, strict=True):
            for rows, order in ordered_rows(share, of_part, sources, train, memory):
                is_held_out = (numbers_of(rows, "holdout")[order] & np.uint64(_IS_HELD_OUT)) != 0
                in_train.write(rows, order[~is_held_out])
                held_out.write(rows, order[is_held_out])
                del rows
    reports = [in_train.report(), held_out.report()]
    for report, reason in zip(reports, (WRITTEN, HELD_OUT), strict=True):
        for label, record in report.sources.items():
            source = folder_of(label)
            counts.add(source, READ, record.bytes, record.documents)
            counts.add(source, reason, record.bytes, record.documents)
    return Result(counts, reports)


class _PartWriter(TokenShardWriter):
    """Writes rows of tokens as a part, a shard with the source of each document; counts lengths of texts."""

    def __init__(self, tokens: Path, sources: list[str], dtype: str, counts: Counts) -> None:
        super().__init__(shard_prefix(tokens), np.dtype(dtype))
        self._counts = counts
        self._names = sources
        self._sources = [np.empty(0, np.int64)]
        self._sizes = np.zeros(len(sources), np.int64)
        self._tokens = np.zeros(len(sources), np.int64)
        self._lossy = 0

    def write(self, rows: pa.RecordBatch, order: NDArray[np.integer]) -> None:
        """Append rows in this order."""
        lengths = np.diff(line_offsets(rows)) // self.dtype.itemsize
        for chosen, data in lines_in_order(rows, order):
            self.add_all(np.frombuffer(data, self.dtype), lengths[chosen].tolist())
        source = rows.column("source").to_numpy()[order].astype(np.int64)
        self._sources.append(source)
        sizes = rows.column("size").to_numpy()[order]
        np.add.at(self._sizes, source, sizes)
        for number in np.unique(source).tolist():
            self._counts.add_lengths(folder_of(self._names[number]), sizes[source == number])
        np.add.at(self._tokens, source, lengths[order])
        self._lossy += int(np.count_nonzero(numbers_of(rows, "holdout")[order] & np.uint64(_IS_LOSSY)))

    def report(self) -> ShardReport:
        """Write the file of sources, and return the report of the part, which is published."""
        numbers = np.concatenate(self._sources)
        documents = np.bincount(numbers, minlength=len(self._names))
        present = np.flatnonzero(documents)
        sources = dict[str, SourceRecord]()
        for number in present.tolist():
            record_of_source = SourceRecord(int(documents[number]), int(self._tokens[number]), int(self._sizes[number]))
            sources[self._names[number]] = record_of_source
        names = list(sources)
        number_of = np.zeros(len(self._names), np.uint32)
        number_of[present] = np.arange(len(present), dtype=np.uint32)
        digest = write_sources(self.prefix, number_of[numbers], names)
        record = ShardRecord(
            self.prefix.name, len(numbers), self.tokens, int(self._sizes.sum()), self.sha256, self.idx_sha256, names,
            digest,
        )  # fmt: skip
        return ShardReport(record, sources, self._lossy)
