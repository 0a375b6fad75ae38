"""Read the header of a fastText model's file: its kind, its sizes, its labels, and whether it is whole.

The file is little-endian: a magic number, a version, 12 arguments as int32 and one as float64; then the dictionary:
entries, words, labels as int32, tokens and pruned entries as int64, and for each entry, words first, its text and a
zero byte, its count as int64, and 1 for a label. Then the pruned entries, and two matrices, dense or quantized.
Source: facebookresearch/fastText src/fasttext.cc, dictionary.cc, densematrix.cc, quantmatrix.cc, productquantizer.cc.
"""

import hashlib
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple

from gristmill.errors import InputError, UsageError, wrap_read_errors

MAGIC = 793712314
VERSION = 12
PREFIX = "__label__"
HEADER = struct.Struct("<ii12id")
DICTIONARY = struct.Struct("<iiiqq")
SHAPE = struct.Struct("<qq")
_VERSIONS = (11, 12)
_KINDS = {1: "cbow", 2: "skipgram", 3: "supervised"}
# Places among the header's numbers, of which magic and version are the first:
_DIM = 2
_WORD_NGRAMS = 7
_LOSS = 8
_KIND = 9
_BUCKET = 10
_MIN_SUBWORD = 11
_MAX_SUBWORD = 12
_NO_SUBWORDS = 11  # the version whose supervised models have none, whatever they say
_AFTER_TEXT = 9  # bytes of an entry after its text: count and type
_CHUNK = 1 << 22
_CENTROIDS = 256  # of a quantizer, for each dimension
_SHOWN = 8  # labels in a message


class FastTextFile(NamedTuple):
    """A supervised model: its labels, as they are stored (with __label__, most often), and its sizes.

    `bucket` vectors are for word n-grams of up to `word_ngrams` words and for subwords of `min_subword` to
    `max_subword` characters; they follow those of the `words`. `dictionary` is where the dictionary's entries begin in
    the file, `matrices` where the vectors do, `pruned` how many entries were pruned, or -1.
    """

    labels: tuple[str, ...]
    label_count: int
    words: int
    loss: int
    dim: int
    word_ngrams: int
    bucket: int
    min_subword: int
    max_subword: int
    pruned: int
    is_quantized: bool
    dictionary: int
    matrices: int = 0

    def find_label(self, path: Path, given: str) -> str:
        """Return the label that is meant by a name with or without __label__. UsageError for none of the model's."""
        for label in (given, PREFIX + given):
            if given and label in self.labels:
                return label
        some = ", ".join(label.removeprefix(PREFIX) for label in self.labels[:_SHOWN])
        more = f" and {len(self.labels) - _SHOWN:,} more" if len(self.labels) > _SHOWN else ""
        raise UsageError(f"{path}: expected label to be one of {some}{more}, got {given!r}")


def read_fasttext(path: Path) -> FastTextFile:
    """Return what a model's file says. UsageError for another kind of model or of file, InputError for a cut one.

    The file is read again only if its size or time differ.
    """
    with wrap_read_errors(path):
        info = path.stat()
    return _read(path, info.st_size, info.st_mtime_ns)


def read_sizes(path: Path) -> FastTextFile:
    """Return what the header of a model's file says: its sizes, without what stands behind all words."""
    with wrap_read_errors(path), path.open("rb") as file:
        return _read_header(path, file)


@lru_cache(maxsize=16)
def _read(path: Path, size: int, _time: int) -> FastTextFile:
    with wrap_read_errors(path), path.open("rb") as file:
        header = _read_header(path, file)
        try:
            entries = _read_entries(file, header.words + header.label_count)
            matrices = file.tell() + 8 * max(header.pruned, 0)
            is_quantized, end = _find_end(file, matrices)
        except (struct.error, EOFError) as error:
            raise _cut(path) from error
        if size < end:
            raise _cut(path)
    labels = tuple(text.decode("utf-8", "replace") for text in entries[header.words :])
    return header._replace(labels=labels, is_quantized=is_quantized, matrices=matrices)


