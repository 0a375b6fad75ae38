"""Token shards of made-up text, in which each token is one of four that the one before decides."""

from pathlib import Path

import numpy as np

from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, TokenShardWriter, token_dtype

VOCABULARY = 512


def write_tokens(folder: Path, seed: int, documents: int) -> Path:
    """Token shards of made-up text: each token is one of four that the one before decides."""
    random = np.random.default_rng(seed)
    following = np.random.default_rng(0).integers(3, VOCABULARY, (VOCABULARY, 4))
    folder.mkdir(parents=True)
    with TokenShardWriter(folder / "shard-00000", token_dtype(VOCABULARY)) as shard:
        for _ in range(documents):
            ids = [int(random.integers(3, VOCABULARY))]
            for choice in random.integers(0, 4, 199):
                ids.append(int(following[ids[-1], choice]))
            shard.add([*ids, 2])
    record = ShardRecord("shard-00000", documents, shard.tokens, 2 * shard.tokens, shard.sha256, shard.idx_sha256)
    tokenizer = TokenizerRecord("none.model", "none", VOCABULARY, 2)
    Manifest(tokenizer, str(token_dtype(VOCABULARY)), [record], {}).save(folder)
    return folder
