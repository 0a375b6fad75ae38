"""Samples of a corpus, small and large, and the extent of the whole: documents, bytes of text, files and slices."""

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from math import ceil
from os import SEEK_END
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet

from gristmill.counts import Counts, Damage
from gristmill.engine.slices import group_slices
from gristmill.errors import DamagedFile, InputError, wrap_read_errors
from gristmill.io import readers
from gristmill.io.arrow_tables import damaged_table
from gristmill.io.corpus_names import LINE_FORMATS, CorpusName, normal_name, parse_name
from gristmill.io.documents import ONE_SLICE, CorpusFile, Cut, list_corpus
from gristmill.io.lines import MAX_LINE_BYTES, CorruptStream, damaged_stream, decompress
from gristmill.io.readers import Slice, is_cut, read_documents, slices_at
from gristmill.io.writers import Rejects, open_jsonl_writer
from gristmill.text import utf8_size
from gristmill_cli.estimate.partial_copy import partial_copy

SMALL_SHARE = 4  # the small sample is this part of the large one
_FILES = 16  # of a sample, if they are large enough
_PLACES = 8  # of a file of uncompressed lines, from which documents are read
_MARGIN_BYTES = 1 << 20  # of a file in a bucket that are fetched beyond those that are read
_COMPRESSED_BYTES = 4 << 20  # of a file that are decompressed, to find how far it is compressed


@dataclass(frozen=True)
class Extent:
    """How large a corpus is, estimated where that would take reading it whole.

    Attributes:
        documents: Number of documents.
        text_bytes: Bytes of their texts in UTF-8.
        disk_bytes: Bytes of the files.
        files: Number of files.
        slices: Parts of files, of 64 MiB at most where a file can be cut.
        groups: Tasks that read the corpus: slices, or groups of small files.
    """

    documents: int
    text_bytes: int
    disk_bytes: int
    files: int
    slices: int
    groups: int


@dataclass(frozen=True)
class Samples:
    """Two corpora of the same files, the small one with a part of the documents; and the extent of the whole."""

    small: Path
    large: Path
    extent: Extent


@dataclass
class _SampleFile:
    """Documents of a file: their lines of JSON, and the bytes of their texts; `is_whole` if they are all it has."""

    name: str
    disk_bytes: int
    lines: list[bytes] = field(default_factory=list)
    sizes: list[int] = field(default_factory=list)
    is_whole: bool = False

    @property
    def line_bytes(self) -> int:
        return sum(map(len, self.lines))


@dataclass
class _Kind:
    """The files of one source and format, those that are sampled, and how many bytes of JSON are in a byte on disk."""

    files: list[CorpusFile]  # without damaged ones
    expansion: float
    sampled: list[_SampleFile] = field(default_factory=list)

    @property
    def disk_bytes(self) -> int:
        return sum(file.size for file in self.files)

    @property
    def json_bytes(self) -> float:
        return self.expansion * self.disk_bytes

    def total(self, count: Callable[[_SampleFile], int]) -> float:
        """The sum of `count` over the documents of all files, if they are like those of the sample.

        Exact if all files were read whole.
        """
        sampled = [file for file in self.sampled if file.is_whole or file.lines]
        found = sum(count(file) * (1 if file.is_whole else self._times(file)) for file in sampled)
        return self.disk_bytes * found / sum(file.disk_bytes for file in sampled) if sampled else 0

    def _times(self, file: _SampleFile) -> float:
        """How many times larger than what was read of it a file is."""
        return self.expansion * file.disk_bytes / file.line_bytes


def sample_corpus(
    root: Path,
    folder: Path,
    sample_bytes: int,
    text_column: str = "text",
    read_also: Sequence[str] = (),
    max_malformed: float = 0,
) -> Samples:
    """Write two samples of a corpus below `folder`, the larger with about `sample_bytes` of JSON, or all.

    Each source and format has its share, from files spread evenly over it. Reads the listing, these documents, and a
    few MiB of a compressed file of each source and format; of files in a bucket as much is fetched, and a little more.
    Raises UsageError and InputError as list_corpus does, InputError if the sample has no document, and TooManyMalformed
    if more than `max_malformed` of the bytes are in files that turn out to be damaged; these are left out.
    """
    files = list_corpus(root, text_column=text_column, read_also=read_also)
    copies, left_out = folder / "copies", Counts({}, [], {}, sum(file.size for file in files))
    kinds = _kinds(files, copies, left_out)
    total = sum(kind.json_bytes for kind in kinds)
    for kind in kinds:
        quota = ceil(sample_bytes * kind.json_bytes / total)
        _read_sample(kind, quota, ceil(_FILES * quota / sample_bytes), copies, left_out)
    left_out.check_malformed("estimate", max_malformed)
    if left_out.damaged:
        print(f"note: left out, as `gristmill run` does: {left_out.damaged_files()}", file=sys.stderr)
    files = [file for file in files if file.name not in left_out.damaged]
    sampled = [file for kind in kinds for file in kind.sampled if file.lines]
    if not sampled:
        raise InputError(f"{root} holds no document in the {len(files):,} files: give a corpus with documents")
    for name, share in (("small", SMALL_SHARE), ("large", 1)):
        for file in sampled:
            _write_share(folder / name / file.name, file, share)
    extent = Extent(
        round(sum(kind.total(lambda file: len(file.lines)) for kind in kinds)),
        round(sum(kind.total(lambda file: sum(file.sizes)) for kind in kinds)),
        sum(file.size for file in files), len(files), *count_slices(files),
    )  # fmt: skip
    return Samples(folder / "small", folder / "large", extent)


