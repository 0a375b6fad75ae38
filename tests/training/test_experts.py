"""Runs of sparse models: they learn, record the loads of experts, resume, and refuse what they do not support."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gristmill.errors import UsageError
from tests.training.conftest import small_run
from training.checkpoint.shard_storage import stored_tensors
from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.model_config import ModelConfig
from training.parallel.expert.routing import Loads
from training.reporting.expert_load import describe_starving
from training.reporting.metrics_file import METRICS, read_metrics
from training.run_plan import RunPlan
from training.train import train
from training.trainer import Trainer

BIAS: dict[str, Any] = {"experts": 4, "expert_width": 32, "balance": "bias", "balance_rate": 0.02, "dense_layers": 1}


def sparse(config: TrainConfig, **options: Any) -> TrainConfig:
    return replace(config, model=replace(config.model, layers=3, **{**BIAS, **options}))


def records(out_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_metrics(out_dir / METRICS) if record["kind"] == kind]


@pytest.mark.parametrize("balance", ["sequence", "bias"])
def test_a_sparse_run_learns_and_records_the_loads_of_its_experts(
    config: TrainConfig, balance: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rate = BIAS["balance_rate"] if balance == "bias" else 0.0
    config = sparse(config, balance=balance, balance_rate=rate, balance_loss=0.0)
    config = replace(config, optim=replace(config.optim, steps=60))
    summary = train(config)
    assert summary.holdout_loss < summary.unigram_loss - 0.2
    loads = records(config.out_dir, "experts")
    assert [record["step"] for record in loads] == list(range(4, 61, 4))
    assert {*loads[-1]["max_load"]} == {"1", "2"}  # the first layer is dense
    for layer in "12":
        assert 1.0 <= loads[-1]["max_load"][layer] < 1.6 and 0.9 < loads[-1]["entropy"][layer] <= 1.0
    assert all(sum(loads[-1]["loads"][layer]) == pytest.approx(4, abs=0.01) for layer in "12")
    assert max(loads[-1]["loads"]["1"]) == pytest.approx(loads[-1]["max_load"]["1"], abs=1e-3)
    said = capsys.readouterr().out
    assert (
        f"{summary.parameters:,} parameters, {summary.parameters - 2 * 2 * 3 * 32 * 32:,} of them active per token"
        in said
    )


def test_experts_take_no_padding_of_packed_documents(config: TrainConfig) -> None:
    """Of 4 rows of 48 tokens each token that is no padding chooses two of the experts, and these are all choices."""
    config = sparse(config, balance_loss=0.1)
    config = replace(config, data=replace(config.data, packing="best-fit", seq_len=48, batch_size=4))
    with init_distributed("cpu") as device, Trainer(RunPlan.of(config), device) as trainer:
        steps = map(trainer.batches.batch, range(trainer.batches.steps_per_epoch))
        batch = next(batch for batch in steps if batch.padding is not None)  # most rows are filled
        assert batch.padding is not None and trainer.model.routing is not None
        trainer.model.forward_backward(batch, 1.0)
        loads = trainer.model.routing.take()
    tokens = int((~batch.padding).sum())
    assert 0 < tokens < 4 * 48 and loads.counts.sum(1).tolist() == [0, 2 * tokens, 2 * tokens]


def test_a_run_resumes_with_the_bias_of_its_choices_under_another_layout(
    config: TrainConfig, tmp_path: Path, train_in_ranks: Any, corpus: Path
) -> None:
    options = [*small_run(corpus), "--model.layers", "3", "--optim.steps", "8", "--optim.decay_steps", "8"]
    options += ["--precision", "fp64", "--checkpoint.every", "2", "--metrics.log_every", "2"]
    options += [word for key, value in BIAS.items() for word in (f"--model.{key}", str(value))]
    train_in_ranks(1, tmp_path / "one", options)
    layout = ["--parallel.dp", "2", "--parallel.zero", "3"]
    stopped = tmp_path / "two"
    train_in_ranks(2, stopped, [*options, *layout, "--optim.steps", "4"])
    key = "model.blocks.1.mlp.router.choice_bias"
    stored = stored_tensors(next((stopped / "checkpoints").glob("step-*4")))
    assert stored[key].size == (4,) and not any("choice_bias" in name for name in stored if name.startswith("optim."))
    train_in_ranks(2, stopped, [*options, "--optim.steps", "6", "--parallel.ep", "2", "--parallel.zero", "2"])
    train_in_ranks(2, stopped, [*options, "--parallel.tp", "2"])
    for ours, theirs in zip(records(tmp_path / "one", "step"), records(stopped, "step"), strict=True):
        assert abs(ours["loss"] - theirs["loss"]) < 1e-10
    assert records(tmp_path / "one", "experts")[-1]["max_load"] == records(stopped, "experts")[-1]["max_load"]


def test_another_balance_starts_from_the_weights_of_a_run_and_biases_are_not_dropped(
    config: TrainConfig, tmp_path: Path
) -> None:
    first = sparse(config, balance="sequence", balance_rate=0.0)
    train(replace(first, optim=replace(config.optim, steps=2, decay_steps=2)))
    biased = replace(config, model=ModelConfig(balance="bias"), init_from=config.out_dir, out_dir=tmp_path / "biased")
    train(biased)
    assert not RunPlan.of(biased).model.balance_loss
    back = replace(biased, model=ModelConfig(balance="none"), init_from=biased.out_dir, out_dir=tmp_path / "back")
    with pytest.raises(UsageError, match=r"another model: model.balance 'bias' there and 'none' here"):
        train(back)


def test_dropped_choices_are_recorded_and_said(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    config = sparse(config, capacity_factor=1.0)
    train(replace(config, optim=replace(config.optim, steps=4)))
    (found,) = [record["dropped"] for record in records(config.out_dir, "experts") if record["step"] == 4]
    assert found.keys() == {"1", "2"} and all(0 < share < 0.5 for share in found.values())
    assert "% of the choices of experts, in layer " in capsys.readouterr().out


def test_starving_experts_are_named() -> None:
    counts = torch.tensor([[0, 0, 0], [50, 50, 50], [100, 1, 90]], dtype=torch.float64)
    loads = Loads(counts, counts[:, 0], counts[:, 0])
    assert describe_starving(loads, [1, 2]).endswith("tenth of the mean load: 1 of layer 2")
    assert describe_starving(loads, [1]) == ""


@pytest.mark.parametrize(
    ("layout", "processes", "options", "said"),
    [
        ({"tp": 4, "tensor": "2d"}, 4, {}, "experts are not divided on a grid; try --parallel.tensor 1d"),
        (
            {"compression": "int8"},
            2,
            {},
            "gradients of experts are not compressed yet; try --parallel.compression none",
        ),
        ({"local_steps": 2}, 2, {}, "each replica would have its own biases; try --model.balance sequence"),
        ({"tp": 2}, 2, {"expert_width": 33}, "model.expert_width 33 is not divisible by parallel.tp 2"),
        (
            {"tp": 2},
            2,
            {"norm": "layer", "qk_norm": True, "qk_norm_joint": True},
            "only RMSNorm can be divided over all heads",
        ),
    ],
)
def test_layouts_that_sparse_models_cannot_have_are_refused(
    layout: dict[str, Any], processes: int, options: dict[str, Any], said: str
) -> None:
    model = ModelConfig(**{"layers": 2, "width": 32, **BIAS, **options}).resolve(300, 16)
    with pytest.raises(UsageError, match=said):
        ParallelConfig(**layout).resolve(processes, model, 16)


def test_what_a_run_cannot_do_with_experts_is_refused(config: TrainConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    full, sinks = MemoryConfig(recompute="full"), replace(config, model=replace(config.model, sinks=True))
    for chosen in (sparse(config), sinks):
        with pytest.raises(UsageError, match=r"recompute full with model.experts .* try --compile false, or --mem"):
            RunPlan.of(replace(chosen, compile=True, memory=full))
    with pytest.raises(UsageError, match=r"memory.recompute selective and model.sinks: .* try --memory.recompute full"):
        RunPlan.of(replace(sinks, memory=MemoryConfig(recompute="selective")))
