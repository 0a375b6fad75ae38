"""Pair files, ours and SlimPajama's: lines `<key> :: <key>`, parsed into edges between document ids."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds
from dedup.candidates.signature_shards import MAX_ROWS
from gristmill.counts import Counts
from gristmill.engine.run import StageRun
from gristmill.engine.staleness.ledger import Ledger
from gristmill.engine.task import FileSet, Result, Task
from gristmill.errors import InputError
from gristmill.io.external_sort import read_records, write_records
from gristmill.io.files import STATE_DIR, marks_in, reject_unfinished_files
from gristmill.paths import name_of
from gristmill.storage.files import file_info, list_names
from gristmill.wording import count_of

_PAIR_FILES = "duplicate_pairs*.txt"
_ROW = "@0*(?P<{}>[0-9]{{1,13}})"  # of the digits that MAX_ROWS has
_PAIR = rf"^(?P<a>.+){_ROW.format('i')} :: (?P<b>.+){_ROW.format('j')}$"
_SEPARATOR = r"@[0-9]+ :: "
_BLOCK = 16 << 20  # bytes parsed together
_PAIR_RECORD = np.dtype([("file", "<u4"), ("row", "<i8"), ("other_file", "<u4"), ("other_row", "<i8")])


@dataclass(frozen=True)
class ParsedPairs:
    """Parsed pairs: a file of 24 bytes each, and the corpus files that they name."""

    path: Path
    rows: dict[str, int]  # file name → its largest row in a pair, plus 1; in the order of first mention

    def edges(self, document_ids: DocumentIds) -> Iterator[NDArray[np.uint64]]:
        """Yield edges between document ids (n × 2), block by block."""
        by_name = document_ids.by_name
        first_ids = np.array([by_name[name] for name in self.rows], np.uint64)
        for pairs in read_records(self.path, _PAIR_RECORD, _BLOCK // _PAIR_RECORD.itemsize):
            one = first_ids[pairs["file"]] + pairs["row"].astype(np.uint64)
            other = first_ids[pairs["other_file"]] + pairs["other_row"].astype(np.uint64)
            yield np.stack([one, other], axis=1)


def list_pair_files(folder: Path) -> FileSet:
    """Return the pair files in a folder, duplicate_pairs*.txt, in name order.

    InputError if a stage has not finished one, or has written one that is not there any more.
    """
    unfinished = list[Path]()  # which may not be there yet
    for mark in marks_in(folder):
        unfinished += [folder / name for name in mark.files if _is_pair_file(name)]
    reject_unfinished_files(unfinished)
    names = sorted(filter(_is_pair_file, list_names(folder)))
    for name, ledger in _written_in(folder).items():
        if _is_pair_file(Path(name).name) and Path(name).name not in names:
            raise InputError(
                f"{name}, which {ledger.stage} wrote, is missing: run that again. (If its pairs "
                f"are not to be read any more, remove {ledger.file}.)"
            )
    return FileSet(tuple(folder / name for name in names))


def _is_pair_file(name: str) -> bool:
    return fnmatchcase(name, _PAIR_FILES)


def note_foreign_files(files: FileSet) -> None:
    """Print which pair files no stage here wrote: they may be the user's own, or left by an earlier run."""
    known = set[str]()
    for folder in {path.parent for path in files.paths}:
        known.update(_written_in(folder))
    foreign = [path.name for path in files.paths if name_of(path) not in known]
    if foreign:
        print(
            f"note: reads {count_of(len(foreign), 'pair file')} that no stage here wrote: {', '.join(foreign)}",
            file=sys.stderr,
        )


def _written_in(folder: Path) -> dict[str, Ledger]:
    """Return the files that stages wrote in a folder, each with the ledger that names it."""
    written = dict[str, Ledger]()
    for ledger in Ledger.all_in(folder / STATE_DIR):
        for name, output in ledger.outputs().items():
            if output.size >= 0:
                written[name] = ledger
    return written


