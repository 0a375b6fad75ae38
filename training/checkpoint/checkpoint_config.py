"""CheckpointConfig: the options of checkpoints."""

from dataclasses import dataclass
from pathlib import Path
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
    folder: Path | None = None
    """For an out_dir in a bucket: folder of each machine for the working copy, with one checkpoint at a time; by
    default in the folder for temporary files."""
    async_save: bool = True
    """Write checkpoints in a background thread, from a copy in CPU memory, while training continues. Has no effect
    if memory.optimizer or memory.parameters is disk: a copy would not fit in memory."""
