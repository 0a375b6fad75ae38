"""TokenFile: a file of tokens that another program wrote, where it lies and how its ids are stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, wrap_read_errors
from preprocessing.token_formats.token_stream import CHUNK_TOKENS

Layout = Literal["raw", "megatron", "table", "mosaic"]
AGAIN = "fetch or write it again"


@dataclass(frozen=True)
class MosaicColumn:
    """A shard in an MDS index: its size, its samples, and where in a sample the column of ids is.

    `sizes` are the bytes of each column, 0 where each sample says; `number` is the column's, `dtype` that of its ids
    ("": each sample says), `has_shape` whether a shape precedes them.
    """

    size: int
    samples: int
    sizes: tuple[int, ...]
    number: int
    dtype: str
    has_shape: bool
    compression: str = ""
    hashes: tuple[tuple[str, str], ...] = ()  # of the file as it is stored


@dataclass(frozen=True)
class TokenFile:
    """A file of tokens.

    Attributes:
        path: The file with the ids.
        source: The name of its source.
        layout: How it is read.
        size: Its bytes.
        dtype: NumPy's name for the stored ids; "" where they are not stored one after the other.
        skipped: Bytes of a header before the ids.
        tokens: How many ids there are, as a header says; -1 if none does.
        index: The .idx next to a Megatron .bin.
        column: The column of a table that holds the ids; "": input_ids or tokens.
        mosaic: Of an MDS shard.
    """

    path: Path
    source: str
    layout: Layout
    size: int
    dtype: str = ""
    skipped: int = 0
    tokens: int = -1
    index: Path | None = None
    column: str = ""
    mosaic: MosaicColumn | None = None

    def is_usable_as(self, dtype: np.dtype) -> bool:
        """Return whether the file can be a shard's .bin of this dtype as it is."""
        bits = {"uint32": "int32"}.get(self.dtype, self.dtype)  # the same bits, as ids are below 2^31
        return self.layout in ("raw", "megatron") and self.skipped == 0 and bits == dtype.name


def map_ids(path: Path, dtype: str, skipped: int = 0) -> NDArray[np.integer]:
    """Memory-map the ids of a file after a header of `skipped` bytes. InputError for a part of an id at its end."""
    kind = np.dtype(dtype)
    with wrap_read_errors(path):
        size = path.stat().st_size - skipped
        if size % kind.itemsize:
            raise InputError(
                f"{path} is truncated, or not of {dtype}: expected {kind.itemsize} bytes per token, got {size:,} "
                f"bytes; {AGAIN}, or try another --dtype"
            )
        if size == 0:
            return np.empty(0, kind)
        return np.memmap(path, kind, mode="r", offset=skipped)


def chunks_of(ids: NDArray[np.integer]) -> Iterator[NDArray[np.integer]]:
    """Yield ids in chunks that are read one at a time."""
    for start in range(0, len(ids), CHUNK_TOKENS):
        yield np.asarray(ids[start : start + CHUNK_TOKENS])
