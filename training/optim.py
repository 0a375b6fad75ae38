"""AdamW, its parameter groups, and the learning rate as a function of the step."""

import math

import torch
from torch import Tensor, nn

from training.config import OptimConfig


def build_optimizer(model: nn.Module, config: OptimConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019, algorithm 2) that decays matrices, and neither norms nor biases."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=config.betas, eps=config.eps, fused=True)


def learning_rate(step: int, config: OptimConfig) -> float:
    """The learning rate of step 0, 1, … steps - 1.

    >>> config = OptimConfig(steps=10, lr=1.0, min_lr=0.1, warmup_steps=2)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 0.966, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    progress = (step + 1 - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate


def clip_gradients(model: nn.Module, longest: float) -> Tensor:
    """Scale the gradients to a 2-norm of `longest` at most (0: leave them); return the norm they had, 0-d."""
    return nn.utils.clip_grad_norm_(model.parameters(), longest or math.inf)
