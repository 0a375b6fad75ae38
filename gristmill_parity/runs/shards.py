"""Token shards of a run: documents of random tokens, the same ones wherever they are written."""

from pathlib import Path

import numpy as np

from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, TokenShardWriter, token_dtype
from gristmill_parity.cases import SEQ_LEN, VOCAB_SIZE

END_OF_DOCUMENT = 2
TRAIN = ("train", "more")
HOLDOUT = "holdout"
_TOKENS = {"train": (400, 1, 260), "more": (300,), "holdout": (330,)}  # of each shard; sequences lie across their ends
_LONGEST = 40  # tokens of a document


def write_token_data(folder: Path) -> None:
    """Write two data sets to train on, and a holdout."""
    for number, (name, sizes) in enumerate(_TOKENS.items()):
        random = np.random.default_rng(number)
        records = []
        for shard, size in enumerate(sizes):
            records.append(_write_shard(folder / name, f"shard-{shard:05d}", size, random))
        tokenizer = TokenizerRecord("", "", VOCAB_SIZE, END_OF_DOCUMENT)
        Manifest(tokenizer, token_dtype(VOCAB_SIZE).name, records, {}).save(folder / name)


def _write_shard(folder: Path, name: str, size: int, random: np.random.Generator) -> ShardRecord:
    documents = 0
    with TokenShardWriter(folder / name, token_dtype(VOCAB_SIZE)) as shard:
        while shard.tokens < size:
            length = min(size - shard.tokens, int(random.integers(1, _LONGEST)))
            ids = random.integers(END_OF_DOCUMENT + 1, VOCAB_SIZE, length)
            ids[-1] = END_OF_DOCUMENT
            shard.add(ids)
            documents += 1
    return ShardRecord(name, documents, shard.tokens, 0, shard.sha256, shard.idx_sha256)


def train_folders(folder: Path, sets: int) -> list[Path]:
    """Return the first `sets` data sets to train on."""
    return [folder / name for name in TRAIN[:sets]]


SEQUENCES = (sum(_TOKENS["train"]) - 1) // SEQ_LEN
"""Sequences of the first data set: an epoch of it."""
