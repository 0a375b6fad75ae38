"""Command: pre-train a decoder, also with `torchrun --nproc_per_node=2 -m gristmill_cli.train …` from any folder."""

import sys
from pathlib import Path

if __name__ == "__main__":  # with -m the current folder comes first, where `training` may be a folder of the user
    sys.path[0] = str(Path(__file__).resolve().parents[1])

from training.train import main

__all__ = ["main"]

if __name__ == "__main__":
    main()
