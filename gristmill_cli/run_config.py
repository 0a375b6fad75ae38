"""Configuration of `gristmill run`: one dataclass per section of the TOML file."""

from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import msgspec
import tyro

from dedup.candidates.input_shards import Scope
from dedup.candidates.repeated_units import CountBy, KeepUnit
from dedup.candidates.text_units import TextUnit
from dedup.clustering.lsh import Bands, choose_bands
from dedup.clustering.similarity import Measure
from dedup.minhash.matching_form import Unit
from dedup.minhash.schemes import Hash
from dedup.minhash.signatures import Sketch
from dedup.spans.joins import KeepSpan
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.corpus import Source
from gristmill.io.documents import Extract
from gristmill.io.files import RUN_FILE
from gristmill.storage.files import is_file, read_file
from preprocessing.decontaminate import ALL_FIELDS, Policy
from preprocessing.minimum_length import SizeUnit
from preprocessing.steps.model_score import ScoreOptions
from preprocessing.steps.user_function import StepOptions
from preprocessing.train_tokenizer import ModelType

Kept = Literal["train_text"]


def read_options(out: Path) -> dict[str, Any]:
    """Return the options of a run, as its run.json has them. Raises InputError where it is damaged."""
    try:
        return msgspec.json.decode(read_file(out / RUN_FILE), type=dict[str, Any])
    except ValueError as error:  # not JSON, of another type, or not UTF-8
        raise InputError(
            f"{out / RUN_FILE}: expected the options of a run, got a damaged file ({error}); try the same "
            "`gristmill run` again, which writes it anew"
        ) from error


def recorded_options(out: Path) -> dict[str, Any]:
    """Return the options of a run; none where there is no run.json, or a damaged one."""
    try:
        return read_options(out) if is_file(out / RUN_FILE) else {}
    except InputError:
        return {}


def is_data_run(out: Path) -> bool:
    """Return whether a folder is of a run of data; a training run has a file of the same name."""
    return is_file(out / RUN_FILE) and "dedup" in (recorded_options(out) or ("dedup",))


@dataclass(frozen=True)
class Normalize:
    """Section [normalize]: text normalisation."""

    ftfy: bool = False
    """Repair mojibake with ftfy before NFC."""
    read_also: tuple[str, ...] = ()
    """More formats to read: txt, md, html (a file is one document), csv, tsv (a row is one)."""
    skip_odd_names: bool = False
    """Leave out files whose names cannot be part of a document's key; they are counted as not read."""
    extract: Extract = "main"
    """Text to take from HTML pages: the main text, without menus and footers, or all of it."""


@dataclass(frozen=True)
class Apply:
    """Section [apply]: your own function, between normalisation and the filter; see `gristmill apply --help`."""

    function: str | None = None
    """The function as module:function, such as my_filters:keep_english; by default the stage is left out."""


@dataclass(frozen=True)
class Lines:
    """Section [lines]: removal of repeated lines or paragraphs; see `gristmill remove-lines --help`."""

    unit: TextUnit | Literal["none"] = "none"
    """line or paragraph; none leaves the stage out."""
    keep: KeepUnit = "first"
    """Which of several equal units to keep: the first in the order of the corpus, or none."""
    min_count: int = 6
    """Minimum number of occurrences of a unit that is removed."""
    min_characters: int = 20
    """Minimum length of a unit that is removed."""
    scope: Scope = "global"
    """per-source counts the units of each source alone."""
    count_by: CountBy = "occurrence"
    """Count occurrences of a unit, or documents that contain it, so that the refrain of a single poem stays."""
    leave_alone: tuple[str, ...] = ()
    """Sources whose units are neither counted nor removed, such as code or poems."""


@dataclass(frozen=True)
class Spans:
    """Section [spans]: removal of repeated spans of text; see `gristmill remove-spans --help`."""

    min: int | None = None
    """Minimum length of a span that is cut, in bytes, such as 100; by default the stage is left out."""
    keep: KeepSpan = "first"
    """Which of several equal spans to keep: the first in the order of the corpus, or none."""
    min_left: int = 200
    """Minimum number of bytes left of a document that lost spans; with fewer it is removed as a fragment."""
    min_share: float = 0.2
    """Minimum share of its bytes left of a document that lost spans."""
    leave_alone: tuple[str, ...] = ()
    """Sources whose spans are neither compared nor cut, such as code or poems."""


