"""Mosaic's MDS: index.json names the shards of its folder, each of which is a file of samples.

A shard has, as uint32, the number of samples n and n + 1 offsets; then a header in JSON, then the samples. A sample has
the sizes of its columns of no fixed size, as uint32, then the columns. Ids are in a column of type `bytes`, or of an
`ndarray:DTYPE:SHAPE`: what the type leaves out precedes the values, a byte for the dtype, then the shape.
Source: mosaicml/streaming streaming/base/format/mds (writer.py, encodings.py); llm-foundry writes ids with it.
"""

import bz2
import gzip
import hashlib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import zstandard
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError, wrap_read_errors
from preprocessing.token_formats.token_file import AGAIN, MosaicColumn, TokenFile
from preprocessing.token_formats.token_stream import Chunk
from preprocessing.token_formats.token_tables import COLUMNS

INDEX = "index.json"
_DTYPES = {8: "uint8", 9: "int8", 16: "uint16", 17: "int16", 32: "uint32", 33: "int32", 64: "uint64", 65: "int64"}
_DTYPE_OF_BYTES = "int64"  # of ids in a column of bytes, as llm-foundry wrote them at first
_ROWS = 1024  # samples of a chunk


class _FileInfo(msgspec.Struct):
    basename: str
    bytes: int
    hashes: dict[str, str] = {}


class _Shard(msgspec.Struct):
    column_names: list[str]
    column_encodings: list[str]
    column_sizes: list[int | None]
    raw_data: _FileInfo
    samples: int
    format: str
    version: int = 2
    compression: str | None = None
    zip_data: _FileInfo | None = None


class _Index(msgspec.Struct):
    shards: list[_Shard]


def find_mosaic_files(index: Path, source: str, column: str, dtype: str) -> list[TokenFile]:
    """Return the shards that an index.json names, in its order. Raises InputError for one that is missing."""
    try:
        with wrap_read_errors(index):
            shards = msgspec.json.decode(index.read_bytes(), type=_Index).shards
    except msgspec.DecodeError as error:
        raise InputError(f"{index} is not an index of MDS shards ({error}); {AGAIN}") from error
    return [_describe(index, shard, source, column, dtype) for shard in shards]


def _describe(index: Path, shard: _Shard, source: str, column: str, dtype: str) -> TokenFile:
    if shard.format != "mds" or shard.version != 2:
        raise UsageError(f"{index}: expected MDS of version 2, got {shard.format} of version {shard.version}")
    names = [column] if column else list(COLUMNS)
    name = next((name for name in names if name in shard.column_names), None)
    if name is None:
        raise UsageError(
            f"{index}: expected a column {' or '.join(names)} of token ids, got {', '.join(shard.column_names)}; try "
            "--column"
        )
    number = shard.column_names.index(name)
    kind, has_shape = _dtype_of(index, name, shard.column_encodings[number], dtype)
    stored = shard.raw_data
    compression = ""
    path = index.with_name(stored.basename)
    if not path.is_file() and shard.zip_data:
        stored = shard.zip_data
        compression = (shard.compression or "").partition(":")[0]
        path = index.with_name(stored.basename)
    if not path.is_file():
        raise InputError(f"{path} is missing, and {index} names it; {AGAIN}")
    sizes = tuple(size or 0 for size in shard.column_sizes)
    known = tuple((algorithm, value) for algorithm, value in stored.hashes.items() if _is_known(algorithm))
    described = MosaicColumn(shard.raw_data.bytes, shard.samples, sizes, number, kind, has_shape, compression, known)
    return TokenFile(path, source, "mosaic", path.stat().st_size, mosaic=described)


def _is_known(algorithm: str) -> bool:
    return algorithm in hashlib.algorithms_guaranteed and not algorithm.startswith("shake")


def _dtype_of(index: Path, column: str, encoding: str, dtype: str) -> tuple[str, bool]:
    """Return the dtype of a column's ids, "" where each sample says, and whether a shape precedes them."""
    kind, *given = encoding.split(":")
    if kind == "bytes":
        return dtype or _DTYPE_OF_BYTES, False
    named = ""
    if given:
        named = given[0]
    if kind != "ndarray" or (named and named not in _DTYPES.values()):
        raise UsageError(
            f"{index}: expected {column} as bytes or an ndarray of integers, got {encoding}; try another --column"
        )
    return named, len(given) < 2


