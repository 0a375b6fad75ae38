"""StageSpec: all that a run, its checks, its reports and its estimates have to know of a stage, said once."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from dedup.steps.fingerprint import Fingerprint
from gristmill.counts import READ, Counts
from gristmill.engine.options import RunOptions
from gristmill.engine.task import Stage
from gristmill.errors import InputError, UsageError
from gristmill.steps import DocumentStep
from gristmill_cli.run_config import RunConfig
from preprocessing.document_pass import removed_path
from preprocessing.mixing.first_texts import FirstTexts
from preprocessing.prepare import versions_of
from preprocessing.steps.model_score import have_bands, score_steps, tables_after
from preprocessing.steps.text_digest import TextDigest
from preprocessing.steps.token_count import TokenCount

UNKNOWN_COUNT = 0  # value of SlimPajama's argument n_docs; 0: not checked
CORPUS = "corpus"  # what most stages read: the documents that the last rewriting stage wrote


@dataclass(frozen=True)
class RunContext:
    """Arguments of a stage, and the paths of what several stages read.

    Attributes:
        config: The configuration of the run.
        options: Workers, memory and limits; in a run they share its workers.
        corpus: The folder of the documents that the stage reads.
        corpus_stage: The stage that wrote `corpus`; None before the first.
        counted_by: The stage whose counts say which documents are read: `corpus_stage`, or note_facts after it, which
            has no facts of a document on which a step failed.
        is_last_writer: The stage is the last that writes the corpus anew, and notes facts of its documents.
        first_texts: The texts that the first stage wrote, where later ones cut them; None if the corpus has these, or a
            function of the user is between.
    """

    config: RunConfig
    options: RunOptions
    corpus: Path
    corpus_stage: str | None = None
    counted_by: str | None = None
    is_last_writer: bool = False
    first_texts: FirstTexts | None = None

    @property
    def out(self) -> Path:
        """Return the folder of the run."""
        return self.config.out

    @property
    def facts(self) -> Path:
        """Return the facts of the documents that are filtered, compared and mixed."""
        return self.out / "facts"

    @property
    def fact_steps(self) -> list[DocumentStep]:
        """Return the steps that note what documents are filtered, compared and mixed by."""
        scores = score_steps(tables_after("rules", self.config.scores))
        steps: list[DocumentStep] = [TextDigest(), Fingerprint(self.config.sketch), *scores]
        if self.config.counting_tokenizer:
            steps.append(TokenCount.of(self.config.counting_tokenizer))
        return steps

    @property
    def short_documents(self) -> Path:
        """Return the key set of the documents that are too short."""
        return self.out / "filtered.pickle"

    @property
    def low_scores(self) -> Path | None:
        """Return the key set of the documents whose scores are too low; None if nothing is scored."""
        has_scores = bool(tables_after("rules", self.config.scores))
        return self.out / "low_scores.parquet" if has_scores else None

    @property
    def scores_after_copies(self) -> Path | None:
        """Return the facts with the scores of the documents that are left after copies; None without such scores."""
        has_scores = bool(tables_after("copies", self.config.scores))
        return self.out / "scores" if has_scores else None

    @property
    def low_after_copies(self) -> Path | None:
        """Return the table of the documents whose scores after copies are too low; None without such scores."""
        return self.out / "low_scores_after_copies.parquet" if self.scores_after_copies else None

    @property
    def failed_after_copies(self) -> Path | None:
        """Return the table of the documents on which scores after copies failed; None where none may fail."""
        scores = self.scores_after_copies
        return removed_path(scores) if scores and self.config.max_failed > 0 else None

    @property
    def bands(self) -> Path | None:
        """Return the bands of a score, by which documents are weighed; None without."""
        return self.out / "score_bands.json" if have_bands(self.config.scores) else None

    @property
    def exact_pairs(self) -> Path:
        """Return the lines of exact copies; the table of the same pairs is next to it."""
        return self.out / "dup" / "duplicate_pairs_exact.txt"

    @property
    def clusters(self) -> Path:
        """Return the table of the clusters of near-duplicates."""
        return self.out / "dup" / "connected_components.parquet"

    @property
    def duplicates(self) -> Path:
        """Return the table of the duplicates to remove."""
        return duplicates_path(self.config)

    def tokens(self, name: str) -> Path:
        """Return the folder of the token shards of a set, train or holdout."""
        return self.out / "tokens" / name


def duplicates_path(config: RunConfig) -> Path:
    """Return the table of the duplicates that a run removes."""
    return config.out / "dup" / "duplicates.parquet"


class DocumentSeconds(NamedTuple):
    """Core seconds that a document costs, 0 where a sample shows it, and seconds of one process however many work.

    `note` says what would change them.
    """

    cores: float = 0.0
    serial: float = 0.0
    note: str = ""


class StageSpec:
    """Description of a stage. A stage is a subclass in a file of its own, and a line of the list in pipeline.py.

    Attributes:
        name: As in --from, in messages and in records.
        engine: As the engine knows it: the name of its ledger, and its version.
        command: As `gristmill --help` names it, where a table has no room for `name`.
        output: Its file or folder in OUT.
        section: The section of RunConfig with its options.
        added_by: The option that adds it to a run, such as apply.function; none: every run has it.
        left_out_by: The option that takes it out of a run.
        rewrites: It writes the corpus anew: the stages after it read its documents.
        notes_facts: It notes facts of its documents if no other stage writes the corpus after it.
        is_in_funnel: It decides what becomes of documents: the funnel has its counts.
        reads: The stage whose documents it reads, or CORPUS. It must count as many documents as that one counted under
            `reads_reasons`, or else under what it keeps (and as many bytes, with `reads_bytes`).
        keeps: The reason under which it must count a document; a run ends otherwise.
        look_at: Where to look if a source loses many documents in it; {source} is the source's name.
        losses: The table in OUT of what documents lost in it, with file, row and removed.
        requests: Requests to a bucket for each slice of 64 MiB, by benchmarks/bench_scaling.py at 10,000 slices.
        is_serial: One process does its work.
        is_done_once: Some of its work does not grow with the corpus.
        is_after_mix: It reads no duplicates.
        reads_documents: It reads documents of the corpus, not only facts of them.
        is_intermediate: It writes documents that the next stage alone reads.
        browsed_as: The name of `losses` in gristmill browse.
        report_section: Its section of the report: a function that returns a StageSection, as "module:function".
    """

    name: str
    engine: Stage
    command: str = ""
    output: str
    section: str = ""
    added_by: str = ""
    left_out_by: str = ""
    rewrites: bool = False
    notes_facts: bool = False
    is_in_funnel: bool = False
    reads: str = CORPUS
    reads_reasons: tuple[str, ...] = ()
    reads_bytes: bool = True
    keeps: str = ""
    look_at: str = ""
    losses: Path | None = None
    requests: float = 4.0
    is_serial: bool = False
    is_done_once: bool = False
    is_after_mix: bool = False
    reads_documents: bool = False
    is_intermediate: bool = False
    browsed_as: str = ""
    report_section: str = ""

    def call(self, run: RunContext) -> Counts:
        """Run the stage; every task that is done is skipped."""
        raise NotImplementedError

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the options that decide what it writes, by name, as --dry_run and --explain show them."""
        raise NotImplementedError

    def own_versions(self, run: RunContext) -> dict[str, str]:
        """Return the versions of Gristmill's own code that it would work with, as records of its tasks name them."""
        return replace(self.engine, steps=versions_of(self.steps(run))).own_versions

    def steps(self, run: RunContext) -> list[DocumentStep]:
        """Return the steps on documents that it runs."""
        return []

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise the error of an option that the stage would refuse, before any stage runs; write nothing.

        It is also called where the run does not have the stage: see `reject_options_without_effect`.
        """

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield what looks wrong in its counts, besides sources that lose many documents."""
        yield from ()

    def hint(self, config: RunConfig) -> str:
        """Return what to try if it kept no document."""
        return ""

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield the lines of its section in the card of the data, given the options of the run and its own settings."""
        yield from ()

    def kernel_options(self, corpus: Path) -> dict[str, Any]:
        """Return options of a small run that needs the compiled kernels of the stage; `corpus` has a few documents."""
        return {}

    def describe_loss(self, rows: list[dict[str, Any]]) -> str:
        """Return what it did with a document, given the rows of the document in `losses`."""
        return "changed"

    def max_text_bytes(self, config: RunConfig) -> int | None:
        """Return how many bytes of text it reads at most, however large the corpus is; None: no limit."""
        return None

    def seconds_a_document(self, config: RunConfig, documents: int) -> DocumentSeconds:
        """Return what a document costs it in a corpus of so many, by benchmarks/bench_clusters.py."""
        return DocumentSeconds()

    def seconds_a_compared_byte(self, config: RunConfig) -> float:
        """Return the core seconds for a byte of a text that it compares with others; 0: it compares none."""
        return 0.0

    def outside_files(self, config: RunConfig) -> list[Path]:
        """Return the files that it reads besides documents and what other stages wrote: a tokenizer, benchmarks."""
        return []

    def stage_read(self, run: RunContext) -> str | None:
        """Return the name of the stage whose documents it reads; None: counts are not compared."""
        if self.reads == CORPUS:
            return run.counted_by
        return self.reads

    def path(self, config: RunConfig) -> Path:
        """Return its output."""
        return config.out / self.output

    def is_in_run(self, options: Mapping[str, Any]) -> bool:
        """Return whether a run with these options, as run.json has them, has the stage."""
        if self.added_by and not is_given(options, self.added_by):
            return False
        return not (self.left_out_by and is_given(options, self.left_out_by))

    def reject_empty(self, config: RunConfig, counts: Counts) -> None:
        """Raise InputError if the stage must keep a document, and kept none."""
        if not self.keeps or counts.total(self.keeps).documents:
            return
        read = counts.total(READ).documents
        outcome = f"{self.name}: no document is left of {read:,}"
        lost = list[str]()
        for reason in counts.reasons:
            if reason != READ:
                lost.append(f"{counts.total(reason).documents:,} {reason}")
        if lost:
            outcome += f" ({', '.join(lost)})"
        raise InputError(f"{outcome}: {self.hint(config)}")


def spell_limits(smallest: float | None, largest: float | None) -> list[str]:
    """Return the limits of a table that are given, as `min 0.5`."""
    limits = list[str]()
    if smallest is not None:
        limits.append(f"min {smallest:g}")
    if largest is not None:
        limits.append(f"max {largest:g}")
    return limits


def settings_of(section: Any, *names: str) -> dict[str, Any]:
    """Return the values of some options of a section."""
    return {name: getattr(section, name) for name in names}


def given_options(section: Any) -> list[str]:
    """Return the names of a section's options that are not at their defaults."""
    defaults = vars(type(section)())
    return [name for name, value in vars(section).items() if value != defaults[name]]


def reject_options_without_effect(section: Any, missing: str, advice: str) -> None:
    """Raise UsageError if options of a section are given whose stage is not in the run, as `missing` says."""
    given = given_options(section)
    if given:
        raise UsageError(f"--{given[0]} has no effect {missing}; try {advice}")


def is_given(options: Mapping[str, Any], name: str) -> bool:
    """Return whether an option such as dedup.exact has a value other than none."""
    value: Any = options
    for key in name.split("."):
        if not isinstance(value, dict):
            return False
        value = value.get(key)
    return bool(value) and value != "none"