@dataclass(frozen=True)
class Decontaminate:
    """Section [decontaminate]: removal of benchmarks; see `gristmill decontaminate --help`."""

    against: tuple[Path, ...] = ()
    """Files or folders of benchmarks, where each record is an item, or tasks of lm-eval (.yaml); without any, the stage
    is left out."""
    template: str = ALL_FIELDS
    """Template of an item's text: "{question} {choices} {answer}"; by default each field is an item."""
    policy: Policy = "drop"
    """drop documents with an item; cut the passages; or report them and leave the corpus as it is."""
    margin: int = 200
    """Characters to cut before and after a passage."""
    min_ngrams: int = 1
    """Minimum number of different n-grams that a document and an item share."""
    common: int = 1000
    """N-grams found in at least this many documents are boilerplate and do not count; 0: count all."""
    near: float = 0.6
    """Share of an item's words that a near-duplicate has, in runs of 5 or more; 0: look for exact n-grams only."""


@dataclass(frozen=True)
class Filter:
    """Section [filter]: removal of short documents."""

    threshold: int = 200
    """Minimum size of a document, counted after lower-casing and removing punctuation."""
    unit: SizeUnit = "character"
    """Unit of the threshold: character, or byte of UTF-8; a Chinese character has three bytes."""


@dataclass(frozen=True)
class Dedup:
    """Section [dedup]: removal of near-duplicates."""

    hash: Hash = "xxh32"
    """Hash family of the signatures; sha1 gives SlimPajama's own values."""
    unit: Unit = "character"
    """Unit of a shingle: character or word."""
    width: int = 13
    """Shingle width, in units."""
    permutations: int = 128
    """Number of permutations: the length of a signature."""
    seed: int = 1
    """Seed of the permutations; signatures of another seed, such as an index's, cannot be compared."""
    range: int | None = None
    """Rows per band; by default, with `bands`, the best for the threshold: 13 for 0.8."""
    bands: int | None = None
    """Number of bands: 9 for 0.8. The expected recall is printed."""
    scope: Scope = "global"
    """Compare documents of all sources (global), or only within a source (per-source)."""
    index: tuple[str, ...] = ()
    """Signatures (OUT/minhash, or NAME=FOLDER) of earlier runs, whose near-duplicates are removed from this one.
    OUT/minhash also has signatures of documents that were too short; `gristmill sign OUT/train` signs only those in the
    mix."""
    exact: bool = True
    """Find exact copies of any length first, and compute no signature for them."""
    keep: str = "first"
    """The document of a cluster to keep: first, longest, source:A,B, or newest:FIELD."""
    verify: Measure | Literal["none"] = "jaccard"
    """Exact similarity of the texts that must confirm each removal: jaccard or containment. With none, as in
    SlimPajama, all but one of the documents connected by candidate pairs are removed."""
    threshold: float = 0.8
    """Minimum similarity of a removed document to a kept one; chooses the bands unless they are given."""

    @property
    def measure(self) -> Measure | None:
        """Return the similarity that confirms each removal."""
        return None if self.verify == "none" else self.verify

    @property
    def chosen_bands(self) -> Bands:
        """Return the bands: as given, or the best for the threshold. Raises UsageError for a value out of range."""
        return choose_bands(self.range, self.bands, self.threshold, self.permutations)


@dataclass(frozen=True)
class Mix:
    """Section [mix]: source weights and holdout."""

    weights: dict[str, float] = field(default_factory=dict)
    """Epochs per source; the defaults are in preprocessing/datasets.py."""
    bytes: dict[str, float] = field(default_factory=dict)
    """Instead of weights, bytes of text of each source: book 2e9 web 8e9. Epochs are computed from the documents that
    are neither short nor duplicates; a source that is not named is read once."""
    tokens: dict[str, float] = field(default_factory=dict)
    """Or tokens of each source, counted with --tokenizer.file, without the tokens that begin and end documents."""
    holdout: float = 0.0017
    """Fraction of each source's documents in the holdout."""
    seed: int | None = None
    """Seed of the sampling by weight, the shuffle and the holdout; by default the run's seed."""


