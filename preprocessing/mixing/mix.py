"""Tasks of pass 1: sample the documents of a group of slices, write each to a random bucket, and gather the parts.

To read each part's rows from each of many bucket files would be work that grows with the square of the corpus. So they
are gathered in levels that each read every file once: a task reads up to `fan` whole files and writes one for each of
up to `fan` ranges of parts; the next level does so for each range, until a range is one part, whose rows are in few
files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import LEFT_OUT, REPEATED, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet, Result, Task
from gristmill.io.documents import KEY_FIELD, Document, Slice, names_of, read_sizes_of, rows_of
from gristmill.io.readers import read_documents
from gristmill.io.writers import ZSTD_LEVEL, Rejects
from gristmill.text import utf8_size
from preprocessing.mixing.drops import load_drops
from preprocessing.mixing.epochs import Amounts, MeasuredSources
from preprocessing.mixing.sampling import SourceEpochs, random_numbers, write_numbers
from preprocessing.mixing.shuffle_buckets import (
    NOT_ELIGIBLE,
    NUMBERS,
    SUFFIX,
    BucketFile,
    BucketManifest,
    Scatter,
    numbers_of,
    open_scatter,
    part_path,
    write_bucket_file,
)

_FILE_BYTES = 64 << 20  # of lines in a file that a task writes, about
_MIN_TASKS = 32  # in a level, if it has so many files: for the workers
_BATCH_DOCUMENTS = 512  # that get their random numbers in one call
_BATCH_CHARACTERS = 1 << 20  # at most that of a long text: its memory is held until the next document is read


def find_epochs(
    run: StageRun,
    weights: Mapping[str, float],
    amounts: Amounts,
    groups: Sequence[SliceGroup],
    drops: dict[tuple[str, ...], Path],
    seed: int,
    fan_in: int,
) -> tuple[dict[str, float], dict[str, SourceEpochs]]:
    """Return the weights and epochs of all sources.

    One with an amount, or a fractional weight, is read once: to measure what is kept, and to sample an exact fraction.
    """
    sources = MeasuredSources(weights, amounts)
    measured = [group for group in groups if group[0].source in sources]
    tasks = []
    for group in measured:
        output = run.work / "sampling" / f"{group[0].label}.zst"
        tokenizer: Path | None = None
        if group[0].source in amounts.of:
            tokenizer = amounts.tokenizer
        arguments = {"drops": drops[names_of(group)], "seed": seed, "tokenizer": tokenizer, "output": output}
        tasks.append(Task.on_slices(group, write_weight_numbers, arguments, (output,)))
    values = run.step("sampling", tasks).values(tuple[int, int])
    for group, task, (documents, amount) in zip(measured, tasks, values, strict=True):
        sources.add(group[0].source, task.outputs[0], documents, amount)
    return sources.choose_epochs(run, fan_in)


def write_weight_numbers(group: SliceGroup, drops: Path, seed: int, tokenizer: Path | None, output: Path) -> Result:
    """Task: write a random number for each document that is not dropped, to sample by.

    The value is how many they are, and how many bytes of text they have, or tokens if a tokenizer is given.
    """
    chunks = [np.empty(0, np.uint64)]
    amount = 0
    for batch in _read_batches(group, drops, Counts({}, []), Rejects(output)):
        numbers = random_numbers(seed, "weight", batch.part.name, batch.rows)
        chunks.append(numbers[~batch.is_dropped])
        texts = [batch.documents[number].text for number in np.flatnonzero(~batch.is_dropped).tolist()]
        if tokenizer:
            amount += _count_tokens(tokenizer, texts)
        else:
            amount += sum(map(utf8_size, texts))
        del batch, texts
    write_numbers(output, np.concatenate(chunks))
    return Result(Counts({}, []), (sum(map(len, chunks)), amount))


def _count_tokens(tokenizer: Path, texts: Sequence[str]) -> int:
    from preprocessing.tokenizer.loading import count_tokens  # here, as it imports libraries of tokenizers

    return count_tokens(tokenizer, texts)


def mix_outputs(group: SliceGroup, folder: Path, out_dir: Path) -> tuple[Path, Path]:
    """Return the bucket file of a group, and the file of its holdout numbers."""
    return folder / f"{group[0].label}{SUFFIX}", out_dir / f"{group[0].label}.holdout.zst"


def mix_task(
    group: SliceGroup, drops: Path, epochs: SourceEpochs, buckets: int, seed: int, outputs: tuple[Path, Path]
) -> Task:
    """Return the task of a group."""
    arguments = {
        "drops": drops, "epochs": epochs, "buckets": buckets, "seed": seed,
        "output": outputs[0], "holdout": outputs[1],
    }  # fmt: skip
    return Task.on_slices(group, mix_group, arguments, outputs)


def mix_group(
    group: SliceGroup, drops: Path, epochs: SourceEpochs, buckets: int, seed: int, output: Path, holdout: Path
) -> Result:
    """Task: write the bucket file of a group: each document that is not dropped, as often as its weight asks.

    With 1 bucket the rows are in no order, for `gather` to scatter. `holdout` gets the numbers to choose the holdout
    by. The value is the number of bytes of all lines.
    """
    counts = Counts({}, [])
    numbers = [np.empty(0, np.uint64)]
    with (
        write_bucket_file(output) as writer,
        open_scatter(lambda rows: partition_of(numbers_of(rows, "draw"), buckets), writer.write, output) as scatter,
    ):
        for batch in _read_batches(group, drops, counts, Rejects(output)):
            copies = _count_copies(batch, epochs, seed, counts)
            numbers += _scatter_copies(scatter, batch, copies, seed)
            del batch  # a large document is gone before its frame is written, and the next read
            scatter.write_full()
    write_numbers(holdout, np.concatenate(numbers))
    return Result(counts, sum(frame.line_bytes for frame in writer.frames))


@dataclass(frozen=True)
class _Batch:
    """Documents of a slice, their rows (n), and the reason to drop each ('' for none)."""

    part: Slice
    documents: list[Document]
    rows: NDArray[np.int64]
    reasons: list[str]

    @property
    def is_dropped(self) -> NDArray[np.bool_]:
        """Return whether each document (n) is dropped."""
        return np.array([reason != "" for reason in self.reasons], np.bool_)


def _read_batches(group: SliceGroup, drops: Path, counts: Counts, rejects: Rejects) -> Iterator[_Batch]:
    of_files = load_drops(drops, names_of(group))
    for part in group:
        in_part = read_documents(part, counts, rejects)
        for documents in batched(in_part, _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)):
            rows = np.array(rows_of(documents), np.int64)
            batch = [_Batch(part, documents, rows, of_files[part.name].reasons(rows))]
            del documents
            yield batch.pop()


def _count_copies(batch: _Batch, epochs: SourceEpochs, seed: int, counts: Counts) -> NDArray[np.int64]:
    """Return how often each document (n) of a batch is written, 0 if it is dropped; count each with its copies."""
    copies = epochs.copies(random_numbers(seed, "weight", batch.part.name, batch.rows))
    copies[batch.is_dropped] = 0
    for document, reason, times in zip(batch.documents, batch.reasons, copies.tolist(), strict=True):
        source = batch.part.source
        size = document.read_bytes
        if times:
            counts.add(source, WRITTEN, size * times, times)
        else:
            counts.add(source, reason or LEFT_OUT, size)
        if times > 1:
            counts.add(source, REPEATED, size * (times - 1), times - 1)
    return copies


def _scatter_copies(
    scatter: Scatter, batch: _Batch, copies: NDArray[np.int64], seed: int
) -> Iterator[NDArray[np.uint64]]:
    """Add copy 0, copy 1, … of the documents, with the random numbers that place each; yield the holdout numbers."""
    lines = []
    for document, times in zip(batch.documents, copies.tolist(), strict=True):
        lines.append(_line(document) if times else b"")
    sizes = np.array(read_sizes_of(batch.documents), np.int64)
    line_sizes = np.array(list(map(len, lines)), np.int64)
    for copy in range(int(copies.max(initial=0))):
        chosen = np.flatnonzero(copies > copy)
        rows = batch.rows[chosen]
        draw = random_numbers(seed, f"part {copy}", batch.part.name, rows)
        order = random_numbers(seed, f"order {copy}", batch.part.name, rows)
        holdout = random_numbers(seed, "holdout", batch.part.name, rows)
        if copy:  # only the first copy may be held out; dedup_train then drops the others from the train set
            holdout[:] = NOT_ELIGIBLE
        columns = [draw, order, holdout, sizes[chosen], [batch.part.source] * len(chosen)]
        scatter.add(pa.record_batch(columns, schema=NUMBERS), line_sizes[chosen], (lines[i] for i in chosen))
        yield holdout[holdout != NOT_ELIGIBLE]


def _line(document: Document) -> bytes:
    document.fields[KEY_FIELD] = str(document.key)
    return document.to_json()


def write_manifest(manifest: BucketManifest, path: Path) -> None:
    """Task: write pass1.json."""
    manifest.save(path)


@dataclass(frozen=True)
class GatherLevel:
    """One level: each range of `width` consecutive parts has `files` files, which tasks gather by `fan_in`."""

    width: int
    files: int
    fan_in: int
    next_width: int

    @property
    def tasks(self) -> int:
        """Return the tasks for each range, and so files of each range of the next level."""
        return math.ceil(self.files / self.fan_in)

    def divide(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of the next level in a range of this one: first part, and the one after the last."""
        starts = range(start, end, self.next_width)
        return list(pairwise([*starts, end]))

    def outputs(self, folder: Path, first: int) -> tuple[Path, ...]:
        """Return the files of the range of the next level that begins with part `first`, one of each task."""
        return tuple(part_path(folder, first, number) for number in range(self.tasks))


