"""Recorded case: a row of the certificate trains once more, with a recorder on this rank's part of the model."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from gristmill_parity.cases import Case
from gristmill_parity.recording.options import Place, RankLayout, RecordOptions
from gristmill_parity.recording.perturb import Perturb
from gristmill_parity.recording.placement import Box, Kind, Partial, Replicate, Shard
from gristmill_parity.recording.recorder import ACTIVATIONS, MICRO_BATCH, MODEL, STATE, Recorder, record
from gristmill_parity.worker import CaseRun
from training.optim.optimizer import Optimizer
from training.parallel.experiment import experiment_of
from training.parallel.parallel_model import ParallelModel
from training.parallel.pipeline.pipeline_stages import PassOn, global_name
from training.plugin import Plugin
from training.sharding.placement import Placement as Row

STEPS = 2
"""The second is the first with updated weights."""
_ZERO = ("shard", "expert_shard")
_DIVIDED_INSIDE = ("attention.o", "mlp.down", "mlp.shared.down")
"""Modules whose inputs tensor parallelism divides, by features."""


def record_case(case: Case, folder: Path, perturb: Perturb | None = None) -> None:
    """Train a case as one of its ranks and record it; every rank of the default process group calls it."""
    scratch = folder / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    run = CaseRun(case, scratch)
    model = run.model
    places = Places(model)
    options = places.options("all", run.train_step.stability.scale)
    try:
        with record(model.parts, folder, layout=places.layout(), options=options, perturb=perturb) as recorder:
            write_initial_weights(recorder, model)
            run.plugins.plugins.append(_Recording(recorder, model, run.optimizer))
            for step in range(1, STEPS + 1):
                try:
                    run.step(step)
                except AssertionError:
                    if not run.train_step.stability.fault:
                        raise
                    break  # gradients are not finite: what was recorded shows why
    finally:
        run.close()


class _Recording(Plugin):
    """Joins the trainer's step: the recorder sees complete gradients before an update, and weights after it."""

    def __init__(self, recorder: Recorder, model: ParallelModel, optimizer: Optimizer) -> None:
        self.recorder = recorder
        self.model = model
        self.optimizer = optimizer

    @contextmanager
    def update(self, loss_scale: float) -> Iterator[None]:
        write_gradients(self.recorder, self.model, loss_scale)
        yield
        write_update(self.recorder, self.model, self.optimizer)


def write_initial_weights(recorder: Recorder, model: ParallelModel) -> None:
    """Record the shards that this rank updates, before the first step."""
    for name, weight in held_values({p.name: p.local for p in model.params}).items():
        recorder.write(name, "initial weight", weight, step=0)


def write_gradients(recorder: Recorder, model: ParallelModel, loss_scale: float) -> None:
    """Record the complete gradients of the shards that this rank updates."""
    gradients = held_values({p.name: p.local.grad for p in model.params})
    if loss_scale != 1:
        gradients = {name: gradient / loss_scale for name, gradient in gradients.items()}
    recorder.after_backward(gradients)


def write_update(recorder: Recorder, model: ParallelModel, optimizer: Optimizer) -> None:
    """Record the optimizer's state and the weights of the shards that this rank updates, after a step's update."""
    for name, state in optimizer.moments().items():
        for key, value in held_values(state).items():
            recorder.write(name, f"{STATE} {key}", value)
    recorder.after_step(held_values({p.name: p.local for p in model.params}))


