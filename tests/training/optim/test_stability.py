"""Steps that would do harm: what is decided about them, and that all ranks decide alike under every layout."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gristmill.errors import UsageError
from training.checkpoint.checkpoint_config import CheckpointConfig
from training.config import TrainConfig
from training.experimental.parallel_config import ParallelConfig
from training.optim.stability import Stability, StabilityConfig
from training.parallel.parallel_model import ParallelModel
from training.reporting.metrics_file import METRICS, read_metrics
from training.train import train

RunRanks = Callable[..., list[Any]]
LAYOUTS = {
    "zero3": (2, ParallelConfig(zero=3)),
    "zero2": (2, ParallelConfig(zero=2)),
    "tp-pp": (4, ParallelConfig(tp=2, sequence_parallel=True, pp=2, schedule="zbv")),
}


def test_non_finite_steps_are_skipped_up_to_max_skipped_steps() -> None:
    stability = Stability(StabilityConfig(max_skipped_steps=2), "fp32")
    assert stability.accepts(1, 5.0, 1.0)
    assert not stability.accepts(2, math.nan, 1.0) and not stability.accepts(3, 5.0, math.inf)
    with pytest.raises(
        UsageError, match=r"the loss is inf at step 4: 3 of the last 1000 steps .*max_skipped_steps is 2.*--optim.lr"
    ):
        stability.accepts(4, math.inf, 1.0)


def test_skipped_steps_count_within_a_thousand_steps() -> None:
    stability = Stability(StabilityConfig(max_skipped_steps=1), "bf16")
    assert not stability.accepts(1, math.nan, 1.0)
    assert not stability.accepts(1001, math.nan, 1.0) and stability.skipped == [1001]


def test_policy_stop_ends_the_run() -> None:
    with pytest.raises(UsageError, match=r"the gradient norm is nan at step 7, and stability.policy is stop"):
        Stability(StabilityConfig(policy="stop"), "fp32").accepts(7, 5.0, math.nan)


def test_a_loss_spike_is_measured_in_standard_deviations() -> None:
    stability, never = Stability(StabilityConfig(loss_spike_sigma=6.0), "fp32"), Stability(StabilityConfig(), "fp32")
    draw = torch.Generator().manual_seed(0)
    for step in range(1, 200):
        loss = 3.0 + 0.1 * torch.randn((), generator=draw).item()
        assert stability.accepts(step, loss, 1.0) and never.accepts(step, loss, 1.0)
    assert stability.mean == pytest.approx(3.0, abs=0.05) and math.sqrt(stability.variance) == pytest.approx(
        0.1, rel=0.3
    )
    assert stability.accepts(200, 3.3, 1.0) and not stability.accepts(201, 4.0, 1.0) and never.accepts(201, 4.0, 1.0)
    assert stability.mean < 3.1  # what was skipped is not remembered


def test_the_loss_scale_halves_after_an_overflow_and_grows_after_an_interval() -> None:
    config = StabilityConfig(initial_loss_scale=8.0, scale_growth_interval=3, min_loss_scale=4.0)
    for policy in ("skip", "stop"):
        stability = Stability(replace(config, policy=policy), "fp16")  # type: ignore[arg-type]
        assert not stability.accepts(1, 5.0, math.inf) and stability.scale == 4.0
        assert [stability.accepts(step, 5.0, 1.0) for step in range(2, 5)] == [True] * 3 and stability.scale == 8.0
        assert not stability.accepts(5, 5.0, math.nan) and stability.scale == 4.0
        with pytest.raises(
            UsageError, match=r"overflow at step 6 with a loss scale of 4, .*min_loss_scale is 4;.*bf16"
        ):
            stability.accepts(6, 5.0, math.inf)


def test_overflows_that_a_smaller_scale_mends_do_not_end_a_run() -> None:
    stability = Stability(StabilityConfig(initial_loss_scale=2.0**40, max_skipped_steps=0), "fp16")
    assert not any(stability.accepts(step, 5.0, math.inf) for step in range(1, 30)) and stability.scale == 2.0**11
    stability.state = {}  # of an imported checkpoint
    assert stability.scale == 2.0**11
    with pytest.raises(UsageError, match=r"max_skipped_steps is 0; start a new run .*--init_from .*lower --optim.lr"):
        stability.accepts(31, math.nan, math.nan)


def test_a_run_that_goes_on_in_fp16_begins_with_the_initial_scale() -> None:
    stability = Stability(StabilityConfig(), "fp16")
    stability.state = Stability(StabilityConfig(), "bf16").state
    assert stability.scale == 65536.0


def test_a_non_finite_loss_is_not_an_overflow() -> None:
    stability = Stability(StabilityConfig(scale_growth_interval=1), "fp16")
    assert not stability.accepts(1, math.nan, math.nan) and stability.scale == 65536.0
    with pytest.raises(UsageError, match="policy is stop"):
        Stability(StabilityConfig(policy="stop"), "fp16").accepts(1, math.nan, math.nan)


_numbers = st.one_of(st.floats(0, 1e4), st.sampled_from([math.nan, math.inf]))


@given(st.lists(st.tuples(_numbers, _numbers), max_size=120), st.integers(0, 120), st.sampled_from(["fp16", "fp32"]))
def test_a_restored_state_decides_alike(told: list[tuple[float, float]], cut: int, precision: str) -> None:
    config = StabilityConfig(
        max_skipped_steps=1000, loss_spike_sigma=4.0, scale_growth_interval=5, min_loss_scale=1e-40
    )
    stability = Stability(config, precision)
    for step, (loss, norm) in enumerate(told[:cut]):
        stability.accepts(step, loss, norm)
    assert all(map(math.isfinite, stability.state.values()))
    other = Stability(config, precision)
    other.state = stability.state
    rest = list(enumerate(told))[cut:]
    assert [stability.accepts(s, *x) for s, x in rest] == [other.accepts(s, *x) for s, x in rest]
    assert stability.state == other.state


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"min_loss_scale": 8.0, "initial_loss_scale": 4.0}, "min_loss_scale 8.0 is above initial_loss_scale 4.0"),
    ],
)
def test_values_out_of_range_are_errors(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        StabilityConfig(**change).check()


def train_poisoned(config: TrainConfig, poison: dict[int, str]) -> list[float]:
    """Train while the last rank alone meets what `poison` says at a step; this rank's loss scales or its updates."""
    forward_backward, told, calls = ParallelModel.forward_backward, list[float](), [0]

    def poisoned(self: ParallelModel, batch: Any, scale: float) -> torch.Tensor:
        loss = forward_backward(self, batch, scale)
        calls[0] += 1
        told.append(scale * config.data.batch_size * config.data.seq_len)
        if self.world.rank == self.world.size - 1 and calls[0] in poison:
            weight = next(w for w in self.params if w.is_primary and w.local.numel() and w.local.grad is not None)
            assert weight.local.grad is not None
            weight.local.grad.view(-1)[0] = float(poison[calls[0]])
        return loss

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ParallelModel, "forward_backward", poisoned)
        train(config)
    return told