def _read_header(path: Path, file: BinaryIO) -> FastTextFile:
    """Return what the numbers before the dictionary's entries say, and leave the file behind them."""
    head = file.read(HEADER.size)
    numbers = HEADER.unpack(head) if len(head) == HEADER.size else (0, 0)
    if numbers[0] != MAGIC or numbers[1] not in _VERSIONS:
        raise UsageError(f"{path}: expected a fastText model (.bin or .ftz), got another file")
    kind = _KINDS.get(numbers[_KIND], "unknown")
    if kind != "supervised":
        raise UsageError(f"{path}: expected a supervised fastText model, got one of kind {kind}; it has no labels")
    try:
        _, words, labels, _, pruned = DICTIONARY.unpack(file.read(DICTIONARY.size))
    except struct.error as error:
        raise _cut(path) from error
    return FastTextFile(
        (),
        labels,
        words,
        numbers[_LOSS],
        numbers[_DIM],
        numbers[_WORD_NGRAMS],
        numbers[_BUCKET],
        numbers[_MIN_SUBWORD],
        0 if numbers[1] == _NO_SUBWORDS else numbers[_MAX_SUBWORD],
        pruned,
        False,
        file.tell(),
    )


def _read_entries(file: BinaryIO, count: int) -> list[bytes]:
    """Return the texts of a dictionary's entries, and leave the file behind them. EOFError if it ends before."""
    entries = list[bytes]()
    data = b""
    start = 0
    while len(entries) < count:
        end = data.find(b"\0", start)
        if end < 0 or end + _AFTER_TEXT >= len(data):
            more = file.read(_CHUNK)
            if not more:
                raise EOFError
            data = data[start:] + more
            start = 0
            continue
        entries.append(data[start:end])
        start = end + 1 + _AFTER_TEXT
    file.seek(start - len(data), 1)
    return entries


def _find_end(file: BinaryIO, start: int) -> tuple[bool, int]:
    """Return whether the matrices that begin at `start` are quantized, and where they end.

    Raises struct.error if the file ends before one of their headers.
    """
    file.seek(start)
    is_quantized = _flag(file)
    _skip_matrix(file, is_quantized)
    is_output_quantized = _flag(file)
    _skip_matrix(file, is_quantized and is_output_quantized)
    return is_quantized, file.tell()


def _skip_matrix(file: BinaryIO, is_quantized: bool) -> None:
    if not is_quantized:
        rows, columns = SHAPE.unpack(file.read(SHAPE.size))
        file.seek(4 * rows * columns, 1)
        return
    has_norms = _flag(file)
    rows, _ = SHAPE.unpack(file.read(SHAPE.size))
    (codes,) = struct.unpack("<i", file.read(4))
    file.seek(codes, 1)
    _skip_quantizer(file)
    if has_norms:
        file.seek(rows, 1)
        _skip_quantizer(file)


def _skip_quantizer(file: BinaryIO) -> None:
    dimensions, _, _, _ = struct.unpack("<4i", file.read(16))
    file.seek(4 * dimensions * _CENTROIDS, 1)


def _flag(file: BinaryIO) -> bool:
    (flag,) = struct.unpack("<?", file.read(1))
    return bool(flag)


def _cut(path: Path) -> InputError:
    return InputError(f"{path} is truncated: expected a whole fastText model, got the beginning of one; fetch it again")


def version_of_file(path: Path) -> str:
    """Return the SHA-256 of a file; it is read again only if its size or time differ."""
    with wrap_read_errors(path):
        info = path.stat()
    return _hash(path, info.st_size, info.st_mtime_ns)


@lru_cache(maxsize=64)
def _hash(path: Path, _size: int, _time: int) -> str:
    with wrap_read_errors(path), path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
