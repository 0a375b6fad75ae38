"""Fixed-length sequences from token shards.

Sequence i of length T is tokens [iT, iT + T] of all shards concatenated: T inputs, and the same shifted by one
as targets. It may hold the end of one document and the start of the next: documents were shuffled when the shards
were written.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, map_shard
from gristmill.io.token_verification import require_known_ids


class TokenSequences(Dataset[Tensor]):
    """Map-style dataset of the sequences of one folder of memory-mapped token shards; item i is (T + 1,) int64."""

    def __init__(self, folder: Path, length: int) -> None:
        """Open the shards of `folder`; `length` is T.

        Raises UsageError for less than one full sequence, InputError where a shard is not the manifest's.
        """
        self.folder, self.length, self.manifest = folder, length, Manifest.load(folder)
        self.shards = [map_shard(folder, self.manifest, record) for record in self.manifest.shards]
        self.starts = np.concatenate([[0], np.cumsum([len(s) for s in self.shards], dtype=np.int64)])
        if len(self) < 1:
            raise UsageError(
                f"{folder} holds {self.tokens} tokens, less than one sequence: data.seq_len {length} needs "
                f"{length + 1}; try a lower --data.seq_len or more text"
            )

    @property
    def tokens(self) -> int:
        """Number of tokens in all shards."""
        return int(self.starts[-1])

    def __len__(self) -> int:
        return max(0, (self.tokens - 1) // self.length)

    def __getitem__(self, i: int) -> Tensor:
        return self.batch([i])[0]

    def batch(self, indices: Sequence[int] | NDArray[np.int64]) -> Tensor:
        """Read the sequences `indices`: (len(indices), T + 1) int64.

        One gather per shard; only sequences that cross into the next shard are read one by one. Raises InputError for
        an id that is not the tokenizer's.
        """
        starts = np.asarray(indices, np.int64) * self.length
        out = np.empty((len(starts), self.length + 1), np.int64)
        shards = np.searchsorted(self.starts, starts, side="right") - 1
        inside = starts + self.length < self.starts[shards + 1]
        for shard in np.unique(shards[inside]):
            rows = inside & (shards == shard)
            offsets = (starts[rows] - self.starts[shard])[:, None] + np.arange(self.length + 1)
            out[rows] = self.require_known(int(shard), self.shards[shard][offsets])
        for row in np.flatnonzero(~inside):
            self._read_across_shards(int(starts[row]), out[row])
        return torch.from_numpy(out)

    def _read_across_shards(self, start: int, row: NDArray[np.int64]) -> None:
        """Fill `row` with the tokens from `start` on, which may span several shards."""
        shard, filled = int(np.searchsorted(self.starts, start, side="right")) - 1, 0
        while filled < len(row):
            offset = start + filled - int(self.starts[shard])
            tokens = self.shards[shard][offset : offset + len(row) - filled]
            row[filled : filled + len(tokens)] = self.require_known(shard, tokens)
            filled, shard = filled + len(tokens), shard + 1

    def require_known(self, shard: int, tokens: NDArray[np.integer]) -> NDArray[np.integer]:
        """Return `tokens`, read from a shard. Raises InputError if one is not the tokenizer's."""
        require_known_ids(tokens, self.manifest, self.folder / self.manifest.shards[shard].name)
        return tokens


def require_same_tokenizer(train: TokenSequences, holdout: TokenSequences) -> None:
    """Raise UsageError where the two folders were tokenized with different tokenizers."""
    ours, theirs = train.manifest.tokenizer, holdout.manifest.tokenizer
    if ours.sha256 != theirs.sha256:
        raise UsageError(
            f"{train.folder} was made with tokenizer {ours.path} (sha256 {ours.sha256[:12]}) and {holdout.folder} with "
            f"{theirs.path} ({theirs.sha256[:12]}); run tokenize_corpus on both with the same tokenizer"
        )
