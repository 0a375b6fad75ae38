"""RunPlan: what follows from the options, the token shards and the number of processes, before a run starts."""

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gristmill.errors import require
from gristmill.io.token_shards import Manifest, TokenizerRecord
from gristmill.storage.stores import store_of
from gristmill.wording import count_of
from training.checkpoint.checkpoint import recorded_model
from training.checkpoint.remote_run import RemoteRun
from training.config import TrainConfig
from training.data.batch_schedule import BatchSplit
from training.data.batches import Batches
from training.data.data_config import DataConfig
from training.data.mix import TokenMix
from training.data.sequences import TokenSequences, require_same_tokenizer
from training.experimental.local_steps.replicas_config import check_local_steps
from training.experimental.parallel_config import ParallelConfig
from training.memory.memory_config import MemoryConfig
from training.model.layer_options import check_blocks
from training.model.model_config import ModelConfig
from training.model.own_checks import check_own_parts
from training.optim.optimizer_kinds import SOME_HAVE, find_optimizer
from training.own_code import allow_named, is_own, load_own, recorded_name
from training.parallel.mesh import World

_DIVISIBLE = 2**12 * 3**2 * 5 * 7  # a vocabulary that any layout divides, where its size is not known yet


@dataclass(frozen=True)
class RunPlan:
    """A run's options, complete and checked against each other and against its data.

    `model`, `layout` and `memory` are those sections with every default filled in; `identity` holds the options that
    must be equal to resume, by name.
    """

    config: TrainConfig
    train: TokenMix
    holdout: TokenSequences
    holdouts: dict[str, TokenSequences]
    model: ModelConfig
    layout: ParallelConfig
    memory: MemoryConfig
    split: BatchSplit
    identity: dict[str, Any]
    remote: RemoteRun | None = None
    """The run's folder in a bucket; `config.out_dir` is then its working copy."""

    @classmethod
    def of(cls, config: TrainConfig) -> "RunPlan":
        """Plan a run of this process group, or of the one that the launcher's WORLD_SIZE promises.

        Writes nothing but copies of what is in buckets. Raises UsageError for options that cannot run with these data
        and processes, InputError for damaged data.
        """
        config.check()
        allow_named(config.own_names)
        if is_own(config.optim.schedule):
            load_own(config.optim.schedule, "optim.schedule")  # now, and not after the warm-up
        data = config.data
        remote = None
        if store_of(config.out_dir).needs_copies:
            remote = RemoteRun.of(config.out_dir, config.checkpoint.folder)
            remote.fetch()
            config = replace(config, out_dir=remote.local)
        parts = []
        cached = 0
        for folder in data.train_folders:
            parts.append(_open_tokens(folder, data, cached, data.skip_documents))
            cached += parts[-1].cached_bytes
        _require_different_sets(parts)
        _require_packing(parts, data)
        _require_documents(parts, data.skip_documents)
        train = TokenMix.of(parts, data.weights)
        holdout = _open_tokens(data.holdout, data, cached)
        cached += holdout.cached_bytes
        holdouts = {}
        for name, folder in data.holdouts.items():
            holdouts[name] = _open_tokens(folder, data, cached)
            cached += holdouts[name].cached_bytes
        for other in (*parts[1:], holdout, *holdouts.values()):
            require_same_tokenizer(train.first, other)
        if dist.is_initialized():
            processes = dist.get_world_size()
        else:
            processes = int(os.environ.get("WORLD_SIZE", 1))
        given = given_model(config)
        vocab_size = train.first.manifest.tokenizer.vocab_size
        for option, source in config.began_from.items():
            require(
                given.vocab_size == 0 or given.vocab_size >= vocab_size,
                f"{option} {source} has a model with a vocabulary of {given.vocab_size}, and data.train tokens of a "
                f"tokenizer with {vocab_size}; expected tokens of the model's own tokenizer; try gristmill tokenize "
                f"--tokenizer {source}",
            )
        model = given.resolve(vocab_size, data.seq_len)
        layout = config.parallel.resolve(processes, model, data.seq_len)
        check_own_parts(model, layout.tp)
        _check_experts(config, model)
        identity = run_identity(config, model, train, holdout.manifest)
        memory = config.memory.resolve(config.out_dir)
        check_local_steps(layout, config.replicas, config.optim, memory, config.profile.norms, config.seconds_to_wait)
        split = BatchSplit.of(data, layout, config.replicas.count)
        return cls(config, train, holdout, holdouts, model, layout, memory, split, identity, remote)

    def batches(self, world: World) -> Batches:
        """Return the batches of this rank: of n replicas that are runs of their own, this one's parts of them."""
        config = self.config
        data = self.config.data
        runs = self.config.replicas.count
        sequences, mix = self.train.sequences(config.seed, config.out_dir if data.is_packed else None)
        part = world.dp_rank * runs + config.replicas.number
        replicas = world.outer.size * runs
        order = data.order, mix, data.mask_documents
        return Batches(sequences, self.split, part, config.seed, *order, runs=runs, replicas=replicas)

    @property
    def named_holdouts(self) -> dict[str, TokenSequences]:
        """Return all holdouts, by name: that of data.holdout by ""."""
        return {"": self.holdout, **self.holdouts}

    @property
    def local_steps(self) -> int:
        """Return the steps that replicas take before they average their weights; 0: none are replicas of that kind."""
        return self.config.replicas.local_steps if self.config.replicas.folder else self.layout.local_steps

    @property
    def moments(self) -> int:
        """Return the values that the optimizer keeps of a parameter, at least, besides the one that it updates."""
        kind = find_optimizer(self.config.optim.name)
        return min(kind.matrix_states, kind.other_states) + (self.config.optim.ema_decay > 0)

    @property
    def tokenizer(self) -> TokenizerRecord:
        """Return the tokenizer of all data."""
        return self.train.first.manifest.tokenizer

    @property
    def tokens_per_step(self) -> int:
        """Return the tokens that this run reads in a step: the global batch, or its part as one of several runs."""
        return self._batch_tokens // self.config.replicas.count

    @property
    def _batch_tokens(self) -> int:
        return self.config.data.batch_size * self.config.data.seq_len

    def notes(self, device: str, steps_done: int) -> list[str]:
        """Return lines on options without effect, for a run that continues after `steps_done` on cpu or cuda."""
        config = self.config
        return [
            *config.memory.warnings(device),
            *config.profile.notes(steps_done),
            *self._notes_of_lengths(),
            *self._notes_of_holdouts(),
            *_idle_options(config, self.model, self.layout),
        ]

    def _notes_of_lengths(self) -> list[str]:
        """Return lines for sequences that are longer than the model has seen before, or no longer than its window."""
        lines = []
        length = self.config.data.seq_len
        stored = _stored_model(self.config)
        if stored is not None and stored.context < length:
            lines.append(
                f"data.seq_len {length} is longer than the {stored.context} positions of the model that the run starts "
                f"from: positions beyond them are new to it, and its export will have {self.model.context} of them"
            )
        if (self.model.window or 0) >= length:
            lines.append(f"model.window {self.model.window} has no effect with data.seq_len {length}")
        return lines

    def _notes_of_holdouts(self) -> list[str]:
        """Return lines for holdouts that are trained on: a shard is known by its checksum, wherever its folder lies."""
        folders = dict[str, Path]()
        for part in self.train.parts:
            for shard in part.manifest.shards:
                folders[shard.sha256] = part.folder
        lines = []
        for name, holdout in self.named_holdouts.items():
            shards = [shard for shard in holdout.manifest.shards if shard.tokens]
            shared = [shard for shard in shards if shard.sha256 in folders]
            if not shared:
                continue
            option = f"data.holdouts.{name}" if name else "data.holdout"
            amount = "" if len(shared) == len(shards) else f"{len(shared)} of "
            verb = "is" if len(shared) == 1 else "are"
            lines.append(
                f"{option}: {amount}its {count_of(len(shards), 'shard')} {verb} in data.train "
                f"{folders[shared[0].sha256]}, too: its loss is of text that the model is trained on, not of new text"
            )
        return lines

    def header(self, parameters: int, active: int, processes: int, device: str) -> str:
        """Return two lines for logs: the sizes of the model, the layout and the batch. `device` is cpu or cuda.

        `active`: the parameters that one token uses.
        """
        model = self.model
        split = self.split
        threads = f", threads {torch.get_num_threads()}" if device == "cpu" else ""
        used = f"{active:,} of them active per token, " if active < parameters else ""
        part = f", of which this run reads {self.tokens_per_step:,}" if self.config.replicas.count > 1 else ""
        return (
            f"{model.preset}: {parameters:,} parameters, {used}{count_of(model.layers, 'layer')} of width "
            f"{model.width}, "
            f"vocabulary {model.vocab_size}\n"
            f"{count_of(processes, 'process', 'processes')} ({device}{threads}, {self.config.precision}): "
            f"{self.layout.describe()}; a step is {count_of(self._batch_tokens, 'token')}: replicas {split.dp_size} x "
            f"micro-batches {split.grad_accum_steps} x sequences {split.micro_batch_size} x length "
            f"{self.train.first.length}{part}"
        )


