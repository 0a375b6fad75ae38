"""Stored weights: which values of a checkpoint's parameters are read, the weights or their average."""

from collections.abc import Callable
from pathlib import Path

from gristmill.errors import UsageError
from training.checkpoint.shard_storage import optimizer_key, parameter_key, stored_dtypes
from training.optim.weight_average import AVERAGE


def weight_keys(checkpoint: Path, ema: bool) -> Callable[[str], str]:
    """Return what gives a parameter's key by its name: that of its weights or, with `ema`, of their average.

    Raises UsageError for a checkpoint without an average.
    """
    if not ema:
        return parameter_key
    if not any(key.endswith(f".{AVERAGE}") for key in stored_dtypes(checkpoint)):
        raise UsageError(
            f"{checkpoint} holds no average of the weights, which --ema asks for: its run was without "
            "optim.ema_decay; try without --ema"
        )
    return lambda name: optimizer_key(name, AVERAGE)
