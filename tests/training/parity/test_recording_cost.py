"""A recording is small and cheap: sketches below a hundredth of the activations, equal tensors summarised once."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from benchmarks.bench_recording import bench_recording
from gristmill_parity.recording import RecordOptions, record
from gristmill_parity.recording import files as recording_files
from gristmill_parity.recording.files import Recording
from gristmill_parity.recording.sketch import _hashes_of_chunks, hash_of


def test_sketches_are_below_a_hundredth_of_the_activations() -> None:
    shown = bench_recording(steps=1)
    assert re.findall(r"^\| (\w+)", shown, re.MULTILINE) == ["step", "plain", "sketches", "values"]
    (share,) = re.findall(r"([\d.]+)% of the activations", shown)
    assert 0 < float(share) < 1


def test_equal_tensors_are_summarised_and_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An output is the next module's input, and a weight that is used is the last step's."""
    counted = list[Tensor]()
    sketch_of = recording_files.sketch_of

    def counting(values: Tensor, *rest: object) -> np.ndarray:  # type: ignore[type-arg]
        counted.append(values)
        return sketch_of(values, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(recording_files, "sketch_of", counting)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with record(model, tmp_path, optimizer=optimizer, options=RecordOptions(keep="all")):
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().sum().backward()
            optimizer.step()
    (rank,) = Recording(tmp_path).ranks
    assert len(counted) < 0.6 * len(rank.entries)
    written = sum(4 * int(np.prod(entry.shape)) for entry in rank.entries)
    assert (tmp_path / "rank-00000.values").stat().st_size < 0.6 * written
    values = {(str(entry.key), entry.key.step): rank.values(entry) for entry in rank.entries}
    np.testing.assert_array_equal(values["0 output", 1], values["1 input", 1])
    np.testing.assert_array_equal(values["0.weight weight", 1], values["0.weight used weight", 2])
    assert not np.array_equal(values["0.weight weight", 1], values["0.weight weight", 2])
    np.testing.assert_allclose(values["0.weight weight", 2], model[0].weight.detach().numpy())


def test_a_tensor_that_is_changed_unnoticed_by_autograd_is_summarised_again(tmp_path: Path) -> None:
    """As an in-place all-reduce changes an output: torch counts no version of it."""

    class Doubling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.inner(x)
            out.data.mul_(2)
            return out

    with record(Doubling(), tmp_path, options=RecordOptions(keep="all")) as recorder:
        recorder.parts[0](torch.ones(2, 4))
    (rank,) = Recording(tmp_path).ranks
    entries = {str(entry.key): entry for entry in rank.entries}
    inner = entries["inner output"]
    outer = entries["model output"]
    assert outer.hash != inner.hash
    np.testing.assert_allclose(outer.sketch, 2 * np.array(inner.sketch))
    np.testing.assert_array_equal(rank.values(outer), 2 * rank.values(inner))


# Hashes


def _signs_of_two(values: Tensor) -> Tensor:
    values[[3, 11]] *= -1
    return values


def _exchanged(values: Tensor) -> Tensor:
    values[[5, 7]] = values[[7, 5]]
    return values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "change",
    [
        lambda values: -values,
        lambda values: 2 * values,
        lambda values: values.flip(0),
        lambda values: values[:-1],
        lambda values: torch.cat([values, values.new_zeros(1)]),
        lambda values: torch.nextafter(values.float(), values.float() + 1).to(values.dtype) * 1.01,
        _signs_of_two,
        _exchanged,
    ],
    ids=["signs", "factor", "order", "shorter", "longer", "rounding", "two signs", "exchanged"],
)
def test_a_hash_is_of_bits_and_places(dtype: torch.dtype, change: Callable[[Tensor], Tensor]) -> None:
    values = torch.randn(70_001, generator=torch.Generator().manual_seed(1)).to(dtype)
    digest = hash_of(values)
    assert 0 <= digest < 1 << 64
    assert hash_of(values.clone()) == digest
    assert hash_of(torch.stack([values, -values], 1)[:, 0]) == digest
    assert hash_of(torch.cat([values[:1], values])[1:]) == digest
    assert hash_of(change(values.clone())) != digest


def test_no_two_signs_cancel() -> None:
    """Signs are the highest bits of words, whose products with odd keys are all alike."""
    values = torch.ones(64, dtype=torch.float64)
    digests = {hash_of(values)}
    for first in range(64):
        for second in range(first):
            changed = values.clone()
            changed[[first, second]] = -1
            digests.add(hash_of(changed))
    assert len(digests) == 1 + 64 * 63 // 2


def test_a_gpu_hashes_chunks_alike() -> None:
    words = torch.randint(-(1 << 62), 1 << 62, (100_003,), generator=torch.Generator().manual_seed(2))
    hashes = _hashes_of_chunks(words)
    assert len(hashes) == 4
    total = 8 * len(words)
    for hashed in hashes:
        total = (total * 0x9E3779B97F4A7C15 + hashed) % (1 << 64)
    assert hash_of(words) == total


@pytest.mark.gpu
def test_a_hash_is_the_same_on_a_gpu() -> None:
    values = torch.randn(9_000_001, generator=torch.Generator().manual_seed(3))
    assert hash_of(values.cuda()) == hash_of(values)
    assert hash_of(values[:3].cuda()) == hash_of(values[:3])


@pytest.mark.parametrize("values", [torch.tensor(True), torch.tensor(2.5).expand(1), torch.zeros(0), torch.zeros(3, 0)])
def test_a_hash_of_the_smallest(values: Tensor) -> None:
    assert hash_of(values) == hash_of(values.clone())
