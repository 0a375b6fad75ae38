"""Tasks of the two-pass shuffle: scatter each group of slices over buckets, then shuffle and split each part."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import READ, REPEATED, WRITTEN, Counts
from gristmill.engine.slices import SliceGroup
from gristmill.engine.task import FileSet, Result
from gristmill.io.documents import KEY_FIELD, Document
from gristmill.io.external_sort import write_array
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size
from preprocessing.mixing.drops import load_drops
from preprocessing.mixing.sampling import SourceEpochs, kth_smallest, random_numbers
from preprocessing.mixing.shuffle_buckets import (
    NOT_ELIGIBLE,
    BucketDocument,
    BucketFile,
    BucketManifest,
    BucketWriter,
    read_holdout_numbers,
    write_bucket_file,
)

LEFT_OUT = "left out by weight"
HELD_OUT = "holdout"
_BATCH = 512  # documents that get their random numbers in one call


def write_weight_numbers(group: SliceGroup, drops: Path, seed: int, output: Path) -> None:
    """Task: write a random number (uint64, .npy) for each document that is not dropped, to sample by."""
    chunks = [
        random_numbers(seed, "weight", part.name, rows)[[not reason for reason in reasons]]
        for part, _, rows, reasons in _read_batches(group, drops, Counts({}, []), Rejects(output))
    ]
    write_array(output, np.concatenate([*chunks, np.empty(0, np.uint64)]))


def find_epochs(weight: float, weight_numbers: FileSet) -> Result:
    """Task: turn the weight of a source into SourceEpochs, exact for its documents.

    `weight_numbers` are the files that write_weight_numbers wrote for the source; none for a whole weight.
    """
    total = sum(len(np.load(path, mmap_mode="r")) for path in weight_numbers.paths)
    limit = kth_smallest(lambda: map(np.load, weight_numbers.paths), round(weight % 1 * total))
    return Result(Counts({}, []), SourceEpochs(int(weight), limit))


def mix_group(
    group: SliceGroup, drops: Path, epochs: SourceEpochs, parts: int, seed: int, output: Path, index: Path
) -> Counts:
    """Task: write the bucket file of a group: each document that is not dropped, as often as its weight asks."""
    counts = Counts({}, [])
    with write_bucket_file(output, index) as writer:
        for part, documents, rows, reasons in _read_batches(group, drops, counts, Rejects(output)):
            copies = epochs.copies(random_numbers(seed, "weight", part.name, rows))
            for document, reason, times in zip(documents, reasons, copies.tolist(), strict=True):
                _count(counts, part.source, utf8_size(document.text), reason, times)
            copies[[bool(reason) for reason in reasons]] = 0
            _scatter(writer, part.name, documents, rows, copies, parts, seed)
    return counts


def _read_batches(
    group: SliceGroup, drops: Path, counts: Counts, rejects: Rejects
) -> Iterator[tuple[Slice, list[Document], NDArray[np.int64], list[str]]]:
    """Batches of documents of a slice, their rows, and the reason to drop each ('' for none)."""
    of_files = load_drops(drops, files_of(group))
    for part in group:
        for documents in batched(read_documents(part, counts, rejects), _BATCH):
            rows = np.array([document.key.row for document in documents], np.int64)
            yield part, documents, rows, of_files[part.name].reasons(rows)


def files_of(group: SliceGroup) -> tuple[str, ...]:
    """The names of the files in a group, in order."""
    return tuple(dict.fromkeys(part.name for part in group))


def _count(counts: Counts, source: str, size: int, reason: str, copies: int) -> None:
    """Count a document as dropped, as left out by weight, or as written, with its repeated copies."""
    if reason or copies == 0:
        counts.add(source, reason or LEFT_OUT, size)
        return
    counts.add(source, WRITTEN, size * copies, copies)
    if copies > 1:
        counts.add(source, REPEATED, size * (copies - 1), copies - 1)


def _scatter(
    writer: BucketWriter,
    file: str,
    documents: list[Document],
    rows: NDArray[np.int64],
    copies: NDArray[np.int64],
    parts: int,
    seed: int,
) -> None:
    """Write copy 0, 1, … of each document to a random part, with a random number for its place in that part."""
    for copy in range(int(copies.max(initial=0))):
        part = partition_of(random_numbers(seed, f"part {copy}", file, rows), parts).tolist()
        order = random_numbers(seed, f"order {copy}", file, rows).tolist()
        # Only the first copy may be held out; dedup_train then drops the others from the train set.
        holdout = random_numbers(seed, "holdout", file, rows).tolist() if copy == 0 else [NOT_ELIGIBLE] * len(rows)
        for i in np.flatnonzero(copies > copy):
            document = documents[i]
            document.fields[KEY_FIELD] = str(document.key)
            size = utf8_size(document.text)
            writer.add(part[i], BucketDocument(document.to_json(), order[i], holdout[i], size))


def write_manifest(manifest: BucketManifest, path: Path) -> None:
    """Task: write pass1.json."""
    manifest.save(path)


def find_holdout_limit(indexes: FileSet, fraction: float) -> Result:
    """Task: find the largest holdout number that is held out of a source, whose buckets have these indexes; -1: none.

    Exactly `fraction` of the source's documents have a number up to it, and at least one of a source with two or more
    (unless `fraction` is 0).
    """
    total = sum(int((numbers != NOT_ELIGIBLE).sum()) for numbers in map(read_holdout_numbers, indexes.paths))
    count = max(round(fraction * total), 1 if total > 1 and fraction > 0 else 0)
    limit = kth_smallest(lambda: map(read_holdout_numbers, indexes.paths), count)
    return Result(Counts({}, []), -1 if limit is None else limit)


def split_part(
    part: int,
    manifest: Path,
    bucket_files: FileSet,
    indexes: FileSet,
    limits: dict[str, int],
    train: Path,
    holdout: Path,
) -> Counts:
    """Task: shuffle one part: sort its documents from all bucket files, and write each to train or to holdout.

    The files are those that the manifest names, in its order; `limits` are of find_holdout_limit, by source.
    """
    counts = Counts({}, [])
    sources = BucketManifest.load(manifest).bucket_files.values()
    found = [
        (source, document)
        for source, path, index in zip(sources, bucket_files.paths, indexes.paths, strict=True)
        for document in BucketFile.open(path, index).read_part(part)
    ]
    found.sort(key=lambda item: (item[1].order, item[0], item[1].line))
    with open_jsonl_writer(train) as train_lines, open_jsonl_writer(holdout) as holdout_lines:
        for source, document in found:
            is_held_out = document.holdout != NOT_ELIGIBLE and document.holdout <= limits[source]
            (holdout_lines if is_held_out else train_lines).write(document.line)
            counts.add(source, READ, document.size)
            counts.add(source, HELD_OUT if is_held_out else WRITTEN, document.size)
    return counts
