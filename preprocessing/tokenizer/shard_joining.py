"""Joining of parts, a token shard for each slice of the corpus, into token shards of a target size.

A plan groups consecutive parts by their sizes, which their reports record; each group is copied into one shard. So
which tokens a shard holds depends on the corpus and the target size, and on nothing else.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.io.token_shards import (
    SHARD_SUFFIXES,
    Manifest,
    ShardRecord,
    TokenShard,
    TokenShardWriter,
    read_sources,
    verify_checksums,
    write_sources,
)
from gristmill.storage.files import list_names

_SHARD = re.compile(r"tokens_\d+")
_DIGITS = 5  # of a shard's number: names sort in the order of the shards up to 100,000 of them
_COPIED_TOKENS = 1 << 22  # copied at once: 8 or 16 MiB


def plan_token_shards(sizes: Sequence[int], target: int) -> list[list[int]]:
    """Group consecutive parts into shards of at most `target`, or of one part where that is larger.

    Args:
        sizes: Size of the .bin of each part, in bytes.
        target: Bytes of a shard's .bin.

    Returns:
        The indices of the parts of each shard, in order; one shard at least, unless there are no parts.

    >>> plan_token_shards([3, 4, 9, 1, 0, 2], target=8)
    [[0, 1], [2], [3, 4, 5]]
    """
    groups: list[list[int]] = []
    filled = 0
    for part, size in enumerate(sizes):
        if not groups or (filled and filled + size > target):
            groups.append([])
            filled = 0
        groups[-1].append(part)
        filled += size
    return groups


def shard_name(number: int) -> str:
    """Return the name of a shard by its number from 0, padded so that names sort.

    >>> shard_name(7)
    'tokens_00007'
    """
    return f"tokens_{number:0{_DIGITS}}"


def shards_in(folder: Path, suffixes: Sequence[str] = SHARD_SUFFIXES) -> list[Path]:
    """Return the files of shards in a folder, absolute, as far as their names say."""
    paths = (folder.absolute() / name for name in list_names(folder))
    return [path for path in paths if path.suffix in suffixes and _SHARD.fullmatch(path.stem)]


def join_parts(prefixes: Sequence[Path], parts: Sequence[ShardRecord], prefix: Path) -> ShardRecord:
    """Write the shard `prefix`.bin, .idx and .sources of the documents of `parts`, in order; return its record.

    Args:
        prefixes: Where the parts are, which are shards themselves, all of one dtype; their names are the records'.
        parts: Records of at least one part.
        prefix: Where to write the shard; its name is the record's.

    Raises:
        InputError: a part is missing or damaged.
        OutputError: the shard cannot be written.
    """
    with TokenShardWriter(prefix, TokenShard(prefixes[0]).tokens.dtype) as shard:
        for path, record in zip(prefixes, parts, strict=True):
            verify_checksums(path.parent, record)
            for ids, lengths in _runs_of_documents(TokenShard(path)):
                shard.add_all(ids, lengths.tolist())
    documents = len(shard.lengths)
    text_bytes = sum(record.bytes for record in parts)
    numbers, names = _join_sources(prefixes, parts)
    digest = write_sources(prefix, numbers, names)
    return ShardRecord(prefix.name, documents, shard.tokens, text_bytes, shard.sha256, shard.idx_sha256, names, digest)


def _join_sources(prefixes: Sequence[Path], parts: Sequence[ShardRecord]) -> tuple[NDArray[np.integer], list[str]]:
    """Return the number of each document's source, and the sources that the numbers stand for: each of the parts'."""
    number_of: dict[str, int] = {}
    numbers = [np.empty(0, np.uint32)]
    for path, record in zip(prefixes, parts, strict=True):
        numbers_of_part = [number_of.setdefault(name, len(number_of)) for name in record.sources]
        numbers.append(np.array(numbers_of_part, np.uint32)[read_sources(path.parent, record)])
    return np.concatenate(numbers), [*number_of]


def blend(manifest: Manifest) -> str:
    """Return contents of data_path.txt, what Megatron-LM's --data-path takes: a line `<weight> <shard>` for each shard.

    A weight is the number of tokens, so that all shards are read equally often. Names are relative to the folder of
    the shards, which may be moved. Empty shards, which Megatron-LM refuses, are left out.
    """
    return "".join(f"{shard.tokens} {shard.name}\n" for shard in manifest.shards if shard.tokens)


def _runs_of_documents(part: TokenShard) -> Iterator[tuple[NDArray[np.integer], NDArray[np.int32]]]:
    """Yield runs of documents of about _COPIED_TOKENS: their ids, concatenated, and their lengths."""
    ends = np.cumsum(part.lengths, dtype=np.int64)
    first = 0
    while first < len(part):
        start = 0
        if first:
            start = int(ends[first - 1])
        last = max(first + 1, int(np.searchsorted(ends, start + _COPIED_TOKENS, side="right")))
        yield part.tokens[start : int(ends[last - 1])], part.lengths[first:last]
        first = last
