"""The decoder: one model, configured to be Llama or GPT-2, written for a single device.

Shapes: B sequences, T tokens, D = width, H heads of E = D / H features, V = vocabulary. Every product
of a matrix is a `Linear` of its own (`q`, `k`, `v`, `o`, `gate`, `up`, `down`, `head`), so that a
plan may shard each by name, and `embed`, `blocks`, `norm` and `head` may each be absent, so that a
pipeline stage is the same class with some of them removed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.cross_entropy import summed_cross_entropy
from training.kernels.dropout import Dropout
from training.kernels.elementwise import gelu, rms_norm, rotary_table, rotate, swiglu
from training.kernels.linear import Linear, linears
from training.model.model_config import ModelConfig


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x.to(self.weight.dtype), self.weight, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=bool(config.bias))


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads in groups (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, site: str) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = Dropout(config.dropout, f"{site}.attention")
        inner, kv = config.width, config.kv_heads * self.head_width
        bias = bool(config.bias)
        self.q = Linear(config.width, inner, bias=bias)
        self.k = Linear(config.width, kv, bias=bias)
        self.v = Linear(config.width, kv, bias=bias)
        self.o = Linear(inner, config.width, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, samples: Tensor | None) -> Tensor:
        # the number of heads follows from the projection's width, which may be a shard of the whole
        projected = linears(x, (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (-1, self.head_width)).transpose(1, 2) for y in projected)
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        if self.training and self.dropout.p:
            mixed = self._attend_and_drop(q, k, v, samples)
        else:
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def _attend_and_drop(self, q: Tensor, k: Tensor, v: Tensor, samples: Tensor | None) -> Tensor:
        """The same, with all weights in memory, as torch's fused attention drops by a random state of its own."""
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.head_width**-0.5
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1)
        return self.dropout(weights, samples).to(v.dtype) @ v


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x): SwiGLU (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.gate = Linear(config.width, config.ffn_width, bias=bias)
        self.up = Linear(config.width, config.ffn_width, bias=bias)
        self.down = Linear(config.ffn_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(*linears(x, (self.gate, self.up))))


class MLP(nn.Module):
    """down(gelu(up x)): GELU in GPT-2's tanh form, or exact (Hendrycks & Gimpel 2016, section 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_width, bias=bool(config.bias))
        self.down = Linear(config.ffn_width, config.width, bias=bool(config.bias))
        self.form = "none" if config.mlp == "gelu-exact" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x), self.form))


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, config: ModelConfig, site: str) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, site)
        self.attention_dropout = Dropout(config.dropout, f"{site}.attention.out")
        self.mlp_norm = build_norm(config)
        self.mlp = GatedMLP(config) if config.mlp == "swiglu" else MLP(config)
        self.mlp_dropout = Dropout(config.dropout, f"{site}.mlp.out")

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, samples: Tensor | None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotary, samples), samples)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), samples)


class Embedding(nn.Module):
    """Token ids to features, with learned positions added where the model has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.dropout = Dropout(config.dropout, "embed")

    def forward(self, ids: Tensor, samples: Tensor | None) -> Tensor:
        return self.place(self.tokens(ids), 0, samples)

    def place(self, x: Tensor, first: int, samples: Tensor | None) -> Tensor:
        """Tell the features `x` (B, T, D) of tokens from position `first` on where they stand."""
        if self.positions is not None:
            x = x + self.positions(torch.arange(first, first + x.shape[1], device=x.device))
        return self.dropout(x, samples)


class Head(nn.Linear):
    """Features to logits, or at once to the loss."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats, (1,), of features (B, T, D) and targets (B, T)."""
        return summed_cross_entropy(x, self.weight, targets)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x) if targets is None else self.loss(x, targets)


class Decoder(nn.Module):
    """Token ids (B, T) int64 to logits (B, T, V), or to their loss; `config` is resolved."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.norm and config.vocab_size, "resolve() the configuration first"
        self.config = config
        self.sequence_parts = 1  # of how many, along the sequence, the features between blocks are one
        self.embed: Embedding | None = Embedding(config)
        self.blocks = nn.ModuleDict({str(i): Block(config, f"blocks.{i}") for i in range(config.layers)})
        self.norm: nn.Module | None = build_norm(config)
        self.head: Head | None = Head(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let output and embedding be one matrix, where configured; to be repeated after they are replaced."""
        if self.config.tied and self.embed is not None and self.head is not None:
            self.head.weight = self.embed.tokens.weight

    def forward(self, x: Tensor, targets: Tensor | None = None, samples: Tensor | None = None) -> Tensor:
        """From ids, or the previous stage's features (B, T, D), to logits, or features for the next stage.

        With `targets` (B, T) the last stage returns their summed loss in nats, (1,), instead. `samples`
        (B,) int64 are numbers of the sequences, unique over the run: what is dropped out depends on them.
        """
        if self.embed is not None:
            x = self.embed(x, samples)
        rotary = None
        if self.config.positions == "rope":
            positions = torch.arange(x.shape[1] * self.sequence_parts, device=x.device)
            rotary = rotary_table(positions, self.config.width // self.config.heads, self.config.rope_base)
        for block in self.blocks.values():
            x = block(x, rotary, samples)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x, targets) if self.head is not None else x


def blocks_of(model: Decoder) -> list[Block]:
    """The blocks in order: an nn.ModuleDict forgets their type."""
    return [block for block in model.blocks.values() if isinstance(block, Block)]


def flops_per_token(model: Decoder, seq_len: int) -> float:
    """Operations of one token, forward and backward: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    N counts the parameters that multiply: all but the embedding tables, and the output matrix also where
    it is tied. Recomputation is not counted, and attention as if it were not causal, as is the custom.
    `model` is whole; its parameters may be on the meta device.
    """
    config = model.config
    multiplied = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed."))
    if config.tied:
        multiplied += config.vocab_size * config.width
    return 6.0 * multiplied + 12.0 * config.layers * config.width * seq_len
