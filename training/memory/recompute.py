"""Recomputation: activations thrown away in the forward pass and computed again in the backward pass."""

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
# What costs most to compute; as autograd hands it on: F.linear and matmul arrive here as mm and addmm
_KEPT = {
    _aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
} | ({ONEDNN} if ONEDNN is not None else set())  # fmt: skip


def checkpoint_activations(part: nn.Module, recompute: Recompute) -> None:
    """Let every block in `part.blocks` keep less for the backward pass, and compute the rest again there.

    "full" keeps a block's input only (Chen et al. 2016, "Training deep nets with sublinear memory cost");
    "selective" the outputs of matrix products and of attention, too, so that only what is cheap is repeated
    (the idea of Korthikanti et al. 2022, section 5, kept by operation). Names of parameters stay. Collectives
    inside a block are repeated, in the same order by every process. No random state is restored: dropout
    must be a function of what it is given. To be applied after what divides the matrices, before FSDP.
    """
    if recompute == "none":
        return
    run = _keeping_products if recompute == "selective" else _keeping_input
    for block in part.blocks.children():  # type: ignore[union-attr]
        block.forward = partial(run, block.forward)


def _keeping_input(forward: Callable[..., Any], *args: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False)


def _keeping_products(forward: Callable[..., Any], *args: Any) -> Any:
    contexts = _compiled_contexts if torch.compiler.is_compiling() else _contexts
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)


def _compiled_contexts() -> Any:
    return create_selective_checkpoint_contexts(list(_KEPT))  # which the compiler knows


def _contexts() -> tuple[TorchDispatchMode, TorchDispatchMode]:
    """What to run a block in, and what to run it in again. torch's own selective checkpointing lets a block be
    computed again once; schedules that compute gradients of inputs and of weights apart do so twice."""
    kept: list[Any] = []
    return _Keep(kept), _Reuse(kept)


class _Keep(TorchDispatchMode):
    """Appends to `kept` what the operations in _KEPT return."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.kept, self.addresses = kept, set[int]()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation.namespace == "c10d":
            # computed again, the kept sum would be summed once more, and gradients be wrong without an error
            overwritten = _addresses(args[0]) & self.addresses
            assert not overwritten, f"{operation} overwrites a kept product; with selective recomputation reduce a copy"
        result = operation(*args, **(kwargs or {}))
        if operation in _KEPT:
            self.kept.append(_detached(result))  # the graph is to keep this list, and not the reverse
            self.addresses |= _addresses(result)
        return result


class _Reuse(TorchDispatchMode):
    """Returns what is in `kept`, in order, instead of calling the operations in _KEPT."""

    def __init__(self, kept: list[Any]) -> None:
        super().__init__()
        self.kept, self.used = kept, 0

    def __enter__(self) -> Self:
        self.used = 0
        return super().__enter__()

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if operation not in _KEPT:
            return operation(*args, **(kwargs or {}))
        self.used += 1
        return _detached(self.kept[self.used - 1])


def _detached(values: Any) -> Any:
    return tree_map_only(Tensor, Tensor.detach, values)


def _addresses(values: Any) -> set[int]:
    tensors = (leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor) and leaf.numel())
    return {leaf.untyped_storage().data_ptr() for leaf in tensors}
