"""Stage: a MinHash signature for every document, in shards beside one another."""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro
from tyro.conf import Positional

from dedup.minhash import Hash, Sketch, signatures
from dedup.shards import SUFFIX, write_shard
from pipeline.command import command
from pipeline.documents import Document, list_source
from pipeline.errors import UsageError
from pipeline.ledger import Counts
from pipeline.reading import Slice, plan_slices, read_documents
from pipeline.stage import STATE, How, Options, Task, note_count, outputs_of, refuse_strangers, run_stage
from pipeline.text import utf8_size
from pipeline.writing import Rejects

NAME = "to_hash"
SIGNED = "signed"
TOO_SHORT = "no shingle"  # documents that are shorter than one: SlimPajama took them all for one another's copies
BATCH_CHARACTERS = 4 << 20


def to_hash(
    dataset_name: Positional[str],
    input_dir: Positional[Path],
    output_dir: Positional[Path],
    n_docs: Positional[int],
    iter: Positional[str],  # noqa: ARG001
    index_start: Positional[int],
    index_end: Positional[int],
    width: Annotated[int, tyro.conf.arg(aliases=["-w"])] = 13,
    batch: Annotated[int, tyro.conf.arg(aliases=["-k"])] = 10_000,
    hash: Hash = "xxh32",
    permutations: int = 128,
    seed: int = 1,
    how: Options = How(),
) -> Counts:
    """Sign every document of the files index_start ≤ i < index_end of a data set, in name order.

    Writes one shard a file (several for a large one) below `output_dir`. A document shorter than
    one shingle gets no signature, and is nobody's duplicate.

    Args:
        dataset_name: The data set, or all.
        input_dir: NORM/<dataset>/, or NORM/ with any data set in it or all.
        output_dir: MINHASH/<dataset>/.
        n_docs: Not needed, as documents are counted; a number that differs is pointed out.
        iter: Accepted and ignored: SlimPajama's job number; ours need none to keep apart.
        index_start: The first file to sign.
        index_end: The first file not to sign; past the end means all.
        width: Characters of a shingle.
        batch: Documents of a batch within a shard.
        hash: xxh32 (fast; datasketch 2.0's default scheme with XXH32) or sha1 (SlimPajama's values).
        permutations: Slots of a signature.
        seed: Seed of the permutations.
        how: How to run.

    Returns:
        Documents read, signed and too short to sign, per source.
    """
    sketch = Sketch(hash, width, permutations, seed)
    files = list_source(input_dir, dataset_name)
    chosen = files[index_start:index_end] if index_start >= 0 else []
    if not chosen or batch < 1:
        raise UsageError(
            f"files {index_start} to {index_end}, -k {batch}: {input_dir} has {len(files)} files, so wanted "
            f"0 ≤ index_start < index_end, index_start below {len(files)}, and batches of 1 document or more"
        )
    tasks = [
        _slice_task(part, output_dir / f"{_below(part.label, dataset_name)}{SUFFIX}", sketch, batch)
        for file in chosen
        for part in plan_slices(file)
    ]
    refuse_strangers(output_dir, outputs_of(tasks), (SUFFIX,), output_dir / STATE / f"{NAME}.jsonl")
    counts = run_stage(NAME, tasks, output_dir / STATE, how, scope="" if chosen == files else None)
    if chosen == files:
        note_count(n_docs, counts, how)
    return counts


def sign_slice(part: Slice, output: Path, sketch: Sketch, batch: int) -> Counts:
    """Write the signatures of one slice."""
    counts = Counts({}, [])
    documents = read_documents(part, counts, Rejects(output))
    with write_shard(output, part.name, sketch) as shard:
        for some in _batches(documents, batch):
            values, shingles = signatures([document.text for document in some], sketch)
            for document, count in zip(some, shingles, strict=True):
                counts.add(part.source, SIGNED if count else TOO_SHORT, utf8_size(document.text))
            signed = shingles > 0
            rows = [document.key.row for document, has in zip(some, signed, strict=True) if has]
            shard.add(rows, values[signed])
    return counts


def _batches(documents: Iterable[Document], most: int) -> Iterator[list[Document]]:
    """Lists of at most `most` documents and about BATCH_CHARACTERS characters."""
    documents = iter(documents)
    while some := list(islice(documents, 1)):
        size = len(some[0].text)
        while len(some) < most and size < BATCH_CHARACTERS and (document := next(documents, None)):
            some.append(document)
            size += len(document.text)
        yield some


def _slice_task(part: Slice, output: Path, sketch: Sketch, batch: int) -> Task:
    arguments = {"part": part, "output": output, "sketch": sketch, "batch": batch}
    return Task(part.label, sign_slice, arguments, (Path(part.path),), (output,), part.size)


def _below(label: str, dataset_name: str) -> str:
    """The label as it is named below the output folder, which is the data set's own unless it is for all."""
    return label if dataset_name == "all" else label.removeprefix(f"{dataset_name}/")


if __name__ == "__main__":
    command(to_hash)
