"""Embedding of token ids, and the output matrix, which is its counterpart."""

from torch import Tensor, nn

from training.kernels.cross_entropy import SequenceLosses, ZLoss, linear_cross_entropy, token_losses
from training.kernels.dispatch import embedding
from training.model.documents import Documents
from training.model.dropout import Dropout
from training.model.layers import EmbeddingTable, build_norm
from training.model.model_config import ModelConfig
from training.model.positions import PositionEmbedding


class TokenEmbedding(EmbeddingTable):
    """Embedding of token ids (B, T): (B, T, D)."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class Embedding(nn.Module):
    """Token embedding, plus learned position embeddings and a norm if the model has them; ids (B, T) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(config.vocab_size, config.width)
        self.positions = PositionEmbedding(config) if config.positions == "learned" else None
        self.embed_norm = build_norm(config) if config.embed_norm else None
        self.dropout = Dropout(config.dropout, "embed")

    def forward(self, ids: Tensor, sample_ids: Tensor | None, documents: Documents | None = None) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(x, documents)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        return self.dropout(x, sample_ids)


class Head(nn.Linear):
    """Output projection: features (B, T, D) to logits (B, T, V), or fused with the loss."""

    z_loss: ZLoss | None = None
    """Added to the loss in training."""
    sequence_losses: SequenceLosses | None = None
    """Has the losses of sequences in training, if they are to be kept."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy in nats from features (B, T, D) and targets (B, T): in training summed, (1,), else (B, T)."""
        if not self.training:
            return token_losses(x, self.weight, targets)
        return linear_cross_entropy(x, self.weight, targets, z_loss=self.z_loss, sequence_losses=self.sequence_losses)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x) if targets is None else self.loss(x, targets)
