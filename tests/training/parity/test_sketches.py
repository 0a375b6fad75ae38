"""What a recording keeps of a tensor: sketches whose pieces add up, values as they were. And the noise of rounding."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch

from gristmill_parity.recording import Perturb, Shard
from gristmill_parity.recording.files import Key, Recording, Writer
from gristmill_parity.recording.perturb import Noise
from gristmill_parity.recording.placement import compress_indices, expand_runs, piece_of
from gristmill_parity.recording.sketch import sketch_of


def test_runs_of_indices_are_compact_and_exact() -> None:
    for indices in ([], [3], [0, 1, 2], [1, 3, 5], [0, 1, 6, 7], [2, 5, 6, 9], [0, 2, 3]):
        runs = compress_indices(np.array(indices, dtype=np.int64))
        assert expand_runs(runs).tolist() == indices
    assert compress_indices(np.arange(1, 100, 4)) == ((1, 98, 4),)


@pytest.mark.parametrize("order", ["chunks", "interleaved", "zigzag"])
def test_a_tensors_sketch_is_the_sum_of_its_pieces(order: str) -> None:
    whole = torch.randn(8, 12, 5, dtype=torch.float64)
    kind = Shard(1, order)  # type: ignore[arg-type]
    total = np.zeros(16)
    seen = torch.zeros(8, 12, 5)
    for rank in range(3):
        for outer in range(2):
            axes = {"a": (rank, 3), "b": (outer, 2)}
            rows = [torch.arange(12).chunk(6)[chunk] for chunk in (rank, 5 - rank)]
            own = {
                "chunks": torch.arange(12).chunk(3)[rank],
                "interleaved": torch.arange(12)[rank::3],
                "zigzag": torch.cat(rows),
            }[order]
            part = whole[4 * outer : 4 * outer + 4][:, own]
            values, piece = piece_of(part, {"b": Shard(0), "a": kind}, axes)
            assert piece.shape == (8, 12, 5) and piece.indices()[1].tolist() == own.tolist()
            seen[np.ix_(*piece.indices())] += 1
            total += sketch_of(values, piece.index, piece.shape)
    assert bool((seen == 1).all())
    everywhere = [((0, size, 1),) for size in whole.shape]
    expected = sketch_of(whole, everywhere, whole.shape)
    np.testing.assert_allclose(total, expected, rtol=1e-10)
    other = whole.clone()
    other[3, 4, 2] += 0.5
    off = sketch_of(other, everywhere, whole.shape) - expected
    assert 0.1 < np.linalg.norm(off) / 4 < 2.0


@pytest.mark.parametrize("columns", [256, 688, 250])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_pieces_of_a_large_tensor_add_up_whether_blocks_are_whole_or_not(columns: int, dtype: torch.dtype) -> None:
    """A piece of whole blocks of columns is summed by blocks, another one by columns."""
    whole = torch.randn(64, columns, generator=torch.Generator().manual_seed(1)).to(dtype)
    rows: tuple[tuple[int, int, int], ...] = ((0, 64, 1),)
    expected = sketch_of(whole, [rows, ((0, columns, 1),)], whole.shape)
    for cuts in ([0, 64, 128, columns], [0, 7, 100, columns]):
        total = np.zeros(16)
        for start, stop in pairwise(cuts):
            total += sketch_of(whole[:, start:stop], [rows, ((start, stop, 1),)], whole.shape)
        np.testing.assert_allclose(total, expected, atol=1e-6 * float(whole.double().norm()))
    changed = whole.clone()
    changed[5, 9] += 1
    off = sketch_of(changed, [rows, ((0, columns, 1),)], whole.shape) - expected
    np.testing.assert_allclose(np.abs(off), float(changed[5, 9].double() - whole[5, 9].double()), rtol=1e-3)


def test_noise_is_of_the_size_of_rounding_in_tensors_of_any_size() -> None:
    for count in (3, 1 << 20, (1 << 21) + 5):
        x = torch.full((count,), 3.0, dtype=torch.float64)
        noise = Noise(Perturb("bf16", 1))
        first = noise.rounded(x) / x - 1
        assert 0 < float(first.abs().max()) <= 2.0**-8
        assert first.unique().numel() >= min(count, 1 << 19)
    assert not torch.equal(noise.rounded(x[:99]), noise.rounded(x[:99]))
    assert not torch.equal(Noise(Perturb("bf16", 2)).rounded(x[:99]), Noise(Perturb("bf16", 1)).rounded(x[:99]))
    assert noise.rounded(x.bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_values_are_read_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.randn(5, 7, generator=torch.Generator().manual_seed(2)).to(dtype)
    with Writer(tmp_path, 0, 1, {}) as writer:
        for number, own in enumerate((values, values.T)):
            own, piece = piece_of(own, {}, {})
            writer.write(Key(1, f"x{number}", "output"), 0, own, piece, True)
    (rank,) = Recording(tmp_path).ranks
    first, second = rank.entries
    np.testing.assert_array_equal(rank.values(first), values.double().numpy())
    np.testing.assert_array_equal(rank.values(second), values.T.double().numpy())
