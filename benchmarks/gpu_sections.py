"""Sections of bench_gpu's report: each trains something in processes of its own and returns Markdown lines."""

import filecmp
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.bench_training import write_tokens
from benchmarks.training_worker import main as train_and_time
from gristmill.engine.execution.local import start_fork_server
from gristmill.errors import GristmillError
from gristmill_parity.certificate import plan_certificate, run_cases, summary
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import OptimizerStates, PlannedRun
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.reporting.throughput import peak_tflops
from training.train import main as train_main

REPOSITORY = Path(__file__).resolve().parents[1]
Options = dict[str, Any]
PARTS = ("eager", "compiled")  # of the section `speed`, which may be left out
_MOST_PROCESSES = 8  # of the certificate
_SHORT: Options = {
    "eval.sequences": 1, "eval.sample_tokens": 0, "metrics.tensorboard": "false", "data.verify": "size", "timeout": 600,
}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """Options of the models that are measured, and how many steps."""

    gpt2: Options
    llama: Options
    sparse: dict[str, Options]
    """Of sparse layers, beside the dense model of equal active parameters."""
    steps: int
    test_folder: str


@dataclass(frozen=True)
class Setting:
    """What a section is run with; `seconds`: time left for all of them; `leave_out`: parts to leave out."""

    device: Literal["cpu", "cuda"]
    tiny: bool
    sizes: Sizes
    folder: Path
    seconds: float
    leave_out: tuple[str, ...]


def sizes_of(tiny: bool) -> Sizes:
    """GPT-2 of 124M, a Llama of 1.1B parameters, and experts in half its layers; tiny: of some thousands."""
    gpt2 = {"model.preset": "gpt2", "model.layers": 12, "model.width": 768, "model.heads": 12, "data.seq_len": 1024}
    llama = {
        "model.layers": 16, "model.width": 2048, "model.heads": 32, "model.kv_heads": 8, "model.ffn_width": 8192,
        "data.seq_len": 2048,
    }  # fmt: skip
    if not tiny:
        gpt2 |= {"data.batch_size": 32, "model.vocab_size": 50304}
        llama |= {"data.batch_size": 8, "model.vocab_size": 32000}
        return Sizes(gpt2, llama, _sparse(llama, 8, (16, 64)), 20, "tests/training")
    small = {"model.layers": 2, "model.width": 32, "model.heads": 4, "data.seq_len": 16, "data.batch_size": 2}
    small |= {"model.vocab_size": 128, "model.kv_heads": 2, "model.ffn_width": 64}
    llama |= small
    return Sizes(gpt2 | {**small, "model.kv_heads": 4}, llama, _sparse(llama, 2, (4,)), 3, "tests/training/test_gpu.py")