def _kinds(files: Sequence[CorpusFile], copies: Path, left_out: Counts) -> list[_Kind]:
    """The files that are not empty, by source and format; those that are seen to be damaged are in `left_out`."""
    found: dict[tuple[str, CorpusName | None], list[CorpusFile]] = defaultdict(list)
    for file in files:
        parts = parse_name(file.name)
        if file.size:
            found[file.source, parts and parts._replace(stem="")].append(file)
    kinds = []
    for of_kind in found.values():
        while of_kind:
            middle = of_kind[len(of_kind) // 2]
            with _leaves_out(middle, of_kind, left_out):
                kinds.append(_Kind(of_kind, _expansion(middle, copies)))
                break
    return kinds


@contextmanager
def _leaves_out(file: CorpusFile, files: list[CorpusFile], left_out: Counts) -> Iterator[None]:
    """Context: if a file is damaged, it goes from `files` to `left_out`."""
    try:
        yield
    except DamagedFile as error:
        damage = Damage(str(error.path), error.fault, error.detail)
        left_out.add_damaged_file(file.source, file.name, damage, file.size)
        left_out.stored -= file.size
        files.remove(file)


def _expansion(file: CorpusFile, copies: Path) -> float:
    """Bytes of a file without its compression, per byte on disk; about 1 for a file that is not compressed."""
    parts = parse_name(file.name)
    assert parts is not None
    if not parts.compression and parts.format != "parquet":
        return 1
    size = 0
    try:
        path = partial_copy(file, _COMPRESSED_BYTES + _MARGIN_BYTES if parts.compression else 1, copies).path
        with wrap_read_errors(path), path.open("rb") as stored:
            if parts.format == "parquet":
                found = pa.parquet.ParquetFile(stored).metadata
                return sum(found.row_group(i).total_byte_size for i in range(found.num_row_groups)) / file.size or 1
            with suppress(*([] if path == file.path else [CorruptStream])):  # where a copy ends
                for chunk in decompress(stored, parts.compression):
                    size += len(chunk)
                    if stored.tell() >= _COMPRESSED_BYTES:
                        break
            return size / stored.tell() or 1
    except CorruptStream as error:
        raise damaged_stream(file.path, f"byte {size:,}", error) from error
    except pa.ArrowException as error:
        raise damaged_table(file.path, "", error) from error


def count_slices(files: Sequence[CorpusFile]) -> tuple[int, int]:
    """How many slices files have, about, and how many tasks read these: one each, or one a group of small files."""
    slices = [part for file in files for part in slices_at(file, ONE_SLICE * _slices_of(file))]
    return len(slices), len(group_slices(slices))


def _slices_of(file: CorpusFile) -> int:
    return ceil(file.size / readers.SLICE_BYTES) if is_cut(file) else 1


def _read_sample(kind: _Kind, quota: int, files: int, copies: Path, left_out: Counts) -> None:
    """Read documents of about `quota` bytes of JSON from at least `files` files, or from all; no document twice."""
    if quota >= kind.json_bytes:
        quota *= 2  # as documents of JSON may be longer than on disk, and all are wanted
    files, left = min(files, len(kind.files)), quota
    for file in _spread([*kind.files], files):
        found, wanted = _SampleFile(normal_name(file.name), file.size), quota * file.size / kind.disk_bytes
        wanted *= len(kind.files) / files
        with _leaves_out(file, kind.files, left_out):
            copy = partial_copy(file, ceil(2 * wanted / kind.expansion) + _MARGIN_BYTES, copies)
            places = _places(copy)
            ended = 0
            for place in places:
                with suppress(*([] if copy is file else [DamagedFile])):  # where a copy ends
                    ended += _read_from(place, wanted / len(places), found, Rejects(copies / "rejects"))
            found.is_whole = ended == len(places) and (copy is file or copy.path.stat().st_size == file.size)
            kind.sampled.append(found)
            left -= found.line_bytes
        if left <= 0:
            return


def _spread(files: Sequence[CorpusFile], count: int) -> Iterator[CorpusFile]:
    """All files: first `count` that are spread evenly, then those after each of them, and so on."""
    stride = ceil(len(files) / count)
    for start in range(stride):
        yield from files[start::stride]


def _places(file: CorpusFile) -> list[Slice]:
    """The parts from which to read documents: the whole file or, of uncompressed lines, parts of about one size."""
    parts, starts = parse_name(file.name), [0]
    if parts and parts.format in LINE_FORMATS and not parts.compression:
        with wrap_read_errors(file.path), file.path.open("rb") as lines:
            size = lines.seek(0, SEEK_END)  # of a copy, which may be a part
            for number in range(1, _PLACES):
                lines.seek(size * number // _PLACES)
                lines.readline(MAX_LINE_BYTES)
                starts.append(lines.tell())
    return slices_at(file, [Cut(start, 0, ((start, None),)) for start in dict.fromkeys(starts)])


def _read_from(place: Slice, quota: float, found: _SampleFile, rejects: Rejects) -> bool:
    """Add documents of about `quota` bytes of JSON; return whether they are all of the part."""
    for document in read_documents(place, Counts({}, []), rejects):
        found.lines.append(document.to_json())
        found.sizes.append(utf8_size(document.text))
        quota -= len(found.lines[-1])
        if quota <= 0:
            return False
    return True


def _write_share(path: Path, file: _SampleFile, share: int) -> None:
    """Write one of each `share` documents of a sampled file."""
    with open_jsonl_writer(path) as sink:
        sink.write(b"".join(file.lines[::share]))
