"""Worker process of bench_training: runs and times some steps of one rank.

python benchmarks/training_worker.py '{"arguments": […], "steps": 60, "report": …, "implementation": "ours"}'
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
from torch import nn
from torch.profiler import ProfilerActivity

from gristmill.config import load_config
from training.config import TrainConfig
from training.distributed.process_group import init_distributed
from training.kernels.precision import COMPUTE_DTYPES
from training.model.decoder import Decoder
from training.reporting.throughput import memory_bytes
from training.run_plan import RunPlan
from training.trainer import Trainer

_PEAK_SECONDS = 0.5
_PROFILE_ROWS = 12


def main(task: str) -> None:
    """Run the steps, and write REPORT/<rank>.json: wall and computing seconds per step, memory, sizes, a profile."""
    asked = json.loads(task)
    config = load_config(TrainConfig, asked["arguments"], prog="bench_training")
    with (
        init_distributed(config.device, config.seconds_to_wait) as device,
        Trainer(RunPlan.of(config), device) as trainer,
    ):
        trainer.load()
        trainer.start()
        step = trainer.step if asked["implementation"] == "ours" else data_parallel_step(trainer, device)
        peaks = [matmul_peak(device, config.precision)]
        times = [timed(lambda number=number: step(number), device) for number in range(1, asked["steps"] + 1)]
        peaks.append(matmul_peak(device, config.precision))
        found = {
            "seconds": [wall for wall, _ in times],
            "busy": [busy for _, busy in times],
            "peak": max(peaks),
            "memory": memory_bytes(device),
            "parameters": trainer.parameters,
            "flops_per_token": trainer.flops_per_token,
            "tokens_per_step": trainer.tokens_per_step,
            "stages": trainer.plan.layout.stages,
            "pp": trainer.plan.layout.pp,
            "micro_batches": trainer.plan.layout.micro_batches,
        }
        if asked.get("profile"):
            found["profile"] = profile(lambda: step(asked["steps"] + 1), device)
        (Path(asked["report"]) / f"{trainer.world.rank}.json").write_text(json.dumps(found))


def timed(action: Callable[[], Any], device: torch.device) -> tuple[float, float]:
    """Wall seconds of `action`, and the seconds in which this thread computed instead of waiting."""
    wall, busy = time.perf_counter(), time.thread_time()
    action()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - wall, time.thread_time() - busy


def profile(action: Callable[[], Any], device: torch.device) -> dict[str, Any]:
    """Where the time of `action` goes: the longest operations or kernels as (name, calls, ms), copies, CPU updates."""
    kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
    with torch.profiler.profile(activities=kinds) as profiler:
        timed(action, device)
    found = profiler.key_averages()
    key = "self_device_time_total" if device.type == "cuda" else "self_cpu_time_total"
    longest = sorted(found, key=lambda one: -getattr(one, key))[:_PROFILE_ROWS]
    return {
        "rows": [(one.key[:80].replace("|", " "), one.count, getattr(one, key) / 1000) for one in longest],
        "copy_seconds": sum(one.self_device_time_total for one in found if one.key.startswith("Memcpy")) / 1e6,
        "update_seconds": sum(one.cpu_time_total for one in found if one.key == "aten::_fused_adamw_") / 1e6,
    }


def matmul_peak(device: torch.device, precision: str) -> float:
    """Peak FLOP/s of a large square matrix product, with as many threads as the training."""
    size = 8192 if device.type == "cuda" else 1024
    a, b = torch.randn(2, size, size, device=device).to(COMPUTE_DTYPES[precision])
    times: list[float] = []
    while sum(times) < _PEAK_SECONDS:
        times.append(timed(lambda: a @ b, device)[0])
    return 2 * size**3 / min(times)


def data_parallel_step(trainer: Trainer, device: torch.device) -> Callable[[int], None]:
    """The same step by nn.DataParallel, for comparison: it copies the model to every GPU in each step."""
    model = nn.DataParallel(Decoder(trainer.model_config).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    dtype, low = COMPUTE_DTYPES[trainer.config.precision], trainer.config.precision in ("bf16", "fp16")

    def step(number: int) -> None:
        batch = trainer.batches.batch(number - 1).to(device)
        with torch.autocast(device.type, dtype if low else torch.bfloat16, enabled=low):
            loss = model(batch.ids, batch.targets, batch.sample_ids).sum() / trainer.tokens_per_step
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), trainer.config.optim.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()

    return step


if __name__ == "__main__":
    main(sys.argv[1])
