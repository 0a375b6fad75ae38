"""Benchmark: step times that the planner predicts for this CPU, beside those of real processes.

    python benchmarks/bench_plan.py [--steps 20] [--hardware cpu.toml]

Calibrates as gristmill plan --calibrate does, or takes what that wrote, and trains small models in one process and in
two: data, tensor and pipeline parallel. The shortest step counts. Processes have one thread each.
"""

import sys
from pathlib import Path

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

from rich.table import Table

from gristmill.command import command
from gristmill_planner.calibration import calibrate, step_seconds
from gristmill_planner.hardware import Cluster, read_hardware
from gristmill_planner.planned_run import PlannedRun
from gristmill_planner.step_time import step_time
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig

_MODELS = {
    "GPT-2, 4 x 256": ModelConfig(preset="gpt2", layers=4, width=256, heads=4).resolve(2048, 256),
    "Llama, 6 x 384": ModelConfig(preset="llama", layers=6, width=384, heads=6, kv_heads=6).resolve(2048, 256),
}
_LAYOUTS = [
    (1, ParallelConfig()),
    (2, ParallelConfig(dp=2)),
    (2, ParallelConfig(tp=2)),
    (2, ParallelConfig(pp=2, micro_batches=4)),
]
_BATCH = 8


def bench_plan(steps: int = 20, hardware: Path | None = None) -> Table:
    """Compare predicted and measured steps.

    Args:
        steps: Steps of each layout, of which the shortest counts.
        hardware: File that gristmill plan --calibrate wrote; None: calibrate now.
    """
    table = Table("model", "layout", "predicted ms", "measured ms", "error", box=None)
    with RankPool(2) as pool:
        device, constants = calibrate(pool) if hardware is None else read_hardware(hardware)
        for name, model in _MODELS.items():
            for processes, layout in _LAYOUTS:
                full = layout.resolve(processes, model, model.context)
                run = PlannedRun(model, full, _BATCH, model.context, Cluster(device, processes))
                predicted = step_time(run, constants).total
                measured = min(each["step"] for each in pool.run(processes, step_seconds, model, layout, _BATCH, steps))
                cells = f"{1e3 * predicted:.0f}", f"{1e3 * measured:.0f}", f"{100 * (predicted / measured - 1):+.0f} %"
                table.add_row(name, full.describe(), *cells)
    return table


if __name__ == "__main__":
    command(bench_plan)