def parse_pair_files(run: StageRun, files: FileSet) -> ParsedPairs:
    """Run the step that parses pair files. InputError names the first line that is no pair."""
    output = run.work / "pairs.bin"
    size = sum(info.size for info in map(file_info, files.paths) if info)
    task = Task("parse", parse_pairs, {"files": files, "output": output}, (output,), size)
    parsed = run.step("pairs", [task])
    return ParsedPairs(output, parsed.values(dict[str, int])[0])


def parse_pairs(files: FileSet, output: Path) -> Result:
    """Task: parse pair files into records; returns the rows of ParsedPairs."""
    numbers: dict[str, int] = {}  # of files, in the order of first mention
    rows: dict[str, int] = {}

    def records() -> Iterator[NDArray]:
        for path in files.paths:
            for first, text in _iter_blocks(path):
                yield _parse(path, first, text, numbers, rows)

    write_records(output, records())
    return Result(Counts({}, []), {name: rows[name] for name in numbers})


def _iter_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield blocks of complete lines of a file, each with the number of its first line, from 1."""
    number = 1
    rest = b""
    with path.open("rb") as file:
        while chunk := file.read(_BLOCK):
            lines, newline, rest = (rest + chunk).rpartition(b"\n")
            if newline:
                yield number, lines
                number += lines.count(b"\n") + 1
    if rest:
        yield number, rest


def _parse(path: Path, first: int, text: bytes, numbers: dict[str, int], rows: dict[str, int]) -> NDArray:
    """Return _PAIR_RECORDs of a block of lines that begins at line `first`; update the files' `numbers` and `rows`."""
    lines = _decode_lines(path, first, text)
    pairs = pc.extract_regex(lines, _PAIR)
    is_unambiguous = pc.less_equal(pc.count_substring_regex(lines, _SEPARATOR), 1)
    is_valid = pc.and_(pairs.is_valid(), pc.and_(pc.utf8_is_printable(lines), is_unambiguous))
    _reject_malformed(is_valid, path, first, lines)
    records = np.empty(len(lines), _PAIR_RECORD)
    for file, row, name, number in (("file", "row", "a", "i"), ("other_file", "other_row", "b", "j")):
        file_rows = pc.struct_field(pairs, number).cast(pa.int64())
        _reject_malformed(pc.less(file_rows, MAX_ROWS), path, first, lines)
        records[row] = file_rows.to_numpy()
        records[file] = _number_files(pc.struct_field(pairs, name), records[row], numbers, rows)
    return records


def _decode_lines(path: Path, first: int, text: bytes) -> pa.StringArray:
    """Return the lines of a text; InputError for one that is not UTF-8."""
    lines = text.split(b"\n")
    try:
        return pa.array(lines, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        for number, line in enumerate(lines, first):
            if line.decode(errors="replace").encode() != line:
                _raise_malformed(path, number, line.decode(errors="backslashreplace"))
        raise


def _number_files(
    files: pa.StringArray, file_rows: NDArray[np.int64], numbers: dict[str, int], rows: dict[str, int]
) -> NDArray[np.uint32]:
    """Return the number of each file; add new files to `numbers` and raise `rows` to at least each row + 1."""
    encoded = files.dictionary_encode()
    names = encoded.dictionary.to_pylist()
    indices = encoded.indices.to_numpy()
    ends = np.zeros(len(names), np.int64)
    np.maximum.at(ends, indices, file_rows + 1)
    for name, end in zip(names, ends.tolist(), strict=True):
        numbers.setdefault(name, len(numbers))
        rows[name] = max(end, rows.get(name, 0))
    return np.array([numbers[name] for name in names], np.uint32)[indices]


def _reject_malformed(is_valid: pa.BooleanArray, path: Path, first: int, lines: pa.StringArray) -> None:
    """Raise the InputError of the first line that is not valid."""
    if not pc.all(is_valid, min_count=0).as_py():
        at = is_valid.index(False).as_py()
        _raise_malformed(path, first + at, lines[at].as_py())


def _raise_malformed(path: Path, line: int, text: str) -> NoReturn:
    raise InputError(
        f"{path} line {line}: expected `<file>@<row> :: <file>@<row>`, rows below {MAX_ROWS:,}, got {text[:80]!r}"
    )