def read_mosaic(file: TokenFile) -> Iterator[Chunk]:
    """Yield the ids of a shard's samples, each a document. Raises InputError for a damaged one."""
    column = file.mosaic
    assert column
    data = _content(file.path, column)
    count = int.from_bytes(data[:4], "little")
    if len(data) != column.size or count != column.samples:
        raise InputError(
            f"{file.path} is truncated or from another run: {INDEX} says {column.samples:,} samples in {column.size:,} "
            f"bytes, got {count:,} in {len(data):,}; {AGAIN}"
        )
    offsets = np.frombuffer(data, np.uint32, count + 1, 4)
    if count and (int(offsets[-1]) != len(data) or (np.diff(offsets.astype(np.int64)) < 0).any()):
        raise InputError(f"{file.path} is damaged: expected samples that follow each other; {AGAIN}")
    bounds = offsets.tolist()
    for first in range(0, count, _ROWS):
        lists = list[NDArray[np.integer]]()
        lengths = list[int]()
        for row in range(first, min(first + _ROWS, count)):
            ids = _ids(file.path, data[bounds[row] : bounds[row + 1]], column)
            lists.append(ids)
            lengths.append(len(ids))
        yield Chunk(np.concatenate(lists), np.cumsum(lengths, dtype=np.int64))


def _ids(path: Path, sample: bytes, column: MosaicColumn) -> NDArray[np.integer]:
    """Return the ids of a sample."""
    try:
        value = _value(sample, column)
        return _array(value, column)
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"{path} is damaged: a sample holds no ids as its header says ({error}); {AGAIN}") from error


def _value(sample: bytes, column: MosaicColumn) -> bytes:
    """Return the bytes of the column in a sample."""
    varying = sum(size == 0 for size in column.sizes)
    given = iter(np.frombuffer(sample, np.uint32, varying).tolist())
    sizes = [size or next(given) for size in column.sizes]
    start = 4 * varying + sum(sizes[: column.number])
    return sample[start : start + sizes[column.number]]


def _array(value: bytes, column: MosaicColumn) -> NDArray[np.integer]:
    """Return the ids in a column's bytes: what its type leaves out precedes them."""
    start = 0
    dtype = column.dtype
    if not dtype:
        dtype = _DTYPES[value[0]]
        start = 1
    if column.has_shape:
        dimensions = value[start] >> 2
        width = 1 << (value[start] & 3)
        start += 1 + dimensions * width
    if len(value) <= start:
        return np.empty(0, dtype)
    ids: NDArray[np.integer] = np.frombuffer(value, dtype, offset=start)
    return ids


def _content(path: Path, column: MosaicColumn) -> bytes:
    with wrap_read_errors(path):
        data = path.read_bytes()
    for algorithm, expected in column.hashes:
        actual = hashlib.new(algorithm, data).hexdigest()
        if actual != expected:
            raise InputError(
                f"{path} is damaged: expected the {algorithm} {expected[:12]}…, got {actual[:12]}…; {AGAIN}"
            )
    if not column.compression:
        return data
    return _decompress(path, data, column.compression)


def _decompress(path: Path, data: bytes, compression: str) -> bytes:
    readers: dict[str, Any] = {"gz": gzip.decompress, "bz2": bz2.decompress, "zstd": _zstd, "br": _brotli}
    if compression not in readers:
        raise UsageError(
            f"{path}: expected {', '.join(readers)}, got {compression}; try writing it without compression"
        )
    try:
        decompressed: bytes = readers[compression](data)
    except UsageError:
        raise
    except (OSError, EOFError, ValueError, zstandard.ZstdError) as error:
        raise InputError(f"{path} is truncated or damaged ({error}); {AGAIN}") from error
    return decompressed


def _brotli(data: bytes) -> bytes:
    """Return what brotli compressed. UsageError without its library, which comes with gristmill[web]."""
    if find_spec("brotli") is None:
        raise UsageError("shards in br need the library brotli: pip install 'gristmill[web]'")
    import brotli

    try:
        decompressed: bytes = brotli.decompress(data)
    except brotli.error as error:
        raise ValueError(str(error)) from error
    return decompressed


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompressobj().decompress(data)
