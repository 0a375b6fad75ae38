"""A real step's passes are read from the traces of its ranks, in the order that the simulator runs."""

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.profiler import profile

from gristmill.errors import InputError, UsageError
from gristmill_planner.plan import plan
from gristmill_planner.timeline import measured_costs, read_timeline
from training.experimental.parallel_config import ParallelConfig
from training.model.batch import TokenBatch
from training.model.decoder import meta_decoder
from training.model.model_config import ModelConfig
from training.parallel.mesh import build_world
from training.parallel.parallelize import parallelize
from training.parallel.pipeline.schedules import Schedule

RunRanks = Callable[..., list[Any]]


def traced_steps(folder: Path, schedule: Schedule) -> None:
    """Two steps of a pipeline as one of its ranks, traced as StepTrace does."""
    model = ModelConfig(preset="gpt2", layers=4, width=16, heads=2).resolve(64, 16)
    layout = ParallelConfig(pp=2, schedule=schedule, micro_batches=4).resolve(2, model, model.context)
    part = parallelize(meta_decoder(model), layout, build_world(layout, torch.device("cpu")), 1)
    tokens = torch.zeros(8, model.context + 1, dtype=torch.int64)
    batch = TokenBatch(tokens[:, :-1], tokens[:, 1:], torch.arange(8))
    part.forward_backward(batch, 1.0)
    with profile() as profiler:
        for _ in range(2):
            part.forward_backward(batch, 1.0)
    profiler.export_chrome_trace(str(folder / f"steps-2-3.rank-{dist.get_rank()}.json.gz"))


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_a_real_step(run_ranks: RunRanks, tmp_path: Path, schedule: Schedule) -> None:
    (tmp_path / "profile").mkdir()
    run_ranks(2, traced_steps, tmp_path / "profile", schedule)
    found = read_timeline(tmp_path)
    for rank, passes in enumerate(found.ranks):
        expected = [each for each in found.layout.passes(rank) if each != ("I", 0)]
        assert [(each.kind, each.stage) for each in passes if (each.kind, each.stage) != ("I", 0)] == expected
        assert all(each.end > each.start >= 0 for each in passes)
    assert min(passes[0].start for passes in found.ranks) == 0
    assert all(costs.forward > 0 for costs in measured_costs(found))
    plan(draw=tmp_path / "both.svg", measured=tmp_path)
    assert f"measured {schedule}" in (tmp_path / "both.svg").read_text(encoding="utf-8")
    (tmp_path / "profile" / "steps-2-3.rank-1.json.gz").unlink()
    with pytest.raises(UsageError, match=r"no trace of pipeline rank 1 of 2 at step 3; train with --profile\.steps"):
        read_timeline(tmp_path)


def test_bad_traces(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no traces of a pipeline's passes"):
        read_timeline(tmp_path)
    (tmp_path / "profile").mkdir()
    (tmp_path / "profile" / "steps-2-3.rank-0.json.gz").write_bytes(b"not gzip")
    with pytest.raises(InputError, match=r"rank-0\.json\.gz is damaged"):
        read_timeline(tmp_path)


def write_trace(out_dir: Path, rank: int, ranks: int, steps: str, kinds: str = "FB") -> Path:
    """A trace of two micro-batches of a pipeline, 10 us for each pass."""
    passes = [
        f"1f1b pass {kind} of stage {rank}, micro-batch {m}, rank {rank} of {ranks}" for kind in kinds for m in (0, 1)
    ]
    events = [
        {"ph": "X", "cat": "user_annotation", "name": name, "ts": 10 * at, "dur": 10} for at, name in enumerate(passes)
    ]
    (out_dir / "profile").mkdir(exist_ok=True)
    path = out_dir / "profile" / f"steps-{steps}.rank-{rank}.json.gz"
    path.write_bytes(gzip.compress(json.dumps({"traceEvents": events}).encode()))
    return path


def test_damaged_traces(tmp_path: Path) -> None:
    path = write_trace(tmp_path, 0, 1, "3-3")
    whole = path.read_bytes()
    flipped = bytes(byte ^ 255 if at in (40, 60) else byte for at, byte in enumerate(whole))
    lists = (b"[]", b'{"traceEvents": [[]]}', b"[" * 100_000)
    for damaged in (flipped, whole[:-20], *map(gzip.compress, lists)):
        path.write_bytes(damaged)
        with pytest.raises(InputError, match=r"steps-3-3\.rank-0\.json\.gz is damaged: .*; trace the steps again"):
            read_timeline(tmp_path)
    write_trace(tmp_path, 0, 1, "3-3", "B")
    with pytest.raises(InputError, match=r"is damaged: it has no whole step"):
        read_timeline(tmp_path)


def test_the_last_step_that_every_rank_traced(tmp_path: Path) -> None:
    for rank in range(4):
        write_trace(tmp_path, rank, 4, "3-3")
    for rank in range(2):
        write_trace(tmp_path, rank, 2, "8-9")  # the run went on with a shorter pipeline
    write_trace(tmp_path, 1, 2, "12-12")  # on one rank alone
    found = read_timeline(tmp_path)
    assert (found.layout.pp, len(found.ranks), found.name) == (2, 2, "step 9, measured")
    (tmp_path / "profile" / "steps-8-9.rank-1.json.gz").unlink()
    assert read_timeline(tmp_path).name == "step 3, measured"
    (tmp_path / "profile" / "steps-3-3.rank-2.json.gz").unlink()
    with pytest.raises(UsageError, match=r"no trace of pipeline rank 0 of 2 at step 12"):
        read_timeline(tmp_path)
