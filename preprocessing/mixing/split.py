"""Splitting a part: its rows in random order, each document written to the train or to the holdout set.

Pass 2 may run on some parts at a time, as a chunk: each part is in one chunk, and none is missing.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.counts import HELD_OUT, READ, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Task
from gristmill.errors import OutputError, UsageError, wrap_write_errors
from gristmill.io.files import STATE_DIR
from gristmill.io.writers import Sink, open_jsonl_writer
from gristmill.storage.files import is_file, is_folder
from gristmill.storage.local import unique_partial_path
from gristmill.storage.stores import store_of
from preprocessing.mixing.sampling import select_kth
from preprocessing.mixing.shuffle_buckets import (
    NOT_ELIGIBLE,
    BucketFile,
    BucketManifest,
    BucketWriter,
    LineBuffer,
    Share,
    join_lines,
    line_bytes,
    line_offsets,
    numbers_of,
    open_scatter,
)

SPLIT = "split"  # name of the step that makes the parts
_SORT_KEYS = [("order", "ascending"), ("source", "ascending"), ("line", "ascending")]
_NUMBER_BYTES = 100  # of a row in memory, without its line
_OUTPUT_BYTES = 1 << 20  # of lines that are put in order at a time
_LONG_LINE = 1 << 16  # bytes: one that is written by itself

Limits = dict[str, int | None]  # the largest holdout number of each source that is held out; None: none is


def check_holdout(fraction: float) -> None:
    """Raise UsageError for a fraction below 0, of 1 or more, or nan."""
    if not 0 <= fraction < 1:
        raise UsageError(f"--holdout {fraction}: expected a fraction of 0 or more and less than 1, such as 0.0017")


def find_limits(run: StageRun, input_dir: Path, manifest: BucketManifest, fraction: float, fan_in: int) -> Limits:
    """Return the largest holdout number that is held out of each source.

    Exactly `fraction` of the source's documents have a number up to it, and at least one of a source with two or more
    (unless `fraction` is 0).
    """
    numbers = dict[str, list[Path]]()
    ranks = dict[str, int]()
    for source, total in manifest.documents.items():
        numbers[source] = []
        ranks[source] = held_out_documents(total, fraction)
    for name, source in manifest.holdout_files.items():
        numbers[source].append(input_dir / name)
    return select_kth(run, "limits", numbers, ranks, fan_in)


def held_out_documents(total: int, fraction: float) -> int:
    """Return how many of a source's documents are held out."""
    min_documents = 1 if total > 1 and fraction > 0 else 0
    return max(round(fraction * total), min_documents)


def split_tasks(
    input_dir: Path, manifest: BucketManifest, limits: Limits, outputs: dict[int, tuple[Path, Path]], memory: int
) -> Iterator[Task]:
    for part, files in manifest.files_of(input_dir, outputs):
        arguments = {
            "share": manifest.share(part), "files": files, "limits": limits,
            "train": outputs[part][0], "holdout": outputs[part][1],
        }  # fmt: skip
        yield Task(f"part {part}", split_part, arguments, outputs[part], memory=memory)


def split_part(share: Share, files: FileSet, limits: Limits, train: Path, holdout: Path, memory: int) -> Counts:
    """Task: shuffle one part: sort its rows, which are in the bucket `files`, and write each to train or to holdout.

    `memory` is that of ordered_rows.
    """
    counts = Counts({}, [])
    sources = sorted(limits)
    with open_jsonl_writer(train) as train_lines, open_jsonl_writer(holdout) as holdout_lines:
        for rows, order in ordered_rows(share, files, sources, train, memory):
            limits_of_sources = [limits[source] for source in sources]
            is_held_out = _is_held_out(rows, limits_of_sources)[order]
            for sink, reason, chosen in (
                (train_lines, WRITTEN, order[~is_held_out]), (holdout_lines, HELD_OUT, order[is_held_out]),
            ):  # fmt: skip
                _write_lines(sink, rows, chosen)
                _count(counts, sources, rows, chosen, reason)
            del rows
    return counts