def _open_tokens(folder: Path, data: DataConfig, cached: int, skipped: Sequence[str] = ()) -> TokenSequences:
    """Open a folder of token shards; `cached` bytes of the cache are those of other folders.

    `skipped`: documents to learn nothing from.
    """
    return TokenSequences(folder, data.seq_len, data.ignores_firsts, data.cache_options, cached, skipped)


def _require_documents(parts: Sequence[TokenSequences], documents: Sequence[str]) -> None:
    """Raise UsageError for a document to skip whose shard is in none of the data sets, or in several."""
    for document in documents:
        name = document.rpartition("@")[0]
        folders = list[str]()
        for part in parts:
            if any(shard.name == name for shard in part.manifest.shards):
                folders.append(str(part.folder))
        require(
            bool(folders), f"data.skip_documents has {document}, and data.train has no shard {name}; check its name"
        )
        require(
            len(folders) == 1,
            f"data.skip_documents has {document}, and {' and '.join(folders)} have a shard of that name; expected one: "
            "leave the document out of its corpus",
        )


def _require_packing(parts: Sequence[TokenSequences], data: DataConfig) -> None:
    """Raise UsageError for masked shards in windows, of which some would have no target."""
    for part in parts:
        require(
            part.masks is None or data.is_packed,
            f"{part.folder} has masks, such as of chats, and data.packing {data.packing} would make sequences of it of "
            "which some have no target; try --data.packing best-fit --data.mask_documents true",
        )


