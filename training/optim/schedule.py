"""Learning-rate schedules: linear warm-up, then a cosine, a line, a constant, or stable and decay (WSD)."""

import math

from training.optim.optim_config import OptimConfig


def learning_rate(step: int, config: OptimConfig) -> float:
    """Learning rate of step 0, 1, …: linear warm-up to `lr`, then as `config.schedule` says, at last `final_lr`.

    The cosine is that of Loshchilov & Hutter 2017 ("SGDR", equation 5) without restarts; WSD is of Hu et al. 2024
    (MiniCPM, section 4), its decay of Hägele et al. 2024 (section 3).

    >>> config = OptimConfig(steps=10, lr=1.0, min_lr=0.1, warmup_steps=2)
    >>> [round(learning_rate(step, config), 3) for step in (0, 1, 2, 9)]
    [0.5, 1.0, 0.966, 0.1]
    """
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    if step < (start := decay_start(config)):
        return config.lr
    progress = min(1.0, (step + 1 - start) / max(1, config.last_decay_step - start))
    return config.final_lr + (config.lr - config.final_lr) * _share(progress, config)


def decay_start(config: OptimConfig) -> float:
    """Steps after which the learning rate begins to fall; infinite if it never does."""
    if config.schedule == "constant" or (config.schedule == "wsd" and not config.cooldown_steps):
        return math.inf
    return config.last_decay_step - config.cooldown_steps if config.schedule == "wsd" else config.warmup_steps


def describe_late_decay(config: OptimConfig) -> str:
    """Say that the run ends before its decay does, and at which rate; nothing where the decay fits, or there is none.

    >>> describe_late_decay(OptimConfig(steps=12, lr=1e-2, warmup_steps=2, decay_steps=1000))
    "the learning rate's decay ends at step 1000, beyond this run's 12 steps: that of step 12 is 1.00e-02, not 1.00e-04"
    """
    end, last = config.last_decay_step, config.steps
    if decay_start(config) == math.inf or end <= last or config.lr == config.final_lr:
        return ""
    return (
        f"the learning rate's decay ends at step {end}, beyond this run's {last} steps: that of step {last} is "
        f"{learning_rate(last - 1, config):.2e}, not {config.final_lr:.2e}"
    )


def _share(progress: float, config: OptimConfig) -> float:
    """The share of `lr` - `final_lr` that is left after a share of the decay: 1 at its start, 0 at its end."""
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * progress))
    return 1 - (math.sqrt(progress) if config.cooldown_shape == "1-sqrt" else progress)
