"""What only a GPU shows: rows of the certificate on it, compiled blocks, offloading with pinned memory, resuming."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill_parity.comparison import Certifier
from gristmill_parity.feature_cases import feature_case
from training.config import TrainConfig
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def certifier() -> Iterator[Certifier]:
    with RankPool(2, device="cuda") as ranks:
        yield Certifier(ranks)


@pytest.mark.parametrize("precision", ["fp64", "fp32", "bf16", "fp16"])
@pytest.mark.parametrize("preset", ["llama", "gpt2"])
def test_one_gpu_agrees_with_an_independent_reference(certifier: Certifier, preset: str, precision: str) -> None:
    row = certifier.certify(feature_case(preset, ParallelConfig(), precision=precision, device="cuda"))  # type: ignore[arg-type]
    assert row.passed, row.reason


@pytest.mark.parametrize(
    ("sparse", "precision"),
    [
        *((sparse, "fp64") for sparse in ("switch", "bias", "capacity", "latent", "sinks")), ("sequence", "fp32"),
        *((sparse, "bf16") for sparse in ("all", "latent, all", "sinks, all")),
    ],
)  # fmt: skip
def test_sparse_models_on_a_gpu_agree_with_an_independent_reference(
    certifier: Certifier, sparse: str, precision: str
) -> None:
    """In bf16 torch's grouped product computes all experts."""
    options = {"sparse": sparse, "precision": precision, "device": "cuda"}
    row = certifier.certify(feature_case("llama", ParallelConfig(), **options))
    assert row.passed, row.reason


@pytest.mark.parametrize(
    "layout",
    [ParallelConfig(dp=2), ParallelConfig(dp=2, zero=2), ParallelConfig(dp=2, zero=3), ParallelConfig(tp=2)],
    ids=ParallelConfig.describe,
)
def test_two_processes_agree_though_they_may_share_a_gpu(certifier: Certifier, layout: ParallelConfig) -> None:
    row = certifier.certify(feature_case("gpt2", layout, optimizer="adamw", device="cuda"))
    assert row.passed, row.reason


def losses(config: TrainConfig) -> list[float]:
    train(config)
    return [line["loss"] for line in read_metrics(config.out_dir / METRICS) if line["kind"] == "step"]


def test_compiled_bf16_follows_the_eager_one(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, device="cuda", precision="bf16")
    expected = losses(config)
    assert losses(replace(config, out_dir=tmp_path / "compiled", compile=True)) == pytest.approx(expected, rel=1e-2)


def test_moments_in_pinned_memory_train_as_those_on_the_gpu(config: TrainConfig, tmp_path: Path) -> None:
    config = replace(config, device="cuda")
    expected = losses(config)
    offloaded = replace(config, out_dir=tmp_path / "offloaded", memory=MemoryConfig(optimizer="cpu"))
    assert losses(offloaded) == pytest.approx(expected, rel=1e-5)


def test_a_gpu_resumes_bit_for_bit(config: TrainConfig, tmp_path: Path) -> None:
    optim = replace(config.optim, decay_steps=12)
    config = replace(config, device="cuda", precision="bf16", optim=optim, deterministic=True)
    expected = losses(config)
    parts = replace(config, out_dir=tmp_path / "parts")
    losses(replace(parts, optim=replace(optim, steps=6)))
    assert losses(parts) == expected
