"""Own parts: MLPs, blocks and activations of the user's file, FILE.py:NAME, and what they say of their parameters.

Nothing of them is taken for granted: each parameter has an entry that says how tensor parallelism divides it and where
its first values come from.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from gristmill.errors import require
from training.kernels.keyed_random import key_from_name
from training.model.model_config import ModelConfig
from training.own_code import call_own, is_own, load_own

MLP_OPTION = "model.mlp"
BLOCK_OPTION = "model.block"


@dataclass(frozen=True)
class Weight:
    """What an own part says of one of its parameters."""

    placement: Literal["colwise", "rowwise", "partial", "replicated"] | None = None
    """Over tensor-parallel ranks. colwise: its first dimension is divided, rowwise: its second one. In between, where
    each rank has some of the features, partial: each has all of it, and a term of its gradient. replicated: outside,
    where all ranks compute the same. None: it is a parameter of one of our modules, placed as usual."""
    initial: Literal["own", "normal", "residual"] | float = "own"
    """Its first values. own: those that the module's __init__ gives it; normal: of model.init_std; residual: those
    times 1 / sqrt(2 layers), as of what is added to the residual stream; or one number."""


class OwnMLP(nn.Module):
    """Base class of an MLP of yours: features (B, T, D) to (B, T, D), of each token alone."""

    weights: ClassVar[Mapping[str, Weight]] = {}
    """Its parameters by name. If one of them is divided, a tensor-parallel rank's output is a term of a sum."""
    last: ClassVar[str] = ""
    """The linear layer at its end, if its weight is rowwise: its bias, which is replicated, is added to the sum."""
    gated: ClassVar[bool] = False
    """It has three matrices of model.ffn_width features instead of two: for costs, and the default of ffn_width."""
    kept: ClassVar[int] = 2
    """Tensors of ffn_width features that its backward pass needs: for the planner's memory."""

    def __init__(self, config: ModelConfig) -> None:  # noqa: ARG002
        super().__init__()

    @property
    def is_divided(self) -> bool:
        """Return True if tensor-parallel ranks have parts of it.

        Otherwise each computes all of it, for its own tokens.
        """
        return any(weight.placement != "replicated" for weight in self.weights.values())


def own_activation(config: ModelConfig) -> Callable[..., Tensor] | None:
    """Return the function of the user's that `model.mlp` names; None where it names a class, or one of ours."""
    if not is_own(config.mlp):
        return None
    own = load_own(str(config.mlp), MLP_OPTION)
    return None if isinstance(own, type) else own


def is_gated_by_user(mlp: str) -> bool:
    """Return whether an own MLP has a gate: a class says so, and an activation takes two arguments."""
    own = load_own(mlp, MLP_OPTION)
    if isinstance(own, type):
        return bool(getattr(own, "gated", False))
    arguments = len(inspect.signature(own).parameters)
    require(
        arguments in (1, 2),
        f"{MLP_OPTION}: {mlp} takes {arguments} arguments; expected one, the features of an MLP without a gate, or "
        "two: those of the gate and the others",
    )
    return arguments == 2


def build_own_mlp(config: ModelConfig) -> OwnMLP:
    """Build the MLP of the class that `model.mlp` names. Raises UsageError for one that says too little of itself."""
    name = str(config.mlp)
    kind = load_own(name, MLP_OPTION, OwnMLP)
    module: OwnMLP = call_own(lambda: kind(config), name, MLP_OPTION)
    _check_described(module, kind.weights, list(dict(module.named_parameters())), name, MLP_OPTION)
    return module


def check_own_block(block: nn.Module, name: str) -> None:
    """Raise UsageError for a block of the user's that says too little of itself."""
    weights = dict(own_weights(block))
    within = [path for path, module in block.named_modules() if isinstance(module, OwnMLP)]
    names = [each for each, _ in block.named_parameters() if not each.startswith(tuple(f"{path}." for path in within))]
    ours = [each for each in names if is_ours(block, each)]
    _check_described(block, weights, [each for each in names if each not in ours], name, BLOCK_OPTION)
    placed = [each for each in ours if each in weights and weights[each].placement is not None]
    require(
        not placed,
        f"{BLOCK_OPTION}: {name} places {''.join(placed[:1])!r}, which is a parameter of ours; leave the placement "
        'out: Weight(initial="own")',
    )


