"""Benchmark: every published run, shrunk, trains for 20 steps in 8 processes on this machine's CPU.

    python benchmarks/bench_presets.py

Each row is what `gristmill plan PRESET --shrink` prints, run by torchrun on tokens that repeat, so that there is much
to learn: the loss begins at about ln 1024 = 6.9 and falls.
"""

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import numpy as np
import tyro

from benchmarks.dedup_tables import markdown
from gristmill.command import run_with_exit_code
from gristmill.errors import UsageError
from gristmill.io.token_shards import Manifest, ShardRecord, TokenizerRecord, TokenShardWriter, token_dtype
from gristmill_planner.published_runs import (
    PROCESSES,
    PublishedRun,
    find_published_run,
    published_runs,
    shrunk_config,
    shrunk_layout,
)
from training.reporting.metrics_file import METRICS, read_metrics

REPOSITORY = Path(__file__).resolve().parents[1]
VOCABULARY, PERIOD, TOKENS = 1000, 97, 200_000


def bench_presets(presets: tyro.conf.Positional[tuple[str, ...]] = ()) -> str:
    """Train them, by default all, and print a table.

    Args:
        presets: Names of published runs.
    """
    names = presets or tuple(dict.fromkeys(each.preset for each in published_runs()))
    rows = []
    with TemporaryDirectory() as scratch:
        for name in ("train", "holdout"):
            _write_tokens(Path(scratch, name))
        for name in names:
            rows.append(_row(find_published_run(name), Path(scratch)))
            print(" | ".join(rows[-1]), file=sys.stderr)
    head = ("run", "published layout", "shrunk layout", "parameters", "first loss", "loss after 20 steps")
    return markdown(f"Published runs in {PROCESSES} processes", head, rows, [])


def _row(each: PublishedRun, scratch: Path) -> list[str]:
    config, out = scratch / f"{each.preset}.toml", scratch / each.preset
    config.write_text(shrunk_config(each))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={PROCESSES}"]
    data = [f"--data.{name}={scratch / name}" for name in ("train", "holdout")]
    command = [sys.executable, *launcher, "training/train.py", "--config", str(config), *data, f"--out_dir={out}"]
    command += ["--timeout", "600", "--metrics.tensorboard", "false"]  # the machine may be busy
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPOSITORY, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(f"{each.preset} failed:\n{done.stderr[-3000:]}")
    losses = [record["loss"] for record in read_metrics(out / METRICS) if record["kind"] == "step"]
    parameters = done.stdout.partition(" parameters")[0].rpartition(" ")[2]
    layouts = [layout.describe() for layout in (each.run.layout, shrunk_layout(each.run.layout))]
    return [each.name, *layouts, parameters, f"{losses[0]:.3f}", f"{losses[-1]:.3f}"]


def _write_tokens(folder: Path) -> None:
    """Tokens of one document that repeat after PERIOD."""
    dtype = token_dtype(VOCABULARY)
    period = np.random.default_rng(1).integers(0, VOCABULARY, PERIOD)
    folder.mkdir()
    with TokenShardWriter(folder / "repeated", dtype) as shard:
        shard.add(np.resize(period, TOKENS))
    record = ShardRecord("repeated", 1, shard.tokens, shard.tokens, shard.sha256, shard.idx_sha256)
    Manifest(TokenizerRecord("none", "none", VOCABULARY, 0), dtype.name, [record], {}).save(folder)


if __name__ == "__main__":
    sys.exit(run_with_exit_code(lambda: print(tyro.cli(bench_presets))))
