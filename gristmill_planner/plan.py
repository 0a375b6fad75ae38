"""Plan a training run on a cluster: `gristmill plan CONFIG --gpus 384 --gpu a100-80gb --nodes-of 8`."""

import sys
from collections.abc import Collection
from dataclasses import replace
from inspect import signature
from math import inf
from pathlib import Path
from typing import Any, Literal

from gristmill.wording import count_of

if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip

import msgspec
from rich.console import Console, Group
from rich.text import Text
from tyro.conf import Positional

from gristmill.command import command
from gristmill.errors import UsageError, require
from gristmill.storage.files import reject_remote
from gristmill_planner.fitted_constants import Constants, fitted_constants
from gristmill_planner.hardware import SUFFIX, Cluster, Device, check_name, find_device, read_hardware, write_hardware
from gristmill_planner.pipeline_simulator import PassCosts, simulate
from gristmill_planner.plan_config import (
    as_toml,
    configured_run,
    is_file,
    names_preset,
    own_rows_table,
    preset_request,
    published_layout,
    published_request,
    read_request,
)
from gristmill_planner.plan_report import about, as_record, choices_table, formulas, next_choice, stage_costs, trust
from gristmill_planner.planned_run import GRISTMILL, MEGATRON, MEGATRON_DEEPSPEED, PlannedRun, PlanRequest
from gristmill_planner.published_runs import (
    PublishedRun,
    comparison_table,
    find_published_run,
    is_published,
    shrunk_config,
)
from gristmill_planner.run_memory import run_memory
from gristmill_planner.search import Choices, PlannedLayout, choose_layouts, describe_choice
from gristmill_planner.step_time import step_time
from gristmill_planner.timeline import draw_measured, draw_schedules, draw_timelines, timeline_text

_CLUSTER = {"config", "gpus", "gpu", "nodes_of", "network", "software", "headroom", "seq_len", "batch_size"}
_PLAN = {*_CLUSTER, "tokens"}
_USED = {  # options that have an effect on what is asked for
    "--calibrate": {"calibrate"},
    "--validate": {"validate", "rows"},
    "--measured": {"draw", "measured"},
    "no CONFIG": {"draw", "ranks", "micro_batches", "costs"},
    "--shrink": {"config", "gpus", "shrink"},
    "--dry_run": {*_CLUSTER, "dry_run", "rank", "configured", "json"},
    "--configured and --json": {*_PLAN, "configured", "json"},
    "--configured": {*_PLAN, "configured", "explain", "draw"},
    "--json": {*_PLAN, "top", "json"},
    "a plan": {*_PLAN, "top", "explain", "draw"},
}
_SOFTWARE = {"gristmill": GRISTMILL, "megatron": MEGATRON, "megatron-deepspeed": MEGATRON_DEEPSPEED}