def _sparse(llama: Options, layers: int, counts: Sequence[int]) -> dict[str, Options]:
    """The Llama with fewer layers: dense, and with so many experts of which a token passes a quarter."""
    dense = llama | {"model.layers": layers}
    width, models = llama["model.ffn_width"], {"dense": dense}
    for count in counts:
        sizes = {"experts": count, "experts_per_token": count // 4, "expert_width": 4 * width // count}
        models[f"{count // 4} of {count} experts"] = dense | {f"model.{key}": value for key, value in sizes.items()}
    return models


def tests(setting: Setting) -> list[str]:
    """The tests that are marked gpu."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        "gpu",
        "-p",
        "no:cacheprovider",
        "-rs",
        setting.sizes.test_folder,
    ]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=setting.seconds)
    if done.returncode:
        raise GristmillError(done.stdout[-3000:] + done.stderr[-1000:])
    return ["```", *done.stdout.splitlines()[-6:], "```"]


def certificate(setting: Setting) -> list[str]:
    """The parity certificate on the device: of two processes, or of as many as there are GPUs, which talk over NCCL."""
    processes = min(_MOST_PROCESSES, max(2, torch.cuda.device_count() if setting.device == "cuda" else 2))
    plan = plan_certificate(False, processes, setting.device)
    cases = plan.cases[:: 40 if setting.tiny else 1]
    started = time.monotonic()
    rows = run_cases(cases, setting.device, setting.seconds)
    lines = [*summary(rows, time.monotonic() - started).splitlines(), *(f"skipped: {line}" for line in plan.skipped)]
    lines += [f"{len(cases) - len(rows)} rows were not begun in time"] * (len(rows) < len(cases))
    if not all(row.passed for row in rows):
        raise GristmillError("\n".join(lines))
    return [f"- {line}" for line in lines]


def speed(setting: Setting) -> list[str]:
    """GPT-2 in bf16, as it is and compiled; where the time goes."""
    runs = {name: {"compile": str(name == "compiled").lower()} for name in PARTS}
    lines, profile = [_HEAD, "|---" * 7 + "|"], []
    for name, options in runs.items():
        if name not in setting.leave_out:
            found = timed_run(setting, setting.sizes.gpt2 | options, name)
            lines.append(_row(setting, name, setting.sizes.gpt2 | options, found))
            profile += ["", f"Where the time of a step goes, {name}:", "", *_profile_lines(found)]
    return [*lines, *profile]


def experts(setting: Setting) -> list[str]:
    """A dense Llama and sparse ones of equal active parameters; where the time of the last goes."""
    lines, found = [_HEAD, "|---" * 7 + "|"], {}
    for name, options in setting.sizes.sparse.items():
        found = timed_run(setting, options, name)
        lines.append(_row(setting, name, options, found))
    return [*lines, "", f"Where the time of a step goes, {name}:", "", *_profile_lines(found)]


def recomputation(setting: Setting) -> list[str]:
    """The Llama with each mode of recomputation."""
    lines = [_HEAD, "|---" * 7 + "|"]
    for mode in ("none", "selective", "full"):
        options = setting.sizes.llama | {"memory.recompute": mode}
        lines.append(_row(setting, mode, options, timed_run(setting, options, mode)))
    return lines


def offload(setting: Setting) -> list[str]:
    """AdamW's moments in pinned CPU memory: what it saves, and which part of its time hides behind other work."""
    options = setting.sizes.llama | {"memory.recompute": "selective"}
    found = {
        place: timed_run(setting, options | {"memory.optimizer": place}, f"optimizer {place}")
        for place in ("device", "cpu")
    }
    lines = [_HEAD, "|---" * 7 + "|"]
    for place, one in found.items():
        lines.append(_row(setting, f"moments: {place}", options | {"memory.optimizer": place}, one))
    added = _step_seconds(found["cpu"]) - _step_seconds(found["device"])
    work = found["cpu"]["profile"]["copy_seconds"] + found["cpu"]["profile"]["update_seconds"]
    hidden = f"{max(0.0, 1 - added / work):.0%}" if work > 0 else "nothing"
    said = f"Copies and updates on the CPU take {1000 * work:.1f} ms a step and add {1000 * added:.1f} ms"
    return [*lines, "", f"{said}: {hidden} is hidden."]


def resuming(setting: Setting) -> list[str]:
    """A run of four steps, and one that goes on from the second step's checkpoint: the same bytes."""
    tokens = _tokens(setting, setting.sizes.gpt2)
    options = {**setting.sizes.gpt2, **_SHORT, "optim.steps": 4, "checkpoint.every": 2, "precision": "bf16"}
    options |= {"deterministic": "true"}
    first, second = setting.folder / "first", setting.folder / "second"
    seconds = []
    for folder in (first, second):
        started = time.monotonic()
        _in_process(
            train_main, [*_flags(options, tokens, setting.device), "--out_dir", str(folder)], setting, folder.name
        )
        seconds.append(time.monotonic() - started)
        if folder == first:
            shutil.copytree(first, second)
            shutil.rmtree(second / "checkpoints/step-00000004")
    last = Path("checkpoints/step-00000004")
    files = sorted(path.name for path in (first / last).iterdir())
    _, differ, missing = filecmp.cmpfiles(first / last, second / last, files, shallow=False)
    if differ or missing:
        raise GristmillError(f"after resuming, {', '.join(differ + missing)} of step 4 differ")
    size = sum((first / last / name).stat().st_size for name in files)
    return [f"{len(files)} files of step 4, {size:,} bytes, are the same bit for bit after a resume from step 2. "
            f"The runs took {seconds[0]:.1f} and {seconds[1]:.1f} s."]  # fmt: skip


SECTIONS: dict[str, Callable[[Setting], list[str]]] = {
    "speed": speed,
    "recomputation": recomputation,
    "offload": offload,
    "experts": experts,
    "resuming": resuming,
    "certificate": certificate,
    "tests": tests,
}
"""In the order of what would be missed most if the time ran out."""

_HEAD = "| | tokens/s | ms a step | MFU | of the measured product | peak memory, GB | by the formula |"


def timed_run(setting: Setting, options: Options, name: str) -> dict[str, Any]:
    """Train some steps in bf16 in a process of its own; returns training_worker's report."""
    folder = setting.folder / f"report {name}"
    folder.mkdir()
    arguments = _flags({**options, **_SHORT, "precision": "bf16"}, _tokens(setting, options), setting.device)
    task = {"arguments": [*arguments, "--out_dir", str(folder / "run")], "steps": setting.sizes.steps, "profile": True}
    _in_process(train_and_time, json.dumps(task | {"report": str(folder), "implementation": "ours"}), setting, name)
    found: dict[str, Any] = json.loads((folder / "0.json").read_text())
    return found


def _in_process(function: Callable[..., Any], argument: Any, setting: Setting, name: str) -> None:
    """Call a function in a new process, which has its own memory; raises GristmillError if it fails or is too slow."""
    start_fork_server(["training.trainer"])
    log = setting.folder / f"{name}.log"
    process = multiprocessing.get_context("forkserver").Process(target=_logged, args=(log, function, argument))
    process.start()
    process.join(setting.seconds)
    if process.exitcode != 0:
        process.kill()
        process.join()
        raise GristmillError(f"{name}: exit code {process.exitcode}\n{log.read_text()[-2500:]}")


def _logged(log: Path, function: Callable[..., Any], argument: Any) -> None:
    """Call a function; what it prints goes to a file."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
    function(argument)


def _tokens(setting: Setting, options: Options) -> Path:
    """A folder of random tokens for a model, enough for two batches."""
    folder = setting.folder / f"tokens {options['model.vocab_size']}"
    if not folder.exists():
        count = 2 * options["data.batch_size"] * options["data.seq_len"] + 1
        write_tokens(folder, count, options["model.vocab_size"])
    return folder


def _flags(options: Options, tokens: Path, device: str) -> list[str]:
    options = {**options, "data.train": tokens, "data.holdout": tokens, "device": device}
    return [word for key, value in options.items() for word in (f"--{key}", str(value))]


def _step_seconds(found: dict[str, Any]) -> float:
    seconds: list[float] = found["seconds"]
    return statistics.median(seconds[len(seconds) // 4 :])  # the first ones compile, allocate and tune


def _row(setting: Setting, name: str, options: Options, found: dict[str, Any]) -> str:
    seconds = _step_seconds(found)
    rate = found["tokens_per_step"] / seconds
    flops = rate * found["flops_per_token"]
    peak = peak_tflops(torch.device(setting.device), "bf16")
    mfu = f"{flops / (peak * 1e12):.1%}" if peak else "peak unknown"
    formula = f"{estimated_peak(options, setting.device) / 1e9:.2f}"
    cells = [
        f"{rate:,.0f}",
        f"{1000 * seconds:.1f}",
        mfu,
        f"{flops / found['peak']:.1%}",
        f"{found['memory'] / 1e9:.2f}",
    ]
    return f"| {name} | {' | '.join(cells)} | {formula} |"


def estimated_peak(options: Options, device: Literal["cpu", "cuda"]) -> int:
    """Bytes of a run of one process in bf16, by the formulas of gristmill_planner/memory."""
    sizes = {key.removeprefix("model."): value for key, value in options.items() if key.startswith("model.")}
    seq_len = options["data.seq_len"]
    model = ModelConfig(**sizes).resolve(sizes["vocab_size"], seq_len)
    layout, usual = ParallelConfig().resolve(1, model, seq_len), find_device("h100")
    cluster = Cluster(usual if device == "cuda" else replace(usual, element_bytes=4), 1)
    run = PlannedRun(
        model, layout, options["data.batch_size"], seq_len, cluster, options.get("memory.recompute", "none"),
        states=OptimizerStates(moments=options.get("memory.optimizer", "device")),
    )  # fmt: skip
    return RankMemory(run, 0).peak


def _profile_lines(found: dict[str, Any]) -> list[str]:
    rows = found["profile"]["rows"]
    return [
        "| operation or kernel | calls | ms |",
        "|---|---|---|",
        *(f"| `{n}` | {c} | {ms:.2f} |" for n, c, ms in rows),
    ]