def _require_different_sets(parts: Sequence[TokenSequences]) -> None:
    """Raise UsageError where two folders hold the same shards: how far a set was read is known by its fingerprint."""
    folders: dict[str, Path] = {}
    for part in parts:
        other = folders.setdefault(part.manifest.fingerprint, part.folder)
        require(
            other == part.folder,
            f"data.train names {other} and {part.folder}, which hold the same token shards; expected each data set "
            "once; try a larger weight for one of them in --data.weights",
        )


def check_sizes(config: TrainConfig, processes: int) -> None:
    """Raise UsageError for a model, layout or batch that do not fit together, before there are tokens to train on."""
    allow_named(config.own_names)
    given = given_model(config)
    model = given.resolve(given.vocab_size or _DIVISIBLE, config.data.seq_len)
    layout = config.parallel.resolve(processes, model, config.data.seq_len)
    BatchSplit.of(config.data, layout, config.replicas.count)


def given_model(config: TrainConfig) -> ModelConfig:
    """Return the options of the model; those of a run that starts from a checkpoint are the checkpoint's, if not given.

    Sequences beyond its context make that longer. Raises UsageError where learned positions forbid it.
    """
    stored = _stored_model(config)
    if stored is None:
        return config.model
    given = config.model.merged_with(stored)
    length = config.data.seq_len
    if config.model.context or given.context >= length or given.preset != stored.preset:
        return given
    require(
        given.positions != "learned",
        f"data.seq_len {length} is longer than the model's {stored.context} positions, which are learned; try "
        f"--data.seq_len {stored.context}",
    )
    return replace(given, context=length)


def _stored_model(config: TrainConfig) -> ModelConfig | None:
    """Return the model of the checkpoint that a run starts from, or of its own; None if it starts from none."""
    if not config.began_from:
        return None
    for folder in (config.out_dir, *map(Path, config.began_from.values())):
        stored = recorded_model(folder)
        if stored is not None:
            return stored
    return None


def _check_experts(config: TrainConfig, model: ModelConfig) -> None:
    """Raise UsageError for options of the run that do not go together with a sparse model, or with sinks."""
    check_blocks(model, config.memory.recompute, config.compile)
    require(
        model.balance != "bias" or config.replicas.folder is None,
        "replicas.folder and model.balance bias: each replica would have its own biases; try --model.balance sequence",
    )


