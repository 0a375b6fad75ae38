"""Stage: find exact duplicates, documents whose text or matching form equals that of an earlier one.

Documents → text digests, partitioned by range → sorted, equal digests are copies → lines of keys and a table.
"""

import shutil
import sys
import time
from pathlib import Path
from typing import get_args

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
import pyarrow as pa

from dedup.candidates.exact_join import BLOCK, COPY, COPY_RECORD, FIRST, join_digest_ranges, merge_copies
from dedup.candidates.input_shards import Scope
from dedup.candidates.text_digests import DIGESTED, EMPTY, PARTS, MatchOn, digest_slice
from gristmill.command import command
from gristmill.counts import READ, Counts
from gristmill.engine.ledger import Ledger
from gristmill.engine.stage import (
    STATE_DIR,
    MemoryBudget,
    RunOptions,
    Task,
    is_done,
    outputs_of,
    reject_overlapping_folders,
    run_stage,
)
from gristmill.errors import UsageError
from gristmill.io.documents import list_corpus
from gristmill.io.external_sort import read_records
from gristmill.io.files import atomic_write
from gristmill.io.parquet_tables import open_table_writer
from gristmill.io.readers import Slice, plan_slices

NAME = "generate_exact_pairs"
UNIQUE = "unique"
_SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64(), "kept_file": pa.string(), "kept_row": pa.int64()})
_SORT_FACTOR = 8  # memory per byte of records while they are sorted
_MAX_SORTED = 256 << 20  # bytes sorted by one task under any budget: more tasks are more parallel


