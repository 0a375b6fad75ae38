"""Stage: exact duplicates, the documents whose text, or its matching form, is another's; cheaper than signatures."""

import shutil
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal, get_args

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from dedup.candidates.exact_duplicates import (
    COPY,
    FIRST,
    PARTS,
    PLACED,
    RECORD,
    Books,
    On,
    by_range,
    digests,
    find_copies,
    read_range,
)
from gristmill.batches import batched
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
from gristmill.io.external_sort import ExternalSorter, read_records, write_records
from gristmill.io.files import atomic_write, atomic_write_bytes
from gristmill.io.keys import open_table
from gristmill.io.readers import Slice, plan_slices, read_documents
from gristmill.io.writers import Rejects
from gristmill.text import utf8_size

NAME = "generate_exact_pairs"
UNIQUE = "unique"
_DIGESTED, _EMPTY = "digested", "nothing to compare"  # what documents are before they are compared
COPIES = np.dtype([("file", "<u4"), ("kept_file", "<u4"), ("row", "<u8"), ("kept_row", "<u8")])
_SCHEMA = pa.schema({"file": pa.string(), "row": pa.int64(), "kept_file": pa.string(), "kept_row": pa.int64()})
_BATCH_CHARACTERS, _BATCH_DOCUMENTS = 4 << 20, 4096  # digested at a time
_CHUNK = 1 << 18  # records written at a time
_BLOCK = 1 << 16  # records read at a time
_SORTING = 8  # bytes of memory a byte of records takes while they are sorted
_MOST = 256 << 20  # bytes sorted at once, however large the budget: more ranges are more parallel

Scope = Literal["global", "per-source"]


def generate_exact_pairs(
    input_dir: Path,
    out_file: Path,
    on: On = "matching_form",
    scope: Scope = "global",
    options: RunOptions = RunOptions(),
) -> Counts:
    """Write every exact duplicate with the document it repeats: a line `<key> :: <key>` each, in key order.

    The second is the first in key order of all documents that are equal. Beside the pairs it writes
    a table of the same name (.parquet) of the copies and, for each, the document that is kept:
    to_hash --skip takes it, so that no copy is signed. A document whose matching form is empty is
    nobody's duplicate.

    Args:
        input_dir: NORM/, the corpus: the folder of all sources.
        out_file: DUP/duplicate_pairs_exact.txt: generate_connected_components reads duplicate_pairs*.txt.
        on: What must be equal: matching_form (lower case, no punctuation, single spaces) or bytes.
        scope: global, or per-source: documents of different sources are not lsh.
        options: Workers, memory, and when to stop; they change no output.

    Returns:
        Documents read, copies and unique ones (the first of a group is one of these), per source.
    """
    _check(input_dir, out_file, on, scope)
    slices = [part for file in list_corpus(input_dir) for part in plan_slices(file)]
    state, name = out_file.parent / STATE_DIR, f"{NAME}-{out_file.name}"
    work = state / f"{name}-{on}-{scope}"  # an argument of the last task, and so `on` and `scope` are, too
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


def digest_slice(part: Slice, on: On, scope: Scope, output: Path) -> Counts:
    """Write a slice's records, by digest range within each chunk, and beside them where each range begins."""
    counts, starts, offset = Counts({}, []), [], 0
    salt = part.source.encode() + b"\0" if scope == "per-source" else b""
    with atomic_write(output) as temporary, temporary.open("wb") as file:
        for chunk in map(np.concatenate, batched(_digested(part, on, salt, counts, Rejects(output)), size=_CHUNK)):
            records, begins = by_range(chunk)
            file.write(records.view(np.uint8).data)
            starts.append(begins + offset)
            offset += len(records)
    with atomic_write(output.with_suffix(".npy")) as temporary, temporary.open("wb") as file:
        np.save(file, np.array(starts, np.int64).reshape(-1, PARTS + 1))
    return counts


def link_range(
    digested: list[Path], slices: list[Slice], first: int, stop: int, memory: MemoryBudget, output: Path
) -> Counts:
    """Sort the records of the digest ranges first ≤ i < stop of all slices, and write the copies among them."""
    books, files = Books([part.source for part in slices]), _file_numbers(slices)

    def found(placed: Iterable[NDArray]) -> Iterator[NDArray]:
        for copies, firsts, new in find_copies(placed):
            books.add(COPY, copies)
            books.add(FIRST, new)
            yield _pair(copies, firsts, files)

    with ExternalSorter(output.with_suffix(".runs"), PLACED, ("high", "low"), memory) as sorter:  # stable: in key order
        for number, path in enumerate(digested):
            for records in read_range(path, first, stop, _BLOCK):
                placed = _place(records, number, slices[number].first_row)
                books.add(READ, placed)
                sorter.add(placed)
        write_records(output, found(_pieces(sorter)))
    return books.counts()


def gather_copies(found: list[Path], counts: Counts, memory: MemoryBudget, output: Path) -> Counts:
    """Sort the copies of all ranges by key, and write them, and beside them the books of the whole."""
    with ExternalSorter(output.with_suffix(".runs"), COPIES, ("file", "row"), memory) as sorter:
        for path in found:
            for records in read_records(path, COPIES, _BLOCK):
                sorter.add(records)
        write_records(output, sorter)
    atomic_write_bytes(output.with_suffix(".json"), msgspec.json.encode(counts))
    return Counts({}, [])


