from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill.errors import InputError
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.mix import MixedSequences
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
    targets = packed.targets(range(7), rows)
    assert packed.target_count(np.arange(7)) == packed.all_targets == (targets != IGNORE_INDEX).sum() == 45
    said = "packing: 8 documents in 7 rows, 17.46% padding, which the loss ignores; "
    assert packed.notes() == [said + "1 cut in documents longer than 9 tokens"]


def test_the_rest_of_a_cut_document_has_no_target_for_its_first_token(
    shards: Callable[..., Path], tmp_path: Path
) -> None:
    data = TokenSequences(shards(tmp_path, [[[0, 1], list(range(2, 17))]]), T)
    packed = PackedSequences(data, tmp_path / "run")
    rows = packed.batch([0, 1])
    assert rows.tolist() == [[*range(2, 11)], [0, 1, *range(10, 17)]]  # 10 is a target of the first row
    targets = packed.targets([0, 1], rows)
    assert targets.tolist() == [[*range(3, 11)], [1, IGNORE_INDEX, *range(11, 17)]]
    assert packed.all_targets == packed.target_count(np.arange(2)) == 15
    assert [packed.target_count(np.array([row])) for row in range(2)] == [8, 7]
    assert [packed.target_spans(row) for row in range(2)] == [[(3, 11)], [(1, 2), (11, 17)]]
    mixed = MixedSequences([packed, packed])
    order = np.array([3, 0, 2, 1])
    assert torch.equal(mixed.targets(order, mixed.batch(order)), targets[order % 2])


def test_a_batch_says_which_of_its_inputs_are_padding(data: TokenSequences, tmp_path: Path) -> None:
    """Windows have none; the last token of a row that is not filled is an input, and no padding."""
    packed = PackedSequences(data, tmp_path / "run")
    batches = Batches(packed, BatchSplit(1, 1, 7), 0, seed=1)
    batch = batches.batch(0)
    rows = packed.batch(batches.indices(0))[:, :-1]
    assert batch.padding is not None and torch.equal(batch.padding, rows == IGNORE_INDEX)
    assert 0 < int(batch.padding.sum()) < batch.padding.numel() / 2
    assert Batches(data, BatchSplit(1, 1, 4), 0, seed=1).batch(0).padding is None


def test_a_row_of_one_token_is_left_out(shards: Callable[..., Path], tmp_path: Path) -> None:
    data = TokenSequences(shards(tmp_path, [[[1] * 9, [2] * 9, [3]]]), T)
    packed = PackedSequences(data, tmp_path / "run")
    assert packed.plan.rows.tolist() == [0, 1, 2] and packed.plan.starts.tolist() == [0, 9]
    assert [packed.target_count(np.array([row])) for row in range(2)] == [8, 8]


@pytest.mark.parametrize("name", ["starts", "lengths", "is_cut", "rows", "sha256"])
@pytest.mark.parametrize("damage", ["other", "shorter", "gone"])
def test_a_damaged_plan_is_refused_and_computed_again_once_removed(
    data: TokenSequences, tmp_path: Path, name: str, damage: str
) -> None:
    rows = PackedSequences(data, tmp_path).batch(range(7))
    (path,), (checksums,) = tmp_path.glob(f"packing-*.{name}"), tmp_path.glob("packing-*.sha256")
    content = path.read_bytes()
    path.write_bytes(content[:8] if damage == "shorter" else bytes([content[0] ^ 1]) + content[1:])
    if damage == "gone":
        path.unlink()
    if path != checksums or damage != "gone":
        with pytest.raises(
            InputError, match=r"of the packing's plan, is missing or damaged: .* Remove .*\.sha256, and"
        ):
            PackedSequences(data, tmp_path)
        checksums.unlink()
    assert torch.equal(PackedSequences(data, tmp_path).batch(range(7)), rows)


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
    alone = [8] if size == 1 else []  # a document of one token
    assert sorted([start for start, _ in pieces] + alone) == [0, 3, 8, 9, 13, 21, 29, 36, 43]
    assert all(np.add.reduceat(w.lengths, w.rows[:-1]).max() <= T + 1 for w in windows if len(w.starts))
