"""Recorder: hooks on a model's modules, parameters and optimizer that write what passes to a rank's recording."""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_flatten_with_path, tree_leaves, tree_unflatten
from torch.utils.module_tracker import ModuleTracker

from gristmill_parity.recording.files import Key, RecordingError, Writer
from gristmill_parity.recording.options import Place, RankLayout, RecordOptions
from gristmill_parity.recording.perturb import Noise, Perturb
from gristmill_parity.recording.placement import Box, Kind, Partial, Placement, Replicate, Shard, piece_of

MICRO_BATCH = "micro-batch"
"""The axis of what a rank computes one after the other, and sums."""
MODEL = "model"
"""The name of the whole model."""
SMALL_BYTES = 32 << 20
"""Of parameters: of a model that has no more, every tensor is kept whole by default."""
ACTIVATIONS = ("input", "output", "input gradient", "output gradient")
PARAMETERS = ("initial weight", "used weight", "own gradient", "gradient", "weight")
_OF_BATCH = (*ACTIVATIONS, "own gradient")
"""Kinds that a rank has once for each micro-batch."""
STATE = "state"
"""Begins the kinds of tensors of an optimizer's state, as "state exp_avg"."""
OPTIMIZER = "optimizer"
"""The name of what an optimizer's state has of no parameter."""
_WRAPPERS = re.compile(r"(^|\.)(module(?=\.|$)|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


@contextmanager
def record(
    model: nn.Module | Sequence[nn.Module],
    folder: str | Path,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    layout: RankLayout | None = None,
    options: RecordOptions | None = None,
    perturb: Perturb | None = None,
) -> Iterator["Recorder"]:
    """Record the tensors of a model while it trains, for `compare`; every rank of the run calls it.

    Inputs, outputs and their gradients of every module; of every parameter the weights as modules use them, the
    gradient before and after reduction, the weights after the step, and what the optimizer's state has of it.

    Args:
        model: The model, or the pipeline stages that this rank has.
        folder: Where the recording goes; the same for all ranks.
        optimizer: Its steps end the recorder's; without it call `after_backward` and `after_step`.
        layout: How the ranks divide tensors; not needed in one process.
        options: What is recorded, and under which names.
        perturb: Add noise, as `reference_runs` says.
    """
    layout = layout or RankLayout()
    parts = [model] if isinstance(model, nn.Module) else list(model)
    rank, size = layout.rank_and_size()
    with Writer(Path(folder), rank, size, layout.coordinates(parts)) as writer:
        recorder = Recorder(writer, parts, layout, options or RecordOptions(), perturb)
        try:
            recorder.start(optimizer)
            yield recorder
        finally:
            recorder.stop()


def _patterns_kept(parts: Sequence[nn.Module], keep: str | Sequence[str]) -> tuple[str, ...]:
    """Return patterns of the tensors that are kept whole."""
    if not isinstance(keep, str):
        return tuple(keep)
    total = sum(p.numel() * p.element_size() for part in parts for p in part.parameters())
    is_whole = keep == "all" or (keep == "auto" and total <= SMALL_BYTES)
    return ("*",) if is_whole else ()


class Recorder:
    """The hooks of one rank. Made by `record`."""

    def __init__(
        self,
        writer: Writer,
        parts: Sequence[nn.Module],
        layout: RankLayout,
        options: RecordOptions,
        perturb: Perturb | None,
    ) -> None:
        self.writer = writer
        self.parts = parts
        self.axes = writer.axes
        self.layout = layout
        self.options = options
        self.mean_over = [axis for axis in layout.mean_over if axis in self.axes]
        self.noise = None if perturb is None else Noise(perturb)
        self.optimizer: torch.optim.Optimizer | None = None
        self.step = 1
        self._kept = _patterns_kept(parts, options.keep)
        self._calls = Counter[tuple[str, str]]()
        self._used = set[str]()
        self._pass = ModuleTracker()
        self._handles: list[Any] = []
        # names recur in every step
        self._name_of = functools.cache(lambda raw: options.rename(clean_name(raw)))
        self._is_asked = functools.cache(functools.partial(_fits, options.names))
        self._is_kept = functools.cache(functools.partial(_fits, self._kept))
        self._place_by_pattern = functools.cache(self._find_place)

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
                if id(module) in seen or isinstance(module, self.options.leave_out):
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
        if self.optimizer is not None:
            self._write_state(self.optimizer)
        for name, value in self._values(weights, "data"):
            self._write(self.step, name, "weight", value)
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

    def _write_state(self, optimizer: torch.optim.Optimizer) -> None:
        """Record each tensor of an optimizer's state, of whichever optimizer."""
        recorded = {id(parameter): (name, parameter) for name, parameter in self._parameters()}
        others = {id(parameter) for part in self.parts for parameter in part.parameters()} - recorded.keys()
        for owner, state in optimizer.state.items():
            if id(owner) in others:
                continue
            name, parameter = recorded.get(id(owner), (OPTIMIZER, None))
            first_key = () if isinstance(owner, Tensor) else (str(owner),)
            for path, value in tree_flatten_with_path(state)[0]:
                if not isinstance(value, Tensor):
                    continue
                keys = [str(getattr(step, "key", getattr(step, "idx", step))) for step in path]
                kind = f"{STATE} {'.'.join([*first_key, *keys])}"
                place = self._place_of_state(name, kind, value, parameter)
                if place is not None:
                    self._write_piece(self.step, name, kind, value, place)

    def _place_of_state(self, name: str, kind: str, value: Tensor, parameter: Tensor | None) -> Place:
        """Return the place of a tensor of an optimizer's state; None if it is not known."""
        copies = dict.fromkeys(self.axes, Replicate())
        if parameter is None or (value.numel() == 1 and value.shape != parameter.shape):
            return copies
        place = self._place(name, kind, value)
        if isinstance(value, DTensor) or place is None or value.shape == parameter.shape:
            return place
        placement = place.placement if isinstance(place, Box) else place
        is_divided = isinstance(parameter, DTensor) or any(isinstance(own, Shard) for own in placement.values())
        return None if is_divided else place  # of another shape than what is divided

    def _parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        for part in self.parts:
            for raw, parameter in part.named_parameters():
                name = self._name_of(raw)
                if self._is_asked(name):
                    yield name, parameter

    def _hook_module(self, name: str, module: nn.Module) -> None:
        shown = self._name_of(name) or MODEL
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
            tensor = _input_of(args, kwargs, shown == MODEL)
            if tensor is not None:
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
            leaves_of, structure = ([output], None) if isinstance(output, Tensor) else tree_flatten(output)
            tensor = _first(leaves_of, torch.is_floating_point)
            if not again:
                self._write_used(module, leaves)
            if tensor is None:
                return None
            if self.noise is None:
                self._activation(shown, "output", tensor, call, again)
                return None
            rounded = self.noise.rounded(tensor)
            self._activation(shown, "output", rounded, call, again)
            if structure is None:
                return rounded
            changed = [rounded if leaf is tensor else leaf for leaf in leaves_of]
            return tree_unflatten(changed, structure)

        self._handles.append(module.register_forward_pre_hook(before, with_kwargs=True))
        # before hooks that were there: tensor parallelism's turn DTensors into plain tensors
        self._handles.append(module.register_forward_hook(after, prepend=True))

    @staticmethod
    def _is_recorded(module: nn.Module) -> bool:
        """Return False in an evaluation."""
        return torch.is_grad_enabled() or module.training

    def _write_used(self, module: nn.Module, leaves: Sequence[tuple[str, str]]) -> None:
        """Record the weights as this module uses them, once a step."""
        for leaf, raw in leaves:
            name = self._name_of(raw)
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

    def _write(self, step: int, name: str, kind: str, tensor: Tensor, call: int = 0, again: bool = False) -> None:
        micro_batches = self.layout.micro_batches
        of_batch = kind in _OF_BATCH
        call = min(call, micro_batches - 1) if again else call
        if call >= micro_batches and of_batch:
            kind = f"{kind} (call {call + 1})"
            call = 0
        place = self._place(name, kind, tensor)
        if place is not None:
            self._write_piece(step, name, kind, tensor, place, call, again)

    def _write_piece(
        self,
        step: int,
        name: str,
        kind: str,
        tensor: Tensor,
        place: Placement | Box,
        call: int = 0,
        again: bool = False,
    ) -> None:
        """Record a tensor whose place is known."""
        micro_batches = self.layout.micro_batches
        of_batch = kind.partition(" (call ")[0] in _OF_BATCH
        axes = self.axes
        if micro_batches > 1 and of_batch:
            axes = {**axes, MICRO_BATCH: (call, micro_batches)}
            place = self._with_micro_batch(place, kind)
        try:
            values, piece = piece_of(tensor.detach(), place, axes)
        except (ValueError, IndexError) as error:
            raise RecordingError(
                f"{name} {kind} has shape {tuple(tensor.shape)} on rank {self.writer.rank}, which its placement "
                f"{place} does not fit ({error}); give another one in placements"
            ) from error
        if isinstance(values, AsyncCollectiveTensor):  # of torch's tensor parallelism: not received yet
            values = values.wait()
        scale = self._scale_of(kind) if of_batch and " gradient" in kind else 1.0
        if scale != 1.0:
            values = values / scale
        keeps = self._is_kept(f"{name} {kind}")
        # modes of activation checkpointing would keep what is computed here; to look for them there costs 50 µs
        has_modes = torch._C._len_torch_dispatch_stack() > 0
        with _disable_current_modes() if has_modes else nullcontext():
            self.writer.write(Key(step, name, kind), call, values, piece, keeps, again)

    def _scale_of(self, kind: str) -> float:
        """Return the factor that a gradient of the backward pass has, of a mean over ranks and of the loss's scale."""
        scale = self.options.loss_scale
        if kind.startswith(("input", "output")):
            for axis in self.mean_over:
                scale *= self.axes[axis][1]
        return scale

    @staticmethod
    def _with_micro_batch(place: Placement | Box, kind: str) -> Placement | Box:
        own: Kind = Partial() if kind.startswith("own gradient") else Shard(0)
        if isinstance(place, Box):
            return Box(place.offset, place.shape, {MICRO_BATCH: own, **place.placement})
        return place if MICRO_BATCH in place else {**place, MICRO_BATCH: own}

    def _place(self, name: str, kind: str, tensor: Tensor) -> Place:
        placements = self.layout.placements
        return placements(name, kind, tensor) if callable(placements) else self._place_by_pattern(name, kind)

    def _find_place(self, name: str, kind: str) -> Place:
        placements = self.layout.placements
        assert not callable(placements)
        of_activation = kind.startswith(("input", "output"))
        tried = [kind, kind.removesuffix(" gradient")] if of_activation else [kind]
        for tried_kind in tried:
            for pattern, place in placements.items():
                if fnmatchcase(f"{name} {tried_kind}", pattern):
                    return place
        activations = self.layout.activations
        if of_activation:
            return activations
        divided = {axis for axis, placed in activations.items() if isinstance(placed, Shard)}
        if kind.startswith("own gradient"):
            return {axis: _term(axis in divided, axis in self.mean_over) for axis in self.axes}
        return dict.fromkeys(self.axes, Replicate())


def _fits(patterns: Sequence[str], name: str) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _term(is_divided: bool, is_mean: bool) -> Kind:
    """Return what a gradient is before reduction: a term along the axes that divide the batch."""
    if not is_divided:
        return Replicate()
    return Partial("mean" if is_mean else "sum")


def clean_name(name: str) -> str:
    """Return a module's or parameter's name without what wrappers add: DDP, FSDP, torch.compile, checkpointing."""
    return _WRAPPERS.sub(r"\1", name).replace("..", ".").strip(".")


def _input_of(args: Any, kwargs: Any, of_model: bool) -> Tensor | None:
    """Return the first input of floating type; of the whole model its token ids, if it has no such input."""
    if args and not of_model and isinstance(args[0], Tensor) and args[0].is_floating_point():
        return args[0]
    leaves = tree_leaves((args, kwargs))
    tensor = _first(leaves, torch.is_floating_point)
    if not of_model:
        return tensor
    return _first(leaves, lambda leaf: leaf.dtype == torch.int64) if tensor is None else None


def _first(leaves: Iterable[Any], accepts: Callable[[Tensor], bool]) -> Tensor | None:
    for leaf in leaves:
        if isinstance(leaf, Tensor) and accepts(leaf):
            return leaf
    return None
