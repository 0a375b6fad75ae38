"""OptimConfig: the optimizer's options, and the learning-rate schedule that they define."""

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from gristmill.config import INT64, Range


@dataclass(frozen=True)
class OptimConfig:
    """AdamW with linear warm-up and cosine decay of the learning rate, and gradient clipping."""

    RENAMED: ClassVar[dict[str, str]] = {"clip": "max_grad_norm"}
    RANGES: ClassVar[dict[str, Range]] = {
        "steps": Range(1, INT64),
        **dict.fromkeys(("warmup_steps", "decay_steps"), Range(0, INT64)),
        **dict.fromkeys(("lr", "eps"), Range(0, above=True)),
        **dict.fromkeys(("min_lr", "weight_decay", "max_grad_norm"), Range(0)),
        "betas": Range(0, math.nextafter(1, 0)),
    }

    name: Literal["adamw", "sgd"] = "adamw"
    """sgd: no momentum, no weight decay; for tests, as AdamW hides errors in a gradient's scale."""
    steps: int = 1000
    """Training steps of the whole run, including those before a resume."""
    lr: float = 1e-3
    """Peak learning rate, reached at the end of the warm-up."""
    min_lr: float = 1e-4
    """Learning rate at the end of the decay."""
    warmup_steps: int = 50
    """Steps of the linear warm-up."""
    decay_steps: int = 0
    """Step at which the learning rate has decayed to min_lr, where it stays; 0: optim.steps. A run that is made longer
    needs it: that of the run before keeps its learning rate, another one changes it from the next step on."""
    weight_decay: float = 0.1
    """Weight decay of matrices; biases and norms do not decay."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of AdamW's two moments."""
    eps: float = 1e-8
    """Epsilon of AdamW's denominator."""
    max_grad_norm: float = 1.0
    """Maximum gradient norm: the 2-norm over all parameters; 0 disables clipping."""

    @property
    def last_decay_step(self) -> int:
        """`decay_steps`, or `steps` where that is 0."""
        return self.decay_steps or self.steps


def learning_rate(step: int, config: OptimConfig) -> float:
    """Learning rate of step 0, 1, …: linear warm-up to `lr`, then half a cosine down to `min_lr` at `decay_steps`.

    The cosine is that of Loshchilov & Hutter 2017 ("SGDR", equation 5) without restarts.

    >>> config = OptimConfig(steps=10, lr=1.0, min_lr=0.1, warmup_steps=2)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 0.966, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(1, config.last_decay_step - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