def held_values(values: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Leave out what this rank has nothing of."""
    return {name: value.detach() for name, value in values.items() if value is not None and value.numel()}


@dataclass
class Places:
    """The places of a model's tensors, by its placement table and what its kinds of parallelism do to activations."""

    model: ParallelModel

    def __post_init__(self) -> None:
        model = self.model
        world = model.world
        layout = model.layout
        self.coordinates: dict[str, tuple[int, int]] = {"dp": (world.dp_rank, world.dp_size)}
        named = {"pp", "cp", "tp"}
        for param in model.params:
            named.update((*param.placement.shard, *param.placement.replicated))
        for name, axis in model.axes.items():
            if axis.size > 1 and name in named:
                self.coordinates[name] = (axis.rank, axis.size)
        self.rows = {p.name: (p.placement, tuple(p.spec.global_shape)) for p in model.params}
        self.specs = {p.name: p.spec for p in model.params}
        kinds: dict[str, Shard] = {"dp": Shard(0, "interleaved")}
        for name in experiment_of(layout).batch_axes:
            kinds[name] = Shard(0)
        kinds[MICRO_BATCH] = Shard(0)
        kinds["cp"] = Shard(1, "zigzag" if layout.context == "ring" else "chunks")
        self.tokens = kinds
        self.is_grid = bool(experiment_of(layout).tp_axes)
        self.is_cube = experiment_of(layout).vocabulary_axis == "row"
        # within attention, the MLP and the loss a cube's columns have the sequences, and its rows the features
        self.tokens_inside = dict[str, Shard]()
        for name, kind in kinds.items():  # in the same order: the first axis is outermost
            inner_name = "column" if self.is_cube and name == "row" else name
            self.tokens_inside[inner_name] = kind

    def layout(self) -> RankLayout:
        """Return where this rank's pieces lie, for a recorder."""
        return RankLayout(self.coordinates, placements=self, micro_batches=self.model.layout.micro_batches)

    def options(self, keep: Literal["auto", "all"] | Sequence[str], loss_scale: float) -> RecordOptions:
        """Return what a recorder records of the model."""
        return RecordOptions(keep=keep, loss_scale=loss_scale, rename=self.rename, leave_out=(PassOn,))

    def rename(self, name: str) -> str:
        """Return a parameter's name in the unsplit model."""
        return global_name(self.model.parts[0], name)

    def __call__(self, name: str, kind: str, tensor: Tensor) -> Place:
        """Return the place of a tensor; None for one that is not recorded."""
        base = kind.partition(" (call")[0]
        if base == "initial weight" and isinstance(tensor, nn.Parameter):
            return None  # what a module holds; the shards that this rank updates are recorded by name
        if base not in ACTIVATIONS:
            return self._of_parameter(name, base, tensor)
        if base != kind:
            return None
        return self._of_activation(name, base, tensor)

    def _of_parameter(self, name: str, kind: str, tensor: Tensor) -> Place:
        if name not in self.rows:
            return None
        row, shape = self.rows[name]
        if kind in ("used weight", "own gradient"):
            return self._of_module(row, shape, kind, tensor)
        spec = self.specs[name]
        if tuple(tensor.shape) != tuple(spec.size):
            return None  # the recorder's own, of what a module holds: shards are written by name
        return Box(spec.offset, shape, _kinds(row, frozenset()))

    def _of_module(self, row: Row, shape: tuple[int, ...], kind: str, tensor: Tensor) -> Place:
        """Return the place of what modules compute with: all that ZeRO's ranks have together."""
        inner = row
        for axis in _ZERO:
            inner = inner.without(axis)
        spec = inner.piece(shape, self.model.axes)
        if tuple(tensor.shape) != tuple(spec.size):
            return None
        if kind == "own gradient" and "tied" in row.replicated and self.model.axes["tied"].size == 1:
            return None  # both ends are on this rank, with a term each, as on two ranks
        terms = frozenset(row.gradient_sum) if kind == "own gradient" else frozenset[str]()
        kinds = _kinds(inner, terms)
        for axis in _ZERO:
            if axis in row.shard:
                kinds[axis] = Partial() if axis in terms else Replicate()
        return Box(spec.offset, shape, kinds)

    def _on_grid(self, name: str, kind: str, tensor: Tensor) -> Place:
        """Return the place of an activation on a grid of ranks.

        Between any two modules rows have sequences and columns features; see `tokens_inside`.
        """
        if name == MODEL:
            return self._of_model_input(kind, "column")
        if name == "head" and kind in ("output", "output gradient"):
            of_loss: Kind = Partial() if kind == "output" else Replicate()
            vocabulary_axis = "row" if self.is_cube else "column"
            return {**dict.fromkeys(self.tokens_inside, of_loss), vocabulary_axis: Replicate()}
        if not _is_known(name) or tensor.ndim != 3:
            return None
        if self.is_cube and _leaf(name) in _DIVIDED_INSIDE and kind.startswith("input"):
            return {**self.tokens_inside, "row": Shard(2)}
        return {**self.tokens, "column": Shard(2)}

    def _of_activation(self, name: str, kind: str, tensor: Tensor) -> Place:
        if self.is_grid:
            return self._on_grid(name, kind, tensor)
        leaf = _leaf(name)
        if name == MODEL:
            return self._of_model_input(kind, "tp")
        if name == "head" and kind in ("output", "output gradient"):
            of_loss: Kind = Partial() if kind == "output" else Replicate()
            return {"dp": of_loss, "cp": of_loss, MICRO_BATCH: of_loss, "tp": Replicate()}
        if leaf == "embed.positions" and tensor.ndim == 2:
            of_batch: Kind = Partial() if kind.endswith("gradient") else Replicate()
            cp = replace(self.tokens["cp"], dim=0)
            return {"dp": of_batch, MICRO_BATCH: of_batch, "cp": cp, "tp": self._between_modules(dim=0)}
        if not _is_known(name) or tensor.ndim != 3:
            return None
        return {**self.tokens, "tp": self._tensor_parallel(leaf, kind)}

    def _of_model_input(self, kind: str, axis: str) -> Place:
        """Return the place of the whole model's input, along whose `axis` are copies; its output is the head's."""
        if kind != "input" or self.model.layout.pp > 1:
            return None
        return {**self.tokens, axis: Replicate()}

    def _tensor_parallel(self, leaf: str, kind: str) -> Kind:
        """Return what tensor parallelism does to an activation (B, T, D) of a module, by the name within its block."""
        is_gradient = kind.endswith("gradient")
        if kind.startswith("input") and leaf in _DIVIDED_INSIDE:
            return Shard(2)
        if kind.startswith("input") and leaf in _INSIDE:
            return Partial() if is_gradient else Replicate()
        if leaf in ("mlp.shared.down", "mlp.shared"):
            return Replicate() if is_gradient else Partial()
        return self._between_modules(dim=1)

    def _between_modules(self, dim: int) -> Kind:
        """Return what tensor parallelism does between modules; `dim`: that of the tokens."""
        return Shard(dim) if self.model.layout.sequence_parallel else Replicate()


def _leaf(name: str) -> str:
    """Return a module's name within its block."""
    if name.startswith("blocks.") and name.count(".") >= 2:
        return name.split(".", 2)[2]
    return name


_OUTSIDE = (
    "embed", "embed.tokens", "embed.positions", "embed.embed_norm", "embed.dropout", "attention_norm", "mlp_norm",
    "input_norm", "attention_dropout", "mlp_dropout", "norm", "head", "attention.o", "mlp.down", "mlp.shared.down",
)  # fmt: skip
"""Modules whose outputs all tensor-parallel ranks have, or with sequence parallelism a part of the tokens."""
_INSIDE = ("attention", "mlp", "mlp.shared")
"""Modules whose inputs all tensor-parallel ranks have, each of which computes a term of their gradient."""


def _kinds(row: Row, terms: frozenset[str]) -> dict[str, Kind]:
    """Return what the axes of a row of the placement table do; along those of `terms` ranks have terms of a sum."""
    kinds: dict[str, Kind] = {axis: Shard(dim) for axis, dim in row.shard.items()}
    for axis in row.replicated:
        kinds[axis] = Partial() if axis in terms else Replicate()
    return kinds


def _is_known(name: str) -> bool:
    """Return whether a module's activations have places: of blocks, and of their modules that are named above."""
    is_block = name.startswith("blocks.") and name.count(".") == 1
    return is_block or _leaf(name) in _OUTSIDE or _leaf(name) in _INSIDE
