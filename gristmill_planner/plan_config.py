"""Plan config: what is to be planned, read from the configuration file that training uses, or from a published run."""

import sys
import tomllib
from dataclasses import replace
from pathlib import Path

from gristmill.config import check_ranges, load_config
from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.token_shards import open_shards
from gristmill_planner.hardware import Cluster
from gristmill_planner.planned_run import GRISTMILL, OptimizerStates, PlannedRun, PlanRequest, Software
from gristmill_planner.published_runs import PublishedRun
from training.config import Precision, TrainConfig
from training.data.batches import BatchSplit
from training.model.model_config import ModelConfig
from training.parallel.pipeline.pipeline_stages import stage_layers

_REQUIRED = ("out_dir", "data.train", "data.holdout")  # which a plan does not need


def read_request(config: str, cluster: Cluster) -> tuple[PlanRequest, int]:
    """The request in `config`, a TOML file of training's options, and the steps of the run.

    Raises UsageError if the file cannot be read, or if it does not say how large the vocabulary is.
    """
    options = _read_options(config)
    model = _model(options, config)
    usual: Precision = "bf16" if cluster.device.is_gpu else "fp32"
    precision: Precision = "fp16" if (usual, options.precision) == ("bf16", "fp16") else usual
    if options.precision != precision:
        print(f"note: {config} trains in {options.precision}, and this plan is for {precision}", file=sys.stderr)
    if options.memory.parameters != "device":
        print(f"note: {config} offloads parameters, which this plan does not count", file=sys.stderr)
    request = PlanRequest(model, options.data.batch_size, options.data.seq_len, cluster, precision)
    return replace(request, states=_states(options), compiled=options.compile), options.optim.steps


def configured_run(config: str, cluster: Cluster) -> PlannedRun:
    """The run as `config` lays it out. Raises UsageError if the trainer would refuse it."""
    options = _read_options(config)
    options.check()
    model, seq_len = _model(options, config), options.data.seq_len
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
    layout = options.parallel.resolve(cluster.devices, model, seq_len)
    BatchSplit.of(options.data, layout)
    layers = tuple(len(each) for each in stage_layers(model, layout.stages, seq_len))
    recompute, states = options.memory.recompute, _states(options)
    return PlannedRun(
        model, layout, options.data.batch_size, seq_len, cluster, recompute, stage_layers=layers, states=states
    )


def _states(options: TrainConfig) -> OptimizerStates:
    return OptimizerStates(options.optim.name, options.optim.ema_decay > 0, options.memory.optimizer)


def _model(options: TrainConfig, config: str) -> ModelConfig:
    """The model with its defaults filled in; the vocabulary may be the token shards'."""
    model = options.model.resolve(1, options.data.seq_len)
    if model.vocab_size > 1:
        return model
    return options.model.resolve(_vocabulary(options, config), options.data.seq_len)


def is_file(config: str) -> bool:
    """True if it names a file of options, which may be missing, and not a published run."""
    return Path(config).suffix == ".toml" or Path(config).is_file()


def published_request(each: PublishedRun, cluster: Cluster, software: Software) -> PlanRequest:
    """The request of a published run's model and batch, on another cluster or with another program."""
    precision: Precision = "bf16" if each.bf16 or software == GRISTMILL else "fp16"
    return PlanRequest(each.run.model, each.run.batch, each.run.seq_len, cluster, precision, software)


def published_layout(each: PublishedRun, cluster: Cluster, software: Software) -> PlannedRun:
    """A published run with its layout, by another program. Raises UsageError for a cluster of another size."""
    devices = each.run.cluster.devices
    require(
        cluster.devices == devices,
        f"{each.name} was published for {devices} GPUs, and --gpus is {cluster.devices}; try --gpus {devices}",
    )
    return replace(each.run, cluster=cluster, software=software)


def _read_options(config: str) -> TrainConfig:
    """All options of the file; those of paths may be missing."""
    arguments = ["--config", config]
    for name in _REQUIRED:
        if not _has(config, name):
            arguments += [f"--{name}", "not-needed"]
    options = load_config(TrainConfig, arguments, prog="plan")
    sections = (options, options.data, options.model, options.optim)
    for section, prefix in zip(sections, ("", "data.", "model.", "optim."), strict=True):
        check_ranges(section, prefix)
    return options


def _has(config: str, name: str) -> bool:
    try:
        table = tomllib.loads(Path(config).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return True  # load_config says what is wrong
    section, _, key = name.rpartition(".")
    inner = table.get(section, {}) if section else table
    return not isinstance(inner, dict) or key in inner


def _vocabulary(options: TrainConfig, config: str) -> int:
    """Size of the vocabulary of the token shards."""
    train = options.data.train
    folder = train if isinstance(train, Path) else train[0]
    try:
        return open_shards(folder)[0].tokenizer.vocab_size
    except (GristmillError, OSError) as error:
        raise UsageError(
            f"{config} does not say how large the vocabulary is, and there are no token shards in {folder}; "
            "give vocab_size in its [model], for example vocab_size = 50304"
        ) from error
