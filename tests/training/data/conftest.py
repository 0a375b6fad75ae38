"""The fixture of the data tests: token shards in which the token at position i is i."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from training.data.sequences import TokenSequences

OpenSequences = Callable[..., TokenSequences]


@pytest.fixture
def open_sequences(shards: Callable[..., Path], tmp_path: Path) -> OpenSequences:
    """`open_sequences(tokens, length, cuts=())`: tokens 0, 1, 2, … in shards that end at `cuts`."""

    def build(tokens: int, length: int, cuts: Sequence[int] = ()) -> TokenSequences:
        parts = np.split(np.arange(tokens), list(cuts))
        folder = shards(tmp_path, [[part.tolist()] if len(part) else [] for part in parts], vocabulary=tokens)
        return TokenSequences(folder, length)

    return build