def plan_levels(files: int, parts: int, line_bytes: int, fan: int) -> list[GatherLevel]:
    """Return the levels that bring `files` files, with `line_bytes` of lines, to at most `fan` files for each part."""
    depth = next(depth for depth in range(1, 65) if fan**depth >= parts)
    fan_out = next(width for width in range(1, fan + 1) if width**depth >= parts)
    levels: list[GatherLevel] = []
    width = parts
    while width > 1 or files > fan or not levels:
        ranges = math.ceil(parts / width)
        next_width = math.ceil(width / fan_out)
        fan_in = _fan_in(ranges * files, line_bytes, math.ceil(width / next_width), fan)
        levels.append(GatherLevel(width, files, fan_in, next_width))
        width = next_width
        files = levels[-1].tasks
    return levels


def _fan_in(files: int, line_bytes: int, fan_out: int, fan: int) -> int:
    """Return how many files a task reads, so that files it writes have _FILE_BYTES, and that there are _MIN_TASKS."""
    expected = fan_out * _FILE_BYTES * files // max(line_bytes, 1)
    return max(2, min(fan, expected, math.ceil(files / _MIN_TASKS)))


def gather(
    run: StageRun,
    files: Sequence[Path],
    parts: int,
    line_bytes: int,
    fan: int,
    folder: Path,
    compression: int = ZSTD_LEVEL,
) -> int:
    """Run the steps of all levels; return n, the number of files that each part then has.

    Those of a part are part_path(folder, part, i) for i < n. `line_bytes` is the size of all lines.
    """
    levels = plan_levels(len(files), parts, line_bytes, fan)
    files_of_ranges = {(0, parts): tuple(files)}  # first part, and the one after the last → files
    for number, level in enumerate(levels):
        target = folder
        if number < len(levels) - 1:
            target = run.work / f"level {number + 1}"
        run.step(f"gather {number + 1}", _gather_tasks(level, files_of_ranges, parts, target, compression))
        next_files = dict[tuple[int, int], tuple[Path, ...]]()
        for start, end in files_of_ranges:
            for first, last in level.divide(start, end):
                next_files[first, last] = level.outputs(target, first)
        files_of_ranges = next_files
    return levels[-1].tasks


