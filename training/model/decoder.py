"""Decoder-only transformer, assembled from parts that the configuration chooses; plain code for one process.

Shapes: B sequences, T tokens, D = width, H heads of E = head_dim features, V = vocabulary size. Parallelism is applied
to it from outside (training/parallel): by the names of its parameters, of which each has a row in the placement table,
and by replacing some of its modules.
"""

import torch
from torch import Tensor, nn

from training.model.block import build_block
from training.model.documents import Documents
from training.model.embedding import Embedding, Head
from training.model.layers import build_norm
from training.model.model_config import ModelConfig, is_lookup
from training.model.positions import build_positions


class Decoder(nn.Module):
    """Decoder-only transformer: token ids (B, T) int64 to logits (B, T, V) or to the loss."""

    def __init__(self, config: ModelConfig) -> None:
        """Build all layers; `config` must be resolved (see `ModelConfig.resolve`)."""
        super().__init__()
        assert config.norm and config.vocab_size, "resolve() the configuration first"
        self.config = config
        self.embed = Embedding(config)
        self.position_table = build_positions(config)
        self.blocks = nn.ModuleDict({str(i): build_block(config, i) for i in range(config.layers)})
        self.norm = nn.Identity() if config.query_layer else build_norm(config)  # a query layer has it
        self.head = Head(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's matrix with the output, if configured; call again after either was replaced."""
        if self.config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(
        self,
        ids: Tensor,
        targets: Tensor | None = None,
        sample_ids: Tensor | None = None,
        positions: Tensor | None = None,
        padding: Tensor | None = None,
    ) -> Tensor:
        """Return logits (B, T, V); with `targets` (B, T), their summed loss in nats, (1,), instead; in
        evaluation mode the loss of each, (B, T).

        `sample_ids` (B,) int64 are ids of the sequences, unique over the run; dropout masks depend on them.
        `positions` (B, T) int64 are those of the tokens in their documents, which then do not see each other. Experts
        take no token of `padding` (B, T) bool.
        """
        documents = None if positions is None else Documents.of(positions)
        x = self.embed(ids, sample_ids, documents)
        table = self.position_table(x)
        if documents is not None:
            table = self.position_table.in_documents(table, documents)
        for block in self.blocks.values():
            x = block(x, table, sample_ids, padding)
        return self.head(self.norm(x), targets)


def meta_decoder(config: ModelConfig) -> Decoder:
    """Build the whole decoder on the meta device: names and shapes, without memory. `config` must be resolved."""
    with torch.device("meta"):
        return Decoder(config)


def active_parameters(model: Decoder) -> int:
    """Return the parameters that one token uses: all but those of experts that it is not sent to."""
    return sum(model.config.active_numel(name, p.numel()) for name, p in model.named_parameters())


def flops_per_token(model: Decoder, seq_len: int) -> float:
    """Model FLOPs per token, forward and backward: 6 N + 12 L H E T (Chowdhery et al. 2022, appendix B).

    N counts the parameters used in matrix products: all but the embeddings; a tied output matrix counts, and of
    experts as many as a token has. As usual, recomputation is not counted, and attention is counted as if it were not
    causal (`ModelConfig.attended`); half of it is that of values, of which latent attention has fewer features. `model`
    must be unsharded; its parameters may be on the meta device.
    """
    config = model.config
    used = [(name, p.numel()) for name, p in model.named_parameters() if not is_lookup(name)]
    matrices = sum(config.active_numel(name, numel) for name, numel in used)
    if config.tied:
        matrices += config.vocab_size * config.width
    attention = config.layers * (config.q_width + config.value_width) * config.attended(seq_len)
    return 6.0 * (matrices + attention)
