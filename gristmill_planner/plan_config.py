"""Plan config: what is to be planned, read from the configuration file that training uses, or from a published run."""

import sys
import tomllib
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from gristmill.config import check_ranges, load_config, toml_lines
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.token_shards import open_shards
from gristmill.wording import count_of
from gristmill_planner.hardware import Cluster
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
from training.config import Precision, TrainConfig
from training.data.batch_schedule import BatchSplit
from training.experimental.parallel_config import ParallelConfig
from training.model.layer_options import check_blocks
from training.model.model_config import ModelConfig
from training.own_code import allow_named
from training.presets.presets import PRESETS

_REQUIRED = ("out_dir", "data.train", "data.holdout")  # which a plan does not need


def read_request(config: str, cluster: Cluster) -> tuple[PlanRequest, TrainConfig]:
    """The request in `config`, a TOML file of training's options, and these.

    Raises UsageError if the file cannot be read, or if it does not say how large the vocabulary is.
    """
    options = _read_options(config)
    allow_named(options.own_names)
    model = _model(options, config)
    usual: Precision = "bf16" if cluster.device.is_gpu else "fp32"
    precision: Precision = "fp16" if (usual, options.precision) == ("bf16", "fp16") else usual
    if options.precision != precision:
        print(f"note: {config} trains in {options.precision}, and this plan is for {precision}", file=sys.stderr)
    if options.memory.parameters != "device":
        print(f"note: {config} offloads parameters, which this plan does not count", file=sys.stderr)
    states = OptimizerStates(options.optim.name, options.optim.ema_decay > 0, options.memory.optimizer)
    sizes = options.data.batch_size, options.data.seq_len
    return PlanRequest(model, *sizes, cluster, precision, states=states, compiled=options.compile), options


def preset_request(preset: str, cluster: Cluster, seq_len: int = 0, batch_size: int = 0) -> PlanRequest:
    """The request of a preset; 0: sequences of 4,096 tokens or the context, and steps of about four million tokens."""
    published = PRESETS[preset]
    context = int(published.options["context"])
    length = seq_len or min(4096, context)
    require(length <= context, f"--seq_len is {length}, and {preset} has a context of {context:,}; try a lower one")
    model = ModelConfig(preset=preset).resolve(int(published.options["vocab_size"]), length)
    precision: Precision = "bf16" if cluster.device.is_gpu else "fp32"
    return PlanRequest(model, batch_size or max(1, (1 << 22) // length), length, cluster, precision)


def as_toml(choice: PlannedLayout, request: PlanRequest, config: str, options: TrainConfig | None) -> str:
    """A model and its layout as options of a training run; `options` are those of the file `config`, if it is one."""
    run = choice.run
    # with a file below it, all that the file has otherwise is said, too
    below = [ParallelConfig()] if options is None else [ParallelConfig(), options.parallel]
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
    first = f"# The first choice: gristmill train {files}", f'precision = "{request.precision}"'
    return "\n".join([*first, *toml_lines(sections)])


def configured_run(config: str, options: TrainConfig, request: PlanRequest) -> PlannedRun:
    """The run as the options of `config` lay it out. Raises UsageError if the trainer would refuse it."""
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
    """The model with its defaults filled in; the vocabulary may be the token shards'."""
    given = options.model
    if options.began_from:  # the checkpoint's model; reading it takes torch, which takes seconds to import
        from training.run_plan import given_model

        given = given_model(options)
    model = given.resolve(1, options.data.seq_len)
    if model.vocab_size > 1:
        return model
    return given.resolve(_vocabulary(options, config), options.data.seq_len)


def names_preset(config: str) -> bool:
    """True if it names a published model among the presets."""
    return config in PRESETS and PRESETS[config].parameters > 0


def is_file(config: str) -> bool:
    """True if it names a file of options, which may be missing, and not a published run."""
    return Path(config).suffix == ".toml" or Path(config).is_file()


def published_request(each: PublishedRun, cluster: Cluster, software: Software) -> PlanRequest:
    """The request of a published run's model and batch, on another cluster or with another program."""
    precision: Precision = "bf16" if each.run.precision == "bf16" or software == GRISTMILL else "fp16"
    return PlanRequest(each.run.model, each.run.batch, each.run.seq_len, cluster, precision, software)


def published_layout(each: PublishedRun, request: PlanRequest) -> PlannedRun:
    """A published run with its layout, by another program. Raises UsageError for a cluster of another size."""
    cluster = request.cluster
    devices = each.run.cluster.devices
    require(
        cluster.devices == devices,
        f"{each.name} was published for {count_of(devices, 'GPU')}, and --gpus is {cluster.devices}; try "
        f"--gpus {devices}",
    )
    return replace(each.run, cluster=cluster, software=request.software, precision=request.precision)


def _read_options(config: str) -> TrainConfig:
    """All options of the file; those of paths may be missing."""
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