def _gather_tasks(
    level: GatherLevel, ranges: dict[tuple[int, int], tuple[Path, ...]], parts: int, target: Path, compression: int
) -> Iterator[Task]:
    for (start, end), files in ranges.items():
        for i in range(level.tasks):
            outputs = dict[int, Path]()
            for first, _ in level.divide(start, end):
                outputs[first] = part_path(target, first, i)
            chosen = FileSet(files[i * level.fan_in : (i + 1) * level.fan_in])
            arguments = {"files": chosen, "parts": parts, "outputs": outputs, "compression": compression}
            yield Task(f"{start}-{i}", gather_rows, arguments, tuple(outputs.values()))


def gather_rows(files: FileSet, parts: int, outputs: dict[int, Path], compression: int = ZSTD_LEVEL) -> None:
    """Task: write the rows of all files to `outputs`: each gets the parts from its key up to the next one's."""
    starts = list(outputs)
    width = parts
    if len(starts) > 1:
        width = starts[1] - starts[0]
    with ExitStack() as stack:
        writers = [stack.enter_context(write_bucket_file(path, compression)) for path in outputs.values()]
        scatter = stack.enter_context(
            open_scatter(
                lambda rows: (partition_of(numbers_of(rows, "draw"), parts) - starts[0]) // width,
                lambda bucket, rows: writers[bucket].write(0, rows),
                outputs[starts[0]],
            )
        )
        for path in files.paths:
            for rows in BucketFile.open(path).read():
                scatter.add_rows(rows)
                del rows  # large lines are gone before their frame is written, and the next read
                scatter.write_full()
