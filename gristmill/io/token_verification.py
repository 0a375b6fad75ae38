"""Verification of token shards against their manifest: checksums and ids."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, wrap_read_errors
from gristmill.io.token_shards import MANIFEST, REMEDY, Manifest, ShardRecord, with_suffix
from gristmill.storage.local import sha256_file


def verify_checksums(folder: Path, record: ShardRecord) -> None:
    """Read one shard and raise InputError where the SHA-256 of its .bin or .idx is not the recorded one."""
    for suffix, wanted in ((".bin", record.sha256), (".idx", record.idx_sha256)):
        path = with_suffix(folder / record.name, suffix)
        with wrap_read_errors(path):
            found = sha256_file(path) if wanted else ""
        if found != wanted:
            raise InputError(
                f"{path} is damaged or of another run: its SHA-256 is {found[:12]}…, and {MANIFEST} wants "
                f"{wanted[:12]}…. {REMEDY}"
            )


def require_known_ids(tokens: NDArray[np.integer], manifest: Manifest, prefix: Path) -> None:
    """Raise InputError where an id is not of the tokenizer; `prefix` is the shard they were read from."""
    size = manifest.tokenizer.vocab_size
    least, most = int(tokens.min(initial=0)), int(tokens.max(initial=0))
    if least < 0 or most >= size:
        wrong = least if least < 0 else most
        raise InputError(f"{prefix}.bin is damaged: it holds id {wrong}; wanted ids from 0 to {size - 1}. {REMEDY}")
