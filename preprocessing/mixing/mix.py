"""Tasks of pass 1: sample the documents of a group of slices, write each to a random bucket, and gather the parts.

To read each part's rows from each of many bucket files would be work that grows with the square of the corpus. So they
are gathered in levels that each read every file once: a task reads up to `fan` whole files and writes one for each of
up to `fan` ranges of parts; the next level does so for each range, until a range is one part, whose rows are in few
files.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import LEFT_OUT, REPEATED, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import UsageError
from gristmill.io.documents import KEY_FIELD, Document
from gristmill.io.readers import Rejects, Slice, read_documents
from gristmill.io.writers import ZSTD_LEVEL
from gristmill.text import utf8_size
from preprocessing.mixing.drops import load_drops
from preprocessing.mixing.sampling import SourceEpochs, random_numbers, select_kth, write_numbers
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

MAX_WEIGHT = 1_000  # epochs: far above any use, and low enough that a slip of the keyboard does not fill a disk
_FILE_BYTES = 64 << 20  # of lines in a file that a task writes, about
_MIN_TASKS = 32  # in a level, if it has so many files: for the workers
_BATCH_DOCUMENTS = 512  # that get their random numbers in one call
_BATCH_CHARACTERS = 1 << 20  # at most that of a long text: its memory is held until the next document is read


@dataclass(frozen=True)
class Amounts:
    """How much of each source the mix asks for: bytes of text or, with a tokenizer, tokens. Others have a weight."""

    of: Mapping[str, float] = field(default_factory=dict)
    tokenizer: Path | None = None

    @property
    def unit(self) -> str:
        return "tokens" if self.tokenizer else "bytes"

    def weight(self, source: str, kept: int) -> float:
        """Epochs of a source that has `kept` of the unit. Raises UsageError for more than MAX_WEIGHT."""
        asked = self.of[source]
        most = kept * MAX_WEIGHT
        if asked <= most:
            return asked / kept
        raise UsageError(
            f"--{self.unit} {source}={asked:g}: expected at most {most:,}, {MAX_WEIGHT:,} times the {kept:,} that are "
            f"left without short documents and duplicates; try {'less' if kept else 'to leave out this source'}"
        )


def find_epochs(
    run: StageRun,
    weights: Mapping[str, float],
    amounts: Amounts,
    groups: Sequence[SliceGroup],
    drops: dict[tuple[str, ...], Path],
    seed: int,
    fan_in: int,
) -> tuple[dict[str, float], dict[str, SourceEpochs]]:
    """The weights and epochs of all sources.

    One with an amount, or a fractional weight, is read once: to measure what is kept, and to sample an exact fraction.
    """
    sampled_sources = {source for source, weight in weights.items() if weight % 1} | amounts.of.keys()
    numbers: dict[str, list[Path]] = {source: [] for source in weights if source in sampled_sources}
    tasks = []
    documents = dict.fromkeys(numbers, 0)
    sizes = dict.fromkeys(numbers, 0)
    sampled = [group for group in groups if group[0].source in numbers]
    for group in sampled:
        output = run.work / "sampling" / f"{group[0].label}.zst"
        source = group[0].source
        tokenizer = amounts.tokenizer if source in amounts.of else None
        arguments = {"drops": drops[files_of(group)], "seed": seed, "tokenizer": tokenizer, "output": output}
        tasks.append(Task.on_slices(group, write_weight_numbers, arguments, (output,)))
        numbers[source].append(output)
    measured = run.step("sampling", tasks).values(tuple[int, int])
    for group, (number, size) in zip(sampled, measured, strict=True):
        documents[group[0].source] += number
        sizes[group[0].source] += size
    weights = {**weights, **{source: amounts.weight(source, sizes[source]) for source in amounts.of}}
    ranks = {source: round(weights[source] % 1 * total) for source, total in documents.items()}
    limits = select_kth(run, "epochs", numbers, ranks, fan_in)
    return weights, {source: SourceEpochs(int(weight), limits.get(source)) for source, weight in weights.items()}


def write_weight_numbers(group: SliceGroup, drops: Path, seed: int, tokenizer: Path | None, output: Path) -> Result:
    """Task: write a random number for each document that is not dropped, to sample by.

    The value is how many they are, and how many bytes of text they have, or tokens if a tokenizer is given.
    """
    chunks = [np.empty(0, np.uint64)]
    size = 0
    for batch in _read_batches(group, drops, Counts({}, []), Rejects(output)):
        numbers = random_numbers(seed, "weight", batch.part.name, batch.rows)
        chunks.append(numbers[[not reason for reason in batch.reasons]])
        kept = [it.text for it, reason in zip(batch.documents, batch.reasons, strict=True) if not reason]
        size += _count_tokens(tokenizer, kept) if tokenizer else sum(map(utf8_size, kept))
        del batch, kept
    write_numbers(output, np.concatenate(chunks))
    return Result(Counts({}, []), (sum(map(len, chunks)), size))


def _count_tokens(tokenizer: Path, texts: Sequence[str]) -> int:
    from preprocessing.tokenizer.loading import count_tokens  # here, as it imports libraries of tokenizers

    return count_tokens(tokenizer, texts)


def mix_outputs(group: SliceGroup, folder: Path, out_dir: Path) -> tuple[Path, Path]:
    """The bucket file of a group, and the file of its holdout numbers."""
    return folder / f"{group[0].label}{SUFFIX}", out_dir / f"{group[0].label}.holdout.zst"


def mix_task(
    group: SliceGroup, drops: Path, epochs: SourceEpochs, buckets: int, seed: int, outputs: tuple[Path, Path]
) -> Task:
    """The task of a group."""
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


def _read_batches(group: SliceGroup, drops: Path, counts: Counts, rejects: Rejects) -> Iterator[_Batch]:
    of_files = load_drops(drops, files_of(group))
    for part in group:
        found = read_documents(part, counts, rejects)
        for documents in batched(found, _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)):
            rows = np.array([document.key.row for document in documents], np.int64)
            batch = [_Batch(part, documents, rows, of_files[part.name].reasons(rows))]
            del documents
            yield batch.pop()


def files_of(group: SliceGroup) -> tuple[str, ...]:
    """The names of the files in a group, in order."""
    return tuple(dict.fromkeys(part.name for part in group))


def _count_copies(batch: _Batch, epochs: SourceEpochs, seed: int, counts: Counts) -> NDArray[np.int64]:
    """How often each document (n) of a batch is written: 0 if it is dropped. Each is counted with its copies."""
    copies = epochs.copies(random_numbers(seed, "weight", batch.part.name, batch.rows))
    copies[[bool(reason) for reason in batch.reasons]] = 0
    for document, reason, times in zip(batch.documents, batch.reasons, copies.tolist(), strict=True):
        source = batch.part.source
        size = utf8_size(document.text)
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
    found = zip(batch.documents, copies.tolist(), strict=True)
    lines = [_line(document) if times else b"" for document, times in found]
    sizes = np.array([utf8_size(document.text) for document in batch.documents], np.int64)
    line_sizes = np.array([len(line) for line in lines], np.int64)
    for copy in range(int(copies.max(initial=0))):
        chosen = np.flatnonzero(copies > copy)
        draw, order, holdout = (
            random_numbers(seed, purpose, batch.part.name, batch.rows[chosen])
            for purpose in (f"part {copy}", f"order {copy}", "holdout")
        )
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
        """Tasks for each range, and so files of each range of the next level."""
        return math.ceil(self.files / self.fan_in)

    def divide(self, start: int, end: int) -> list[tuple[int, int]]:
        """The ranges of the next level in a range of this one: first part, and the one after the last."""
        return [(first, min(first + self.next_width, end)) for first in range(start, end, self.next_width)]


def plan_levels(files: int, parts: int, line_bytes: int, fan: int) -> list[GatherLevel]:
    """The levels that bring `files` files, with `line_bytes` of lines, to at most `fan` files for each part."""
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
    """Files that a task reads: so many that those it writes are of _FILE_BYTES, and that there are _MIN_TASKS."""
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
    ranges = {(0, parts): tuple(files)}  # first part, and the one after the last → files
    for number, level in enumerate(levels):
        target = folder if number == len(levels) - 1 else run.work / f"level {number + 1}"
        run.step(f"gather {number + 1}", _gather_tasks(level, ranges, parts, target, compression))
        ranges = {
            found: tuple(part_path(target, found[0], i) for i in range(level.tasks))
            for whole in ranges
            for found in level.divide(*whole)
        }
    return levels[-1].tasks


def _gather_tasks(
    level: GatherLevel, ranges: dict[tuple[int, int], tuple[Path, ...]], parts: int, target: Path, compression: int
) -> Iterator[Task]:
    for (start, end), files in ranges.items():
        for i in range(level.tasks):
            outputs = {first: part_path(target, first, i) for first, _ in level.divide(start, end)}
            found = FileSet(files[i * level.fan_in : (i + 1) * level.fan_in])
            arguments = {"files": found, "parts": parts, "outputs": outputs, "compression": compression}
            yield Task(f"{start}-{i}", gather_rows, arguments, tuple(outputs.values()))


def gather_rows(files: FileSet, parts: int, outputs: dict[int, Path], compression: int = ZSTD_LEVEL) -> None:
    """Task: write the rows of all files to `outputs`: each gets the parts from its key up to the next one's."""
    starts = list(outputs)
    width = starts[1] - starts[0] if len(starts) > 1 else parts
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
