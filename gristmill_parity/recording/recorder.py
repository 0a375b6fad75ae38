"""Recorder: hooks on a model's modules, parameters and optimizer that write what passes to a rank's recording."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.module_tracker import ModuleTracker

from gristmill_parity.recording.files import Key, RecordingError, Writer
from gristmill_parity.recording.perturb import Noise, Perturb
from gristmill_parity.recording.placement import (
    Box,
    Coordinates,
    Kind,
    Partial,
    Placement,
    Replicate,
    Shard,
    coordinates_of_mesh,
    piece_of,
)

MICRO_BATCH = "micro-batch"
"""The axis of what a rank computes one after the other, and sums."""
MODEL = "model"
"""The name of the whole model."""
SMALL_BYTES = 32 << 20
"""Of parameters: of a model that has no more, every tensor is kept whole by default."""
ACTIVATIONS = ("input", "output", "input gradient", "output gradient")
PARAMETERS = ("initial weight", "used weight", "own gradient", "gradient", "weight")
_WRAPPERS = re.compile(r"(^|\.)(module(?=\.|$)|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")

Place = Placement | Box | None
"""Where the values lie in the whole tensor; None: not recorded."""
PlacementRule = Callable[[str, str, Tensor], Place]
"""The place of a tensor, by a module's or parameter's name and one of ACTIVATIONS or PARAMETERS."""
Placements = Mapping[str, Place] | PlacementRule


@contextmanager
def record(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    axes: Coordinates | DeviceMesh | None = None,
    activations: Placement | None = None,
    placements: Placements | None = None,
    names: Sequence[str] = ("*",),
    micro_batches: int = 1,
    mean_over: Sequence[str] = (),
    loss_scale: float = 1.0,
    keep: Literal["auto", "all", "nothing"] | Sequence[str] = "auto",
    perturb: Perturb | None = None,
    leave_out: tuple[type[nn.Module], ...] = (),
    rename: Callable[[str], str] = lambda name: name,
    rank: int | None = None,
    ranks: int | None = None,
) -> Iterator["Recorder"]:
    """Record the tensors of a model while it trains, for `compare`; every rank of the run calls it.

    Inputs, outputs and their gradients of every module; of every parameter the weights as modules use them, the
    gradient before and after reduction, and the weights after the step. What a DTensor is, it says itself.

    Args:
        model: The model, or the pipeline stages that this rank has.
        folder: Where the recording goes; the same for all ranks.
        optimizer: Its steps end the recorder's; without it call `after_backward` and `after_step`.
        axes: This rank's index along each axis of the mesh of ranks, and the axis's size; or a DeviceMesh.
        activations: What the axes do to activations: {"dp": Shard(0)} where ranks have other sequences.
        placements: Of tensors for which that is not so, by a pattern for "NAME KIND", as {"head output": {"dp":
            Partial()}}; None: not recorded. The first that fits counts. Or a function of name, kind and tensor.
        names: Patterns of the modules and parameters to record.
        micro_batches: How often a module is called in a step, each time with further sequences of the batch.
        mean_over: Axes whose ranks each take the mean loss of their own sequences, and then average gradients, as
            DDP and FSDP do by default.
        loss_scale: Factor of the loss in the backward pass, which gradients are divided by.
        keep: Which values are kept whole, beside hash, norm and sketch: by default those of a model of up to 32 MiB;
            or "all", "nothing", or patterns for "NAME KIND".
        perturb: Add noise, as `reference_runs` says.
        leave_out: Classes of modules that are not recorded: those that stand for a module of another rank.
        rename: A module's or parameter's name on the other side, from its name here.
        rank: This rank's number; by default of the default process group, else 0.
        ranks: The number of ranks.
    """
    own_rank = 0 if rank is None else rank
    size = 1 if ranks is None else ranks
    if rank is None and ranks is None and dist.is_available() and dist.is_initialized():
        own_rank = dist.get_rank()
        size = dist.get_world_size()
    parts = [model] if isinstance(model, nn.Module) else list(model)
    coordinates = dict(coordinates_of_mesh(axes) if isinstance(axes, DeviceMesh) else (axes or {}))
    for parameter in (p for part in parts for p in part.parameters()):
        if isinstance(parameter, DTensor):
            coordinates = {**coordinates_of_mesh(parameter.device_mesh), **coordinates}
    with Writer(Path(folder), own_rank, size, coordinates) as writer:
        recorder = Recorder(writer, parts, coordinates, activations or {}, placements or {})
        recorder.names = tuple(names)
        recorder.leave_out = leave_out
        recorder.micro_batches = micro_batches
        recorder.mean_over = tuple(name for name in mean_over if name in coordinates)
        recorder.loss_scale = loss_scale
        recorder.keep = _patterns_kept(parts, keep)
        recorder.noise = None if perturb is None else Noise(perturb)
        recorder.rename = rename
        try:
            recorder.start(optimizer)
            yield recorder
        finally:
            recorder.stop()


def _patterns_kept(parts: Sequence[nn.Module], keep: str | Sequence[str]) -> tuple[str, ...]:
    if not isinstance(keep, str):
        return tuple(keep)
    total = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
    whole = keep == "all" or (keep == "auto" and total <= SMALL_BYTES)
    return ("*",) if whole else ()


class Recorder:
    """The hooks of one rank. Made by `record`."""

    def __init__(
        self,
        writer: Writer,
        parts: Sequence[nn.Module],
        axes: Coordinates,
        activations: Placement,
        placements: Placements,
    ) -> None:
        self.writer = writer
        self.parts = parts
        self.axes = axes
        self.activations = activations
        self.placements = placements
        self.names: tuple[str, ...] = ("*",)
        self.leave_out: tuple[type[nn.Module], ...] = ()
        self.micro_batches = 1
        self.mean_over: tuple[str, ...] = ()
        self.loss_scale = 1.0
        self.keep: tuple[str, ...] = ()
        self.noise: Noise | None = None
        self.rename: Callable[[str], str] = lambda name: name
        self.step = 1
        self._calls = Counter[tuple[str, str]]()
        self._used = set[str]()
        self._pass = ModuleTracker()
        self._handles: list[Any] = []

    def start(self, optimizer: torch.optim.Optimizer | None) -> None:
        """Record the initial weights, and register the hooks."""
        self.optimizer = optimizer
        for name, parameter in self._parameters():
            self._write(0, name, "initial weight", parameter)
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                self._handles.append(parameter.register_hook(self._gradient_hook(name)))
        for part in self.parts:
            seen = set[int]()
            for name, module in part.named_modules():
                if id(module) in seen or isinstance(module, self.leave_out):
                    continue
                seen.add(id(module))
                self._hook_module(clean_name(name), module)
        if optimizer is not None:
            self._handles.append(optimizer.register_step_pre_hook(lambda *_: self.after_backward()))
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.after_step()))

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()

    def after_backward(self, gradients: Mapping[str, Tensor] | None = None) -> None:
        """Record the gradients with which weights are about to be updated; by default those of the parameters."""
        for name, value in self._values(gradients, "grad"):
            self._write(self.step, name, "gradient", value)

    def after_step(self, weights: Mapping[str, Tensor] | None = None) -> None:
        """Record the weights after an update, by default the parameters; the next step begins."""
        for name, value in self._values(weights, "data"):
            self._write(self.step, name, "weight", value)
        if self.optimizer is not None:
            self._write_moments(self.optimizer)
        self.step += 1
        self._calls.clear()
        self._used.clear()

    def write(self, name: str, kind: str, value: Tensor, step: int | None = None) -> None:
        """Record a tensor of the caller's, in the present step; its place is that of `placements`."""
        self._write(self.step if step is None else step, name, kind, value)

    def _values(self, given: Mapping[str, Tensor] | None, attribute: str) -> Iterable[tuple[str, Tensor]]:
        if given is not None:
            return ((name, value) for name, value in given.items() if self._is_asked(name))
        held = ((name, getattr(p, attribute)) for name, p in self._parameters())
        return ((name, value) for name, value in held if value is not None)

    def _write_moments(self, optimizer: torch.optim.Optimizer) -> None:
        for name, parameter in self._parameters():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape and value.ndim:
                    self._write(self.step, name, f"moment {kind}", value)

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            for raw, parameter in part.named_parameters():
                name = self.rename(clean_name(raw))
                if self._is_asked(name):
                    yield name, parameter

    def _is_asked(self, name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.names)

    def _hook_module(self, name: str, module: nn.Module) -> None:
        shown = self.rename(name) or MODEL
        if not self._is_asked(shown):
            return
        leaves = [(leaf, f"{name}.{leaf}" if name else leaf) for leaf in module._parameters]
        for child, inner in module.named_children():  # of which some may be used without being called
            path = f"{name}.{child}" if name else child
            leaves += [(f"{child}.{leaf}", f"{path}.{leaf}") for leaf in inner._parameters]
        own = [pair for pair in leaves if "." not in pair[0]]

        def before(_module: nn.Module, args: Any, kwargs: Any) -> None:
            if not self._is_recorded(module):
                return
            again = self._pass.is_bw
            call = self._calls[shown, "output"] if not again else self._calls[shown, "again"]
            tensor = _first(tree_leaves((args, kwargs)), torch.is_floating_point)
            if tensor is None and shown == MODEL:
                tensor = _first(tree_leaves((args, kwargs)), lambda x: x.dtype == torch.int64)
            if tensor is not None and (shown != MODEL or not tensor.is_floating_point()):
                self._activation(shown, "input", tensor, call, again)
            if not again:
                self._write_used(module, own)

        def after(_module: nn.Module, _args: Any, output: Any) -> Any:
            if not self._is_recorded(module):
                return None
            again = self._pass.is_bw
            counted = "again" if again else "output"
            call = self._calls[shown, counted]
            self._calls[shown, counted] += 1
            leaves_of, structure = tree_flatten(output)
            tensor = _first(leaves_of, torch.is_floating_point)
            if not again:
                self._write_used(module, leaves)
            if tensor is None:
                return None
            if self.noise is not None:
                place = next(i for i, leaf in enumerate(leaves_of) if leaf is tensor)
                leaves_of[place] = tensor = self.noise.rounded(tensor)
            self._activation(shown, "output", tensor, call, again)
            return None if self.noise is None else tree_unflatten(leaves_of, structure)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        # before hooks that were there: tensor parallelism's turn DTensors into plain tensors
        self._handles.append(module.register_forward_hook(after, prepend=True))

    @staticmethod
    def _is_recorded(module: nn.Module) -> bool:
        """False in an evaluation."""
        return torch.is_grad_enabled() or module.training

    def _write_used(self, module: nn.Module, leaves: Sequence[tuple[str, str]]) -> None:
        """Record the weights as this module uses them, once a step."""
        for leaf, raw in leaves:
            name = self.rename(clean_name(raw))
            if name in self._used or not self._is_asked(name):
                continue
            owner, _, attribute = leaf.rpartition(".")
            value = getattr(getattr(module, owner) if owner else module, attribute)
            if value is None or (isinstance(value, DTensor) and owner):  # its own module will use it, gathered
                continue
            self._used.add(name)
            self._write(self.step, name, "used weight", value)

    def _activation(self, name: str, kind: str, tensor: Tensor, call: int, again: bool) -> None:
        """Record an activation, and its gradient when that is computed."""
        self._write(self.step, name, kind, tensor, call, again)
        if not tensor.requires_grad or again:
            return
        step = self.step
        handles = list[Any]()

        def on_gradient(gradient: Tensor) -> Tensor | None:
            handles.pop().remove()  # a pipeline receives the activations of later steps in the same tensors
            changed = gradient if self.noise is None else self.noise.rounded(gradient)
            self._write(step, name, f"{kind} gradient", changed, call)
            return None if self.noise is None else changed

        handles.append(tensor.register_hook(on_gradient))

    def _gradient_hook(self, name: str) -> Callable[[Tensor], None]:
        def on_gradient(gradient: Tensor) -> None:
            call = self._calls[name, "own gradient"]
            self._calls[name, "own gradient"] += 1
            self._write(self.step, name, "own gradient", gradient, call)

        return on_gradient

    @torch.no_grad()
    def _write(self, step: int, name: str, kind: str, tensor: Tensor, call: int = 0, again: bool = False) -> None:
        of_batch = kind in ACTIVATIONS or kind == "own gradient"
        call = min(call, self.micro_batches - 1) if again else call
        if call >= self.micro_batches and of_batch:
            kind = f"{kind} (call {call + 1})"
            call = 0
        place = self._place(name, kind, tensor)
        if place is None:
            return
        axes = dict(self.axes)
        if self.micro_batches > 1 and of_batch:
            axes[MICRO_BATCH] = (call, self.micro_batches)
            place = self._with_micro_batch(place, kind)
        scale = self.loss_scale if kind.endswith("gradient") and (of_batch or kind == "own gradient") else 1.0
        if kind.startswith(("input gradient", "output gradient")):
            for axis in self.mean_over:
                scale *= self.axes[axis][1]
        try:
            values, piece = piece_of(tensor, place, axes)
        except (ValueError, IndexError) as error:
            raise RecordingError(
                f"{name} {kind} has shape {tuple(tensor.shape)} on rank {self.writer.rank}, which its placement "
                f"{place} does not fit ({error}); give another one in placements"
            ) from error
        if scale != 1.0:
            values = values / scale
        keeps = any(fnmatchcase(f"{name} {kind}", pattern) for pattern in self.keep)
        # modes of activation checkpointing would keep what is computed here; to look for them there costs 50 µs
        has_modes = torch._C._len_torch_dispatch_stack() > 0
        with _disable_current_modes() if has_modes else nullcontext():
            self.writer.write(Key(step, name, kind), call, values, piece, keeps, again)

    @staticmethod
    def _with_micro_batch(place: Placement | Box, kind: str) -> Placement | Box:
        own: Kind = Partial() if kind.startswith("own gradient") else Shard(0)
        if isinstance(place, Box):
            return Box(place.offset, place.shape, {MICRO_BATCH: own, **place.placement})
        return place if MICRO_BATCH in place else {**place, MICRO_BATCH: own}

    def _place(self, name: str, kind: str, tensor: Tensor) -> Place:
        if callable(self.placements):
            return self.placements(name, kind, tensor)
        tried = [kind, kind.removesuffix(" gradient")] if kind.startswith(("input", "output")) else [kind]
        for each in tried:
            for pattern, place in self.placements.items():
                if fnmatchcase(f"{name} {each}", pattern):
                    return place
        if kind.startswith(("input", "output")):
            return self.activations
        divided = {axis for axis, placed in self.activations.items() if isinstance(placed, Shard)}
        if kind.startswith("own gradient"):
            return {axis: _term(axis in divided, axis in self.mean_over) for axis in self.axes}
        return dict.fromkeys(self.axes, Replicate())


def _term(is_divided: bool, is_mean: bool) -> Kind:
    """Return what a gradient is before reduction: a term along the axes that divide the batch."""
    if not is_divided:
        return Replicate()
    return Partial("mean" if is_mean else "sum")


def clean_name(name: str) -> str:
    """Return a module's or parameter's name without what wrappers add: DDP, FSDP, torch.compile, checkpointing."""
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").strip(".")


def _first(leaves: Iterable[Any], accepts: Callable[[Tensor], bool]) -> Tensor | None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and accepts(leaf):
            return leaf
    return None
