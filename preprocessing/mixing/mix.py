"""Tasks of pass 1: sample the documents of a group of slices, and write each to a random bucket."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import REPEATED, WRITTEN, Counts
from gristmill.engine.run import StageRun
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import Result, Task
from gristmill.io.documents import KEY_FIELD, Document
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size
from preprocessing.mixing.drops import KeptRows, load_drops
from preprocessing.mixing.manifest import BucketManifest
from preprocessing.mixing.sampling import SourceEpochs, random_numbers
from preprocessing.mixing.selection import select_kth, write_numbers
from preprocessing.mixing.shuffle_buckets import (
    NOT_ELIGIBLE,
    NUMBERS,
    SUFFIX,
    Scatter,
    numbers_of,
    open_scatter,
    write_bucket_file,
)

LEFT_OUT = "left out by weight"
_BATCH_DOCUMENTS = 512  # that get their random numbers in one call
_BATCH_CHARACTERS = 1 << 20  # at most that of a long text: its memory is held until the next document is read


def find_epochs(
    run: StageRun,
    weights: dict[str, float],
    groups: Sequence[SliceGroup],
    drops: dict[tuple[str, ...], Path],
    seed: int,
    fan_in: int,
) -> dict[str, SourceEpochs]:
    """Turn weights into epochs; sources with a fractional weight are read once to sample an exact fraction."""
    numbers: dict[str, list[Path]] = {source: [] for source, weight in weights.items() if weight % 1}
    tasks, totals = [], dict.fromkeys(numbers, 0)
    sampled = [group for group in groups if group[0].source in numbers]
    for group in sampled:
        output = run.work / "sampling" / f"{group[0].label}.zst"
        arguments = {"group": group, "drops": drops[files_of(group)], "seed": seed, "output": output}
        tasks.append(Task(group[0].label, write_weight_numbers, arguments, (output,), _bytes(group)))
        numbers[group[0].source].append(output)
    for group, total in zip(sampled, run.step("sampling", tasks).values(int), strict=True):
        totals[group[0].source] += total
    ranks = {source: round(weights[source] % 1 * total) for source, total in totals.items()}
    limits = select_kth(run, "epochs", numbers, ranks, fan_in)
    return {source: SourceEpochs(int(weight), limits.get(source)) for source, weight in weights.items()}


def write_weight_numbers(group: SliceGroup, drops: Path, seed: int, output: Path) -> Result:
    """Task: write a random number for each document that is not dropped, to sample by; return how many."""
    chunks = [np.empty(0, np.uint64)]
    for batch in _read_batches(group, drops, Counts({}, []), Rejects(output), end_row=0):
        numbers = random_numbers(seed, "weight", batch.part.name, batch.rows)
        chunks.append(numbers[[not reason for reason in batch.reasons]])
        del batch
    write_numbers(output, np.concatenate(chunks))
    return Result(Counts({}, []), sum(map(len, chunks)))


def mix_outputs(group: SliceGroup, folder: Path, out_dir: Path) -> tuple[Path, Path]:
    """The bucket file of a group, and the file of its holdout numbers."""
    return folder / f"{group[0].label}{SUFFIX}", out_dir / f"{group[0].label}.holdout.zst"


def mix_task(
    group: SliceGroup,
    end_row: int | None,
    drops: Path,
    epochs: SourceEpochs,
    buckets: int,
    seed: int,
    outputs: tuple[Path, Path],
) -> Task:
    """The task of a group; `end_row` is the row after its last if that is not the last of its file."""
    arguments = {
        "group": group, "end_row": end_row, "drops": drops, "epochs": epochs, "buckets": buckets, "seed": seed,
        "output": outputs[0], "holdout": outputs[1],
    }  # fmt: skip
    return Task(group[0].label, mix_group, arguments, outputs, _bytes(group))


def mix_group(
    group: SliceGroup,
    end_row: int | None,
    drops: Path,
    epochs: SourceEpochs,
    buckets: int,
    seed: int,
    output: Path,
    holdout: Path,
) -> Result:
    """Task: write the bucket file of a group: each document that is not dropped, as often as its weight asks.

    With 1 bucket the rows are in no order, for gather.py to scatter. `holdout` gets the numbers to choose the holdout
    by. The value is the number of bytes of all lines. Raises InputError if a document of which others are copies is
    not there.
    """
    counts, numbers = Counts({}, []), [np.empty(0, np.uint64)]
    with (
        write_bucket_file(output) as writer,
        open_scatter(lambda rows: partition_of(numbers_of(rows, "draw"), buckets), writer.write, output) as scatter,
    ):
        for batch in _read_batches(group, drops, counts, Rejects(output), end_row):
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


def _read_batches(
    group: SliceGroup, drops: Path, counts: Counts, rejects: Rejects, end_row: int | None
) -> Iterator[_Batch]:
    """Yield the documents of a group; see KeptRows for `end_row`, with 0 nothing is checked."""
    of_files = load_drops(drops, files_of(group))
    for part in group:
        found, kept = read_documents(part, counts, rejects), KeptRows(part, of_files[part.name].kept, end_row)
        for documents in batched(found, _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)):
            rows = np.array([document.key.row for document in documents], np.int64)
            kept.see(rows)
            batch = [_Batch(part, documents, rows, of_files[part.name].reasons(rows))]
            del documents
            yield batch.pop()
        kept.end()


def files_of(group: SliceGroup) -> tuple[str, ...]:
    """The names of the files in a group, in order."""
    return tuple(dict.fromkeys(part.name for part in group))


def _count_copies(batch: _Batch, epochs: SourceEpochs, seed: int, counts: Counts) -> NDArray[np.int64]:
    """How often each document (n) of a batch is written: 0 if it is dropped. Each is counted with its copies."""
    copies = epochs.copies(random_numbers(seed, "weight", batch.part.name, batch.rows))
    for document, reason, times in zip(batch.documents, batch.reasons, copies.tolist(), strict=True):
        _count(counts, batch.part.source, utf8_size(document.text), reason, times)
    copies[[bool(reason) for reason in batch.reasons]] = 0
    return copies


def _count(counts: Counts, source: str, size: int, reason: str, copies: int) -> None:
    """Count a document as dropped, as left out by weight, or as written, with its repeated copies."""
    if reason or copies == 0:
        counts.add(source, reason or LEFT_OUT, size)
        return
    counts.add(source, WRITTEN, size * copies, copies)
    if copies > 1:
        counts.add(source, REPEATED, size * (copies - 1), copies - 1)


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


def _bytes(group: SliceGroup) -> int:
    return sum(part.size for part in group)
