"""Measured timeline: the passes of a real step's pipeline ranks, from the traces of a run (profile.steps)."""

import gzip
import json
import re
import zlib
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple, cast

from gristmill.errors import InputError, UsageError
from gristmill_planner.timeline.pipeline_simulator import PassCosts, TimedPass, Timeline, pipeline_layout
from training.parallel.pipeline.schedules import SCHEDULES, Schedule
from training.profiling.profiler import FOLDER

_PASS = re.compile(r"([\w-]+) pass ([FBIW]) of stage (\d+), micro-batch (\d+), rank (\d+) of (\d+)")
_FILE = re.compile(r"steps-(\d+)-(\d+)\.rank-(\d+)\.json\.gz")


class _Traced(NamedTuple):
    """The pipeline that a trace is of; traces of another are not of the same step."""

    schedule: Schedule
    ranks: int
    stages: int
    """Of each rank."""
    micro_batches: int


def read_timeline(out_dir: Path) -> Timeline:
    """The last step of the run in `out_dir` that was traced on every pipeline rank, under one layout.

    Of replicas and tensor-parallel ranks, it is the first that were traced. Raises UsageError if the traces are not of
    a pipeline, or lack one of its ranks, InputError if one is damaged.
    """
    folder, lacking = out_dir / FOLDER, "no traces of a pipeline's passes"
    for (last, _), files in _by_steps(folder):
        traces: dict[_Traced, dict[int, list[TimedPass]]] = {}
        for path in files:
            for traced, rank, passes in _read(path):
                traces.setdefault(traced, {}).setdefault(rank, passes)
        for traced, found in traces.items():
            missing = [rank for rank in range(traced.ranks) if rank not in found]
            if not missing:
                return _timeline(traced, [found[rank] for rank in range(traced.ranks)], last)
            if lacking.startswith("no traces"):
                lacking = f"no trace of pipeline rank {missing[0]} of {traced.ranks} at step {last}"
    raise UsageError(f"{folder} has {lacking}; train with --profile.steps 3:3 and --profile.ranks of every rank")


def measured_costs(timeline: Timeline) -> list[PassCosts]:
    """Mean seconds of the passes of each stage, for a simulation; of a whole backward pass each half."""
    kinds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for each in (each for passes in timeline.ranks for each in passes):
        seconds = each.end - each.start
        for kind in "IW" if each.kind == "B" else each.kind:
            kinds[each.stage, kind].append(seconds / 2 if each.kind == "B" else seconds)
    return [
        PassCosts(*(fmean(kinds[stage, kind] or [0.0]) for kind in "FIW")) for stage in range(timeline.layout.stages)
    ]


def _by_steps(folder: Path) -> list[tuple[tuple[int, int], list[Path]]]:
    """Traces of the same steps, by their last and first step, from the last on."""
    found: dict[tuple[int, int], list[tuple[int, Path]]] = defaultdict(list)
    for path in folder.glob("steps-*.rank-*.json.gz"):
        if match := _FILE.fullmatch(path.name):
            first, last, rank = map(int, match.groups())
            found[last, first].append((rank, path))
    return [(steps, [path for _, path in sorted(found[steps])]) for steps in sorted(found, reverse=True)]


def _read(path: Path) -> list[tuple[_Traced, int, list[TimedPass]]]:
    """Pipeline rank and the passes of the last step of a trace; none if it has no pipeline."""
    try:
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
        events = [
            (match, base + event["ts"] / 1e6, event["dur"] / 1e6)
            for event in trace["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") == "user_annotation"
            if (match := _PASS.fullmatch(event["name"]))
        ]
    except (OSError, ValueError, LookupError, TypeError, AttributeError, EOFError, RecursionError, zlib.error) as error:
        raise InputError(f"{path} is damaged: {error}; trace the steps again") from error
    if not events:
        return []
    events.sort(key=lambda event: event[1])
    kinds = [match.group(2, 3, 4) for match, _, _ in events]
    one_step = events[len(kinds) - 1 - kinds[::-1].index(kinds[0]) :]
    passes = [TimedPass(m[2], int(m[3]), int(m[4]), start, start + length) for m, start, length in one_step]
    first = events[0][0]
    stages, count = len({each.stage for each in passes}), 1 + max(each.micro_batch for each in passes)
    forward = {(each.stage, each.micro_batch) for each in passes if each.kind == "F"}
    if first[1] not in SCHEDULES or len(forward) != stages * count:
        raise InputError(f"{path} is damaged: it has no whole step of a pipeline; trace the steps again")
    return [(_Traced(cast(Schedule, first[1]), int(first[6]), stages, count), int(first[5]), passes)]


def _timeline(traced: _Traced, ranks: list[list[TimedPass]], step: int) -> Timeline:
    """From the first pass at 0 s on."""
    began = min(passes[0].start for passes in ranks)
    layout = pipeline_layout(traced.schedule, traced.ranks, traced.micro_batches, traced.stages)
    moved = [
        [TimedPass(each.kind, each.stage, each.micro_batch, each.start - began, each.end - began) for each in passes]
        for passes in ranks
    ]
    return Timeline(layout, moved, f"step {step}, measured")
