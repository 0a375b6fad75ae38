"""Decoder-only transformer, configured to be Llama or GPT-2; plain code for one process.

Shapes: B sequences, T tokens, D = width, H heads of E = D / H features, V = vocabulary size. Parallelism is applied to
it from outside (training/parallel): by the names of its parameters, of which each has a row in the placement table, and
by replacing some of its modules.

Dropout is counter-based: the mask depends on sequence, layer and element, not on RNG state. Sequence ids are unique
over the run, so a resumed run, or one with another layout, drops the same elements.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.kernels.cross_entropy import linear_cross_entropy
from training.kernels.dispatch import embedding, fused_linears, gelu, layer_norm, linear, rms_norm, swiglu
from training.kernels.keyed_random import key_from_name, keyed_bernoulli, splitmix64
from training.kernels.precision import accumulation_dtype
from training.kernels.rotary import apply_rotary, rotary_table
from training.model.model_config import ModelConfig


class Linear(nn.Linear):
    """Linear layer x W^T + bias."""

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class RMSNorm(nn.Module):
    """RMSNorm over the last dimension (Zhang & Sennrich 2019, equation 4)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class LayerNorm(nn.LayerNorm):
    """LayerNorm over the last dimension (Ba et al. 2016, equation 4)."""

    def forward(self, x: Tensor) -> Tensor:
        return layer_norm(x, self.weight, self.bias, self.eps)


def build_norm(config: ModelConfig) -> nn.Module:
    """RMSNorm or LayerNorm over D features."""
    if config.norm == "rms":
        return RMSNorm(config.width, config.norm_eps)
    return LayerNorm(config.width, config.norm_eps, bias=bool(config.bias))


class Dropout(nn.Module):
    """Zero elements with probability `p` and scale the others by 1 / (1 - p) (Srivastava et al. 2014)."""

    def __init__(self, p: float, name: str) -> None:
        """`name`: the layer's name, unique in the model; its masks are keyed by it."""
        super().__init__()
        # a tensor: torch.compile would compile every layer anew for its number, and give up at the eighth
        self.p, self.key = p, torch.tensor(key_from_name(name), device="cpu")

    def forward(self, x: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Drop elements of `x` (B, N, …); `sample_ids` (B,) int64: the ids of its sequences, unique over the run."""
        if not self.training or self.p == 0.0:
            return x
        assert sample_ids is not None, "dropout needs sample_ids in training"
        keys = splitmix64(sample_ids, self.key).view(-1, *[1] * (x.ndim - 1))
        return x.masked_fill(keyed_bernoulli(self.p, keys, self.index(x)), 0.0) / (1.0 - self.p)

    def index(self, x: Tensor) -> Tensor:
        """Numbers of the elements of a sequence, (N, …) int64, which are all that its masks depend on."""
        return torch.arange(x[0].numel(), device=x.device).view(x.shape[1:])


class Attention(nn.Module):
    """Causal self-attention with grouped-query heads (Vaswani et al. 2017; Ainslie et al. 2023)."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.head_dim = config.width // config.heads
        self.dropout = Dropout(config.dropout, f"{name}.attention")
        kv = config.kv_heads * self.head_dim
        bias = bool(config.bias)
        self.q = Linear(config.width, config.width, bias=bias)
        self.k = Linear(config.width, kv, bias=bias)
        self.v = Linear(config.width, kv, bias=bias)
        self.o = Linear(config.width, config.width, bias=bias)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, sample_ids: Tensor | None) -> Tensor:
        """(B, T, D) to (B, T, D); `rotary` is the pair cos, sin of `rotary_table`, `sample_ids` (B,) int64."""
        projected = fused_linears(x, (self.q, self.k, self.v))
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in projected)
        if rotary is not None:
            q, k = apply_rotary(q, rotary), apply_rotary(k, rotary)
        if self.training and self.dropout.p:
            mixed = self._attention_with_dropout(q, k, v, sample_ids)
        else:
            grouped = q.shape[1] != k.shape[1]
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o(mixed.transpose(1, 2).flatten(-2))

    def _attention_with_dropout(self, q: Tensor, k: Tensor, v: Tensor, sample_ids: Tensor | None) -> Tensor:
        """Attention with all (T, T) weights in memory: torch's fused kernel has no counter-based dropout.

        `q` (B, H, T, E); `k` and `v` (B, kv_heads, T, E).
        """
        k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * self.head_dim**-0.5
        future = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(-1, dtype=accumulation_dtype(q.dtype))
        return self.dropout(weights, sample_ids).to(v.dtype) @ v


class GatedMLP(nn.Module):
    """SwiGLU MLP: down(silu(gate x) * up x) (Shazeer 2020, "GLU variants", equation 6)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = bool(config.bias)
        self.gate = Linear(config.width, config.ffn_width, bias=bias)
        self.up = Linear(config.width, config.ffn_width, bias=bias)
        self.down = Linear(config.ffn_width, config.width, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(swiglu(*fused_linears(x, (self.gate, self.up))))


class MLP(nn.Module):
    """GELU MLP: down(gelu(up x)), with GPT-2's tanh approximation or exact (Hendrycks & Gimpel 2016, section 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, config.ffn_width, bias=bool(config.bias))
        self.down = Linear(config.ffn_width, config.width, bias=bool(config.bias))
        self.approximate = "none" if config.mlp == "gelu-exact" else "tanh"

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x), self.approximate))


