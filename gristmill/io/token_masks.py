"""Masks of token shards: which tokens are targets of training, such as what an assistant says in a chat.

`NAME.mask` has a byte for each token of NAME.bin, 1 for a target; `masks.json` in the folder names the masks of all
shards. Shards without that file have no masks: each token is a target. Programs that know no masks read them as others.
"""

import hashlib
from functools import cached_property
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError
from gristmill.io.token_shards import REMEDY, Manifest, ShardRecord, with_suffix
from gristmill.storage.local import atomic_write_bytes, sha256_file

MASKS = "masks.json"
MASK = ".mask"


class MaskRecord(msgspec.Struct, forbid_unknown_fields=True):
    """The mask of one shard: its SHA-256, and how many tokens are targets."""

    sha256: str
    targets: int


class TokenMasks:
    """The masks of one folder of token shards."""

    def __init__(self, folder: Path, manifest: Manifest, records: dict[str, MaskRecord]) -> None:
        """Raises InputError where a shard has no mask of its size."""
        self.folder = folder
        self.shards = manifest.shards
        self.records = records
        self.starts = np.cumsum([0] + [shard.tokens for shard in manifest.shards], dtype=np.int64)
        for shard in manifest.shards:
            path = with_suffix(folder / shard.name, MASK)
            if shard.name not in records or not path.is_file() or path.stat().st_size != shard.tokens:
                raise InputError(f"{path} is missing or damaged: expected {shard.tokens:,} bytes. {REMEDY}")

    @classmethod
    def load(cls, folder: Path, manifest: Manifest) -> "TokenMasks | None":
        """Return the masks of a folder; None if it has none. Raises InputError where they are damaged."""
        path = folder / MASKS
        if not path.is_file():
            return None
        try:
            records = msgspec.json.decode(path.read_bytes(), type=dict[str, MaskRecord])
        except (msgspec.DecodeError, UnicodeDecodeError, OSError) as error:
            raise InputError(f"{path} is damaged ({error}). {REMEDY}") from error
        return cls(folder, manifest, records)

    @cached_property
    def _mapped(self) -> list[NDArray[np.uint8]]:
        mapped = []
        for shard in self.shards:
            path = with_suffix(self.folder / shard.name, MASK)
            mask: NDArray[np.uint8] = np.empty(0, np.uint8)
            if shard.tokens:
                mask = np.memmap(path, np.uint8, "r")
            mapped.append(mask)
        return mapped

    @property
    def targets(self) -> int:
        """Return the number of tokens that are targets."""
        return sum(record.targets for record in self.records.values())

    @property
    def fingerprint(self) -> str:
        """Return a hash that names the masks, wherever they lie."""
        checksums = [self.records[shard.name].sha256 for shard in self.shards]
        return hashlib.sha256(msgspec.json.encode(checksums)).hexdigest()[:16]

    def between(self, start: int, stop: int) -> NDArray[np.bool_]:
        """Return which of the tokens start … stop of all shards concatenated are targets: (stop - start,) bool."""
        shard = int(np.searchsorted(self.starts, start, side="right")) - 1
        parts = []
        while start < stop:
            begin = int(self.starts[shard])
            end = min(stop, int(self.starts[shard + 1]))
            parts.append(self._mapped[shard][start - begin : end - begin])
            start = max(start, end)
            shard += 1
        if not parts:
            return np.empty(0, bool)
        return np.concatenate(parts).astype(bool)

    def verify(self, record: ShardRecord) -> None:
        """Raise InputError where the SHA-256 of a shard's mask is not the recorded one."""
        path = with_suffix(self.folder / record.name, MASK)
        if sha256_file(path) != self.records[record.name].sha256:
            raise InputError(f"{path} is damaged or from another run: its SHA-256 is not that of {MASKS}. {REMEDY}")


def write_mask(prefix: Path, mask: NDArray[np.bool_]) -> MaskRecord:
    """Write PREFIX.mask, atomically, and return its record."""
    data = mask.astype(np.uint8).tobytes()
    atomic_write_bytes(with_suffix(prefix, MASK), data)
    return MaskRecord(hashlib.sha256(data).hexdigest(), int(mask.sum()))


def write_masks(folder: Path, records: dict[str, MaskRecord]) -> None:
    """Write masks.json, atomically."""
    atomic_write_bytes(folder / MASKS, msgspec.json.format(msgspec.json.encode(records), indent=2) + b"\n")


def runs_of(is_present: NDArray[np.bool_], first: int) -> list[tuple[int, int]]:
    """Return the starts and stops of the runs of True, counted from `first`.

    >>> runs_of(np.array([True, True, False, True]), 10)
    [(10, 12), (13, 14)]
    """
    changes = np.flatnonzero(np.diff(is_present.astype(np.int8), prepend=0, append=0)) + first
    return list(zip(changes[::2].tolist(), changes[1::2].tolist(), strict=True))
