"""Routing: the routers of a model on several ranks; tokens are counted over all of them, for loads and for the bias."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from training.kernels.precision import accumulation_dtype
from training.model.decoder import Decoder
from training.model.model_config import ModelConfig
from training.model.router import Router, Tokens
from training.model.sparse_mlp import SparseMLP
from training.parallel.context.tokens import TokenOrder
from training.parallel.mesh import World
from training.sharding.axis import Axis, JointAxis


class Loads(NamedTuple):
    """How tokens fell on experts, over all ranks."""

    counts: Tensor
    """Choices of each expert, (layers, experts) float64; zeros for a dense layer."""
    losses: Tensor
    """Auxiliary losses, summed over tokens, (layers,) float64."""
    dropped: Tensor
    """Of the choices those whose expert was full, (layers,) float64."""

    @property
    def dropped_shares(self) -> Tensor:
        """Return the share of a layer's choices whose expert was full, (layers,) float64; of a dense layer 0."""
        return self.dropped / self.counts.sum(1).clamp(min=1)


class Routing:
    """The routers of this rank's layers, by the layers' numbers; built by `parallelize`, None for a dense model."""

    def __init__(self, routers: dict[int, Router], world: World, config: ModelConfig, order: TokenOrder) -> None:
        self.routers = routers
        self.world = world
        self.config = config
        self.data = world.joint_axis("replicate", "shard")
        self.tokens = _TokensOfRanks(self.data, world, order)
        for router in routers.values():
            router.tokens = self.tokens
            if router.choice_bias is not None:  # steps are smaller than what 16 bits resolve
                wide = accumulation_dtype(router.weight.dtype)
                router.choice_bias = torch.zeros(router.choice_bias.shape, dtype=wide, device=world.device)
        self._taken = self._no_loads()

    @classmethod
    def of(cls, parts: Sequence[Decoder], world: World, order: TokenOrder) -> "Routing | None":
        """Build it for the parts of a model, allocated; collective if it has experts."""
        if not parts[0].config.experts:
            return None
        blocks = {int(layer): block for part in parts for layer, block in part.blocks.items()}
        routers = {layer: block.mlp.router for layer, block in blocks.items() if isinstance(block.mlp, SparseMLP)}
        return cls(routers, world, parts[0].config, order)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Return the tensors that checkpoints have besides parameters, by name."""
        return {
            f"blocks.{layer}.mlp.router.choice_bias": router.choice_bias
            for layer, router in self.routers.items()
            if router.choice_bias is not None
        }

    def begin_step(self, scale: float) -> None:
        """Training passes follow, whose gradients are those of `scale` times the loss sum."""
        self.tokens.scale = scale
        for layer, router in self.routers.items():
            if isinstance(router.counts, Tensor):
                self._taken.counts[layer] += router.counts
                self._taken.losses[layer] += router.losses
                self._taken.dropped[layer] += router.dropped
            router.forget()

    def update_bias(self) -> None:
        """After an update of the weights: raise the bias of experts that had fewer tokens than the mean in this step.

        (Wang et al. 2024, algorithm 1.) The same on all ranks that have a layer.
        """
        biased = [router for router in self.routers.values() if router.choice_bias is not None]
        if not biased:
            return
        counts = torch.stack([torch.as_tensor(router.counts, device=self.world.device) for router in biased])
        if self.data.size > 1:
            dist.all_reduce(counts, group=self.data.group)
        for router, own in zip(biased, counts.double(), strict=True):
            assert router.choice_bias is not None
            router.choice_bias += router.config.balance_rate * (own.mean() - own).sign()

    def take(self) -> Loads:
        """Return the loads since the last call; collective."""
        self.begin_step(self.tokens.scale)
        table = torch.cat([self._taken.counts, self._taken.losses[:, None], self._taken.dropped[:, None]], 1)
        self.world.all_reduce(table if self.tokens.counts_losses else table.zero_())
        self._taken = self._no_loads()
        return _loads(table.cpu())

    def _no_loads(self) -> Loads:
        shape = self.config.layers, self.config.experts + 2
        return _loads(torch.zeros(shape, dtype=torch.float64, device=self.world.device))


def _loads(table: Tensor) -> Loads:
    return Loads(table[:, :-2], table[:, -2], table[:, -1])


class _TokensOfRanks(Tokens):
    """Tokens on several ranks: of a micro-batch along `data`, of a sequence along "cp", in an order."""

    def __init__(self, data: JointAxis, world: World, order: TokenOrder) -> None:
        self.data = data
        self.cp = world.axis("cp")
        self.gather, self.own = order.gather, order.own  # type: ignore[method-assign]
        self.counts_losses = world.axis("tp").rank == 0

    def sum_counts(self, counts: Tensor, balance: str) -> Tensor:
        axis: JointAxis | Axis = self.data if balance == "switch" else self.cp
        if axis.size == 1:
            return counts
        counts = counts.clone()
        dist.all_reduce(counts, group=axis.group)
        return counts