@dataclass(frozen=True)
class Tokenizer:
    """Section [tokenizer]: a tokenizer to use or to train, and the token shards."""

    file: Path | None = None
    """A tokenizer.json, a SentencePiece model, a rank file of tiktoken, a folder of a model with one, or a repository
    ORG/NAME of the Hugging Face Hub; by default one is trained on the train set."""
    bos: str = "none"
    """The token that begins each document: none, model (as the tokenizer names it), or a token of its vocabulary."""
    eos: str = "model"
    """The token that ends each document: none, model, or a token of the vocabulary."""
    vocab_size: int = 32_000
    """Vocabulary size, in pieces."""
    model_type: ModelType = "bpe"
    """bpe or unigram (a SentencePiece model), or byte-bpe (a tokenizer.json, as GPT-2, Llama 3 and Qwen have)."""
    sample: str = "64MiB"
    """Size of the text sample to train the tokenizer on."""
    exact: bool = True
    """Fail if the sample is too small for the vocabulary size, instead of making fewer pieces."""
    seed: int | None = None
    """Seed of the sample; by default the run's seed."""
    shard_size: str = "512MiB"
    """Maximum size of a token shard; a larger slice of the corpus becomes a shard of its own."""


@dataclass(frozen=True)
class Chats:
    """Section [chats]: conversations, which become token shards of their own, with masks: OUT/tokens/chats."""

    path: Path | None = None
    """A .jsonl or .parquet file, or a folder of them, with a list of messages in each record; none by default."""
    template: Path | None = None
    """Jinja file with another chat template than that of --tokenizer.file."""
    messages: str = "messages"
    """Field with the list of messages."""


@dataclass(frozen=True)
class Alarms:
    """Section [alarms]: limits beyond which counts raise an alarm; 0: no limit."""

    source_loss: float = 0.5
    """Share of its documents that a source may lose in one stage."""
    times_median: float = 3.0
    """How many times the median share of the other sources, or of the other files of a source, one may lose, from a
    share of 0.1 on."""
    cluster: int = 1000
    """Maximum number of documents in a cluster."""
    alike: float = 0.5
    """Minimum share of sampled pairs in a large cluster that reach the similarity threshold, if pairs are not verified.
    """
    length: float = 4.0
    """How many times longer or shorter the documents of a file may be than those of the median file of their source."""
    bytes_a_token: float = 1.5
    """How many times longer or shorter the tokens of a file may be than those of the median file, in a sample."""
    language: float = 0.2
    """How far the share of a file's documents that the rule language removes may differ from that of the median file.
    """
    mix: float = 0.1
    """How far a source may miss the amount that the mix asks for, as a share of that amount."""
    score: float = 0.5
    """Share of the differences in a score that the source, or the length of documents, may explain."""
    idle_rule: int = 1_000_000
    """Number of documents after which a recipe's rule that removed none raises an alarm."""


@dataclass(frozen=True)
class _Corpus:
    """Options of a run that come first in its help."""

    corpus: Path
    """Folder of the corpus: CORPUS/<source>/**."""
    out: Path
    """Folder for everything the run writes."""
    text_column: str = "text"
    """The column or field of the corpus that holds the text, or one in another: meta.text; it keeps its name."""
    sources: dict[str, Source] = field(default_factory=dict)
    """Tables [sources.NAME] of the file; the texts are written as the field that --text_column names."""
    steps: Annotated[tuple[StepOptions, ...], tyro.conf.Fixed] = ()
    """Tables [[steps]] of the file: functions of yours, which keep, score or rewrite documents after normalisation."""
    scores: Annotated[dict[str, ScoreOptions], tyro.conf.Fixed] = field(default_factory=dict)
    """Tables [scores.NAME] of the file: models that score documents, and which documents a score keeps."""
    seed: int = 1
    """Seed of the mix and of the tokenizer's sample; signatures have their own, dedup.seed."""


