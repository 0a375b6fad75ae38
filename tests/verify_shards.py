"""Verification of a whole folder of token shards, for tests of the stages that write them."""

from pathlib import Path

import numpy as np

from gristmill.errors import InputError
from gristmill.io.token_shards import REMEDY, Manifest, map_shard, open_shards, require_known_ids, verify_checksums


def verify_shards(folder: Path) -> Manifest:
    """Check every shard of a folder against its manifest: checksums, counts, ids, end-of-document ids.

    Raises InputError that names the first shard that differs.
    """
    manifest, shards = open_shards(folder)
    for record, shard in zip(manifest.shards, shards, strict=True):
        map_shard(folder, manifest, record)
        verify_checksums(folder, record)
        require_known_ids(shard.tokens, manifest, shard.prefix)
        last = shard.tokens[np.cumsum(shard.lengths, dtype=np.int64) - 1]
        if not (last == manifest.tokenizer.end_of_document).all():
            raise InputError(f"{shard.prefix}.bin has a document that does not end in its end-of-document id. {REMEDY}")
    return manifest