def generate_exact_pairs(
    input_dir: Path,
    out_file: Path,
    on: MatchOn = "matching_form",
    scope: Scope = "global",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write every exact copy with the document it repeats, a line `<key> :: <key>` each, in key order.

    Of a group of equal documents the first in key order is kept; the others are copies. A table of the same
    name (.parquet) has the same pairs: to_hash --skip takes it, so that copies get no signature. A document
    whose matching form is empty is never a copy.

    Args:
        input_dir: NORM/, the corpus, a folder of sources.
        out_file: DUP/duplicate_pairs_exact.txt; generate_connected_components reads duplicate_pairs*.txt.
        on: Compare the matching_form (lower case, no punctuation, single spaces) or the text's bytes.
        scope: per-source compares documents only with documents of their own source.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, copies and unique documents (including the first of each group), per source.
    """
    _check(input_dir, out_file, on, scope)
    slices = [part for file in list_corpus(input_dir) for part in plan_slices(file)]
    state, name = out_file.parent / STATE_DIR, f"{NAME}-{out_file.name}"
    work = state / f"{name}-{on}-{scope}"  # so that the last task's fingerprint depends on both
    inputs = tuple(dict.fromkeys(Path(part.path) for part in slices))
    final = Task("write", write_pairs, {"slices": slices, "work": work, "out_file": out_file},
                 inputs, (out_file, out_file.with_suffix(".parquet")))  # fmt: skip
    if is_done(final, Ledger(state / f"{name}.jsonl").read(), final.fingerprint()):
        return run_stage(name, [final], state, options)
    start = time.perf_counter()
    found = _find_copies(slices, on, scope, work, options)
    counts = run_stage(name, [final], state, options, summary=False)
    shutil.rmtree(work, ignore_errors=True)
    if not options.quiet:
        print(_summary(counts, found.total(FIRST).documents, time.perf_counter() - start), file=sys.stderr)
    return counts


def _find_copies(slices: list[Slice], on: MatchOn, scope: Scope, work: Path, options: RunOptions) -> Counts:
    """Run the tasks that write the sorted copies to work/copies.bin; return the counts of the join."""
    digested = [work / "digests" / f"{number:06}.bin" for number, _ in enumerate(slices)]
    digest = [
        Task(f"digests {path.stem}", digest_slice, {"part": part, "on": on, "scope": scope, "output": path},
             (Path(part.path),), (path, path.with_suffix(".npy")), part.size)
        for part, path in zip(slices, digested, strict=True)
    ]  # fmt: skip
    counts = run_stage(f"{NAME}-digests", digest, work, options)
    share = MemoryBudget(options.memory_bytes // options.processes)
    parts = _count_parts(digested, share)
    join = [
        Task(f"copies {parts:04}-{part:04}", join_digest_ranges,
             {"digested": digested, "slices": slices, "first": PARTS * part // parts,
              "stop": PARTS * (part + 1) // parts, "memory": share, "output": path},
             tuple(digested), (path,))
        for part in np.arange(parts).tolist()
        for path in [work / "copies" / f"{parts:04}-{part:04}.bin"]
    ]  # fmt: skip
    found = run_stage("copies", join, work, options, summary=False)
    output, sources = work / "copies.bin", tuple(outputs_of(join))
    memory = MemoryBudget(options.memory_bytes)
    arguments = {"found": list(sources), "counts": _join_counts(counts, found), "memory": memory, "output": output}
    merge = Task("gather", merge_copies, arguments, sources, (output, output.with_suffix(".json")))
    run_stage("gather", [merge], work, options, summary=False)
    return found


def _count_parts(digested: list[Path], share: int) -> int:
    """Number of join tasks to divide the digest ranges among, a power of two: each sorts within `share` bytes."""
    size = sum(path.stat().st_size for path in digested) * _SORT_FACTOR
    return min(PARTS, 1 << (size // max(1, min(share, _MAX_SORTED))).bit_length())


def write_pairs(slices: list[Slice], work: Path, out_file: Path) -> Counts:
    """Task: write the sorted copies as lines of keys and as a table."""
    files = list(dict.fromkeys(part.name for part in slices))
    values = pa.array(files, pa.string())
    with (
        atomic_write(out_file) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as lines,
        open_table_writer(out_file.with_suffix(".parquet"), _SCHEMA) as write,
    ):
        for block in read_records(work / "copies.bin", COPY_RECORD, BLOCK):
            lines.writelines(f"{files[a]}@{i} :: {files[b]}@{j}\n" for a, b, i, j in block.tolist())
            columns = {name: pa.array(block[name].astype(np.int64)) for name in _SCHEMA.names}
            write({name: values.take(column) if "file" in name else column for name, column in columns.items()})
    return msgspec.json.decode((work / "copies.json").read_bytes(), type=Counts)


def _join_counts(digested: Counts, joined: Counts) -> Counts:
    """Counts per source, with read = copies + unique + malformed."""
    counts = Counts({}, digested.examples)
    for source, reason, tally in digested.rows():
        counts.add(source, UNIQUE if reason in (DIGESTED, EMPTY) else reason, tally.bytes, tally.documents)
    for source, reason, tally in joined.rows():
        if reason == COPY:
            counts.add(source, UNIQUE, -tally.bytes, -tally.documents)
            counts.add(source, COPY, tally.bytes, tally.documents)
    return counts


def _summary(counts: Counts, groups: int, seconds: float) -> str:
    read, copies = counts.total(READ), counts.total(COPY)
    return (
        f"{NAME}: {groups:,} groups, {copies.documents:,} copies: {copies.bytes / 1e6:,.1f} of "
        f"{read.bytes / 1e6:,.1f} MB need no signature | {seconds:.1f} s ({read.bytes / 1e6 / seconds:,.1f} MB/s)"
    )


def _check(input_dir: Path, out_file: Path, on: str, scope: str) -> None:
    if on not in get_args(MatchOn) or scope not in get_args(Scope):
        raise UsageError(
            f"--on {on} --scope {scope}: wanted {' or '.join(get_args(MatchOn))}, and {' or '.join(get_args(Scope))}"
        )
    if not (out_file.name.startswith("duplicate_pairs") and out_file.suffix == ".txt"):
        raise UsageError(
            f"--out_file {out_file}: wanted a name such as duplicate_pairs_exact.txt, "
            "as generate_connected_components reads duplicate_pairs*.txt"
        )
    reject_overlapping_folders(input_dir, out_file.parent)


if __name__ == "__main__":
    command(generate_exact_pairs)
