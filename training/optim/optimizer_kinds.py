"""Optimizer kinds: all that the program has to know of an optimizer besides how it updates; read without torch.

A new optimizer is a row here and a file with its builder. One of the user's, FILE.py:CLASS, describes itself by its
class (`OwnOptimizer`).
"""

from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from gristmill.arguments import one_of
from gristmill.errors import UsageError
from training.own_code import is_own, load_own

if TYPE_CHECKING:
    from collections.abc import Callable

_OPTION = "optim.name"
_OF_ADAMW = ("weight_decay", "decay_parts", "betas", "eps")


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer's description."""

    name: str
    builder: str
    """The function that builds it: module:function, called as `build_optimizer` calls it."""
    matrix_states: int
    """Values that it keeps of each element of the blocks' matrices."""
    other_states: int
    """Values that it keeps of each element of other parameters."""
    can_offload: bool
    """Its states, and the parameters that it updates, may be on the CPU or on disk."""
    options: tuple[str, ...]
    """Options of [optim] that have an effect on it, of those that not all optimizers have."""

    @property
    def has_states(self) -> bool:
        """Return whether it keeps anything."""
        return max(self.matrix_states, self.other_states) > 0

    def load_builder(self) -> "Callable[..., Any]":
        """Import the function that builds it."""
        module, _, function = self.builder.partition(":")
        builder: Callable[..., Any] = getattr(import_module(module), function)
        return builder


SOME_HAVE = (*_OF_ADAMW, "muon_momentum")
"""Options of [optim] that not all optimizers have."""
KINDS = {
    kind.name: kind
    for kind in (
        OptimizerKind("adamw", "training.optim.adamw:build_adamw", 2, 2, True, _OF_ADAMW),
        OptimizerKind("muon", "training.optim.muon:build_muon", 1, 2, False, SOME_HAVE),
        OptimizerKind("sgd", "training.optim.optimizer:build_sgd", 0, 0, True, ()),
    )
}


def check_optimizer_name(name: str) -> None:
    """Raise UsageError for a name that is neither one of ours nor FILE.py:CLASS; runs no code."""
    if name not in KINDS and not is_own(name):
        raise UsageError(f"{_OPTION} is {name}; {one_of(name, KINDS)}, and FILE.py:CLASS is one of yours")


def find_optimizer(name: str) -> OptimizerKind:
    """Return the description of an optimizer. Raises UsageError for an unknown name, or a class that is none."""
    check_optimizer_name(name)
    if not is_own(name):
        return KINDS[name]
    from training.optim.own_optimizer import OwnOptimizer  # imports torch

    own = load_own(name, _OPTION, OwnOptimizer)
    states = len(own.states)
    others = 2 if own.matrices_only else states
    return OptimizerKind(name, "training.optim.own_optimizer:build_own", states, others, False, _OF_ADAMW)
