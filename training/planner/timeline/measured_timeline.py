"""Measured timeline: the passes of a real step's pipeline ranks, from the traces of a run (profile.steps)."""

import gzip
import json
import re
from collections import defaultdict
from pathlib import Path
from statistics import fmean
from typing import Any, cast

from gristmill.errors import InputError, UsageError
from training.distributed.layout import Schedule
from training.planner.timeline.pipeline_simulator import PassCosts, TimedPass, Timeline, pipeline_layout
from training.profiling.step_trace import FOLDER

_PASS = re.compile(r"([\w-]+) pass ([FBIW]) of stage (\d+), micro-batch (\d+), rank (\d+) of (\d+)")


def read_timeline(out_dir: Path) -> Timeline:
    """The last traced step of the run in `out_dir`; of replicas and tensor-parallel ranks, the first that were traced.

    Raises UsageError if the traces are not of a pipeline, or lack one of its ranks, InputError if one is damaged.
    """
    files = sorted((out_dir / FOLDER).glob("steps-*.rank-*.json.gz"), key=_number)
    found: dict[int, list[TimedPass]] = {}
    schedule, pp = "", 0
    for path in files:
        for name, rank, of, passes in _read(path):
            schedule, pp = name, of
            found.setdefault(rank, passes)
    missing = [rank for rank in range(pp) if rank not in found]
    if not found or missing:
        raise UsageError(
            f"{out_dir / FOLDER} has "
            + (f"no trace of pipeline rank {missing[0]}" if found else "no traces of a pipeline's passes")
            + "; train with --profile.steps 3:3 and --profile.ranks of every rank"
        )
    return _timeline(schedule, [found[rank] for rank in range(pp)])


def measured_costs(timeline: Timeline) -> list[PassCosts]:
    """Mean seconds of the passes of each stage, for a simulation; of a whole backward pass each half."""
    kinds: dict[tuple[int, str], list[float]] = defaultdict(list)
    for each in (each for passes in timeline.ranks for each in passes):
        seconds = each.end - each.start
        for kind in "IW" if each.kind == "B" else each.kind:
            kinds[each.stage, kind].append(seconds / 2 if each.kind == "B" else seconds)
    return [PassCosts(*(fmean(kinds[stage, kind]) for kind in "FIW")) for stage in range(timeline.layout.stages)]


def _number(path: Path) -> tuple[int, int]:
    """By rank, and by steps, the last ones first."""
    numbers = [int(n) for n in re.findall(r"\d+", path.name)]
    return numbers[2], -numbers[1]


def _read(path: Path) -> list[tuple[str, int, int, list[TimedPass]]]:
    """Schedule, pipeline rank, ranks, and the passes of the last step of a trace; none if it has no pipeline."""
    try:
        trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
        base = float(trace.get("baseTimeNanoseconds", 0)) / 1e9
        events = [
            (match, base + event["ts"] / 1e6, event["dur"] / 1e6)
            for event in trace["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") == "user_annotation"
            if (match := _PASS.fullmatch(event["name"]))
        ]
    except (OSError, ValueError, KeyError, TypeError, EOFError) as error:
        raise InputError(f"{path} is damaged: {error}; trace the steps again") from error
    if not events:
        return []
    events.sort(key=lambda event: event[1])
    kinds = [match.group(2, 3, 4) for match, _, _ in events]
    one_step = events[len(kinds) - 1 - kinds[::-1].index(kinds[0]) :]
    passes = [TimedPass(m[2], int(m[3]), int(m[4]), start, start + length) for m, start, length in one_step]
    first = events[0][0]
    return [(first[1], int(first[5]), int(first[6]), passes)]


def _timeline(schedule: str, ranks: list[list[TimedPass]]) -> Timeline:
    """From the first pass at 0 s on."""
    began = min(passes[0].start for passes in ranks)
    count = 1 + max(each.micro_batch for each in ranks[0])
    stages = len({each.stage for each in ranks[0]})
    layout = pipeline_layout(cast(Schedule, schedule), len(ranks), count, stages)
    moved = [
        [TimedPass(each.kind, each.stage, each.micro_batch, each.start - began, each.end - began) for each in passes]
        for passes in ranks
    ]
    return Timeline(layout, moved, "measured")
