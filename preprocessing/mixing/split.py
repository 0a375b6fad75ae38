"""Splitting a part: its rows in random order, each document written to the train or to the holdout set."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from gristmill.batches import partition_of
from gristmill.counts import READ, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.task import FileSet, Task
from gristmill.errors import wrap_write_errors
from gristmill.io.files import unique_partial_path
from gristmill.io.writers import Sink, open_jsonl_writer
from preprocessing.mixing.manifest import BucketManifest
from preprocessing.mixing.selection import select_kth
from preprocessing.mixing.shuffle_buckets import (
    BUFFER_BYTES,
    NOT_ELIGIBLE,
    BucketFile,
    BucketWriter,
    Scatter,
    Share,
    line_offsets,
    numbers_of,
)

HELD_OUT = "holdout"
_NUMBER_BYTES = 100  # of a row in memory, beside its line
_OUTPUT_BYTES = 4 << 20  # of lines that are put in order at a time

Limits = dict[str, int | None]  # the largest holdout number of each source that is held out; None: none is


def find_limits(run: StageRun, input_dir: Path, manifest: BucketManifest, fraction: float, fan_in: int) -> Limits:
    """The largest holdout number that is held out of each source.

    Exactly `fraction` of the source's documents have a number up to it, and at least one of a source with two or more
    (unless `fraction` is 0).
    """
    numbers: dict[str, list[Path]] = {source: [] for source in manifest.documents}
    for name, source in manifest.holdout_files.items():
        numbers[source].append(input_dir / name)
    ranks = {
        source: max(round(fraction * total), 1 if total > 1 and fraction > 0 else 0)
        for source, total in manifest.documents.items()
    }
    return select_kth(run, "limits", numbers, ranks, fan_in)


def split_tasks(
    input_dir: Path, manifest: BucketManifest, limits: Limits, outputs: dict[int, tuple[Path, Path]], memory: int
) -> Iterator[Task]:
    for part, files in manifest.files_of(input_dir, outputs):
        arguments = {
            "share": manifest.share(part), "files": files, "limits": limits, "content": manifest.content,
            "train": outputs[part][0], "holdout": outputs[part][1],
        }  # fmt: skip
        yield Task(f"part {part}", split_part, arguments, outputs[part], memory=memory)


def split_part(
    share: Share, files: FileSet, limits: Limits, content: str, train: Path, holdout: Path, memory: int
) -> Counts:
    """Task: shuffle one part: sort its rows, which are in the bucket `files`, and write each to train or to holdout.

    A part that takes more than `memory` bytes is first scattered to a temporary file by ranges of its order. `content`
    tells what pass 1 mixed: see chunks.py.
    """
    del content
    counts, sources = Counts({}, []), sorted(limits)
    opened = [BucketFile.open(path, share.bucket) for path in files.paths]
    with (
        _in_ranges(opened, share, memory, train) as ranges,
        open_jsonl_writer(train) as train_lines,
        open_jsonl_writer(holdout) as holdout_lines,
    ):
        for found in ranges:
            rows = _load(found, sources)
            order = pc.sort_indices(rows, [(name, "ascending") for name in ("order", "source", "line")]).to_numpy()
            is_held_out = _is_held_out(rows, [limits[source] for source in sources])[order]
            for sink, reason, chosen in (
                (train_lines, WRITTEN, order[~is_held_out]), (holdout_lines, HELD_OUT, order[is_held_out]),
            ):  # fmt: skip
                _write_lines(sink, rows, chosen)
                _count(counts, sources, rows, chosen, reason)
    return counts


@dataclass(frozen=True)
class _Found:
    """Rows to load: their files, and an upper bound of their number and of the bytes of their lines."""

    files: Sequence[BucketFile]
    share: Share

    @property
    def rows(self) -> int:
        return sum(frame.rows for file in self.files for frame in file.frames)

    @property
    def line_bytes(self) -> int:
        return sum(frame.line_bytes for file in self.files for frame in file.frames)

    @property
    def memory(self) -> int:
        """Bytes that the rows of the part take, about."""
        return (self.line_bytes + _NUMBER_BYTES * self.rows) // self.share.parts_a_bucket

    def read(self) -> Iterator[pa.RecordBatch]:
        for file in self.files:
            yield from map(self.share.select, file.read())


@contextmanager
def _in_ranges(files: Sequence[BucketFile], share: Share, memory: int, output: Path) -> Iterator[Iterator[_Found]]:
    """Context: the rows of a part in consecutive ranges of their order, each of less than `memory` bytes."""
    whole, room = _Found(files, share), memory * 3 // 4
    if whole.memory <= room:
        yield iter([whole])
        return
    ranges = math.ceil(2 * whole.memory / room)  # half full, on average: the order is random
    temporary = unique_partial_path(output)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        with wrap_write_errors(output), temporary.open("wb") as file:
            writer = BucketWriter(file)
            scatter = Scatter(
                lambda rows: partition_of(numbers_of(rows, "order"), ranges),
                writer.write,
                min(BUFFER_BYTES, room // 4),
            )
            for rows in whole.read():
                scatter.add(rows)
            scatter.flush()
            writer.finish()
        yield (_Found([BucketFile.open(temporary, i)], Share(share.part, share.parts, i)) for i in range(ranges))
    finally:
        temporary.unlink(missing_ok=True)


def _load(found: _Found, sources: Sequence[str]) -> pa.RecordBatch:
    """Rows in memory: their lines once, and their numbers; `source` is the number in `sources`.

    Each frame is copied and let go, so that no line is in memory twice.
    """
    lines = np.empty(found.line_bytes, np.uint8)
    offsets = [np.zeros(1, np.int64)]
    numbers: dict[str, list[NDArray]] = {"order": [], "holdout": [], "size": [], "source": []}
    names = pa.array(sources, pa.string())
    for rows in (rows for rows in found.read() if rows.num_rows):
        start, at = offsets[-1][-1], line_offsets(rows)
        data = np.frombuffer(rows.column("line").buffers()[2], np.uint8)[at[0] : at[-1]]
        lines[start : start + len(data)] = data
        offsets.append(at[1:] - at[0] + start)
        for name in ("order", "holdout", "size"):
            numbers[name].append(rows.column(name).to_numpy().copy())
        numbers["source"].append(pc.index_in(rows.column("source"), names).to_numpy())
    ends = np.concatenate(offsets)
    types = {"order": np.uint64, "holdout": np.uint64, "size": np.int64, "source": np.int32}
    columns = {name: np.concatenate([*numbers[name], np.empty(0, kind)]) for name, kind in types.items()}
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(lines)]
    return pa.record_batch(columns | {"line": pa.Array.from_buffers(pa.large_binary(), len(ends) - 1, buffers)})


def _is_held_out(rows: pa.RecordBatch, limits: Sequence[int | None]) -> NDArray[np.bool_]:
    """Whether each row (n) is held out, given the limit of each source."""
    has_limit = np.array([limit is not None for limit in limits], np.bool_)
    limit = np.array([limit or 0 for limit in limits], np.uint64)
    source, numbers = rows.column("source").to_numpy(), numbers_of(rows, "holdout")
    return has_limit[source] & (numbers != NOT_ELIGIBLE) & (numbers <= limit[source])


def _write_lines(sink: Sink, rows: pa.RecordBatch, order: NDArray[np.integer]) -> None:
    """Write lines in this order, some megabytes at a time."""
    ends = np.cumsum(np.diff(line_offsets(rows))[order]) // _OUTPUT_BYTES
    for chosen in np.split(order, np.flatnonzero(np.diff(ends)) + 1):
        if len(chosen):
            lines = rows.column("line").take(pa.array(chosen))
            sink.write(lines.buffers()[2].to_pybytes())


def _count(
    counts: Counts, sources: Sequence[str], rows: pa.RecordBatch, chosen: NDArray[np.integer], reason: str
) -> None:
    source, size = (rows.column(name).to_numpy()[chosen] for name in ("source", "size"))
    documents = np.bincount(source, minlength=len(sources)).tolist()
    sizes = np.bincount(source, size, len(sources)).tolist()
    for i, name in enumerate(sources):
        if documents[i]:
            counts.add(name, READ, int(sizes[i]), documents[i])
            counts.add(name, reason, int(sizes[i]), documents[i])
