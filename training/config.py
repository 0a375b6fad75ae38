"""What a training run is configured by: dataclasses, one a section."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from pipeline.errors import UsageError


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
    mlp: Literal["swiglu", "gelu"] | None = None
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
        _require(min(sizes) > 0, f"model sizes are {sizes}; wanted all of them above 0")
        _require(
            self.width % self.heads == 0,
            f"model.width {self.width} is not divisible by model.heads {self.heads}; try --model.width "
            f"{-(-self.width // self.heads) * self.heads}",
        )
        _require(
            self.heads % self.kv_heads == 0,
            f"model.heads {self.heads} is not divisible by model.kv_heads {self.kv_heads}; try one of its divisors",
        )
        _require(
            self.positions != "rope" or self.width // self.heads % 2 == 0,
            f"rotary positions turn pairs of features, a head has {self.width // self.heads}; try other --model.heads",
        )
        _require(
            self.vocab_size >= vocab_size,
            f"model.vocab_size {self.vocab_size} is below the tokenizer's {vocab_size}; raise it, or leave it at 0",
        )
        _require(
            self.context >= seq_len,
            f"model.context {self.context} is below data.seq_len {seq_len}; raise it, or leave it at 0",
        )
        _require(0 <= self.dropout < 1, f"model.dropout is {self.dropout}; wanted 0 <= dropout < 1")


PRESETS: dict[str, dict[str, Any]] = {
    # Touvron et al. 2023, "LLaMA", section 2.2
    "llama": {"norm": "rms", "positions": "rope", "mlp": "swiglu", "bias": False, "tied": False},
    # Radford et al. 2019, "Language Models are Unsupervised Multitask Learners", section 2.3
    "gpt2": {"norm": "layer", "positions": "learned", "mlp": "gelu", "bias": True, "tied": True},
}


@dataclass(frozen=True)
class DataConfig:
    """What is read, and how much of it in a step."""

    train: Path
    """Folder of token shards to train on."""
    holdout: Path
    """Folder of token shards to evaluate on."""
    seq_len: int = 256
    """Tokens in a sequence."""
    batch_size: int = 32
    """Sequences in a step, over all processes."""
    micro_batch: int = 0
    """Sequences a process passes through the model at once; 0: its whole share. Smaller needs less memory."""


@dataclass(frozen=True)
class OptimConfig:
    """AdamW and its learning rate: linear warm-up, then half a cosine."""

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd: plain, without momentum or decay; its updates show every error in a gradient's scale."""
    steps: int = 1000
    lr: float = 1e-3
    """The highest learning rate, at the end of the warm-up."""
    min_lr: float = 1e-4
    """The learning rate of the last step."""
    warmup_steps: int = 50
    weight_decay: float = 0.1
    """Applied to matrices only."""
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8
    clip: float = 1.0
    """Longest gradient, by its 2-norm over all parameters; 0: any length."""


@dataclass(frozen=True)
class EvalConfig:
    """How often the holdout is measured, and what text is drawn then."""

    every: int = 100
    """Steps between evaluations; 0: only after the last step."""
    sequences: int = 0
    """Holdout sequences to measure, from the first; 0: all."""
    sample_tokens: int = 64
    """Tokens of text to draw; 0: none."""
    prompt: str = ""
    """What the text begins with; empty: the start of a document."""
    temperature: float = 0.8
    """0: always the most probable token."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is written down."""

    every: int = 200
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """How many of the latest to keep."""


@dataclass(frozen=True)
class MetricsConfig:
    """What is told of the run, and where."""

    log_every: int = 10
    """Steps between lines in the terminal. metrics.jsonl and TensorBoard receive every step."""
    tensorboard: bool = True
    peak_tflops: float = 0.0
    """One device's peak in 10^12 operations a second, for the model FLOPs utilisation; 0: from a table of GPUs."""


@dataclass(frozen=True)
class TrainConfig:
    """A training run."""

    out_dir: Path
    """Where checkpoints and metrics go. If it holds this run's checkpoint, training goes on from there."""
    data: DataConfig
    model: ModelConfig = field(default_factory=ModelConfig)
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval: EvalConfig = field(default_factory=EvalConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    seed: int = 1
    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: the matrix products in bfloat16; parameters, norms' sums and the loss stay in float32."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    timeout: float = 60.0
    """Seconds one process waits for another before it gives up."""

    def check(self) -> None:
        """Raise UsageError for a value that no run could have."""
        optim, data = self.optim, self.data
        above_zero = {
            "optim.steps": optim.steps,
            "optim.lr": optim.lr,
            "data.seq_len": data.seq_len,
            "data.batch_size": data.batch_size,
            "checkpoint.keep": self.checkpoint.keep,
            "metrics.log_every": self.metrics.log_every,
            "timeout": self.timeout,
        }
        not_below_zero = {
            "optim.min_lr": optim.min_lr,
            "optim.warmup_steps": optim.warmup_steps,
            "optim.weight_decay": optim.weight_decay,
            "optim.clip": optim.clip,
            "data.micro_batch": data.micro_batch,
            "eval.every": self.eval.every,
            "eval.sequences": self.eval.sequences,
            "eval.sample_tokens": self.eval.sample_tokens,
            "eval.temperature": self.eval.temperature,
            "checkpoint.every": self.checkpoint.every,
        }
        for key, value in above_zero.items():
            _require(value > 0, f"{key} is {value}; wanted more than 0")
        for key, value in not_below_zero.items():
            _require(value >= 0, f"{key} is {value}; wanted 0 or more")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UsageError(message)