@dataclass(frozen=True)
class RunConfig(RunOptions, _Corpus):
    """Run the data pipeline, from a corpus to token shards.

    `gristmill run pipeline.toml`, or --config pipeline.toml, reads options from a TOML file; other options override it.

    Sources that differ have a table each in the file, [sources.NAME], and only these are read then: path (a folder or
    file; by default CORPUS/NAME), column (content, or meta.text) or template ("{title} {body}"), format (jsonl,
    parquet, arrow, warc, wet, txt, md, html, csv or tsv: the only one that is read), encoding (cp1252), message (the
    template of a message, "{role}: {content}\\n", where the column holds a chat), weight (epochs).
    """

    quiet: ClassVar[bool] = False  # type: ignore[misc]  # no options: a run prints its progress, and is part of none
    of_run: ClassVar[Any] = None  # type: ignore[misc]

    recipe: str = ""
    """Quality rules, applied between apply and the filter: gopher, c4, fineweb, fineweb-en, fineweb2, or a TOML
    file, by its path from the current folder, with its lists next to it; none by default."""
    normalize: Normalize = field(default_factory=Normalize)
    apply: Apply = field(default_factory=Apply)
    lines: Lines = field(default_factory=Lines)
    spans: Spans = field(default_factory=Spans)
    decontaminate: Decontaminate = field(default_factory=Decontaminate)
    filter: Filter = field(default_factory=Filter)
    dedup: Dedup = field(default_factory=Dedup)
    mix: Mix = field(default_factory=Mix)
    tokenizer: Tokenizer = field(default_factory=Tokenizer)
    chats: Chats = field(default_factory=Chats)
    max_failed: float = 0.0
    """Fraction of the documents on which functions of yours, a stage's own steps, or the tokenizer may fail: these are
    left out, and listed in a table of removed documents, or OUT/applied.failed.parquet."""
    keep: tuple[Kept, ...] = ()
    """What to keep besides tokens: train_text (OUT/train_deduped and OUT/holdout, the mixed text as JSON lines)."""
    remove_used: bool = False
    """Remove documents that no later stage reads, as soon as that is so: at the end OUT has tokens, facts and tables.
    The same run skips these stages afterwards, and writes what is needed again if something has changed."""
    keep_list: Path | None = None
    """File of lines that overrule what the mix keeps and drops: `drop sha256:DIGEST`, as gristmill trace shows them, of
    a text wherever it is; `keep KEY` and `drop KEY`, as gristmill browse writes them, of rows as they are now."""
    alarms: Alarms = field(default_factory=Alarms)
    strict: bool = False
    """End with exit code 3 after the first stage whose counts raise an alarm."""

    from_: Annotated[str | None, tyro.conf.arg(name="from", metavar="STAGE")] = None
    """First stage to run, by its name in --dry_run. Earlier stages must have finished, and are not checked again."""
    until: Annotated[str | None, tyro.conf.arg(metavar="STAGE")] = None
    """Last stage to run."""
    dry_run: bool = False
    """Check the configuration and print the stages with their options and state; run and write nothing."""

    @property
    def signatures(self) -> Path:
        """Return the folder of the signatures."""
        return self.out / "minhash"

    @property
    def weights(self) -> dict[str, float]:
        """Return epochs per source, as the mix or the sources' own tables give them. Raises UsageError if both do."""
        own = dict[str, float]()
        for name, source in self.sources.items():
            if source.weight is not None:
                own[name] = source.weight
        twice = sorted(own.keys() & self.mix.weights.keys())
        if twice:
            raise UsageError(f"the source {twice[0]!r} has a weight in [sources] and in [mix.weights]: give one")
        return self.mix.weights | own

    @property
    def counting_tokenizer(self) -> Path | None:
        """Return the tokenizer that counts the tokens of documents, if the mix asks for amounts of tokens."""
        if not self.mix.tokens:
            return None
        return self.tokenizer.file

    @property
    def mix_seed(self) -> int:
        return self.seed if self.mix.seed is None else self.mix.seed

    @property
    def tokenizer_seed(self) -> int:
        return self.seed if self.tokenizer.seed is None else self.tokenizer.seed

    @property
    def sketch(self) -> Sketch:
        """Return the parameters of the signatures. Raises UsageError for a value out of range."""
        spec = self.dedup
        return Sketch(spec.hash, spec.width, spec.permutations, spec.seed, spec.unit)

    @property
    def run_options(self) -> RunOptions:
        """Return the resources and limits of every stage."""
        options = {option.name: getattr(self, option.name) for option in fields(RunOptions)}
        return RunOptions(**options)


def corpus_folders(config: RunConfig) -> list[Path]:
    """Return the folders that a run reads raw documents from."""
    if not config.sources:
        return [config.corpus]
    return [source.folder(config.corpus, name) for name, source in config.sources.items()]


def load_options(options: dict[str, Any], out: Path) -> RunConfig:
    """Return the options of a run, as run.json has them. Raises ValueError for options of another version."""
    return msgspec.convert(
        {**options, "out": str(out)}, RunConfig, strict=False, dec_hook=lambda kind, text: kind(text)
    )
