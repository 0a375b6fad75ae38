"""The decoder's configuration: its sizes, and of which parts it is made."""

from dataclasses import dataclass, replace
from typing import Any, Literal

from gristmill.errors import require


@dataclass(frozen=True)
class ModelConfig:
    """The decoder: its sizes, and of which parts it is made."""

    preset: Literal["llama", "gpt2"] = "llama"
    """Names the parts below that are left at None."""
    layers: int = 4
    width: int = 256
    """Features of the residual stream."""
    heads: int = 4
    """Query heads of width / heads features each."""
    kv_heads: int = 0
    """Key and value heads, each shared by heads / kv_heads query heads; 0: as many as heads."""
    hidden: int = 0
    """Features inside the MLP; 0: 4 x width, or 8/3 x width to the next multiple of 32 where it is gated."""
    vocab_size: int = 0
    """0: the tokenizer's."""
    context: int = 0
    """The longest sequence, where positions are learned; 0: data.seq_len."""
    norm: Literal["rms", "layer"] | None = None
    positions: Literal["rope", "learned"] | None = None
    mlp: Literal["swiglu", "gelu", "gelu-exact"] | None = None
    """gelu: by GPT-2's tanh, gelu-exact: by the error function, which takes half the time on a CPU."""
    bias: bool | None = None
    """Biases in the linear layers."""
    tied: bool | None = None
    """One matrix for the embedding and the output."""
    dropout: float = 0.0
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    init_std: float = 0.02

    def resolve(self, vocab_size: int, seq_len: int) -> "ModelConfig":
        """The same with nothing left open: no None, no 0; UsageError where the sizes do not fit together."""
        parts = {key: value for key, value in PRESETS[self.preset].items() if getattr(self, key) is None}
        full = replace(self, **parts)
        gated = -(-8 * self.width // 3 // 32) * 32
        full = replace(
            full,
            kv_heads=self.kv_heads or self.heads,
            hidden=self.hidden or (gated if full.mlp == "swiglu" else 4 * self.width),
            vocab_size=self.vocab_size or vocab_size,
            context=self.context or seq_len,
        )
        full.check(vocab_size, seq_len)
        return full

    def check(self, vocab_size: int, seq_len: int) -> None:
        """Raise UsageError unless a resolved configuration can be built and can read such sequences."""
        sizes = (self.layers, self.width, self.heads, self.kv_heads, self.hidden, self.vocab_size, self.context)
        require(min(sizes) > 0, f"model sizes are {sizes}; wanted all of them above 0")
        require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not divisible by model.heads {self.heads}; try --model.width "
            f"{-(-self.width // self.heads) * self.heads}",
        )
        require(
            self.heads % self.kv_heads == 0,
            f"model.heads {self.heads} is not divisible by model.kv_heads {self.kv_heads}; try one of its divisors",
        )
        require(
            self.positions != "rope" or self.width // self.heads % 2 == 0,
            f"rotary positions turn pairs of features, a head has {self.width // self.heads}; try other --model.heads",
        )
        require(
            self.vocab_size >= vocab_size,
            f"model.vocab_size {self.vocab_size} is below the tokenizer's {vocab_size}; raise it, or leave it at 0",
        )
        require(
            self.context >= seq_len,
            f"model.context {self.context} is below data.seq_len {seq_len}; raise it, or leave it at 0",
        )
        require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}; wanted 0 <= dropout < 1")


PRESETS: dict[str, dict[str, Any]] = {
    # Touvron et al. 2023, "LLaMA", section 2.2
    "llama": {"norm": "rms", "positions": "rope", "mlp": "swiglu", "bias": False, "tied": False},
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tied": True},
}
