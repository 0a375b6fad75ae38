"""Megatron's indexed datasets (.bin and .idx; see gristmill.io.token_shards), of one or several sequences a document.

Source: NVIDIA/Megatron-LM megatron/core/datasets/indexed_dataset.py.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.token_shards import IDX_HEADER, MAGIC
from preprocessing.token_formats.token_file import AGAIN, TokenFile, chunks_of, map_ids
from preprocessing.token_formats.token_stream import Chunk

_DTYPES = {1: "uint8", 2: "int8", 3: "int16", 4: "int32", 5: "int64", 6: "float64", 7: "float32", 8: "uint16"}


class _Header(NamedTuple):
    dtype: str
    sequences: int
    boundaries: int  # of documents: one more than there are


def describe_megatron(file: TokenFile) -> TokenFile:
    """Return the file with the dtype that its .idx says. Raises InputError where that is no index of tokens."""
    assert file.index
    return replace(file, dtype=_read_header(file.index).dtype)


def read_megatron(file: TokenFile) -> Iterator[Chunk]:
    """Yield the ids of a .bin, and where its documents end. Raises InputError where it and its .idx disagree."""
    assert file.index
    ends = document_ends(file.index)
    ids = map_ids(file.path, file.dtype)
    expected = 0
    if len(ends):
        expected = int(ends[-1])
    if len(ids) != expected:
        raise InputError(
            f"{file.path} is truncated or from another run: its .idx says {expected:,} tokens, got {len(ids):,}; "
            f"{AGAIN}"
        )
    start = 0
    used = 0
    for chunk in chunks_of(ids):
        stop = start + len(chunk)
        last = int(np.searchsorted(ends, stop, side="right"))
        yield Chunk(chunk, ends[used:last] - start)
        used = last
        start = stop
    if used < len(ends):  # a .bin without a token, of empty documents
        yield Chunk(np.empty(0, ids.dtype), np.zeros(len(ends) - used, np.int64))


def document_ends(index: Path) -> NDArray[np.int64]:
    """Return how many tokens precede the end of each document. Raises InputError for a damaged .idx."""
    header = _read_header(index)
    with wrap_read_errors(index):
        content = index.read_bytes()
    expected = IDX_HEADER.size + 12 * header.sequences + 8 * header.boundaries
    if len(content) != expected:
        raise InputError(
            f"{index} is truncated, or not of text: {header.sequences:,} sequences of {header.boundaries - 1:,} "
            f"documents are {expected:,} bytes, got {len(content):,}; {AGAIN}"
        )
    lengths = np.frombuffer(content, np.int32, header.sequences, IDX_HEADER.size)
    pointers = np.frombuffer(content, np.int64, header.sequences, IDX_HEADER.size + lengths.nbytes)
    offset = IDX_HEADER.size + lengths.nbytes + pointers.nbytes
    boundaries = np.frombuffer(content, np.int64, header.boundaries, offset)
    sequence_ends = np.cumsum(lengths, dtype=np.int64)
    starts = (sequence_ends - lengths) * np.dtype(header.dtype).itemsize
    if lengths.min(initial=0) < 0 or not np.array_equal(starts, pointers):
        raise InputError(f"{index} is damaged: expected sequences that follow each other in the .bin; {AGAIN}")
    if not _are_boundaries(boundaries, header.sequences):
        raise InputError(
            f"{index} is damaged: expected documents that divide its {header.sequences:,} sequences; {AGAIN}"
        )
    return np.concatenate([np.zeros(1, np.int64), sequence_ends])[boundaries[1:]]


def _are_boundaries(boundaries: NDArray[np.int64], sequences: int) -> bool:
    """Return whether documents begin with the first sequence, follow each other, and end with the last."""
    if not len(boundaries):
        return False
    return boundaries[0] == 0 and boundaries[-1] == sequences and bool((np.diff(boundaries) >= 0).all())


def _read_header(index: Path) -> _Header:
    with wrap_read_errors(index), index.open("rb") as file:
        head = file.read(IDX_HEADER.size)
    if len(head) < IDX_HEADER.size or not head.startswith(MAGIC):
        raise InputError(f"{index}: expected Megatron's index, which begins with {MAGIC!r}, got {head[:9]!r}; {AGAIN}")
    _, version, code, sequences, boundaries = IDX_HEADER.unpack(head)
    dtype = _DTYPES.get(code, f"unknown type {code}")
    if version != 1 or not dtype.startswith(("int", "uint")):
        raise InputError(f"{index}: expected version 1 with integer ids, got version {version} with {dtype}; {AGAIN}")
    return _Header(dtype, sequences, boundaries)
