"""Stage: compute a MinHash signature of every document, in one signature shard per corpus file.

Documents → matching form → shingles → hashes → signature → shard.
"""

import sys
from pathlib import Path
from typing import Annotated

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro
from numpy.typing import NDArray
from tyro.conf import Positional

from dedup.minhash.hash_families import Hash
from dedup.minhash.matching_form import Unit
from dedup.minhash.signature_shards import SUFFIX, write_shard
from dedup.minhash.signatures import Sketch, signatures
from gristmill.batches import batched
from gristmill.command import command
from gristmill.counts import Counts
from gristmill.engine.stage import (
    STATE_DIR,
    RunOptions,
    Task,
    note_count_mismatch,
    outputs_of,
    reject_unknown_files,
    run_stage,
)
from gristmill.errors import UsageError
from gristmill.io.documents import list_source
from gristmill.io.keys import read_keys
from gristmill.io.parquet_tables import is_table
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

NAME = "to_hash"
SIGNED = "signed"
TOO_SHORT = "no shingle"  # shorter than a shingle; in SlimPajama they are all duplicates of one another
SKIPPED = "skipped"
BATCH_CHARACTERS = 4 << 20  # characters hashed together
_NO_ROWS = np.empty(0, np.int64)


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
    unit: Unit = "character",
    hash: Hash = "xxh32",
    permutations: int = 128,
    seed: int = 1,
    skip: Path | None = None,
    options: RunOptions = RunOptions(),
) -> Counts:
    """Compute the signatures of the documents in files index_start ≤ i < index_end, in name order, of a data set.

    Writes one shard per file (several for a large file) below `output_dir`. A document shorter than a
    shingle gets no signature and is never a duplicate.

    Args:
        dataset_name: Name of the data set, or all.
        input_dir: NORM/<dataset>/; or NORM/, in which dataset_name chooses one data set or all.
        output_dir: MINHASH/<dataset>/, the folder of signature shards to write; MINHASH/ for all.
        n_docs: The expected number of documents; a note is printed if it differs from the count.
        iter: SlimPajama's job number; accepted and ignored.
        index_start: Index of the first file.
        index_end: Index after the last file; may exceed the number of files.
        width: Length of a shingle in units.
        unit: The unit of shingles: character or word (datatrove's preset: --unit word -w 5 --permutations 112).
        batch: Maximum documents in a record batch of a shard.
        hash: xxh32 (datasketch 2.0's default scheme with XXH32), sha1 (datasketch 1.x: SlimPajama's values),
            sha1-affine32 (datasketch 2.0's defaults), xxh32-mersenne (datasketch 1.x with XXH32), or fss (fast
            similarity sketching: the fastest, but no other library's values).
        permutations: Number of slots of a signature.
        seed: Seed of the permutations.
        skip: Keys of documents to leave out, such as the copies that generate_exact_pairs found: a .parquet table
            (each worker reads only its file's rows) or a .pickle.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, signed, skipped and too short (no shingle), per source.
    """
    sketch = Sketch(hash, width, permutations, seed, unit)
    files = list_source(input_dir, dataset_name)
    chosen = files[index_start:index_end] if index_start >= 0 else []
    if not chosen or batch < 1:
        raise UsageError(
            f"files {index_start} to {index_end}, -k {batch}: {input_dir} has {len(files)} files, so wanted "
            f"0 ≤ index_start < index_end, index_start below {len(files)}, and batches of 1 document or more"
        )
    _check_skip(skip)
    tasks = [
        _slice_task(part, output_dir / f"{_shard_name(part.label, dataset_name)}{SUFFIX}", sketch, batch, skip)
        for file in chosen
        for part in plan_slices(file)
    ]
    reject_unknown_files(output_dir, outputs_of(tasks), (SUFFIX,), output_dir / STATE_DIR / f"{NAME}.jsonl")
    counts = run_stage(NAME, tasks, output_dir / STATE_DIR, options, stale_prefix="" if chosen == files else None)
    if chosen == files:
        note_count_mismatch(n_docs, counts, options)
    if skip is not None and not counts.total(SKIPPED).documents and not options.quiet:
        print(f"note: no document of these files is among the keys of {skip}; none was skipped", file=sys.stderr)
    return counts


def sign_slice(part: Slice, output: Path, sketch: Sketch, batch: int, skip: Path | None) -> Counts:
    """Task: write the signatures of a slice as a shard, without the documents whose keys are in `skip`."""
    counts, source = Counts({}, []), part.source
    skipped = read_keys(skip, {part.name}).get(part.name, _NO_ROWS) if skip else _NO_ROWS
    documents = read_documents(part, counts, Rejects(output))
    with write_shard(output, part.name, sketch) as shard:
        for chunk in batched(documents, batch, BATCH_CHARACTERS, lambda document: len(document.text)):
            rows = np.array([document.key.row for document in chunk], np.int64)
            is_skipped = _is_in(rows, skipped)
            texts = [document.text for document, skip_it in zip(chunk, is_skipped, strict=True) if not skip_it]
            values, shingles = signatures(texts, sketch)
            is_signed = np.zeros(len(chunk), np.bool_)
            is_signed[~is_skipped] = shingles > 0
            shard.add(rows[is_signed], values[shingles > 0])
            sizes = np.array([utf8_size(document.text) for document in chunk], np.int64)
            for reason, chosen in (
                (SIGNED, is_signed), (SKIPPED, is_skipped), (TOO_SHORT, ~is_signed & ~is_skipped)
            ):  # fmt: skip
                if chosen.any():
                    counts.add(source, reason, int(sizes[chosen].sum()), int(chosen.sum()))
    return counts


def _is_in(rows: NDArray[np.int64], ascending: NDArray[np.int64]) -> NDArray[np.bool_]:
    """For each row (n) whether the sorted array `ascending` holds it."""
    at = np.searchsorted(ascending, rows)
    found = at < len(ascending)
    found[found] = ascending[at[found]] == rows[found]
    return found


def _check_skip(skip: Path | None) -> None:
    if skip is None:
        return
    is_table(skip)
    if not skip.is_file():
        raise UsageError(f"--skip {skip}: wanted a key set, and there is no file of that name")


def _slice_task(part: Slice, output: Path, sketch: Sketch, batch: int, skip: Path | None) -> Task:
    arguments = {"part": part, "output": output, "sketch": sketch, "batch": batch, "skip": skip}
    inputs = (Path(part.path), skip) if skip else (Path(part.path),)
    return Task(part.label, sign_slice, arguments, inputs, (output,), part.size)


def _shard_name(label: str, dataset_name: str) -> str:
    """A slice's label relative to the output folder, which is the data set's unless the name is all."""
    return label if dataset_name == "all" else label.removeprefix(f"{dataset_name}/")


if __name__ == "__main__":
    command(to_hash)
