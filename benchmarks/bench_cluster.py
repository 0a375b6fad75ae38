"""Benchmark: n GPUs on m nodes, in one Markdown report: collectives, parity across nodes, speed of published sizes.

    NODES=2 GPUS=8 HEAD=node1 bash benchmarks/gpu.sh --out report.md          the same on each node
    NODES=2 GPUS=1 bash benchmarks/gpu.sh --tiny --device cpu                 the same code in small, over gloo

The nodes need no folder in common: each makes its own random tokens, and rank 0 writes the report.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import torch
import torch.distributed as dist
import tyro

from benchmarks.bench_training import write_tokens
from benchmarks.training_worker import main as train_and_time
from gristmill.command import run_with_exit_code
from gristmill.errors import GristmillError, UsageError
from gristmill.storage.local import atomic_write_bytes
from training.distributed.process_group import init_distributed
from training.reporting.metrics_file import METRICS, read_metrics
from training.reporting.throughput import peak_tflops
from training.train import main as train_main

ROOT = Path(__file__).resolve().parents[1]
Options = dict[str, Any]
_SECONDS = 600.0  # of a rank for the others: rank 0 trains the reference alone
_REPEATS = 10  # of a collective
_STEPS = 5  # of the runs that are compared
_TOLERANCE = 1e-9  # of a loss in float64
_SHORT: Options = {
    "eval.sequences": 1, "eval.sample_tokens": 0, "metrics.tensorboard": "false", "data.verify": "size",
    "metrics.log_every": 1, "timeout": _SECONDS,
}  # fmt: skip
_SMALL: Options = {
    "model.layers": 4, "model.width": 64, "model.heads": 8, "model.kv_heads": 8, "model.vocab_size": 512,
    "data.seq_len": 64, "precision": "fp64", "optim.steps": _STEPS, "optim.lr": 0.01, "optim.warmup_steps": 1,
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    """This process, among all; `folder` is its own."""

    device: torch.device
    tiny: bool
    folder: Path
    rank: int
    size: int
    node: int
    """Processes of this node."""

    @property
    def name(self) -> Literal["cpu", "cuda"]:
        return "cuda" if self.device.type == "cuda" else "cpu"


def bench_cluster(
    out: Path = Path("cluster-report.md"), device: Literal["cpu", "cuda"] = "cuda", tiny: bool = False
) -> None:
    """Measure all processes that torchrun has started together; rank 0 writes the report.

    Args:
        out: The report, Markdown, on the node of rank 0.
        device: Where to train: cuda talks over NCCL, cpu over gloo.
        tiny: Small models and messages, to test the benchmark itself.
    """
    if "WORLD_SIZE" not in os.environ:
        raise UsageError("expected to be started by torchrun; try NODES=1 GPUS=8 bash benchmarks/gpu.sh")
    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, and torch finds no GPU on this machine; try --tiny --device cpu")
    parts: list[str] = []
    failed: list[str] = []
    with init_distributed(device, _SECONDS) as own, TemporaryDirectory() as name:
        node = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
        job = Job(own, tiny, Path(name), dist.get_rank(), dist.get_world_size(), node)
        for title, section in SECTIONS.items():
            started = time.monotonic()
            lines, good = section(job)
            failed += [] if good else [title]
            parts.append("\n".join([f"## {title}", "", *lines, "", f"({time.monotonic() - started:.0f} s)"]))
            if job.rank == 0:  # anew after each section, so that an interrupted run leaves what it found
                atomic_write_bytes(out, "\n\n".join(["# Report from several GPUs", *parts, ""]).encode())
        dist.barrier()
        if job.rank == 0:
            print(f"{out}: {len(parts)} sections")
    if failed:
        raise GristmillError(f"failed: {', '.join(failed)}; see {out} on the node of rank 0")


def nodes(job: Job) -> tuple[list[str], bool]:
    """Return a table of the nodes: their names, processes and devices."""
    device = torch.cuda.get_device_name(job.device) if job.name == "cuda" else "CPU"
    found: list[Any] = [None] * job.size
    dist.all_gather_object(found, (socket.gethostname(), os.environ.get("GROUP_RANK", "0"), device))
    count = {place: found.count(place) for place in dict.fromkeys(found)}
    rows = [f"| {host} | {group} | {processes} | {name} |" for (host, group, name), processes in count.items()]
    backend = dist.get_backend()
    lines = [f"{job.size} processes over {backend}, torch {torch.__version__}", ""]
    return [*lines, "| host | node | processes | device |", "|---|---|---|---|", *rows], True


def collectives(job: Job) -> tuple[list[str], bool]:
    """Return the bandwidth of all-reduce and all-to-all; of the bus as NCCL's own tests count it."""
    sizes = (1 << 16, 1 << 20) if job.tiny else (1 << 20, 1 << 24, 1 << 28, 1 << 30)
    lines = ["| collective | MiB | ms | GB/s | GB/s of the bus |", "|---|---|---|---|---|"]
    n = job.size
    calls: dict[str, tuple[Callable[[torch.Tensor], Any], float]] = {
        "all-reduce": (dist.all_reduce, 2 * (n - 1) / n),
        "all-to-all": (lambda data: dist.all_to_all_single(torch.empty_like(data), data), (n - 1) / n),
    }
    for name, (call, share) in calls.items():
        for size in sizes:
            data = torch.ones(size // 4 // n * n, device=job.device)
            seconds = _time_of(lambda call=call, data=data: call(data), job)
            rate = size / seconds / 1e9
            lines.append(f"| {name} | {size / 2**20:g} | {1000 * seconds:.2f} | {rate:.2f} | {rate * share:.2f} |")
    return lines, True


def _time_of(call: Callable[[], Any], job: Job) -> float:
    """Return the mean seconds of a collective, after it has been called once."""
    call()
    _wait(job)
    started = time.perf_counter()
    for _ in range(_REPEATS):
        call()
    _wait(job)
    return (time.perf_counter() - started) / _REPEATS


def _wait(job: Job) -> None:
    if job.name == "cuda":
        torch.cuda.synchronize(job.device)
    dist.barrier()


def parity(job: Job) -> tuple[list[str], bool]:
    """Train under each kind of layout over all processes, in float64, and compare the losses with one process."""
    batch = 2 * job.size
    tokens = _tokens(job, _SMALL | {"data.batch_size": batch})
    options = _SMALL | _SHORT | {"data.batch_size": batch, "checkpoint.every": 0}
    reference: list[Any] = [None]
    if job.rank == 0:
        _train_alone([*_flags(options, tokens, job), "--out_dir", str(job.folder / "alone")])
        reference = [_losses(job.folder / "alone")]
    dist.broadcast_object_list(reference, 0)
    lines = [f"| layout of {job.size} processes | largest relative difference of a loss | |", "|---|---|---|"]
    good = True
    for name, layout in _layouts(job.size):
        folder = job.folder / name
        train_main([*_flags(options | layout, tokens, job), "--out_dir", str(folder)])
        found: list[Any] = [_losses(folder) if job.rank == 0 else None]
        dist.broadcast_object_list(found, 0)
        difference = max(abs(a - b) / abs(b) for a, b in zip(found[0], reference[0], strict=True))
        is_equal = difference < _TOLERANCE and len(found[0]) == _STEPS
        good = good and is_equal
        lines.append(f"| {name} | {difference:.1e} | {'green' if is_equal else '**red**'} |")
    return lines, good


def _layouts(size: int) -> Iterator[tuple[str, Options]]:
    """Yield the kinds of layouts of so many processes that the small model allows."""
    yield "dp", {"parallel.dp": size}
    for zero in (1, 3):
        yield f"ZeRO-{zero}", {"parallel.dp": size, "parallel.zero": zero}
    for kind, most, more in (("tp", 8, {}), ("pp", 4, {"parallel.micro_batches": 2}), ("cp", 8, {})):
        if size <= most and 8 % size == 0:
            yield kind, {f"parallel.{kind}": size, **more}


def speed(job: Job) -> tuple[list[str], bool]:
    """Return tokens/s and MFU of published sizes in bf16, each in a layout that fits it."""
    lines = ["| model | layout | tokens/s | ms a step | MFU | peak memory, GB |", "|---|---|---|---|---|---|"]
    for name, options in _models(job):
        report = job.folder / f"speed {name}"
        report.mkdir()
        tokens = _tokens(job, options)
        words = [*_flags(options | _SHORT | {"precision": "bf16", "optim.steps": 99}, tokens, job)]
        words += ["--out_dir", str(report / "run")]
        steps = 3 if job.tiny else 20
        task = {"arguments": words, "steps": steps, "report": str(report), "implementation": "ours"}
        train_and_time(json.dumps(task))
        found = json.loads((report / f"{job.rank}.json").read_text())
        seconds = sorted(found["seconds"][steps // 4 :])[len(found["seconds"][steps // 4 :]) // 2]
        rate = found["tokens_per_step"] / seconds
        peak = peak_tflops(job.device, "bf16")
        mfu = f"{rate * found['flops_per_token'] / (peak * 1e12 * job.size):.1%}" if peak else "peak unknown"
        layout = " ".join(f"{key[9:]} {value}" for key, value in options.items() if key.startswith("parallel."))
        cells = [name, layout, f"{rate:,.0f}", f"{1000 * seconds:.1f}", mfu, f"{found['memory'] / 1e9:.2f}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines, True


def _models(job: Job) -> Iterator[tuple[str, Options]]:
    """Yield published sizes: GPT-2 of 124M, Llamas of 1.1B and 8B; tiny ones in the same layouts."""
    tp = min(job.node, 8)
    sizes: dict[str, tuple[Options, Options, int]] = {
        "GPT-2 124M": (
            {"model.preset": "gpt2", "model.layers": 12, "model.width": 768, "model.heads": 12,
             "model.vocab_size": 50304, "data.seq_len": 1024},
            {"parallel.dp": job.size}, 32,
        ),
        "Llama 1.1B": (
            {"model.layers": 16, "model.width": 2048, "model.heads": 32, "model.kv_heads": 8, "model.ffn_width": 8192,
             "model.vocab_size": 32000, "data.seq_len": 2048},
            {"parallel.dp": job.size, "parallel.zero": 1}, 8,
        ),
        "Llama 3.1 8B": (
            {"model.layers": 32, "model.width": 4096, "model.heads": 32, "model.kv_heads": 8, "model.ffn_width": 14336,
             "model.vocab_size": 128256, "data.seq_len": 8192, "memory.recompute": "selective"},
            {"parallel.dp": job.size // tp, "parallel.tp": tp, "parallel.zero": 3}, 1,
        ),
    }  # fmt: skip
    for name, (model, layout, rows) in sizes.items():
        if name.endswith("8B") and job.size < 8 and not job.tiny:
            continue  # needs the memory of eight
        if job.tiny:
            small = {"model.layers": 2, "model.width": 32, "model.heads": 8, "model.kv_heads": 8, "data.seq_len": 16}
            model = model | small | {"model.vocab_size": 128, "model.ffn_width": 64}
            rows = 2
        yield name, model | layout | {"data.batch_size": rows * layout["parallel.dp"]}


def _tokens(job: Job, options: Options) -> Path:
    """Return a folder of random tokens, which is this process's own: the same numbers everywhere."""
    folder = job.folder / f"tokens {options['model.vocab_size']} {options['data.seq_len']} {options['data.batch_size']}"
    if not folder.exists():
        count = (_STEPS + 1) * options["data.batch_size"] * options["data.seq_len"] + 1
        write_tokens(folder, count, options["model.vocab_size"])
    return folder


def _flags(options: Options, tokens: Path, job: Job) -> list[str]:
    given = {**options, "data.train": tokens, "data.holdout": tokens, "device": job.name}
    return [word for key, value in given.items() for word in (f"--{key}", str(value))]


def _train_alone(words: list[str]) -> None:
    """Train in a process that knows nothing of the others."""
    of_torchrun = ("RANK", "WORLD_SIZE", "MASTER", "LOCAL_", "GROUP_", "ROLE_", "TORCHELASTIC")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(of_torchrun)}
    command = [sys.executable, "-m", "gristmill_cli.train", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise GristmillError(done.stdout[-1500:] + done.stderr[-1500:])


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in read_metrics(folder / METRICS) if record["kind"] == "step"]


SECTIONS: dict[str, Callable[[Job], tuple[list[str], bool]]] = {
    "nodes": nodes,
    "collectives": collectives,
    "parity": parity,
    "speed": speed,
}


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: tyro.cli(bench_cluster)))
