"""Block: attention and MLP, each with its norm, on the residual stream."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor, nn

from gristmill.errors import require
from training.model.attention import Attention, QueryAttention
from training.model.dropout import Dropout
from training.model.latent_attention import LatentAttention
from training.model.layers import build_norm
from training.model.mlp import MLP, GatedMLP, build_mlp
from training.model.model_config import ModelConfig
from training.model.own_parts import BLOCK_OPTION, OwnMLP, Weight, check_own_block, own_weights
from training.model.positions import PositionTable
from training.model.sparse_mlp import SparseMLP
from training.own_code import call_own, load_own


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    weights: ClassVar[Mapping[str, Weight]] = {}
    """Of a block of the user's: what it says of parameters of its own."""
    kept: ClassVar[int] = 0
    """Of a block of the user's: tensors of `width` features that its backward pass needs besides those of ours."""

    def __init__(self, config: ModelConfig, layer: int, attention: type[Attention] | None = None) -> None:
        super().__init__()
        name = f"blocks.{layer}"
        self.attention_norm = build_norm(config)
        self.attention = (attention or (LatentAttention if config.kv_lora_rank else Attention))(config, layer)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention.out")
        self.mlp_norm = build_norm(config)
        self.mlp: SparseMLP | GatedMLP | MLP | OwnMLP = (
            SparseMLP(config) if config.is_sparse(layer) else build_mlp(config)
        )
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp.out")

    def apply_mlp(self, x: Tensor, padding: Tensor | None) -> Tensor:
        """Return the MLP's output of features (B, T, D); experts take no token of `padding` (B, T) bool."""
        output: Tensor = self.mlp(x, padding) if isinstance(self.mlp, SparseMLP) else self.mlp(x)
        return output

    def forward(
        self, x: Tensor, table: PositionTable, sample_ids: Tensor | None, padding: Tensor | None = None
    ) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), table, sample_ids), sample_ids)
        return x + self.mlp_dropout(self.apply_mlp(self.mlp_norm(x), padding), sample_ids)


class ParallelBlock(Block):
    """x + attention(norm(x)) + mlp(norm'(x)): both see the same stream (Black et al. 2022, GPT-NeoX, section 2.1)."""

    def forward(
        self, x: Tensor, table: PositionTable, sample_ids: Tensor | None, padding: Tensor | None = None
    ) -> Tensor:
        mixed = self.attention_dropout(self.attention(self.attention_norm(x), table, sample_ids), sample_ids)
        return x + mixed + self.mlp_dropout(self.apply_mlp(self.mlp_norm(x), padding), sample_ids)


class DeepNormBlock(Block):
    """Post-norm with DeepNorm's constant α = (2 layers)^½: x = norm(x), then α x + sublayer(x).

    A sublayer's norm is applied where the next one begins, and the decoder's last norm is that of the last sublayer
    (Wang et al. 2022, DeepNet, section 2; Zeng et al. 2022, GLM-130B, section 2.1).
    """

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer)
        self.alpha = (2 * config.layers) ** 0.5

    def forward(
        self, x: Tensor, table: PositionTable, sample_ids: Tensor | None, padding: Tensor | None = None
    ) -> Tensor:
        x = self.attention_norm(x)
        x = self.alpha * x + self.attention_dropout(self.attention(x, table, sample_ids), sample_ids)
        x = self.mlp_norm(x)
        return self.alpha * x + self.mlp_dropout(self.apply_mlp(x, padding), sample_ids)


class QueryBlock(Block):
    """The last block of a model with a query layer: a pre-norm block, on the stream after the last norm."""

    def __init__(self, config: ModelConfig, layer: int) -> None:
        super().__init__(config, layer, QueryAttention)
        self.input_norm = build_norm(config)

    def forward(
        self, x: Tensor, table: PositionTable, sample_ids: Tensor | None, padding: Tensor | None = None
    ) -> Tensor:
        return super().forward(self.input_norm(x), table, sample_ids, padding)


def build_block(config: ModelConfig, layer: int) -> Block:
    """Return the block of a layer."""
    if config.block:
        return _build_own_block(config, layer)
    if config.query_layer and layer == config.layers - 1:
        return QueryBlock(config, layer)
    blocks: dict[str | None, type[Block]] = {"parallel": ParallelBlock, "deepnorm": DeepNormBlock}
    return blocks.get(config.residual, Block)(config, layer)


def _build_own_block(config: ModelConfig, layer: int) -> Block:
    """Return the block of a layer by the class that `model.block` names.

    Raises UsageError for one that breaks our rules.
    """
    kind = load_own(config.block, BLOCK_OPTION, Block)
    block: Block = call_own(lambda: kind(config, layer), config.block, BLOCK_OPTION)
    require(
        isinstance(getattr(block, "attention", None), Attention),
        f"{BLOCK_OPTION}: {config.block} has no attention of ours; expected super().__init__(config, layer) to make it",
    )
    check_own_block(block, config.block)
    return block


def kept_by_block(config: ModelConfig) -> int:
    """Return the tensors of `width` features that a block of the user's keeps besides those of ours."""
    return int(load_own(config.block, BLOCK_OPTION, Block).kept) if config.block else 0


def described_shapes(config: ModelConfig, layer: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return placement and shape of the parameters of own parts of a block, by name; nothing without own parts."""
    with torch.device("meta"):
        block = build_block(config, layer)
    shapes = {name: tuple(p.shape) for name, p in block.named_parameters()}
    weights = own_weights(block).items()
    return {name: (weight.placement, shapes[name]) for name, weight in weights if weight.placement is not None}
