"""Own checks: own parts of the user's are tried on the CPU before a run, so that no layout trains them wrongly."""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from gristmill.errors import UsageError, require
from training.model.block import build_block
from training.model.decoder import Decoder, meta_decoder
from training.model.model_config import ModelConfig
from training.model.own_parts import (
    BLOCK_OPTION,
    MLP_OPTION,
    OwnMLP,
    check_divisible,
    is_ours,
    own_activation,
    own_weights,
)
from training.own_code import call_own, is_own, load_own


def check_own_parts(model: ModelConfig, tp: int) -> None:
    """Raise UsageError for own parts that say too little or break a rule, or that `tp` ranks do not divide."""
    if not model.own_names:
        return
    check_divisible(meta_decoder(model), tp)
    activation = own_activation(model)
    if activation is not None:
        require_elementwise_activation(activation, len(inspect.signature(activation).parameters), str(model.mlp))
    elif model.mlp is not None and is_own(model.mlp):
        require_divided_alike(model)
    if model.block:
        require_values_kept(lambda: build_block(model, 0), model.block)
    require_gradients(model)
    if model.block and not model.experts:  # whose capacity depends on the number of tokens
        require_causal(model)


def require_divided_alike(model: ModelConfig) -> None:
    """Raise UsageError for an own MLP that mixes tokens, or whose placements do not divide it, tried with two ranks."""
    name = str(model.mlp)
    small = replace(model, width=8, ffn_width=12)
    kind = load_own(name, MLP_OPTION, OwnMLP)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(1)
        try:
            whole: OwnMLP = kind(small).double()
        except Exception:  # sizes of its own, which are tried as they are
            small = model
            whole = call_own(lambda: kind(small), name, MLP_OPTION).double()
        for p in whole.parameters():  # its first values may be zeros, which hide much
            nn.init.normal_(p)
        x = torch.randn(1, 3, small.width, dtype=torch.float64)
        output = call_own(lambda: whole(x), name, MLP_OPTION)
        require(
            output.shape == x.shape,
            f"{MLP_OPTION}: {name} makes {tuple(output.shape)} of features {tuple(x.shape)}; expected the same shape",
        )
        require(
            torch.allclose(whole(x[:, :2]), output[:, :2]),
            f"{MLP_OPTION}: {name} gives other features for a token with another one after it; expected an MLP of each "
            "token alone",
        )
        output.square().sum().backward()
        if whole.is_divided:
            _compare_ranks(whole, x, output, name)


def _compare_ranks(whole: OwnMLP, x: Tensor, output: Tensor, name: str) -> None:
    ranks = [deepcopy(whole) for _ in range(2)]
    for rank, part in enumerate(ranks):
        for each, p in list(part.named_parameters()):
            placement = whole.weights[each].placement
            values = p.detach()
            if placement in ("colwise", "rowwise"):
                values = values.chunk(2, 0 if placement == "colwise" else 1)[rank].clone()
            if rank and each == f"{whole.last}.bias":  # which is added once, to the sum
                values = torch.zeros_like(values)
            owner, _, leaf = each.rpartition(".")
            setattr(part.get_submodule(owner), leaf, nn.Parameter(values))
    terms = call_own(lambda: [part(x) for part in ranks], f"{name}, divided by its placements,", MLP_OPTION)
    total = sum(terms)
    require(
        torch.allclose(total, output),
        f"{MLP_OPTION}: the outputs of two tensor-parallel ranks of {name}, as its placements divide it, do not add up "
        "to its output; expected colwise for what makes features, and rowwise for what adds them up",
    )
    total.square().sum().backward()
    for each, p in whole.named_parameters():
        first, second = (part.get_parameter(each).grad for part in ranks)
        placement = whole.weights[each].placement
        if placement in ("colwise", "rowwise") or p.grad is None or first is None or second is None:
            continue
        gradient = first if placement == "replicated" else first + second
        require(
            torch.allclose(gradient, p.grad),
            f"{MLP_OPTION}: {each} of {name} is {placement}, and the gradients of two tensor-parallel ranks say it is "
            f"{'partial' if placement == 'replicated' else 'replicated'}; try that",
        )