def ordered_rows(
    share: Share, files: FileSet, sources: Sequence[str], output: Path, memory: int
) -> Iterator[tuple[pa.RecordBatch, NDArray[np.int64]]]:
    """Yield the rows of a part, in consecutive ranges of their order, each with the order of its rows.

    `memory` bytes are half for the rows' numbers and half for their lines. Lines that take more are in a temporary
    file next to `output`; a part whose numbers take more is first scattered to another, by ranges of its order.
    """
    opened = [BucketFile.open(path, share.bucket) for path in files.paths]
    with (
        _in_ranges(opened, share, memory // 2, output) as ranges,
        closing(LineBuffer(output.parent, memory // 2)) as lines,
    ):
        for row_range in ranges:
            lines.clear()
            rows = _load(row_range, sources, lines)
            yield rows, pc.sort_indices(rows, _SORT_KEYS).to_numpy()
            del rows


@dataclass(frozen=True)
class _RowRange:
    """A range of the rows of a part: the rows of `share` in some bucket files."""

    files: Sequence[BucketFile]
    share: Share

    @property
    def memory(self) -> int:
        """Return the bytes that the numbers of the rows of the part take, about."""
        rows = 0
        for file in self.files:
            rows += sum(frame.rows for frame in file.frames)
        return _NUMBER_BYTES * rows // self.share.parts_a_bucket

    def read(self) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from map(self.share.select, file.read())


@contextmanager
def _in_ranges(files: Sequence[BucketFile], share: Share, memory: int, output: Path) -> Iterator[Iterator[_RowRange]]:
    """Context: the rows of a part in consecutive ranges of their order, whose numbers take less than `memory` bytes."""
    whole = _RowRange(files, share)
    if whole.memory <= memory:
        yield iter([whole])
        return
    ranges = math.ceil(2 * whole.memory / memory)  # half full, on average: the order is random
    temporary = unique_partial_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with wrap_write_errors(output), temporary.open("wb") as file:
            writer = BucketWriter(file)
            with open_scatter(
                lambda rows: partition_of(numbers_of(rows, "order"), ranges), writer.write, output
            ) as scatter:
                for rows in whole.read():
                    scatter.add_rows(rows)
                    del rows
                    scatter.write_full()
            writer.finish()
        yield _ranges_in(temporary, share, ranges)
    finally:
        temporary.unlink(missing_ok=True)


def _ranges_in(scattered: Path, share: Share, count: int) -> Iterator[_RowRange]:
    """Yield the ranges of a part, each of which is a bucket of the file that it was scattered to."""
    for number in range(count):
        yield _RowRange([BucketFile.open(scattered, number)], Share(share.part, share.parts, number))


def _load(row_range: _RowRange, sources: Sequence[str], lines: LineBuffer) -> pa.RecordBatch:
    """Return the rows: their lines, which are in `lines` until its next use, and their numbers.

    `source` is the number in `sources`. Each frame is copied and let go.
    """
    sizes = [np.empty(0, np.int64)]
    types = {"order": np.uint64, "holdout": np.uint64, "size": np.int64, "source": np.int32}
    numbers = dict[str, list[NDArray]]()
    for name, kind in types.items():
        numbers[name] = [np.empty(0, kind)]
    names = pa.array(sources, pa.string())
    for rows in row_range.read():
        lines.append(line_bytes(rows).data)
        sizes.append(np.diff(line_offsets(rows)))
        for name in ("order", "holdout", "size"):
            numbers[name].append(rows.column(name).to_numpy().copy())
        numbers["source"].append(pc.index_in(rows.column("source"), names).to_numpy())
        del rows
    columns = {name: np.concatenate(arrays) for name, arrays in numbers.items()}
    return join_lines(columns, np.concatenate(sizes), lines.view())


def _is_held_out(rows: pa.RecordBatch, limits: Sequence[int | None]) -> NDArray[np.bool_]:
    """Return whether each row (n) is held out, given the limit of each source."""
    has_limit = np.array([limit is not None for limit in limits], np.bool_)
    limit = np.array([limit or 0 for limit in limits], np.uint64)
    source = rows.column("source").to_numpy()
    numbers = numbers_of(rows, "holdout")
    return has_limit[source] & (numbers != NOT_ELIGIBLE) & (numbers <= limit[source])


def _write_lines(sink: Sink, rows: pa.RecordBatch, order: NDArray[np.integer]) -> None:
    """Write lines in this order."""
    for _, data in lines_in_order(rows, order):
        sink.write(data)


def lines_in_order(
    rows: pa.RecordBatch, order: NDArray[np.integer]
) -> Iterator[tuple[NDArray[np.integer], memoryview]]:
    """Yield rows in this order, and their lines one after another: short ones together, a long one as it lies."""
    starts = line_offsets(rows)
    data = line_bytes(rows)
    sizes = np.diff(starts)[order]
    is_long = sizes > _LONG_LINE
    is_last = (np.diff(np.cumsum(sizes) // _OUTPUT_BYTES) != 0) | is_long[1:] | is_long[:-1]
    for chosen in np.split(order, np.flatnonzero(is_last) + 1):
        if len(chosen) == 1:
            yield chosen, data[starts[chosen[0]] : starts[chosen[0] + 1]].data
        elif len(chosen):
            lines = rows.column("line").take(pa.array(chosen))
            yield chosen, memoryview(lines.buffers()[2] or b"")


def _count(
    counts: Counts, sources: Sequence[str], rows: pa.RecordBatch, chosen: NDArray[np.integer], reason: str
) -> None:
    source = rows.column("source").to_numpy()[chosen]
    size = rows.column("size").to_numpy()[chosen]
    documents = np.bincount(source, minlength=len(sources)).tolist()
    sizes = np.bincount(source, size, len(sources)).tolist()
    for i, name in enumerate(sources):
        if documents[i]:
            counts.add(name, READ, int(sizes[i]), documents[i])
            counts.add(name, reason, int(sizes[i]), documents[i])


def _written(run: StageRun) -> Iterator[tuple[int, Path, Path]]:
    """Yield the parts that all calls of pass 2 have written: number, train file and holdout file."""
    for ledger in (run.ledger, *run.ledger.siblings):
        for (step, name), record in ledger.read().items():
            if step == SPLIT:
                train, holdout = map(ledger.path, record.outputs[:2])
                yield int(name.removeprefix("part ")), train, holdout


def reject_other_holdout(run: StageRun, train_dir: Path, holdout_dir: Path) -> None:
    """Raise if the parts in the train folder have their holdout elsewhere, or the holdout folder is none of pass 2's.

    UsageError, as the holdout that is there would be removed; OutputError, as files of others would be replaced.
    """
    folders = set[Path]()
    for _, _, holdout in _written(run):
        folders.add(holdout.parent.parent)
    for folder in sorted(folders - {holdout_dir}):
        if is_folder(folder):
            raise UsageError(
                f"{train_dir} was split with --holdout_dir {folder}, which would lose its files: give that one, or "
                "another --train_dir, or remove both"
            )
    is_copy = bool(folders) and not store_of(holdout_dir).needs_copies and not is_folder(holdout_dir / STATE_DIR)
    if is_copy and any(holdout_dir.glob("*")):
        raise OutputError(
            f"{holdout_dir} is not the holdout of {train_dir}, which was copied without it, and its files could be "
            "replaced: give another --holdout_dir, or remove it"
        )


def reject_other_parts(run: StageRun, chosen: range, parts: int, chunk_dir: Path) -> None:
    """Raise OutputError if a `chosen` part is in another chunk, too, or there are more parts than pass 1 made now."""
    for number, train, _ in _written(run):
        is_elsewhere = number in chosen and train.parent != chunk_dir
        if (is_elsewhere or number >= parts) and is_file(train):
            raise OutputError(
                f"{train} was written by an earlier pass2, so its documents would be there twice: remove "
                f"{train.parent}, and run pass2 for its twentieths again"
            )


def note_missing_parts(run: StageRun, parts: int) -> None:
    """Print a note if some of the parts are in no chunk yet: their documents are in no train set."""
    written = {number for number, _, _ in _written(run)}
    missing = sorted({*range(parts)} - written)
    if missing:
        print(
            f"note: {len(missing):,} of the {parts:,} parts are in no chunk yet, such as part {missing[0]}: run pass2 "
            "for the other twentieths, too (0 20 are all), before the train set is read as a whole",
            file=sys.stderr,
        )