class Block(nn.Module):
    """Pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, name: str) -> None:
        super().__init__()
        self.attention_norm = build_norm(config)
        self.attention = Attention(config, name)
        self.attention_dropout = Dropout(config.dropout, f"{name}.attention.out")
        self.mlp_norm = build_norm(config)
        self.mlp = GatedMLP(config) if config.mlp == "swiglu" else MLP(config)
        self.mlp_dropout = Dropout(config.dropout, f"{name}.mlp.out")

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor] | None, sample_ids: Tensor | None) -> Tensor:
        x = x + self.attention_dropout(self.attention(self.attention_norm(x), rotary, sample_ids), sample_ids)
        return x + self.mlp_dropout(self.mlp(self.mlp_norm(x)), sample_ids)


class TokenEmbedding(nn.Embedding):
    """Embedding of token ids (B, T): (B, T, D)."""

    def forward(self, ids: Tensor) -> Tensor:
        return embedding(ids, self.weight)


class PositionEmbedding(nn.Embedding):
    """Learned embedding of the positions of features (B, T, D): (T, D)."""

    def forward(self, x: Tensor) -> Tensor:
        return embedding(self.positions(x), self.weight)

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)


class Embedding(nn.Module):
    """Token embedding, plus learned position embeddings if the model has them; ids (B, T) to (B, T, D)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.tokens = TokenEmbedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.positions = PositionEmbedding(config.context, config.width) if learned else None
        self.dropout = Dropout(config.dropout, "embed")

    def forward(self, ids: Tensor, sample_ids: Tensor | None) -> Tensor:
        x = self.tokens(ids)
        if self.positions is not None:
            x = x + self.positions(x)
        return self.dropout(x, sample_ids)


class Rotary(nn.Module):
    """The pair cos, sin of the positions of features (B, T, D), each (T, E); None for a model without rotary ones."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.used = config.positions == "rope"
        self.head_dim, self.base = config.width // config.heads, config.rope_base

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor] | None:
        if not self.used:
            return None
        return rotary_table(self.positions(x), self.head_dim, self.base, accumulation_dtype(x.dtype))

    def positions(self, x: Tensor) -> Tensor:
        """Positions of the tokens in their sequence, (T,) int64."""
        return torch.arange(x.shape[1], device=x.device)


class Head(nn.Linear):
    """Output projection: features (B, T, D) to logits (B, T, V), or fused with the loss."""

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        """Summed cross-entropy in nats, (1,), from features (B, T, D) and targets (B, T)."""
        return linear_cross_entropy(x, self.weight, targets)

    def forward(self, x: Tensor, targets: Tensor | None = None) -> Tensor:
        return super().forward(x) if targets is None else self.loss(x, targets)


class Decoder(nn.Module):
    """Decoder-only transformer: token ids (B, T) int64 to logits (B, T, V) or to the loss."""

    def __init__(self, config: ModelConfig) -> None:
        """Build all layers; `config` must be resolved (see `ModelConfig.resolve`)."""
        super().__init__()
        assert config.norm and config.vocab_size, "resolve() the configuration first"
        self.config = config
        self.embed = Embedding(config)
        self.rotary = Rotary(config)
        self.blocks = nn.ModuleDict({str(i): Block(config, f"blocks.{i}") for i in range(config.layers)})
        self.norm = build_norm(config)
        self.head = Head(config.width, config.vocab_size, bias=False)
        self.tie()

    def tie(self) -> None:
        """Share the embedding's matrix with the output, if configured; call again after either was replaced."""
        if self.config.tied:
            self.head.weight = self.embed.tokens.weight

    def forward(self, ids: Tensor, targets: Tensor | None = None, sample_ids: Tensor | None = None) -> Tensor:
        """Return logits (B, T, V); with `targets` (B, T), the summed loss in nats, (1,), instead.

        `sample_ids` (B,) int64 are ids of the sequences, unique over the run; dropout masks depend on them.
        """
        x = self.embed(ids, sample_ids)
        rotary = self.rotary(x)
        for block in self.blocks.values():
            x = block(x, rotary, sample_ids)
        return self.head(self.norm(x), targets)


def meta_decoder(config: ModelConfig) -> Decoder:
    """Build the whole decoder on the meta device: names and shapes, without memory. `config` must be resolved."""
    with torch.device("meta"):
        return Decoder(config)


def flops_per_token(model: Decoder, seq_len: int) -> float:
    """Model FLOPs per token, forward and backward: 6 N + 12 L D T (Chowdhery et al. 2022, appendix B).

    N counts the parameters used in matrix products: all but the embeddings; a tied output matrix counts. As usual,
    recomputation is not counted, and attention is counted as if it were not causal. `model` must be unsharded; its
    parameters may be on the meta device.
    """
    config = model.config
    matrices = sum(p.numel() for name, p in model.named_parameters() if not name.startswith("embed."))
    if config.tied:
        matrices += config.vocab_size * config.width
    return 6.0 * matrices + 12.0 * config.layers * config.width * seq_len
