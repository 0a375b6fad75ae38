"""Activation checkpointing: recompute activations in the backward pass instead of keeping them."""

from collections.abc import Callable
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from training.kernels import portable
from training.kernels.dispatch import kernels_for
from training.kernels.varlen_attention import varlen_operators
from training.memory.memory_config import Recompute

_aten = torch.ops.aten
_ATTENTION = frozenset({
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
})  # fmt: skip


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
    contexts: Callable[[], Any] = _compiled_contexts
    if not torch.compiler.is_compiling():
        saved = _ATTENTION | varlen_operators() | kernels_for(args[0].device).PRODUCTS
        contexts = partial(_selective_contexts, saved)
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_ATTENTION | portable.PRODUCTS))  # understood by torch.compile


def _selective_contexts(saved_ops: frozenset[Any]) -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """Dispatch modes for a block's forward pass and for its recomputation.

    torch's selective checkpointing allows one recomputation only. Zero-bubble schedules need two: for the gradients
    of inputs and of weights.
    """
    saved: list[Any] = []
    return _SaveOutputs(saved_ops, saved), _ReuseOutputs(saved_ops, saved)


class _SaveOutputs(TorchDispatchMode):
    """Dispatch mode of the forward pass: appends the outputs of `operations` to `saved`."""

    def __init__(self, operations: frozenset[Any], saved: list[Any]) -> None:
        super().__init__()
        self.operations = operations
        self.saved = saved
        self.addresses = set[int]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "c10d":
            # an in-place all-reduce of a saved output would be repeated on it: silently wrong gradients
            overwritten = _addresses(args[0]) & self.addresses
            assert not overwritten, f"{operation} overwrites a saved output; with selective recomputation reduce a copy"
        result = operation(*args, **(kwargs or {}))
        if operation in self.operations:
            # detached: the graph refers to this list, and a reference back would be a cycle
            self.saved.append(_detached(result))
            self.addresses |= _addresses(result)
        return result


class _ReuseOutputs(TorchDispatchMode):
    """Dispatch mode of the recomputation: returns the outputs in `saved`, in order, instead of running `operations`."""

    def __init__(self, operations: frozenset[Any], saved: list[Any]) -> None:
        super().__init__()
        self.operations = operations
        self.saved = saved
        self.used = 0

    def __enter__(self) -> Self:
        self.used = 0
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation not in self.operations:
            return operation(*args, **(kwargs or {}))
        self.used += 1
        return _detached(self.saved[self.used - 1])


def _detached(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, values)


def _addresses(values: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel() and not leaf.is_meta)
    return {leaf.untyped_storage().data_ptr() for leaf in tensors}