def require_gradients(model: ModelConfig) -> None:
    """Raise UsageError for own parts that fail, or with a parameter that takes no part in the loss."""
    small = replace(model, layers=1, vocab_size=16, dropout=0.0)
    name = " and ".join(model.own_names.values())
    option = next(iter(model.own_names))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(1)
        decoder = Decoder(small)
        for layer in decoder.modules():
            if isinstance(layer, nn.Linear):
                nn.init.normal_(layer.weight, std=0.02)
        ids = torch.arange(4)[None]
        loss = call_own(lambda: decoder(ids, ids, torch.zeros(1, dtype=torch.int64)), name, option)
        loss.sum().backward()
    unused = [each for each in own_weights(decoder) if decoder.get_parameter(each).grad is None]
    require(
        not unused,
        f"{option}: {''.join(unused[:1])} of {name} has no gradient: it takes no part in the output; expected it to, "
        "or leave it out",
    )


def require_causal(model: ModelConfig) -> None:
    """Raise UsageError for a block under which a token sees later ones: it would learn to copy its target."""
    small = replace(model, layers=1, vocab_size=16, dropout=0.0)
    with torch.random.fork_rng(devices=[]), torch.device("cpu"), torch.no_grad():
        torch.manual_seed(1)
        decoder = Decoder(small).double().eval()
        for p in decoder.parameters():  # its first values may be zeros, which hide much
            nn.init.normal_(p, std=0.2)
        ids = torch.arange(4)[None]
        whole, start = call_own(lambda: (decoder(ids), decoder(ids[:, :3])), model.block, BLOCK_OPTION)
    require(
        torch.allclose(whole[:, :3], start),
        f"{BLOCK_OPTION}: {model.block} gives other features for a token with another one after it; expected a block "
        "that sees no later token, and tokens together in its attention alone",
    )


def require_values_kept(make: Callable[[], nn.Module], name: str) -> None:
    """Raise UsageError for a block that sets values of our parameters, and does not say that they are to be kept."""
    with _unset_parameters(), torch.device("cpu"):
        block = call_own(make, name, BLOCK_OPTION)
    weights = own_weights(block)
    for path, module in block.named_modules():
        for leaf, p in module.named_parameters(recurse=False):
            each = f"{path}.{leaf}"
            if each in weights or not is_ours(block, each):
                continue
            is_unset = bool(p.isnan().all()) if isinstance(module, (nn.Linear, nn.Embedding)) else True
            if p.ndim == 1 and path.endswith("norm"):
                is_unset = bool((p == (0.0 if leaf == "bias" else 1.0)).all())
            require(
                is_unset,
                f"{BLOCK_OPTION}: {name} sets the values of {each}, which begins with ours; try weights = "
                f'{{"{each}": Weight(initial="own")}} to keep them, or leave them alone',
            )


@contextmanager
def _unset_parameters() -> Iterator[None]:
    """Within it linear layers and embeddings begin with NaN, which shows what else sets their values."""

    def fill(layer: nn.Module) -> None:
        for p in layer.parameters(recurse=False):
            nn.init.constant_(p, float("nan"))

    kinds: tuple[Any, ...] = (nn.Linear, nn.Embedding)
    before = [kind.reset_parameters for kind in kinds]
    try:
        for kind in kinds:
            kind.reset_parameters = fill
        yield
    finally:
        for kind, reset in zip(kinds, before, strict=True):
            kind.reset_parameters = reset


def require_elementwise_activation(function: Callable[..., Tensor], arguments: int, name: str) -> None:
    """Raise UsageError for an activation whose result of some features depends on others: ranks have some of them."""
    values = torch.linspace(-3, 3, 8 * arguments, dtype=torch.float64, device="cpu").view(arguments, 2, 4)

    def run(parts: Tensor) -> Tensor:
        result: Tensor = call_own(lambda: function(*parts), name, MLP_OPTION)
        require(
            isinstance(result, Tensor) and result.shape == parts[0].shape,
            f"{MLP_OPTION}: {name} returned no tensor of the shape of its argument; expected an activation",
        )
        return result

    whole = run(values)
    halves = torch.cat([run(values[..., :2]), run(values[..., 2:])], -1)
    if not torch.allclose(whole, halves, rtol=1e-9, atol=1e-12):
        raise UsageError(
            f"{MLP_OPTION}: {name} gives other values for some of the features than for all of them: layouts would "
            "train differently; expected a function of each element alone, or a class that derives from OwnMLP"
        )