def losses(out_dir: Path) -> list[tuple[int, float, bool]]:
    found = [r for r in read_metrics(out_dir / METRICS) if r["kind"] == "step"]
    return [(r["step"], r["loss"], r.get("skipped", False)) for r in found]


@pytest.mark.every(3)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_skip_an_overflow_and_the_loss_scale_is_checkpointed(
    config: TrainConfig, run_ranks: RunRanks, layout: str
) -> None:
    size, parallel = LAYOUTS[layout]
    config = replace(config, precision="fp16", parallel=parallel, checkpoint=CheckpointConfig(every=3))
    config = replace(config, model=replace(config.model, layers=4), stability=StabilityConfig(initial_loss_scale=512.0))
    halved = replace(config.optim, steps=4, min_lr=config.optim.lr)
    told = run_ranks(size, train_poisoned, replace(config, optim=halved), {2: "inf", 3: "nan"})
    assert told == [[512.0, 512.0, 256.0, 128.0]] * size
    again = run_ranks(size, train_poisoned, replace(config, optim=replace(halved, steps=6)), {})
    assert again == [[128.0] * 2] * size
    found = losses(config.out_dir)
    assert [step for step, _, skipped in found if skipped] == [2, 3] and len(found) == 6
    assert all(math.isfinite(loss) for _, loss, _ in found)


def test_a_skipped_step_does_not_change_the_parameters(config: TrainConfig, run_ranks: RunRanks) -> None:
    config = replace(config, parallel=ParallelConfig(zero=3), optim=replace(config.optim, steps=3), seed=3)
    saves = replace(config, checkpoint=CheckpointConfig(every=1, keep=9, async_save=False))
    run_ranks(2, train_poisoned, saves, {3: "nan"})
    folder = config.out_dir / "checkpoints"
    files = [(folder / f"step-{step:08d}/__0_0.distcp").read_bytes() for step in (1, 2, 3)]
    assert files[0] != files[1] == files[2]  # after the last step it is saved in any case


def test_skipped_steps_are_reported_with_the_reason(config: TrainConfig, capsys: pytest.CaptureFixture[str]) -> None:
    train_poisoned(replace(config, optim=replace(config.optim, steps=4)), {3: "nan"})
    assert "skipped step 3: the gradient norm is nan\n" in capsys.readouterr().out
    assert [skipped for _, _, skipped in losses(config.out_dir)] == [False, False, True, False]


def test_too_many_skipped_steps_end_every_rank_with_the_same_error(config: TrainConfig, run_ranks: RunRanks) -> None:
    config = replace(config, parallel=ParallelConfig(tp=2), stability=StabilityConfig(max_skipped_steps=1))
    told = run_ranks(2, spend, config)
    assert told[0] == told[1] and "at step 3: 2 of the last 1000 steps were skipped" in told[0]


def spend(config: TrainConfig) -> str:
    with pytest.raises(UsageError) as met:
        train_poisoned(config, {2: "inf", 3: "inf"})
    return str(met.value)