def write_pairs(slices: list[Slice], work: Path, out_file: Path) -> Counts:
    """Write the sorted copies as lines of keys and as a table."""
    files = list(dict.fromkeys(part.name for part in slices))
    values = pa.array(files, pa.string())
    with (
        atomic_write(out_file) as temporary,
        temporary.open("w", encoding="utf-8", newline="\n") as lines,
        open_table(out_file.with_suffix(".parquet"), _SCHEMA) as write,
    ):
        for some in read_records(work / "copies.bin", COPIES, _BLOCK):
            lines.writelines(f"{files[a]}@{i} :: {files[b]}@{j}\n" for a, b, i, j in some.tolist())
            columns = {name: pa.array(some[name].astype(np.int64)) for name in _SCHEMA.names}
            write({name: values.take(column) if "file" in name else column for name, column in columns.items()})
    return msgspec.json.decode((work / "copies.json").read_bytes(), type=Counts)


def _find_copies(slices: list[Slice], on: On, scope: Scope, work: Path, options: RunOptions) -> Counts:
    """Run all tasks but the last; return what linking counted."""
    digested = [work / "digests" / f"{number:06}.bin" for number, _ in enumerate(slices)]
    digest = [
        Task(f"digests {path.stem}", digest_slice, {"part": part, "on": on, "scope": scope, "output": path},
             (Path(part.path),), (path, path.with_suffix(".npy")), part.size)
        for part, path in zip(slices, digested, strict=True)
    ]  # fmt: skip
    counts = run_stage(f"{NAME}-digests", digest, work, options)
    share = MemoryBudget(options.memory_bytes // options.processes)
    parts = _parts(digested, share)
    links = [
        Task(f"copies {parts:04}-{part:04}", link_range,
             {"digested": digested, "slices": slices, "first": PARTS * part // parts,
              "stop": PARTS * (part + 1) // parts, "memory": share, "output": path},
             tuple(digested), (path,))
        for part in np.arange(parts).tolist()
        for path in [work / "copies" / f"{parts:04}-{part:04}.bin"]
    ]  # fmt: skip
    found = run_stage("copies", links, work, options, summary=False)
    output, sources = work / "copies.bin", tuple(outputs_of(links))
    memory = MemoryBudget(options.memory_bytes)
    arguments = {"found": list(sources), "counts": _books(counts, found), "memory": memory, "output": output}
    gather = Task("gather", gather_copies, arguments, sources, (output, output.with_suffix(".json")))
    run_stage("gather", [gather], work, options, summary=False)
    return found


def _digested(part: Slice, on: On, salt: bytes, counts: Counts, rejects: Rejects) -> Iterator[NDArray]:
    """RECORDs of a slice's documents, batch by batch."""
    for documents in batched(
        read_documents(part, counts, rejects), _BATCH_DOCUMENTS, _BATCH_CHARACTERS, lambda document: len(document.text)
    ):
        found, empty = digests([document.text for document in documents], on, salt)
        records = np.empty(len(documents), RECORD)
        records["high"], records["low"] = found.T
        records["row"] = [document.key.row - part.first_row for document in documents]
        records["size"] = [utf8_size(document.text) for document in documents]
        for reason, some in ((_DIGESTED, records[~empty]), (_EMPTY, records[empty])):
            counts.add(part.source, reason, int(some["size"].sum(dtype=np.int64)), len(some))
        yield records[~empty]


def _pieces(blocks: Iterable[NDArray]) -> Iterator[NDArray]:
    """The same records in arrays of at most _BLOCK."""
    for block in blocks:
        for start in range(0, len(block), _BLOCK):
            yield block[start : start + _BLOCK]


def _place(records: NDArray, number: int, first_row: int) -> NDArray:
    """PLACEDs of a slice's RECORDs."""
    placed = np.empty(len(records), PLACED)
    for name in ("high", "low", "size"):
        placed[name] = records[name]
    placed["row"], placed["slice"] = records["row"].astype(np.uint64) + np.uint64(first_row), number
    return placed


def _pair(copies: NDArray, firsts: NDArray, files: NDArray[np.uint32]) -> NDArray:
    """COPIES of PLACEDs and the first of each one's group."""
    found = np.empty(len(copies), COPIES)
    found["file"], found["row"] = files[copies["slice"]], copies["row"]
    found["kept_file"], found["kept_row"] = files[firsts["slice"]], firsts["row"]
    return found


def _file_numbers(slices: list[Slice]) -> NDArray[np.uint32]:
    """For each slice the place of its file among all, in name order."""
    names = {name: number for number, name in enumerate(dict.fromkeys(part.name for part in slices))}
    return np.array([names[part.name] for part in slices], np.uint32)


def _parts(digested: list[Path], share: int) -> int:
    """Into how many tasks the digest ranges are divided: a power of two, so that each fits into `share` bytes."""
    size = sum(path.stat().st_size for path in digested) * _SORTING
    return min(PARTS, 1 << (size // max(1, min(share, _MOST))).bit_length())


def _books(digested: Counts, linked: Counts) -> Counts:
    """Read = copies + unique ones + malformed, per source."""
    counts = Counts({}, digested.examples)
    for source, reason, tally in digested.rows():
        counts.add(source, UNIQUE if reason in (_DIGESTED, _EMPTY) else reason, tally.bytes, tally.documents)
    for source, reason, tally in linked.rows():
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
    if on not in get_args(On) or scope not in get_args(Scope):
        raise UsageError(
            f"--on {on} --scope {scope}: wanted {' or '.join(get_args(On))}, and {' or '.join(get_args(Scope))}"
        )
    if not (out_file.name.startswith("duplicate_pairs") and out_file.suffix == ".txt"):
        raise UsageError(
            f"--out_file {out_file}: wanted a name such as duplicate_pairs_exact.txt, "
            "as generate_connected_components reads duplicate_pairs*.txt"
        )
    reject_overlapping_folders(input_dir, out_file.parent)


if __name__ == "__main__":
    command(generate_exact_pairs)