def plan(
    config: Positional[str] = "",
    gpus: int | None = None,
    gpu: str | None = None,
    nodes_of: int = 8,
    network: float = 0.0,
    headroom: float = 0.08,
    seq_len: int = 0,
    batch_size: int = 0,
    tokens: float = 0.0,
    top: int = 5,
    software: Literal["gristmill", "megatron", "megatron-deepspeed"] = "gristmill",
    configured: bool = False,
    dry_run: bool = False,
    rank: int = 0,
    shrink: bool = False,
    explain: bool = False,
    json: bool = False,
    validate: bool = False,
    rows: Path | None = None,
    calibrate: Path | None = None,
    draw: Path | None = None,
    measured: Path | None = None,
    ranks: int = 4,
    micro_batches: int = 8,
    costs: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Group | None:
    """Choose the parallel layout of a training run for a cluster, and predict its speed and memory.

    Args:
        config: TOML file of training's options (model, data.seq_len, data.batch_size, precision, optim.steps), a preset
            of model.preset, such as llama-3.1-8b, or the name of a published run, such as bloom-176b.
        gpus: GPUs of the cluster; by default those of the published run, or 8.
        gpu: v100, a100-40gb, a100-80gb, h100, h200, b200 or ascend-910, or a file that --calibrate wrote; by default
            that of the published run, or a100-80gb.
        nodes_of: GPUs per node.
        network: Bandwidth of a node's network cards in each direction, in GB/s; 0: what such nodes usually have.
        headroom: Share of a GPU's memory that layouts leave free for what the formulas leave out: fragmentation,
            libraries, other programs.
        seq_len: For a preset: tokens per sequence; 0: 4,096, or its context if that is shorter.
        batch_size: For a preset: sequences per step; 0: about four million tokens.
        tokens: Tokens of the whole run; 0: optim.steps of the file.
        top: Layouts to show.
        software: The training program: this one, or what published runs of 2021 and 2022 used, without fused attention,
            which says nothing about Megatron-LM today.
        configured: Plan the layout in the file's [parallel] and [memory] alone, or that of the published run, instead
            of searching for one.
        dry_run: Build one rank's modules without memory, run a step of them without the other ranks, and compare
            parameters, bytes and collectives with the formulas, for the published layout, the file's with --configured,
            or the first choice.
        rank: The rank to build, from 0.
        shrink: Print a configuration that trains the published run in 8 processes on a CPU: the same architecture and
            shape of the layout, and small sizes.
        explain: Show each formula of the first choice with its numbers.
        json: Print JSON, for programs.
        validate: Compare the planner with published runs; needs no config.
        rows: With --validate, compare it with measured steps of yours instead: a CSV file with the columns config (a
            file of training's options, with its layout), gpus, gpu and seconds.
        calibrate: Measure this CPU for some seconds and write its speeds to this TOML file, which --gpu reads.
        draw: Draw the timelines of the schedules to this file (.svg, .png, .pdf) and in the terminal: for the first
            choice or, without a config, for --ranks, --micro_batches and --costs.
        measured: With --draw, the out_dir of a run with a pipeline that traced a step on every rank (--profile.steps,
            --profile.ranks): that step, and a simulation with its costs.
        ranks: Pipeline ranks to draw.
        micro_batches: Micro-batches to draw.
        costs: Seconds of a rank's forward pass, its backward pass for inputs, and its backward pass for weights, to
            draw.
    """
    options = dict(locals())
    for path in (calibrate, draw):
        if path is not None:
            reject_remote(path)
    mode = _mode(options)
    _require_effects(options, mode, _USED[mode])
    if calibrate is not None:
        return _calibrate(calibrate)
    if rows is not None:
        return Group(*own_rows_table(rows))
    if validate:
        return Group(comparison_table(fitted_constants()))
    if not config:
        assert draw is not None
        if measured is not None:
            return draw_measured(draw, measured)
        return draw_schedules(draw, ranks, micro_batches, PassCosts(*costs))
    require(top > 0, f"--top is {top}; expected 1 or more")
    require(0 <= headroom < 1, f"--headroom is {headroom}; expected a share of memory from 0 to below 1, such as 0.08")
    require(0 <= tokens < inf, f"--tokens is {tokens}; expected a finite number, 0 or more")
    is_preset = not is_file(config) and names_preset(config) and not is_published(config)
    published = None if is_file(config) or is_preset else find_published_run(config, gpus)
    if shrink:
        if published is None:
            raise UsageError(f"--shrink is for published runs, and {config} is none; try bloom-176b --shrink")
        print(shrunk_config(published))
        return None
    if is_preset:
        _require_effects(options, f"the preset {config}, which has no layout", options.keys() - {"configured"})
    else:
        _require_effects(options, config, options.keys() - {"seq_len", "batch_size"})
    device, constants = _device(gpu)
    cluster = _cluster(gpus, device, nodes_of, network, published)
    total = tokens or 300e9
    training = None
    if published is not None:
        request = published_request(published, cluster, _SOFTWARE[software])
    elif is_preset:
        request = preset_request(config, cluster, seq_len, batch_size)
    else:
        request, training = read_request(config, cluster)
        total = tokens or float(training.optim.steps * request.batch * request.seq_len)
    request = replace(request, software=_SOFTWARE[software], headroom=headroom)
    given = None
    if published is not None and (configured or dry_run):
        given = published_layout(published, request)
    elif configured:
        assert training is not None  # a preset has no layout
        given_with = "--configured and a file, whose layout is this trainer's"
        _require_effects(options, given_with, options.keys() - {"software"})
        given = configured_run(config, training, request)
    if dry_run:
        return _dry_run(given or _search(request, constants, 1).shown[0].run, rank, json)
    if given is None:
        result = _search(request, constants, top)
    else:
        chosen = PlannedLayout(given, step_time(given, constants), run_memory(given))
        result = Choices([chosen], chosen, 1)
    if json:
        _print_json([as_record(choice, total) for choice in result.shown])
        return None
    first = result.shown[0]
    lines: list[Any] = [choices_table(result.shown, total), "", *about(first, constants)]
    missing = (first.memory.total - cluster.device.memory) / (1 << 30)
    if given is None:
        reason = describe_choice(result)
        if reason:
            lines.append(reason)
        lines.append(next_choice(result.shown))
        lines.append(f"{count_of(result.considered, 'layout')} considered; {total:.3g} tokens.")
    elif missing > 0:
        lines.append(f"It does not fit: it exceeds the memory by {missing:.1f} GiB.")
    else:
        lines.append("It fits.")
    if explain:
        lines += ["", *formulas(first, constants)]
    lines += ["", trust(cluster.device, gpu, request.software)]
    if given is None and request.software == GRISTMILL:
        lines += ["", Text(as_toml(first, request, config, training))]
    if draw is not None:
        lines += ["", _draw_choice(first, constants, draw)]
    return Group(*lines)


def _mode(options: dict[str, Any]) -> str:
    """Return which plan is asked for. Raises UsageError if it is none."""
    for name in ("calibrate", "validate"):
        if options[name]:
            return f"--{name}"
    if not options["config"]:
        require(options["draw"], "there is nothing to plan; give a CONFIG, or --validate, or --draw timeline.svg")
        return "--measured" if options["measured"] else "no CONFIG"
    for name in ("shrink", "dry_run"):
        if options[name]:
            return f"--{name}"
    given = [f"--{name}" for name in ("configured", "json") if options[name]]
    return " and ".join(given) or "a plan"


def _require_effects(options: dict[str, Any], mode: str, used: Collection[str]) -> None:
    """Raise UsageError for the first of plan's options that is given and not `used`."""
    for name, parameter in signature(plan).parameters.items():
        label = "CONFIG" if name == "config" else f"--{name}"
        require(
            name in used or options[name] == parameter.default,
            f"{label} has no effect with {mode}; leave one of them out",
        )


def _calibrate(path: Path) -> Group:
    from gristmill_planner.calibration import calibrate
    from training.distributed.rank_pool import RankPool

    check_name(path)
    with RankPool(2) as pool:
        device, constants = calibrate(pool)
    write_hardware(path, device, constants)
    return Group(
        f"{device.flops / 1e9:.1f} GFLOP/s, {device.bandwidth / 1e9:.1f} GB/s of memory, {device.link / 1e9:.2f} GB/s "
        f"between processes; written to {path}: gristmill plan CONFIG --gpu {path} --gpus 2"
    )


def _device(gpu: str | None) -> tuple[Device | None, Constants]:
    """Return the device called `gpu`, None for the usual one, and the constants that go with it: a file has its own."""
    if gpu is not None and gpu.endswith(SUFFIX):
        return read_hardware(Path(gpu))
    device = None if gpu is None else find_device(gpu)
    return device, fitted_constants()


def _cluster(
    gpus: int | None, device: Device | None, nodes_of: int, network: float, published: PublishedRun | None
) -> Cluster:
    require(
        0 <= network < inf,
        f"--network is {network}; expected finite GB/s, or 0 for what such nodes usually have",
    )
    usual = Cluster(find_device("a100-80gb"), 8)
    if published is not None:
        usual = published.run.cluster
    devices = usual.devices if gpus is None else gpus
    cluster = Cluster(device or usual.device, devices, nodes_of)
    require(
        cluster.fills_nodes,
        f"{count_of(devices, 'GPU')} cannot fill nodes of {nodes_of}; try --gpus {-(-devices // nodes_of) * nodes_of}",
    )
    if network:
        cluster = cluster.with_network(1e9 * network)
    return cluster


def _search(request: PlanRequest, constants: Constants, top: int) -> Choices:
    with Console(stderr=True).status("looking for the fastest layouts …"):  # on a terminal alone
        return choose_layouts(request, constants, top)


def _dry_run(run: PlannedRun, rank: int, json: bool) -> Group | None:
    # takes seconds to import, needed for dry runs only
    from gristmill_planner.dry_run import dry_run_record, dry_run_report, try_rank

    result = try_rank(run, rank)
    if json:
        _print_json(dry_run_record(result))
        return None
    return Group(*dry_run_report(run, result))  # type: ignore[arg-type]


def _print_json(record: Any) -> None:
    print(msgspec.json.format(msgspec.json.encode(record)).decode())


def _draw_choice(choice: PlannedLayout, constants: Constants, path: Path) -> Group:
    """Draw the pipeline of a layout, with at most four micro-batches for each rank."""
    layout = choice.run.layout
    require(layout.pp > 1, f"--draw {path}: the first choice has no pipeline to draw; give --draw without a config")
    shown = replace(layout, micro_batches=min(layout.micro_batches, 4 * layout.pp))
    timeline = simulate(shown, stage_costs(choice.run, constants))
    draw_timelines([timeline], path)
    return Group(timeline_text(timeline), f"drawn in {path}")


if __name__ == "__main__":
    command(plan)
