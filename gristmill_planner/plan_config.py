"""Plan config: what is to be planned, read from the configuration file that training uses, or from a published run.

And measured steps of the user's, each in the layout of such a file, beside what is planned for them.
"""

import csv
import sys
import tomllib
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median

from rich.table import Table

from gristmill.arguments import one_of
from gristmill.config import check_ranges, load_config, toml_lines
from gristmill.errors import GristmillError, UsageError, require, wrap_read_errors
from gristmill.io.token_shards import open_shards
from gristmill.wording import count_of
from gristmill_planner.fitted_constants import Constants, fitted_constants
from gristmill_planner.hardware import SUFFIX, Cluster, find_device, read_hardware
from gristmill_planner.planned_run import (
    GRISTMILL,
    OptimizerStates,
    PlannedRun,
    PlanRequest,
    Software,
    layers_of_stages,
)  # fmt: skip
from gristmill_planner.published_runs import PublishedRun, changed
from gristmill_planner.search import PlannedLayout
from gristmill_planner.step_time import step_time
from training.config import Precision, TrainConfig
from training.data.batch_schedule import BatchSplit
from training.experimental.parallel_config import ParallelConfig
from training.model.layer_options import check_blocks
from training.model.model_config import ModelConfig
from training.own_code import allow_named
from training.presets.presets import PRESETS

_REQUIRED = ("out_dir", "data.train", "data.holdout")  # which a plan does not need


def read_request(config: str, cluster: Cluster) -> tuple[PlanRequest, TrainConfig]:
    """Return the request in `config`, a TOML file of training's options, and these.

    Raises UsageError if the file cannot be read, or if it does not say how large the vocabulary is.
    """
    options = _read_options(config)
    allow_named(options.own_names)
    model = _model(options, config)
    precision: Precision = "fp32"
    if cluster.device.is_gpu:
        precision = "fp16" if options.precision == "fp16" else "bf16"
    if options.precision != precision:
        print(f"note: {config} trains in {options.precision}, and this plan is for {precision}", file=sys.stderr)
    if options.memory.parameters != "device":
        print(f"note: {config} offloads parameters, which this plan does not count", file=sys.stderr)
    states = OptimizerStates(options.optim.name, options.optim.ema_decay > 0, options.memory.optimizer)
    sizes = options.data.batch_size, options.data.seq_len
    return PlanRequest(model, *sizes, cluster, precision, states=states, compiled=options.compile), options


