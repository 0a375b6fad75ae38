"""Lines of pairs, `<key> :: <key>`, read back as edges: ours and SlimPajama's."""

from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from dedup.candidates.document_ids import DocumentIds
from gristmill.counts import Counts
from gristmill.errors import InputError
from gristmill.io.external_sort import read_records, write_records
from gristmill.io.files import atomic_write_bytes

_PAIR = r"^(?P<a>.+)@(?P<i>[0-9]+) :: (?P<b>.+)@(?P<j>[0-9]+)$"
_JOINT = r"@[0-9]+ :: "
_BLOCK = 16 << 20  # bytes parsed at a time
_ENDS = np.dtype([("file", "<u4"), ("row", "<i8"), ("other_file", "<u4"), ("other_row", "<i8")])


class ParsedPairs:
    """Pairs of several files, parsed once into `work`: pairs.bin of 24 bytes each, and the names in pairs.json."""

    def __init__(self, work: Path) -> None:
        self.ends = work / "pairs.bin"
        self.files = work / "pairs.json"

    def rows(self) -> dict[str, int]:
        """File → how many rows it has at least, in the order in which the pairs name them."""
        return msgspec.json.decode(self.files.read_bytes(), type=dict[str, int])

    def edges(self, document_ids: DocumentIds) -> Iterator[NDArray[np.uint64]]:
        """Edges (n × 2) between documents as they are numbered."""
        by_name = document_ids.by_name
        bases = np.array([by_name[name] for name in self.rows()], np.uint64)
        for ends in read_records(self.ends, _ENDS, _BLOCK // _ENDS.itemsize):
            one = bases[ends["file"]] + ends["row"].astype(np.uint64)
            yield np.stack([one, bases[ends["other_file"]] + ends["other_row"].astype(np.uint64)], axis=1)


def parse_pairs(files: tuple[Path, ...], work: Path) -> Counts:
    """Parse files of pairs for ParsedPairs. InputError names the first line that is none."""
    numbers: dict[str, int] = {}  # of files, as they come
    rows: dict[str, int] = {}
    parsed = ParsedPairs(work)
    blocks = (_parse(path, first, text, numbers, rows) for path in files for first, text in _blocks(path))
    write_records(parsed.ends, blocks)
    atomic_write_bytes(parsed.files, msgspec.json.encode({name: rows[name] for name in numbers}))
    return Counts({}, [])


def _parse(path: Path, first: int, text: bytes, numbers: dict[str, int], rows: dict[str, int]) -> NDArray:
    """The pairs in whole lines, of which the first has that number; new files and rows are noted."""
    lines = _as_lines(path, first, text)
    pairs = pc.extract_regex(lines, _PAIR)
    once = pc.less_equal(pc.count_substring_regex(lines, _JOINT), 1)
    good = pc.and_(pairs.is_valid(), pc.and_(pc.utf8_is_printable(lines), once))
    if not pc.all(good, min_count=0).as_py():
        at = good.index(False).as_py()
        _refuse(path, first + at, lines[at].as_py())
    ends = np.empty(len(lines), _ENDS)
    for file, row, name, number in (("file", "row", "a", "i"), ("other_file", "other_row", "b", "j")):
        ends[row] = _rows(path, pc.struct_field(pairs, number))
        ends[file] = _number(pc.struct_field(pairs, name), ends[row], numbers, rows)
    return ends


def _rows(path: Path, digits: pa.StringArray) -> NDArray[np.int64]:
    try:
        return digits.cast(pa.int64()).to_numpy()
    except pa.ArrowInvalid as error:
        raise InputError(f"{path}: wanted rows below 2^63 ({error}). Is it a file of pairs?") from error


def _number(files: pa.StringArray, at: NDArray[np.int64], numbers: dict[str, int], rows: dict[str, int]) -> NDArray:
    """The number of each file, new ones numbered as they come; `rows` learns of the rows they have."""
    encoded = files.dictionary_encode()
    names, places = encoded.dictionary.to_pylist(), encoded.indices.to_numpy()
    ends = np.zeros(len(names), np.int64)
    np.maximum.at(ends, places, at + 1)
    for name, end in zip(names, ends.tolist(), strict=True):
        numbers.setdefault(name, len(numbers))
        rows[name] = max(end, rows.get(name, 0))
    return np.array([numbers[name] for name in names], np.uint32)[places]


def _blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Whole lines of a file, and the number of the first of them."""
    number, rest = 1, b""
    with path.open("rb") as file:
        while some := file.read(_BLOCK):
            whole, newline, rest = (rest + some).rpartition(b"\n")
            if newline:
                yield number, whole
                number += whole.count(b"\n") + 1
    if rest:
        yield number, rest


def _as_lines(path: Path, first: int, text: bytes) -> pa.StringArray:
    lines = text.split(b"\n")
    try:
        return pa.array(lines, pa.binary()).cast(pa.string())
    except pa.ArrowInvalid:
        at = next(at for at, line in enumerate(lines) if line.decode(errors="replace").encode() != line)
        _refuse(path, first + at, lines[at].decode(errors="backslashreplace"))


def _refuse(path: Path, number: int, text: str) -> NoReturn:
    raise InputError(f"{path} line {number}: wanted `<file>@<row> :: <file>@<row>`, got {text[:80]!r}")
