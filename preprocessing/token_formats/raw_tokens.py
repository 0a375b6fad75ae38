"""nanoGPT's .bin: ids as uint16 and nothing else. llm.c's and modded-nanogpt's: the same after a header.

The header has 256 int32: a magic number, a version, the number of tokens.
Source: karpathy/nanoGPT data/openwebtext/prepare.py; karpathy/llm.c dev/data/data_common.py, write_datafile.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from gristmill.errors import InputError, wrap_read_errors
from preprocessing.token_formats.token_file import AGAIN, TokenFile, chunks_of, map_ids
from preprocessing.token_formats.token_stream import NO_ENDS, Chunk

HEADER_BYTES = 1024
_DTYPES_OF_HEADERS = {(20240520, 1): "uint16", (20240801, 7): "uint32"}  # llm.c's GPT-2 and Llama 3
DTYPES = ("uint16", "int32", "uint32", "int64")
_PROBED = 1 << 16  # tokens


def describe_raw(file: TokenFile, dtype: str) -> TokenFile:
    """Return the file with the dtype and number of its ids: what its header says, or else `dtype`, or uint16.

    Raises InputError for a header that does not fit the file.
    """
    with wrap_read_errors(file.path), file.path.open("rb") as opened:
        beginning = opened.read(12).ljust(12, b"\0")
    head = np.frombuffer(beginning, np.int32).tolist()
    named = _DTYPES_OF_HEADERS.get((head[0], head[1]))
    if named is None:
        return replace(file, dtype=dtype or "uint16")
    tokens = head[2]
    expected = HEADER_BYTES + tokens * np.dtype(named).itemsize
    if file.size != expected:
        raise InputError(
            f"{file.path} is truncated: its header says {tokens:,} tokens, which are {expected:,} bytes, got "
            f"{file.size:,}; {AGAIN}"
        )
    return replace(file, dtype=named, skipped=HEADER_BYTES, tokens=tokens)


def read_raw(file: TokenFile) -> Iterator[Chunk]:
    """Yield the ids of a file; nothing in it says where documents end. Raises InputError for another dtype."""
    ids = map_ids(file.path, file.dtype, file.skipped)
    if file.tokens < 0:
        _reject_wider(file.path, ids[:_PROBED])
    for chunk in chunks_of(ids):
        yield Chunk(chunk, NO_ENDS)


def _reject_wider(path: Path, first: np.ndarray) -> None:
    """Raise InputError where every second id is 0, as where the ids are twice as wide as was said."""
    if first.dtype.itemsize < 4 and len(first) >= 8 and not first[1::2].any() and first[::2].any():
        raise InputError(f"{path}: expected {first.dtype} ids, got 0 for every second one; try --dtype int32")
