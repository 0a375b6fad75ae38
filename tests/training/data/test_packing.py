from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from training.data.packing import PackedSequences, pack_windows
from training.data.sequences import TokenSequences
from training.kernels.cross_entropy import IGNORE_INDEX

LENGTHS = [[3, 0, 5, 1], [], [4], [23, 7, 7]]  # of documents, by shard
T = 8


@pytest.fixture
def data(shards: Callable[..., Path], tmp_path: Path) -> TokenSequences:
    """The token at position i is i."""
    ends = np.cumsum([length for shard in LENGTHS for length in shard])
    documents = iter(np.split(np.arange(50), ends[:-1]))
    return TokenSequences(shards(tmp_path, [[next(documents).tolist() for _ in shard] for shard in LENGTHS]), T)


def test_every_token_is_an_input_or_a_target_once_and_only_long_documents_are_cut(
    data: TokenSequences, tmp_path: Path
) -> None:
    packed = PackedSequences(data, tmp_path / "run")
    rows = packed.batch(range(len(packed)))
    assert rows.shape == (len(packed), T + 1)
    pieces = sorted(zip(packed.plan.starts.tolist(), packed.plan.lengths.tolist(), strict=True))
    # the document of 23 tokens: 9 of them, from the last of these 9 again, and the rest
    assert pieces == [(0, 3), (3, 5), (8, 1), (9, 4), (13, 9), (21, 9), (29, 7), (36, 7), (43, 7)]
    assert len(packed) == 7 and (rows != IGNORE_INDEX).sum() == 52 == sum(length for _, length in pieces)
    assert packed.target_count(np.arange(7)) == (rows[:, 1:] != IGNORE_INDEX).sum() == 45
    said = "packing: 8 documents in 7 rows, 17.46% padding, which the loss ignores; "
    assert packed.notes() == [said + "cuts of documents longer than 9 tokens: 1"]


def test_positions_restart_with_each_piece_and_with_the_padding(data: TokenSequences, tmp_path: Path) -> None:
    packed = PackedSequences(data, tmp_path / "run")
    starts, order = {0, 3, 8, 9, 13, 21, 29, 36, 43}, range(len(packed))[::-1]
    for tokens, positions in zip(packed.batch(order).tolist(), packed.positions(order).tolist(), strict=True):
        for at in range(1, T):
            padding_starts = tokens[at] == IGNORE_INDEX != tokens[at - 1]
            assert positions[at] == (0 if tokens[at] in starts or padding_starts else positions[at - 1] + 1)
        assert positions[0] == 0


def test_a_plan_is_computed_once_and_in_bounded_windows(
    data: TokenSequences, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = PackedSequences(data, tmp_path / "run")
    monkeypatch.setattr("training.data.packing.pack_windows", None)
    second = PackedSequences(data, tmp_path / "run")
    assert all(np.array_equal(a, b) for a, b in zip(first.plan, second.plan, strict=True))
    with pytest.raises(TypeError):
        PackedSequences(TokenSequences(data.folder, T - 1), tmp_path / "run")  # another plan


@pytest.mark.parametrize("size", [1, 2, 3, 100])
def test_windows_of_any_size_pack_every_piece(data: TokenSequences, size: int) -> None:
    windows = list(pack_windows(data.documents, T + 1, size))
    pieces = sorted(pair for w in windows for pair in zip(w.starts.tolist(), w.lengths.tolist(), strict=True))
    assert [start for start, _ in pieces] == [0, 3, 8, 9, 13, 21, 29, 36, 43]
    assert all(np.add.reduceat(w.lengths, w.rows[:-1]).max() <= T + 1 for w in windows if len(w.starts))