def preset_request(preset: str, cluster: Cluster, seq_len: int = 0, batch_size: int = 0) -> PlanRequest:
    """Return the request of a preset; 0: sequences of 4,096 tokens or the context, steps of four million tokens."""
    published = PRESETS[preset]
    context = int(published.options["context"])
    length = seq_len or min(4096, context)
    require(length <= context, f"--seq_len is {length}, and {preset} has a context of {context:,}; try a lower one")
    model = ModelConfig(preset=preset).resolve(int(published.options["vocab_size"]), length)
    precision: Precision = "bf16" if cluster.device.is_gpu else "fp32"
    batch = batch_size or max(1, (1 << 22) // length)
    return PlanRequest(model, batch, length, cluster, precision)


def as_toml(choice: PlannedLayout, request: PlanRequest, config: str, options: TrainConfig | None) -> str:
    """Return a model and its layout as options of a training run; `options`: those of `config`, if that is a file."""
    run = choice.run
    # with a file below it, all that the file has otherwise is said, too
    below = [ParallelConfig()]
    if options is not None:
        below.append(options.parallel)
    layout: dict[str, object] = {"dp": run.layout.dp, "micro_batches": run.layout.micro_batches}
    for name, value in asdict(run.layout).items():
        if any(value != getattr(other, name) for other in below):
            layout[name] = value
    memory: dict[str, object] = {"recompute": run.recompute, "optimizer": run.states.moments}
    if options is not None and options.memory.parameters != "device":
        memory["parameters"] = "device"
    model: dict[str, object] = {"preset": request.model.preset}
    if options is not None:  # as the file has it
        model = changed(options.model, ModelConfig())
    sections: dict[str, dict[str, object]] = {
        "model": model, "data": {"seq_len": run.seq_len, "batch_size": run.batch}, "parallel": layout,
        "memory": memory,
    }  # fmt: skip
    files = "--config THIS_FILE" if options is None else f"--config {config} --config THIS_FILE"
    first = [f"# The first choice: {_launcher(request.cluster)} {files}"]
    if options is not None and options.precision != request.precision:
        first.append(f"# {config} trains in {options.precision}, and this layout was chosen for {request.precision}:")
    return "\n".join([*first, f'precision = "{request.precision}"', *toml_lines(sections)])


def _launcher(cluster: Cluster) -> str:
    """Return the command that trains on all devices of a cluster, on each of its nodes, without its options."""
    if cluster.devices == 1:
        return "gristmill train"
    nodes = -(-cluster.devices // cluster.per_node)
    where = "--standalone"
    if nodes > 1:
        where = f"--nnodes={nodes} --rdzv_backend=c10d --rdzv_endpoint=HEAD:29400"
    per_node = cluster.devices // nodes
    return f"gristmill torchrun {where} --nproc_per_node={per_node} -m gristmill_cli.train"


def configured_run(config: str, options: TrainConfig, request: PlanRequest) -> PlannedRun:
    """Return the run as the options of `config` lay it out. Raises UsageError if the trainer would refuse it."""
    options.check()
    require(
        options.parallel.compression == "none",
        f"{config} has parallel.compression {options.parallel.compression}, whose time and memory are not known; try "
        "parallel.compression none, or the search, without --configured",
    )
    require(
        not options.parallel.local_steps and options.replicas.folder is None,
        f"{config} has replicas of local steps, whose traffic is not planned; try parallel.local_steps 0, without "
        "replicas.folder",
    )
    check_blocks(request.model, options.memory.recompute, options.compile)
    layout = options.parallel.resolve(request.cluster.devices, request.model, request.seq_len)
    BatchSplit.of(options.data, layout)
    layers = layers_of_stages(request.model, layout.stages, request.seq_len)
    return request.run(layout, options.memory.recompute, layers)


def _model(options: TrainConfig, config: str) -> ModelConfig:
    """Return the model with its defaults filled in; the vocabulary may be the token shards'."""
    given = options.model
    if options.began_from:  # the checkpoint's model; reading it takes torch, which takes seconds to import
        from training.run_plan import given_model

        given = given_model(options)
    model = given.resolve(1, options.data.seq_len)
    if model.vocab_size > 1:
        return model
    return given.resolve(_vocabulary(options, config), options.data.seq_len)


def names_preset(config: str) -> bool:
    """Return whether it names a published model among the presets."""
    return config in PRESETS and PRESETS[config].parameters > 0


def is_file(config: str) -> bool:
    """Return whether it names a file of options, which may be missing, and not a published run."""
    return Path(config).suffix == ".toml" or Path(config).is_file()


def published_request(published: PublishedRun, cluster: Cluster, software: Software) -> PlanRequest:
    """Return the request of a published run's model and batch, on another cluster or with another program."""
    run = published.run
    precision: Precision = "bf16" if run.precision == "bf16" or software == GRISTMILL else "fp16"
    return PlanRequest(run.model, run.batch, run.seq_len, cluster, precision, software)


def published_layout(published: PublishedRun, request: PlanRequest) -> PlannedRun:
    """Return a published run with its layout, by another program. Raises UsageError for a cluster of another size."""
    cluster = request.cluster
    devices = published.run.cluster.devices
    require(
        cluster.devices == devices,
        f"{published.name} was published for {count_of(devices, 'GPU')}, and --gpus is {cluster.devices}; try "
        f"--gpus {devices}",
    )
    return replace(published.run, cluster=cluster, software=request.software, precision=request.precision)


def _read_options(config: str) -> TrainConfig:
    """Return all options of the file; those of paths may be missing."""
    arguments = ["--config", config]
    with suppress(OSError, ValueError, RecursionError):  # load_config says what is wrong
        table = tomllib.loads(Path(config).read_text(encoding="utf-8"))
        for name in _REQUIRED:
            parent, _, key = name.rpartition(".")
            inner = table.get(parent, {}) if parent else table
            if isinstance(inner, dict) and key not in inner:
                arguments += [f"--{name}", "not-needed"]
    options = load_config(TrainConfig, arguments, prog="plan")
    sections = (options, options.data, options.model, options.optim)
    for section, prefix in zip(sections, ("", "data.", "model.", "optim."), strict=True):
        check_ranges(section, prefix)
    return options


def _vocabulary(options: TrainConfig, config: str) -> int:
    train = options.data.train
    folder = train if isinstance(train, Path) else train[0]
    try:
        return open_shards(folder)[0].tokenizer.vocab_size
    except (GristmillError, OSError) as error:
        raise UsageError(
            f"{config} does not say how large the vocabulary is, and there are no token shards in {folder}; "
            "give vocab_size in its [model], for example vocab_size = 50304"
        ) from error


_NEEDED = ("config", "gpus", "gpu", "seconds")
_OTHERS = ("nodes_of", "network")


def own_rows_table(path: Path) -> tuple[Table, str]:
    """Return a table of the measured rows in a CSV file, and a line that sums them up.

    A row has the columns config (a file of training's options, from the folder of the CSV file, whose layout is
    planned), gpus, gpu and seconds (of a step); nodes_of and network may be there, as the options of `gristmill plan`.
    Raises UsageError for a row that cannot be planned, by its line.
    """
    table = Table("config", "layout", "GPUs", "measured s", "planned s", "error", box=None, pad_edge=False)
    errors = []
    for line, row in _read(path):
        try:
            run, constants = _planned(path.parent, row)
            seconds = _number(row, "seconds")
        except UsageError as refusal:
            raise UsageError(f"{path}:{line}: {refusal}") from refusal
        planned = step_time(run, constants).total
        error = planned / seconds - 1
        errors.append(error)
        layout = run.layout.describe()
        if run.compiled:
            layout += ", compiled"
        gpus = f"{run.cluster.devices} {run.cluster.device.name}"
        table.add_row(row["config"], layout, gpus, f"{seconds:.3g}", f"{planned:.3g}", f"{100 * error:+.1f} %")
    mean = 100 * fmean(map(abs, errors))
    middle = 100 * median(errors)
    return table, f"{count_of(len(errors), 'row')}: mean absolute error {mean:.1f} %, median {middle:+.1f} %"


def _read(path: Path) -> list[tuple[int, dict[str, str]]]:
    with wrap_read_errors(path), path.open(newline="", encoding="utf-8") as file:
        reader = csv.DictReader(file)
        names = reader.fieldnames or []
        for name in _NEEDED:
            require(name in names, f"{path}:1: there is no column {name}; expected {','.join(_NEEDED)}")
        for name in names:
            known = [*_NEEDED, *_OTHERS]
            require(name in known, f"{path}:1: unknown column {name}; {one_of(name, known)}")
        rows = [(reader.line_num, row) for row in reader]
    require(bool(rows), f"{path} has no rows; expected measured steps below its first line")
    return rows


def _planned(folder: Path, row: dict[str, str]) -> tuple[PlannedRun, Constants]:
    """Return the run of a row in its file's layout, and the constants of its device."""
    gpu = row["gpu"] or ""
    if gpu.endswith(SUFFIX):
        device, constants = read_hardware(folder / gpu)
    else:
        device = find_device(gpu)
        constants = fitted_constants()
    cluster = Cluster(device, int(_number(row, "gpus")), int(_number(row, "nodes_of", 8)))
    network = _number(row, "network", 0.0)
    if network:
        cluster = cluster.with_network(1e9 * network)
    config = str(folder / row["config"])
    request, options = read_request(config, cluster)
    return replace(configured_run(config, options, request), compiled=options.compile), constants


def _number(row: dict[str, str], name: str, default: float | None = None) -> float:
    text = row.get(name) or ""
    if not text and default is not None:
        return default
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    require(number > 0, f"{name} is {text!r}; expected a number above 0")
    return number
