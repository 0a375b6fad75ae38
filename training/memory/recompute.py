"""Activation checkpointing: recompute activations in the backward pass instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from training.kernels.linear import ONEDNN
from training.memory.memory_config import Recompute

_aten = torch.ops.aten
# The most expensive operations, by their names below autograd, where F.linear and matmul are mm and addmm
_SAVED_OPS = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
} | ({ONEDNN} if ONEDNN is not None else set())  # fmt: skip


def checkpoint_activations(part: nn.Module, recompute: Recompute) -> None:
    """Apply activation checkpointing to every block in `part.blocks`, in place.

    "full" saves a block's input only (Chen et al. 2016, "Training deep nets with sublinear memory cost");
    "selective" also the outputs of matrix products and attention, so that only cheap operations are recomputed
    (Korthikanti et al. 2022, section 5, here chosen by operation). Parameter names do not change. Collectives in a
    block are repeated, in the same order on every rank. RNG state is not restored, so dropout must be
    counter-based. Apply after tensor parallelism and before FSDP.
    """
    if recompute == "none":
        return
    run = _run_selective if recompute == "selective" else _run_full
    for block in part.blocks.children():  # type: ignore[union-attr]
        block.forward = partial(run, block.forward)


def _run_full(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def _run_selective(forward: Callable[..., Any], *args: Any) -> Any:
    contexts = _compiled_contexts if torch.compiler.is_compiling() else _selective_contexts
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_SAVED_OPS))  # understood by torch.compile


def _selective_contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Dispatch modes for a block's forward pass and for its recomputation.

    torch's selective checkpointing allows one recomputation only. Zero-bubble schedules need two: for the gradients
    of inputs and of weights.
    """
    saved: list[Any] = []
    return _SaveOutputs(saved), _ReuseOutputs(saved)


class _SaveOutputs(TorchDispatchMode):
    """Dispatch mode of the forward pass: appends the outputs of _SAVED_OPS to `saved`."""

    def __init__(self, saved: list[Any]) -> None:
        super().__init__()
        self.saved, self.addresses = saved, set[int]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "c10d":
            # an in-place all-reduce of a saved output would be repeated on it: silently wrong gradients
            overwritten = _addresses(args[0]) & self.addresses
            assert not overwritten, f"{operation} overwrites a saved output; with selective recomputation reduce a copy"
        result = operation(*args, **(kwargs or {}))
        if operation in _SAVED_OPS:
            # detached: the graph refers to this list, and a reference back would be a cycle
            self.saved.append(_detached(result))
            self.addresses |= _addresses(result)
        return result


class _ReuseOutputs(TorchDispatchMode):
    """Dispatch mode of the recomputation: returns the outputs in `saved`, in order, instead of running _SAVED_OPS."""

    def __init__(self, saved: list[Any]) -> None:
        super().__init__()
        self.saved, self.used = saved, 0

    def __enter__(self) -> Self:
        self.used = 0
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation not in _SAVED_OPS:
            return operation(*args, **(kwargs or {}))
        self.used += 1
        return _detached(self.saved[self.used - 1])


def _detached(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, values)


def _addresses(values: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
    return {leaf.untyped_storage().data_ptr() for leaf in tensors}