def is_ours(block: nn.Module, name: str) -> bool:
    """Return whether a parameter of a block is one of our modules, which the placement table has."""
    module, _, _ = name.partition(".")
    return module in ("attention", "attention_norm", "mlp_norm") or (
        module == "mlp" and not isinstance(block.get_submodule("mlp"), OwnMLP)
    )


def _check_described(
    module: nn.Module, weights: Mapping[str, Weight], names: list[str], name: str, option: str
) -> None:
    missing = [each for each in names if each not in weights or weights[each].placement is None]
    require(
        not missing,
        f"{option}: {name} has a parameter {''.join(missing[:1])!r} without a placement in its weights; try weights = "
        f'{{"{"".join(missing[:1])}": Weight("replicated")}}, or colwise, rowwise or partial',
    )
    parameters = dict(module.named_parameters())
    unknown = [each for each in weights if each not in parameters]
    require(not unknown, f"{option}: {name} has no parameter {''.join(unknown[:1])!r}, which its weights name")
    for each in names:
        dims = 2 if weights[each].placement == "rowwise" else 1
        advice = "colwise" if dims == 2 else "shape (1,)"
        require(
            parameters[each].ndim >= dims,
            f"{option}: {each} of {name} has the shape {tuple(parameters[each].shape)}, and "
            f"{weights[each].placement} needs {dims} or more dimensions; try {advice}",
        )
        require(parameters[each].requires_grad, f"{option}: {each} of {name} requires no gradient; expected it to")
    buffers = [each for each, _ in module.named_buffers() if not each.startswith(("attention.", "mlp."))]
    require(
        not buffers,
        f"{option}: {name} has a buffer {''.join(buffers[:1])!r}, which no checkpoint has; try a parameter, or compute "
        "it in forward",
    )


def own_weights(root: nn.Module) -> dict[str, Weight]:
    """Return what own parts in a model say of their parameters, by the parameters' full names."""
    weights: dict[str, Weight] = {}
    for path, module in root.named_modules():
        for name, weight in getattr(type(module), "weights", {}).items():
            weights[f"{path}.{name}" if path else name] = weight
    return weights


def check_divisible(root: nn.Module, tp: int) -> None:
    """Raise UsageError for a parameter of an own part that `tp` ranks do not divide."""
    shapes = {name: tuple(p.shape) for name, p in root.named_parameters()}
    for name, weight in own_weights(root).items():
        if weight.placement not in ("colwise", "rowwise"):
            continue
        features = shapes[name][0 if weight.placement == "colwise" else 1]
        require(
            features % tp == 0,
            f"{name} of your model is {weight.placement}, and its {features} features are not divisible by parallel.tp "
            f"{tp}; try another --parallel.tp, or the placement partial or replicated",
        )


def own_values(root: nn.Module, path: str, config: ModelConfig, seed: int) -> dict[str, Tensor]:
    """Return the first values of the own part `path` of a model as its __init__ gives them, on the CPU, by name.

    They depend on the seed and the part's place in the model, and on no layout.
    """
    kind: Any = type(root.get_submodule(path))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(key_from_name(f"{seed}/{path}") % 2**63)
        made = kind(config) if issubclass(kind, OwnMLP) else kind(config, int(path.rpartition(".")[2]))
    return {name: p.detach() for name, p in made.named_parameters()}


def kept_by_mlp(config: ModelConfig, usual: int) -> int:
    """Return the tensors of ffn_width features that an own MLP keeps; `usual` of an activation, or one of ours."""
    if not is_own(config.mlp) or own_activation(config) is not None:
        return usual
    kind: type[OwnMLP] = load_own(str(config.mlp), MLP_OPTION, OwnMLP)
    return kind.kept