def _idle_options(config: TrainConfig, model: ModelConfig, layout: ParallelConfig) -> list[str]:
    """Return a line for each option that another one leaves without effect, or to odd effect.

    `model` and `layout` are resolved.
    """
    optim = config.optim
    memory = config.memory
    kind = find_optimizer(optim.name)
    name_of = f"optim.name {optim.name}"
    biases = all(getattr(config.model, name) is not None for name in ("qkv_bias", "out_bias", "mlp_bias"))
    never_decays = "optim.schedule wsd and optim.cooldown_steps 0"
    idle: list[tuple[str, bool, str]] = [
        ("model.rope_base", model.positions != "rope", f"model.positions {model.positions}"),
        ("model.bias", biases and model.norm != "layer", "qkv_bias, out_bias and mlp_bias"),
        ("model.init_std", bool(config.began_from), "the weights of a checkpoint"),
        ("data.weights", len(config.data.train_folders) == 1, "one folder in data.train"),
        ("optim.min_lr", optim.schedule == "constant", "optim.schedule constant"),
        ("optim.min_lr", optim.schedule == "wsd" and not optim.cooldown_steps, never_decays),
        ("optim.decay_steps", optim.schedule == "wsd" and not optim.cooldown_steps, never_decays),
        *((f"optim.{name}", name not in kind.options, name_of) for name in SOME_HAVE),
        ("optim.decay_parts", "decay_parts" in kind.options and not optim.weight_decay, "optim.weight_decay 0"),
        ("memory.optimizer", not kind.has_states, f"{name_of}, which has no moments"),
        ("parallel.zero", layout.replicas == 1, "one replica"),
        ("parallel.reduce_bf16", layout.replicas == 1, "one replica"),
        ("data.eod_mask_loss", config.data.mask_documents, "data.mask_documents, which already implies it"),
        ("eval.prompt", not config.eval.sample_tokens, "eval.sample_tokens 0"),
        ("eval.temperature", not config.eval.sample_tokens, "eval.sample_tokens 0"),
        ("eval.task_folder", not config.eval.tasks, "no eval.tasks"),
        ("eval.task_items", not config.eval.tasks, "no eval.tasks"),
        ("parallel.schedule", config.parallel.pp == 1, "parallel.pp 1"),
        ("memory.folder", not memory.on_disk, "nothing offloaded to disk"),
        ("stability.max_skipped_steps", config.stability.policy == "stop", "stability.policy stop"),
        ("profile.ranks", not config.profile.steps, "no profile.steps"),
    ]
    scaling = ("initial_loss_scale", "scale_growth_interval", "min_loss_scale")
    idle += [(f"stability.{name}", config.precision != "fp16", f"precision {config.precision}") for name in scaling]
    lines = []
    steps = optim.steps - optim.warmup_from
    if steps < 2 * optim.warmup_steps:
        advice = f"; a tenth of the run is --optim.warmup_steps {steps // 10}" if steps >= 10 else ""
        length = f"the {steps} steps from there" if optim.warmup_from else f"optim.steps {steps}"
        lines.append(
            f"the learning rate warms up for optim.warmup_steps {optim.warmup_steps}, more than half of "
            f"{length}{advice}"
        )
    for option, without_effect, reason in idle:
        section_name, _, name = option.partition(".")
        section = getattr(config, section_name)
        given = getattr(section, name)
        default = getattr(type(section), name)
        if without_effect and given != default:
            value = " ".join(map(str, given)) if isinstance(given, tuple) else given
            lines.append(f"{option} {value} has no effect with {reason}")
    return lines


def run_identity(config: TrainConfig, model: ModelConfig, train: TokenMix, holdout: Manifest) -> dict[str, Any]:
    """Return options and data that determine the results, by option name; a run resumes only if all are equal.

    Not among them: paths, the number of processes and their layout. `model` must be resolved; `holdout` is
    the manifest of the token shards.
    """
    identity: dict[str, Any] = {}
    for key, value in model.record().items():
        if key != "preset":
            identity[f"model.{key}"] = value
    identity |= _train_identity(train)
    identity["data.holdout"] = holdout.fingerprint
    identity["data.seq_len"] = config.data.seq_len
    identity["data.batch_size"] = config.data.batch_size
    identity["data.order"] = config.data.order
    if config.data.batch_ramp:
        identity["data.batch_ramp"] = config.data.batch_ramp
    identity |= config.data.of_documents()
    for key, value in config.parallel.compression_record().items():
        identity[f"parallel.{key}"] = value
    for key, value in asdict(config.optim).items():
        if key not in ("steps", "decay_steps", "cooldown_steps"):  # a run can be made longer
            identity[f"optim.{key}"] = value
    for key in ("name", "schedule"):
        identity[f"optim.{key}"] = recorded_name(getattr(config.optim, key))
    identity |= config.replicas.record()
    if config.parallel.local_steps:
        identity["parallel.local_steps"] = config.parallel.local_steps
    identity["optim.min_lr"] = config.optim.final_lr
    identity["seed"] = config.seed
    identity["precision"] = config.precision
    return identity


def _train_identity(train: TokenMix) -> dict[str, Any]:
    """Return what decides the results of the data sets: their shards and, of several, their shares."""
    identity: dict[str, Any] = {}
    fingerprints = [part.manifest.fingerprint for part in train.parts]
    if len(fingerprints) == 1:
        identity["data.train"] = fingerprints[0]
    else:
        identity["data.train"] = fingerprints
        identity["data.weights"] = [f"{share:.9g}" for share in train.shares]
    masks = [part.masks.fingerprint for part in train.parts if part.masks is not None]
    if masks:
        identity["data.masks"] = masks
    return identity
