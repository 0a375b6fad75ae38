"""The configuration of a run: what `pipeline.toml` may say. A section is a stage."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dedup.candidates.input_shards import Scope
from dedup.minhash.hash_families import Hash
from dedup.minhash.matching_form import Unit
from dedup.removal.verify import Measure
from gristmill.engine.stage import RunOptions


@dataclass(frozen=True)
class Normalize:
    """[normalize]"""

    ftfy: bool = False
    """Repair mojibake with ftfy before NFC."""


@dataclass(frozen=True)
class Filter:
    """[filter]"""

    threshold: int = 200
    """Fewest characters, in the matching form, of a document that is kept."""


@dataclass(frozen=True)
class Dedup:
    """[dedup]"""

    hash: Hash = "xxh32"
    """Family of the signatures; sha1 gives SlimPajama's own values."""
    unit: Unit = "character"
    """What a shingle is made of: character, or word."""
    width: int = 13
    """Units of a shingle."""
    permutations: int = 128
    """Slots of a signature."""
    range: int = 13
    """Rows of a band."""
    bands: int = 9
    """Bands of a signature."""
    scope: Scope = "global"
    """per-source compares documents only with those of their own source."""
    index: tuple[str, ...] = ()
    """Signatures (OUT/minhash) of runs before this one, or NAME=FOLDER: what they hold is removed here."""
    exact: bool = False
    """Find exact copies first, and do not sign them."""
    keep: str = "first"
    """Which document of a cluster to keep: first, longest, source:A,B, or newest:FIELD."""
    verify: Measure | None = None
    """Confirm each removal on the texts, by jaccard or containment; SlimPajama does not."""
    threshold: float = 0.8
    """The similarity from which on a verified document is removed."""


@dataclass(frozen=True)
class Mix:
    """[mix]"""

    weights: dict[str, float] = field(default_factory=dict)
    """Epochs per source; otherwise as preprocessing/datasets.py says."""
    holdout: float = 0.0017
    """Fraction of each source's documents to hold out."""


@dataclass(frozen=True)
class Tokenizer:
    """[tokenizer]"""

    vocab_size: int = 32_000
    """Pieces."""
    model_type: Literal["bpe", "unigram"] = "bpe"
    """Kind of model."""
    sample: str = "64MiB"
    """Text to train on."""
    exact: bool = True
    """Fail where the sample cannot fill the vocabulary, rather than make fewer pieces."""


@dataclass(frozen=True)
class RunConfig:
    """From a corpus to token shards."""

    corpus: Path
    """Folder of the corpus: CORPUS/<source>/**."""
    out: Path
    """Folder for everything the run writes."""
    seed: int = 1
    """Seed of every random choice."""
    workers: int | None = None
    """Processes to use; all cores by default."""
    memory: str = "auto"
    """Memory for all workers together, such as 4GiB; by default half of what is free."""
    max_malformed: float = 0.001
    """Stop when more than this fraction of the records is malformed."""
    normalize: Normalize = field(default_factory=Normalize)
    filter: Filter = field(default_factory=Filter)
    dedup: Dedup = field(default_factory=Dedup)
    mix: Mix = field(default_factory=Mix)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)

    @property
    def run_options(self) -> RunOptions:
        return RunOptions(self.workers, self.memory, self.max_malformed)
