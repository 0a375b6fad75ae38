"""Tensor parallelism: every matrix sharded over the "tp" axis (Shoeybi et al. 2019, figures 3 and 4).

Attention and MLP are each a tensor-parallel region: a column-parallel product, then a row-parallel one, so one
collective at the entry and one at the exit suffice. Outside the regions activations are replicated, (B, T, D), or with
sequence parallelism sharded along the sequence, (B, T / n, D) (Korthikanti et al. 2022, figure 5). Per region a forward
pass all-reduces B T D numbers, and so does the backward pass; with sequence parallelism each all-reduce becomes an
all-gather and a reduce-scatter of the same size. Shards are plain tensors, not DTensors; which rank has which is in
placement_table.py.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.distributed.collectives import copy_to_tp, gather_from_sp, reduce_from_tp, reduce_scatter_to_sp
from training.kernels.cross_entropy import linear_cross_entropy, token_losses
from training.kernels.dispatch import embedding, linear
from training.kernels.precision import accumulation_dtype
from training.model.block import Block
from training.model.decoder import Decoder
from training.model.dropout import Dropout
from training.model.embedding import Embedding, Head, TokenEmbedding
from training.model.layers import RMSNorm
from training.model.own_parts import OwnMLP
from training.model.positions import Alibi, PositionEmbedding, Rotary
from training.model.sparse_mlp import SparseMLP
from training.sharding.axis import Axis
from training.sharding.shard_spec import ShardSpec


def apply_tensor_parallel(part: Decoder, pieces: Mapping[str, ShardSpec], axis: Axis, sequence_parallel: bool) -> None:
    """Shard a decoder, or a pipeline stage of one, that is on the meta device, into this rank's `pieces`; in place.

    `pieces`: those of the placement table along `axis`, by the names of the part's parameters.
    """
    if axis.size == 1:
        return
    cut_parameters(part, pieces)
    region = _Region(axis, sequence_parallel)
    for block in part.blocks.values():
        assert isinstance(block, Block)
        _shard_block(block, region)
    if isinstance(part.embed, Embedding):
        part.embed.tokens = _VocabParallelTokens(part.embed.tokens, region, pieces["embed.tokens.weight"].offset[0])
        if sequence_parallel:
            part.embed.dropout = ShardedDropout(part.embed.dropout, axis)
        if sequence_parallel and part.embed.positions is not None:
            part.embed.positions = _ShardedPositions(part.embed.positions, axis)
    if isinstance(part.head, Head):
        part.head = _VocabParallelHead(part.head, region, pieces["head.weight"].offset[0])
    if isinstance(part.position_table, Alibi):
        part.position_table = ShardedAlibi(part.position_table, axis, axis.size if sequence_parallel else 1)
    elif sequence_parallel and isinstance(part.position_table, Rotary):
        part.position_table = _AllRotary(part.position_table, axis)


def cut_parameters(part: Decoder, pieces: Mapping[str, ShardSpec]) -> None:
    """Make each parameter, on the meta device, one of the shape of this rank's piece of it; in place."""
    for name, parameter in list(part.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        setattr(part.get_submodule(owner), leaf, nn.Parameter(parameter.new_empty(pieces[name].size)))
    part.tie()


class _Region:
    """The collectives at a tensor-parallel region's entry and exit."""

    def __init__(self, axis: Axis, sequence_parallel: bool) -> None:
        self.axis = axis
        self.sequence_parallel = sequence_parallel
        self._entry = gather_from_sp if sequence_parallel else copy_to_tp
        self._exit = reduce_scatter_to_sp if sequence_parallel else reduce_from_tp

    def enter(self, x: Tensor) -> Tensor:
        """Entry collective: activations from outside the region to the full (B, T, D) on every rank."""
        return self._entry(x, self.axis)

    def exit(self, x: Tensor) -> Tensor:
        """Exit collective: partial sums (B, T, D) to their sum, in the layout of activations outside the region."""
        return self._exit(x, self.axis)

    def enter_hook(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """Forward pre-hook: `enter` with the module's first argument."""
        return self.enter(arguments[0]), *arguments[1:]


def _shard_block(block: Block, region: _Region) -> None:
    """Make attention and MLP a region each; key dropout by the global heads, or positions, that this rank computes."""
    regions: list[tuple[nn.Module, str]] = [(block.attention, "o")]
    if not isinstance(block.mlp, OwnMLP) or block.mlp.is_divided:
        regions.append((block.mlp, block.mlp.last))
    for module, last in regions:
        module.register_forward_pre_hook(region.enter_hook)
        if not last:  # an own MLP whose output is a term of the sum
            module.register_forward_hook(lambda _module, _arguments, output: region.exit(output))
            continue
        product = getattr(module, last)
        setattr(module, last, _RowParallelLinear(product, region) if isinstance(product, nn.Linear) else _Exit(region))
    if block.attention.joint_norms:
        block.attention.q_norm = _JointRMSNorm(block.attention.q_norm, region.axis)
        block.attention.k_norm = _JointRMSNorm(block.attention.k_norm, region.axis)
    if isinstance(block.mlp, SparseMLP):
        block.mlp.experts.down.bias_share = 1 / region.axis.size
    block.attention.dropout = ShardedDropout(block.attention.dropout, region.axis)
    if region.sequence_parallel:
        block.attention_dropout = ShardedDropout(block.attention_dropout, region.axis)
        block.mlp_dropout = ShardedDropout(block.mlp_dropout, region.axis)


class ShardedDropout(Dropout):
    """Dropout of this rank's shard of dimension 1 (heads, or tokens), which is split evenly: the unsharded mask's.

    `full` may be one of a shard, which is split again.
    """

    def __init__(self, full: Dropout, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.p = full.p
        self.key = full.key
        shard = full.shard_index if isinstance(full, ShardedDropout) else 0
        self.shard_index: int = shard * axis.size + axis.rank

    def index(self, x: Tensor) -> Tensor:
        return super().index(x) + self.shard_index * x[0].numel()


class _ShardedPositions(PositionEmbedding):
    """Embedding of the positions of this rank's tokens, where the sequence is sharded."""

    def __init__(self, full: PositionEmbedding, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.offset = full.offset
        self.axis = axis

    def positions(self, x: Tensor) -> Tensor:
        return super().positions(x) + self.axis.rank * x.shape[1]


class ShardedAlibi(Alibi):
    """ALiBi's bias of this rank's heads, and of all tokens, where features are of one of `parts` of a sequence."""

    def __init__(self, full: Alibi, axis: Axis, parts: int = 1) -> None:
        nn.Module.__init__(self)
        count = len(full.slopes) // axis.size
        self.slopes = full.slopes[axis.rank * count :][:count]
        self.parts = parts

    def tokens(self, x: Tensor) -> int:
        return x.shape[1] * self.parts


class _AllRotary(Rotary):
    """Rotary positions of all tokens, where the sequence is sharded between the regions: attention has all of them."""

    def __init__(self, full: Rotary, axis: Axis) -> None:
        nn.Module.__init__(self)
        self.config = full.config
        self.axis = axis

    def positions(self, x: Tensor) -> Tensor:
        return torch.arange(x.shape[1] * self.axis.size, device=x.device)


class _RowParallelLinear(nn.Module):
    """Row-parallel linear layer: sums the ranks' partial products at the region's exit, then adds the bias once."""

    def __init__(self, full: nn.Linear, region: _Region) -> None:
        super().__init__()
        self.weight = full.weight
        self.bias = full.bias
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        x = self.region.exit(linear(x, self.weight))
        return x if self.bias is None else x + self.bias


class _JointRMSNorm(nn.Module):
    """RMSNorm over the features of all ranks' heads, of which `weight` has this rank's.

    Ranks that have the same head of keys count it as often, so that the mean is that of all heads.
    """

    def __init__(self, full: nn.Module | None, axis: Axis) -> None:
        super().__init__()
        assert isinstance(full, RMSNorm)
        self.weight = full.weight
        self.eps = full.eps
        self.axis = axis

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(accumulation_dtype(x.dtype))
        squares = wide.square().mean(-1, keepdim=True) / self.axis.size
        # each rank's output depends on the sum, so its gradient is a sum over the ranks, too
        mean = copy_to_tp(reduce_from_tp(squares, self.axis), self.axis)
        return (wide * torch.rsqrt(mean + self.eps)).to(x.dtype) * self.weight


class _Exit(nn.Module):
    """The region's exit, where several row-parallel products are added before it: those of the experts."""

    def __init__(self, region: _Region) -> None:
        super().__init__()
        self.region = region

    def forward(self, x: Tensor) -> Tensor:
        return self.region.exit(x)


class _VocabParallelTokens(TokenEmbedding):
    """Vocab-parallel embedding: each rank looks up its own ids, leaves zeros elsewhere, then all-reduces."""

    def __init__(self, full: TokenEmbedding, region: _Region, first: int) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.region = region
        self.first = first

    def forward(self, ids: Tensor) -> Tensor:
        return self.region.exit(lookup(ids, self.weight, self.first))


def lookup(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Return the rows of `weight` (V / n, D), which are those of the ids from `first` on, and zeros for other ids."""
    local = ids - first
    count = len(weight)
    return embedding(local.clamp(0, count - 1), weight) * ((local >= 0) & (local < count))[..., None]


class _VocabParallelHead(Head):
    """Vocab-parallel output matrix: each rank computes the logits of its shard of the ids."""

    def __init__(self, full: Head, region: _Region, first: int) -> None:
        nn.Module.__init__(self)
        self.weight = full.weight
        self.region = region
        self.first = first
        self.register_parameter("bias", None)
        self.in_features = full.in_features
        self.out_features = len(full.weight)

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        x = self.region.enter(x)
        group = self.region.axis.group
        if not self.training:
            return token_losses(x, self.weight, targets, self.first, group)
        return linear_cross_entropy(x, self.weight, targets, self.first, group, self.z_loss, self.sequence_losses)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the loss; without targets this rank's logits, (B, T, V / n)."""
        return F.linear(self.region.enter(x), self.weight) if targets is None else self.loss(x, targets)
