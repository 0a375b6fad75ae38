"""Benchmark: collectives and bytes of a training step, counted in real processes, beside the papers' formulas.

    python benchmarks/bench_traffic.py

Each row is a layout of a small model in processes on the CPU, with buckets and chunks of the loss so small that there
are many. Counted are calls of the process group, and the bytes of each call's largest tensor.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import tyro

import training.kernels.cpu.kernels as cpu
import training.parallel.data.grad_reducer as data_parallel
from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from gristmill_parity.cases import SEQ_LEN, Case, small_model
from gristmill_parity.worker import ALL_RANKS, run_case
from training.config import Precision
from training.distributed.rank_pool import RankPool
from training.experimental.parallel_config import ParallelConfig
from training.parallel.traffic import expected_traffic
from training.parallel.traffic_inputs import Traffic, Volume

BUCKET_BYTES, CHUNK_BYTES = 60_000, 2_000
LAYOUTS: dict[str, tuple[int, ParallelConfig]] = {
    "DDP": (2, ParallelConfig(micro_batches=2)),
    "ZeRO-1": (2, ParallelConfig(zero=1, micro_batches=2)),
    "ZeRO-2": (2, ParallelConfig(zero=2, micro_batches=2)),
    "ZeRO-2, groups of 2": (4, ParallelConfig(zero=2, zero_group=2, micro_batches=2)),
    "ZeRO-3": (2, ParallelConfig(zero=3, micro_batches=2)),
    "ZeRO-3, pp": (4, ParallelConfig(dp=2, zero=3, pp=2)),
    "tp": (2, ParallelConfig(tp=2, micro_batches=2)),
    "tp, sequence parallel": (2, ParallelConfig(tp=2, sequence_parallel=True)),
    "2D": (4, ParallelConfig(tp=4, tensor="2d")),
    "2.5D": (8, ParallelConfig(tp=8, tensor="2.5d", depth=2)),
    "3D": (8, ParallelConfig(tp=8, tensor="3d")),
    "ring": (2, ParallelConfig(cp=2)),
    "Ulysses": (2, ParallelConfig(cp=2, context="ulysses")),
    "pp, 1f1b": (2, ParallelConfig(pp=2, micro_batches=4)),
    "pp, interleaved": (2, ParallelConfig(pp=2, schedule="interleaved-1f1b", micro_batches=4)),
    "PowerSGD": (2, ParallelConfig(micro_batches=2, compression="powersgd", compression_rank=2)),
    "PowerSGD, tp, sequence parallel": (
        4,
        ParallelConfig(tp=2, sequence_parallel=True, compression="powersgd", compression_rank=2),
    ),
    "int8": (3, ParallelConfig(micro_batches=2, compression="int8")),
    "int8, tp, pp": (8, ParallelConfig(tp=2, pp=2, compression="int8")),
    "dp, tp, pp": (8, ParallelConfig(dp=2, zero=1, tp=2, sequence_parallel=True, pp=2)),
}


def traffic_case(name: str, preset: Literal["llama", "gpt2"], precision: Precision) -> Case:
    """A row's case."""
    size, layout = LAYOUTS[name]
    layout = layout.resolve(size, small_model(preset, 9), SEQ_LEN)
    return Case.of(preset, layout, precision=precision)


def counted_and_expected(case: Case) -> tuple[Traffic, Traffic]:
    """This rank's traffic of a step but for its sums, with many buckets and chunks: counted, and by the formulas."""
    buckets, chunks = data_parallel.BUCKET_BYTES, cpu.LOGITS_BYTES
    data_parallel.BUCKET_BYTES, cpu.LOGITS_BYTES = BUCKET_BYTES, CHUNK_BYTES
    try:
        result = run_case(case)
    finally:
        data_parallel.BUCKET_BYTES, cpu.LOGITS_BYTES = buckets, chunks
    assert result.inputs is not None
    inputs = replace(result.inputs, bucket_bytes=BUCKET_BYTES, chunk_bytes=CHUNK_BYTES)
    in_passes = {key: volume for key, volume in result.counted.items() if key != ALL_RANKS}
    return in_passes, expected_traffic(inputs)


def bench_traffic(
    preset: Literal["llama", "gpt2"] = "llama",
    precisions: tuple[Literal["fp32", "bf16", "fp16"], ...] = ("fp32", "bf16"),
) -> str:
    """A row per layout, precision and kind of collective, of the first rank."""
    rows = []
    with RankPool(8) as pool:
        for name, (size, _) in LAYOUTS.items():
            for precision in precisions:
                counted, expected = pool.run(size, counted_and_expected, traffic_case(name, preset, precision))[0]
                rows += _rows(f"{name}, {precision}", counted, expected)
    return markdown(
        "Traffic of rank 0 in a step: counted = theory", ("layout", "collective", "calls", "kB", ""), rows, []
    )


def _rows(name: str, counted: Traffic, expected: Traffic) -> list[list[str]]:
    rows, none = [], Volume(0, 0)
    for axis, operation in sorted({*counted, *expected}):
        found, theory = counted.get((axis, operation), none), expected.get((axis, operation), none)
        cells = [f"{found.calls} = {theory.calls}", f"{found.bytes / 1e3:.1f} = {theory.bytes / 1e3:.1f}"]
        rows.append([name, f"{axis} {operation}", *cells, "" if found == theory else "differs"])
    return rows


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_traffic))))
