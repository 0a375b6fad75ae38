"""Tensor parallelism: every matrix divided over the processes of the "tp" axis (Shoeybi et al. 2019, figures 3 and 4).

What a process computes with is a plain tensor: its part. Between the matrices features are whole on every
process, or, with sequence parallelism, divided along the sequence (Korthikanti et al. 2022, figure 5).
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from training.distributed.collectives import copy_to_tp, gather_from_sp, reduce_from_tp, reduce_scatter_to_sp
from training.distributed.mesh import Axis
from training.kernels.cross_entropy import summed_cross_entropy
from training.kernels.linear import linear
from training.model.decoder import Decoder, Embedding, Head, blocks_of
from training.sharding.shard_spec import ShardSpec

# Which dimension of a parameter is divided, by the end of its name; what is not here is whole on every process.
# A linear layer's weight is (outputs, inputs): 0 divides the outputs ("column parallel" in the paper, which
# writes x W), 1 the inputs ("row parallel"), whose results are then parts of a sum.
TP_PLAN = {
    "embed.tokens.weight": 0,  # the vocabulary
    "attention.q.weight": 0,  # heads
    "attention.q.bias": 0,
    "attention.k.weight": 0,
    "attention.k.bias": 0,
    "attention.v.weight": 0,
    "attention.v.bias": 0,
    "attention.o.weight": 1,
    "mlp.gate.weight": 0,  # hidden features
    "mlp.gate.bias": 0,
    "mlp.up.weight": 0,
    "mlp.up.bias": 0,
    "mlp.down.weight": 1,
    "head.weight": 0,  # the vocabulary
}


def tp_dim(name: str) -> int | None:
    """The dimension of parameter `name` that tensor parallelism divides, None where it does not."""
    return next((dim for end, dim in TP_PLAN.items() if name == end or name.endswith("." + end)), None)


def tp_shard(name: str, shape: tuple[int, ...], axis: Axis) -> ShardSpec:
    """What this process holds of a parameter."""
    whole, dim = ShardSpec.whole(shape), tp_dim(name)
    return whole if dim is None else whole.shard(dim, axis.size, axis.rank)


def apply_tensor_parallel(part: Decoder, axis: Axis, sequence_parallel: bool) -> None:
    """Divide a decoder, or a stage of one, that is on the meta device."""
    if axis.size == 1:
        return
    for name, parameter in list(part.named_parameters()):
        owner, _, leaf = name.rpartition(".")
        size = tp_shard(name, tuple(parameter.shape), axis).size
        setattr(part.get_submodule(owner), leaf, nn.Parameter(parameter.new_empty(size)))
    part.tie()
    part.sequence_parts = axis.size if sequence_parallel else 1
    border = _Border(axis, sequence_parallel)
    for block in blocks_of(part):
        for inner, last in ((block.attention, "o"), (block.mlp, "down")):
            inner.register_forward_pre_hook(border.enter)
            setattr(inner, last, _RowParallelLinear(getattr(inner, last), border))
    _shard_dropout(part, axis.rank, sequence_parallel)
    if part.embed is not None:
        part.embed = _VocabParallelEmbedding(part.embed, border)
    if part.head is not None:
        part.head = _VocabParallelHead(part.head, border, part.config.vocab_size)


class _Border:
    """How features enter and leave what is divided."""

    def __init__(self, axis: Axis, sequence_parallel: bool) -> None:
        self.axis, self.sequence_parallel = axis, sequence_parallel
        self._in = gather_from_sp if sequence_parallel else copy_to_tp
        self._out = reduce_scatter_to_sp if sequence_parallel else reduce_from_tp

    def enter(self, _module: nn.Module, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        """As a hook before a module's forward: its first argument."""
        return self.whole(arguments[0]), *arguments[1:]

    def whole(self, x: Tensor) -> Tensor:
        return self._in(x, self.axis)

    def leave(self, x: Tensor) -> Tensor:
        return self._out(x, self.axis)


class _RowParallelLinear(nn.Module):
    """A linear layer of which each process has some inputs; the bias is added once, to the sum."""

    def __init__(self, whole: nn.Linear, border: _Border) -> None:
        super().__init__()
        self.weight, self.bias, self.border = whole.weight, whole.bias, border

    def forward(self, x: Tensor) -> Tensor:
        x = self.border.leave(linear(x, self.weight))
        return x if self.bias is None else x + self.bias


class _VocabParallelEmbedding(Embedding):
    """An embedding of which each process has some ids: the others' are zero, and the sum is what is looked up."""

    def __init__(self, whole: Embedding, border: _Border) -> None:
        nn.Module.__init__(self)
        self.tokens, self.positions, self.dropout, self.border = whole.tokens, whole.positions, whole.dropout, border
        rows = whole.tokens.num_embeddings
        spec = ShardSpec.whole((rows,)).shard(0, border.axis.size, border.axis.rank)
        self.first, self.count = spec.offset[0], spec.size[0]

    def forward(self, ids: Tensor, samples: Tensor | None) -> Tensor:
        local = ids - self.first
        mine = (local >= 0) & (local < self.count)
        x = F.embedding(local.clamp(0, self.count - 1), self.tokens.weight) * mine[..., None]
        x = self.border.leave(x)
        return self.place(x, self.border.axis.rank * x.shape[1] if self.border.sequence_parallel else 0, samples)


class _VocabParallelHead(Head):
    """An output matrix of which each process has some ids."""

    def __init__(self, whole: Head, border: _Border, vocabulary: int) -> None:
        nn.Module.__init__(self)
        self.weight, self.border = whole.weight, border
        self.register_parameter("bias", None)
        self.in_features, self.out_features = whole.in_features, len(whole.weight)
        self.vocabulary = vocabulary

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        axis = self.border.axis
        first = ShardSpec.whole((self.vocabulary,)).shard(0, axis.size, axis.rank).offset[0]
        return summed_cross_entropy(self.border.whole(x), self.weight, targets, first, axis.group)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        """Without targets: this process's logits, (B, T, V / n)."""
        return F.linear(self.border.whole(x), self.weight) if targets is None else self.loss(x, targets)


def is_replicated(name: str) -> bool:
    """Whether with sequence parallelism each process has only a part of the parameter's gradient.

    That is what is used where features are divided along the sequence: all that is whole on every process.
    """
    return tp_dim(name) is None


def _shard_dropout(part: Decoder, rank: int, sequence_parallel: bool) -> None:
    """Tell each dropout which of the whole model's heads, or positions, it sees."""
    for block in blocks_of(part):
        block.attention.dropout.part = rank
    if sequence_parallel:
        outer = [d for block in blocks_of(part) for d in (block.attention_dropout, block.mlp_dropout)]
        for dropout in [*outer, *([part.embed.dropout] if part.embed is not None else [])]:
            dropout.part = rank
