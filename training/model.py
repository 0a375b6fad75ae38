"""The decoder: one model, configured to be Llama or GPT-2, written for a single device.

Shapes: B sequences, T tokens, D = width, H heads of E = D / H features, V = vocabulary. Every product
of a matrix is an `nn.Linear` of its own (`q`, `k`, `v`, `o`, `gate`, `up`, `down`, `head`), so that a
plan may shard each by name, and `embed`, `blocks`, `norm` and `head` may each be absent, so that a
pipeline stage is the same class with some of them removed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.config import ModelConfig

IGNORED = -100  # a target that is not counted


class RMSNorm(nn.Module):
    """x / rms(x) * weight, in float32 (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return nn.LayerNorm(config.width, config.norm_eps, bias=bool(config.bias))


def rotary_table(positions: Tensor, features: int, base: float) -> tuple[Tensor, Tensor]:
    """cos and sin of position × frequency, each (T, features / 2), float32 (Su et al. 2021, equation 15)."""
    frequencies = base ** (-torch.arange(0, features, 2, device=positions.device, dtype=torch.float32) / features)
    angles = positions.float()[:, None] * frequencies
    return angles.cos(), angles.sin()


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn each pair (x[i], x[i + E/2]) of `x` (B, heads, T, E) by its position's angle."""
    cos, sin = (t.to(x.dtype) for t in table)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Attention(nn.Module):
    """Causal self-attention; query heads share key and value heads in groups (Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_width = config.width // config.heads
        self.dropout = config.dropout
        inner, kv = config.width, config.kv_heads * self.head_width
        bias = bool(config.bias)
        self.q = nn.Linear(config.width, inner, bias=bias)
        self.k = nn.Linear(config.width, kv, bias=bias)
        self.v = nn.Linear(config.width, kv, bias=bias)
        self.o = nn.Linear(inner, config.width, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        # the number of heads follows from the projection's width, which may be a shard of the whole
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_width)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        if rotary is not None:
            q, k = rotate(q, rotary), rotate(k, rotary)
        dropout = self.dropout if self.training else 0.0
        grouped = q.shape[1] != k.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(nn.Module):
    """down(silu(gate x) * up x): SwiGLU (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.gate = nn.Linear(config.width, config.hidden, bias=bias)
        self.up = nn.Linear(config.width, config.hidden, bias=bias)
        self.down = nn.Linear(config.hidden, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class MLP(nn.Module):
    """down(gelu(up x)), with GPT-2's tanh form of GELU."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.width, config.hidden, bias=bool(config.bias))
        self.down = nn.Linear(config.hidden, config.width, bias=bool(config.bias))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    """x + attention(norm(x)), then the same with the MLP."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.mlp_norm = build_norm(config)
        self.mlp = GatedMLP(config) if config.mlp == "swiglu" else MLP(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.dropout(self.attention(self.attention_norm(x), rotary))
        return x + self.dropout(self.mlp(self.mlp_norm(x)))


class Embedding(nn.Module):
    """Token ids to features, with learned positions added where the model has them."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.context, config.width) if learned else None
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.dropout(x)


class Decoder(nn.Module):
    """Token ids (B, T) int64 to logits (B, T, V); `config` is resolved."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.norm and config.vocab_size, "resolve() the configuration first"
        self.config = config
        self.embed: nn.Module | None = Embedding(config)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm: nn.Module | None = build_norm(config)
        self.head: nn.Module | None = nn.Linear(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Let output and embedding be one matrix, where configured; to be repeated after they are replaced."""
        if self.config.tied and isinstance(self.embed, Embedding) and self.head is not None:
            self.head.weight = self.embed.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        """From ids, or the previous stage's features (B, T, D), to logits, or features for the next stage."""
        if self.embed is not None:
            x = self.embed(x)
        rotary = None
        if self.config.positions == "rope":
            positions = torch.arange(x.shape[1], device=x.device)
            rotary = rotary_table(positions, self.config.width // self.config.heads, self.config.rope_base)
        for block in self.blocks.values():
            x = block(x, rotary)
        x = self.norm(x) if self.norm is not None else x
        return self.head(x) if self.head is not None else x


def summed_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in nats, summed over the targets (B, T) that are not IGNORED, of logits (B, T, V).

    Float32 or better whatever the logits are: a bfloat16 log-sum-exp loses the second digit.
    """
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")


def flops_per_token(model: Decoder, seq_len: int) -> float:
    """Operations of one token, forward and backward: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    N counts the parameters that multiply: all but the embedding tables, and the output matrix also where
    it is tied. Recomputation is not counted, and attention as if it were not causal, as is the custom.
    """
    config = model.config
    multiplied = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed."))
    if config.tied:
        multiplied += config.vocab_size * config.width
    return 6.0 * multiplied + 12.0 * config.layers * config.width * seq_len
