"""Tasks of the two-pass shuffle: scatter each slice of the corpus over buckets, then shuffle and split each part."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.batches import batched, partition_of
from gristmill.counts import READ, REPEATED, WRITTEN, Counts
from gristmill.io.documents import KEY_FIELD, Document
from gristmill.io.files import atomic_write
from gristmill.io.readers import Slice, read_documents
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size
from preprocessing.mixing.drops import Drops
from preprocessing.mixing.sampling import SourceEpochs, kth_smallest, random_numbers
from preprocessing.mixing.shuffle_buckets import (
    NOT_ELIGIBLE,
    BucketDocument,
    BucketFile,
    BucketManifest,
    BucketWriter,
    write_bucket_file,
)

LEFT_OUT = "left out by weight"
HELD_OUT = "holdout"
_BATCH = 512  # documents that get their random numbers in one call


def write_weight_numbers(corpus_slice: Slice, drops: Path, seed: int, output: Path) -> Counts:
    """Write a random number (uint64, .npy) for each document that is not dropped: fractional weights sample by it."""
    chunks = [
        random_numbers(seed, "weight", corpus_slice.name, rows)[[not reason for reason in reasons]]
        for _, rows, reasons in _read_batches(corpus_slice, drops, Counts({}, []), Rejects(output))
    ]
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        np.save(file, np.concatenate([*chunks, np.empty(0, np.uint64)]))
    return Counts({}, [])


def source_epochs(weight: float, weight_numbers: list[Path]) -> SourceEpochs:
    """Turn the weight of a source into whole epochs and an exact fraction of its documents.

    `weight_numbers` are the files that write_weight_numbers wrote for the slices of the source; they may be
    left out for a whole weight.
    """
    total = sum(len(np.load(path, mmap_mode="r")) for path in weight_numbers)
    limit = kth_smallest(lambda: (np.load(path) for path in weight_numbers), round(weight % 1 * total))
    return SourceEpochs(int(weight), limit)


def mix_slice(corpus_slice: Slice, drops: Path, epochs: SourceEpochs, parts: int, seed: int, output: Path) -> Counts:
    """Write the bucket file of one slice: each document that is not dropped, as often as its weight asks."""
    counts = Counts({}, [])
    with write_bucket_file(output) as writer:
        for documents, rows, reasons in _read_batches(corpus_slice, drops, counts, Rejects(output)):
            copies = epochs.copies(random_numbers(seed, "weight", corpus_slice.name, rows))
            for document, reason, times in zip(documents, reasons, copies.tolist(), strict=True):
                _count(counts, corpus_slice.source, utf8_size(document.text), reason, times)
            copies[[bool(reason) for reason in reasons]] = 0
            _scatter(writer, corpus_slice.name, documents, rows, copies, parts, seed)
    return counts


def _read_batches(
    corpus_slice: Slice, drops: Path, counts: Counts, rejects: Rejects
) -> Iterator[tuple[list[Document], NDArray[np.int64], list[str]]]:
    """Batches of documents, their rows, and the reason to drop each ('' for none)."""
    loaded = Drops.load(drops)
    for documents in batched(read_documents(corpus_slice, counts, rejects), _BATCH):
        rows = np.array([document.key.row for document in documents], np.int64)
        yield documents, rows, loaded.reasons(rows)


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


def write_manifest(manifest: BucketManifest, folder: Path) -> Counts:
    """Write pass1.json."""
    manifest.save(folder)
    return Counts({}, [])


def holdout_limits(folder: Path, manifest: BucketManifest, fraction: float) -> dict[str, int]:
    """Limit of each source: documents whose holdout number is at most the limit are held out.

    These are exactly `fraction` of the source's documents, and at least one of a source with two or more
    (unless `fraction` is 0). A source without held-out documents is left out.
    """
    by_source: dict[str, list[BucketFile]] = {}
    for name, source in manifest.bucket_files.items():
        by_source.setdefault(source, []).append(BucketFile.open(folder / name))
    limits = {}
    for source, files in by_source.items():
        total = sum(int((file.holdout != NOT_ELIGIBLE).sum()) for file in files)
        count = max(round(fraction * total), 1 if total > 1 and fraction > 0 else 0)
        limit = kth_smallest(lambda files=files: (file.holdout for file in files), count)  # type: ignore[misc]
        if limit is not None:
            limits[source] = limit
    return limits


def split_part(part: int, input_dir: Path, limits: dict[str, int], train: Path, holdout: Path) -> Counts:
    """Shuffle one part: sort its documents from all bucket files, and write each to train or to holdout."""
    counts = Counts({}, [])
    found = [
        (source, document)
        for name, source in BucketManifest.load(input_dir).bucket_files.items()
        for document in BucketFile.open(input_dir / name).read_part(part)
    ]
    found.sort(key=lambda item: (item[1].order, item[0], item[1].line))
    with open_jsonl_writer(train) as train_lines, open_jsonl_writer(holdout) as holdout_lines:
        for source, document in found:
            is_held_out = document.holdout != NOT_ELIGIBLE and document.holdout <= limits.get(source, -1)
            (holdout_lines if is_held_out else train_lines).write(document.line)
            counts.add(source, READ, document.size)
            counts.add(source, HELD_OUT if is_held_out else WRITTEN, document.size)
    return counts
