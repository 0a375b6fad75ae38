"""CheckpointConfig: the options of checkpoints."""

from dataclasses import dataclass
from typing import ClassVar

from gristmill.config import INT64, Range


@dataclass(frozen=True)
class CheckpointConfig:
    """Options of checkpoints: the interval, the number kept, asynchronous saving."""

    RANGES: ClassVar[dict[str, Range]] = {
        "every": Range(0, INT64), "keep": Range(1, INT64), "keep_every": Range(0, INT64),
    }  # fmt: skip

    every: int = 200
    """Steps between checkpoints; 0: only after the last step."""
    keep: int = 2
    """Number of latest checkpoints to keep."""
    keep_every: int = 0
    """Also keep every checkpoint at a multiple of this many steps, for ever; 0: none."""
    async_save: bool = True
    """Write checkpoints in a background thread, from a copy in CPU memory, while training continues. Has no effect
    if memory.optimizer or memory.parameters is disk: a copy would not fit in memory."""
