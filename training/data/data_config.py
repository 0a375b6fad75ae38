"""DataConfig: the token shards to read, and the size of a step."""

import math
import re
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Literal

from gristmill.config import Range
from gristmill.engine.options import parse_size
from gristmill.errors import require
from gristmill.io.shard_cache import CacheOptions
from gristmill.storage.files import reject_remote, resolved

OrderKind = Literal["keyed", "randperm"]
PACKING_VERSION = 2  # of the plan, and of which tokens of a row are targets: part of the identity of runs
_RAMP = re.compile(r"(\d{1,10}):(\d{1,18})")
_DOCUMENT = re.compile(r"(.+)@(\d{1,18})")
_MOST = 2**31 - 1  # of tokens in a sequence, and of sequences in a batch


@dataclass(frozen=True)
class DataConfig:
    """The token shards to read, and the size of a step."""

    RANGES: ClassVar[dict[str, Range]] = {
        "seq_len": Range(1, _MOST),
        "batch_size": Range(1, _MOST),
        "skip": Range(0, _MOST),
    }

    train: Path | tuple[Path, ...]
    """Folder of token shards to train on, or several with the same tokenizer."""
    holdout: Path
    """Folder of token shards to evaluate on."""
    holdouts: dict[str, Path] = field(default_factory=dict)
    """More folders of token shards to evaluate on, each reported by its name."""
    weights: tuple[float, ...] = ()
    """With several folders to train on: the weight of each, its share of the tokens; by default in proportion to their
    tokens. A folder with fewer tokens than its weight asks for is read again, in whole epochs."""
    seq_len: int = 256
    """Tokens per sequence."""
    batch_size: int = 32
    """Sequences per step, over all data-parallel ranks and micro-batches (the global batch size)."""
    batch_ramp: tuple[str, ...] = ()
    """Smaller batches at the start, as SIZE:TOKENS: this many sequences per step until the run has read this many
    tokens. 8:1000000 16:3000000 means 8 until one million tokens, 16 until three million, then batch_size. The learning
    rate depends on the step, not on its size."""
    skip: int = 0
    """With branch_from: steps of data that are left out, such as those in which the loss went up. The branch reads on
    after as many sequences as it reads in so many steps."""
    skip_documents: tuple[str, ...] = ()
    """Documents to learn nothing from, as SHARD@NUMBER, which gristmill rewind shows: no token of them is a target. In
    a branch, those that made the loss of its run go up."""
    verify: Literal["checksum", "size"] = "checksum"
    """How to check the token shards. checksum: the ranks compare the SHA-256 of all files, in a thread during the first
    steps, and the first checkpoint waits for it. size: only what is always checked, the manifest, sizes and headers at
    the start, and every id that is read."""
    cache: Path | None = None
    """For token shards in a bucket: folder of each machine for copies of what was read, shared by its processes and
    kept for the next start; by default in the folder for temporary files."""
    cache_size: str = ""
    """Disk space for these copies, such as 200GiB; by default half of what is free. What does not fit is fetched each
    time it is read."""
    order: OrderKind = "keyed"
    """Order of the sequences in an epoch. keyed: a permutation computed index by index, which takes no memory;
    randperm: torch.randperm, which takes 8 bytes per sequence in every process. Use randperm to resume a run of a
    release without this option."""
    mask_documents: bool = False
    """Documents in one sequence do not see each other, and positions restart with each, in training and evaluation. The
    first document of a sequence starts at position 0 even if it was cut. Where documents start is read from the .idx
    files."""
    eod_mask_loss: bool = False
    """No loss on the first token of a document, which would be predicted from the end of another document (Megatron's
    option of this name). mask_documents implies it."""
    packing: Literal["windows", "best-fit"] = "windows"
    """How sequences are made. windows: consecutive tokens, so most sequences begin and end within a document; best-fit:
    whole documents, packed with little padding, which the loss ignores; only documents longer than a sequence are cut
    (Ding et al. 2024). The packing plan is kept in out_dir."""

    @property
    def train_folders(self) -> tuple[Path, ...]:
        """Return the folders to train on."""
        return self.train if isinstance(self.train, tuple) else (self.train,)

    @property
    def is_packed(self) -> bool:
        """Return whether training sequences are packed documents."""
        return self.packing == "best-fit"

    @property
    def ignores_firsts(self) -> bool:
        """Return whether the first token of a document is no target."""
        return self.mask_documents or self.eod_mask_loss

    @property
    def ramp(self) -> list[tuple[int, int]]:
        """`batch_ramp` as numbers: sequences per step, and the tokens read until which they hold."""
        return [(int(match[1]), int(match[2])) for each in self.batch_ramp if (match := _RAMP.fullmatch(each))]

    def of_documents(self) -> dict[str, Any]:
        """Return the options of documents that are not at their defaults, by name: runs from before them have none.

        With a packing its version, too: another one has other targets.
        """
        masked = {"data.mask_documents": True} if self.mask_documents else {}
        packed = {"data.packing": self.packing, "data.packing_version": PACKING_VERSION} if self.is_packed else {}
        eod = {"data.eod_mask_loss": True} if self.eod_mask_loss and not self.mask_documents else {}
        skipped = {"data.skip_documents": sorted(self.skip_documents)} if self.skip_documents else {}
        return {**masked, **eod, **packed, **skipped}

    @property
    def cache_options(self) -> CacheOptions:
        """Return the options of copies of token shards. Raises UsageError for a size that is none."""
        size = parse_size(self.cache_size, "data.cache_size") if self.cache_size else 0
        return CacheOptions(self.cache, size)

    def check(self) -> None:
        """Raise UsageError for a holdout without a name, weights that do not fit the folders, or an order of no mix."""
        folders = len(self.train_folders)
        reject_remote(*filter(None, [self.cache]), option="data.cache")
        assert self.cache_options.size >= 0  # it is a size
        require(
            all(name.strip() for name in self.holdouts),
            "data.holdouts has a folder with an empty name; expected a name and a folder each; is a variable of your "
            f"shell not set? try --data.holdouts other {next(iter(self.holdouts.values()), '')}",
        )
        ends = [tokens for _, tokens in self.ramp]
        require(
            len(ends) == len(self.batch_ramp) and all(size for size, _ in self.ramp) and ends == sorted(set(ends)),
            f"data.batch_ramp is {' '.join(self.batch_ramp)}; expected SIZE:TOKENS, at growing numbers of tokens; try "
            "--data.batch_ramp 8:1000000 16:3000000",
        )
        for document in self.skip_documents:
            require(
                _DOCUMENT.fullmatch(document) is not None,
                f"data.skip_documents has {document}; expected SHARD@NUMBER, such as tokens_00000@81, which gristmill "
                "rewind shows",
            )
        require(
            not self.skip_documents or not self.is_packed,
            f"data.skip_documents with data.packing {self.packing}: rows were packed with these documents; try "
            "--data.packing window, or leave them out of the corpus",
        )
        require(folders > 0, "data.train names no folder; expected one of token shards, or several")
        twice = [path for path, count in Counter(resolved(path) for path in self.train_folders).items() if count > 1]
        require(
            not twice,
            f"data.train names {''.join(map(str, twice[:1]))} twice; expected each once: a weight in data.weights "
            "has it read more often",
        )
        require(
            len(self.weights) in (0, folders),
            f"data.weights are {len(self.weights)}, and data.train names {folders} folders; expected a weight for each",
        )
        require(
            all(weight > 0 and math.isfinite(weight) for weight in self.weights),
            f"data.weights are {' '.join(map(str, self.weights))}; expected finite numbers above 0; leave folders that "
            "should not be read out of data.train",
        )
        require(
            folders == 1 or self.order == "keyed",
            f"data.order {self.order} is for a single folder, but data.train names {folders}; try --data.order keyed",
        )
