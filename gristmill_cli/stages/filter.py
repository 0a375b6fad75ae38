"""Stages of a run that list documents by their facts: documents that are too short, or whose scores are too low."""

from collections.abc import Iterator, Mapping
from dataclasses import replace as replace_stage
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gristmill.counts import Counts
from gristmill.errors import require
from gristmill.wording import markdown_table
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.note_facts import ScoreAfterCopies, has_scores_after
from gristmill_cli.stages.spec import RunContext, StageSpec, spell_limits
from preprocessing.filter import KEPT, STAGE
from preprocessing.from_facts.low_scores import STAGE as CHOOSE_BY_SCORE
from preprocessing.from_facts.low_scores import list_low_scores, read_score_sums
from preprocessing.from_facts.short_documents import list_short
from preprocessing.minimum_length import check_threshold
from preprocessing.scoring.score_choice import Band, Choice, parse_bands
from preprocessing.scoring.score_statistics import ScoreSums, odd_scores
from preprocessing.steps.model_score import After, ScoreOptions, have_bands, score_steps, tables_after


class FilterShort(StageSpec):
    """List the documents that are too short; the mix drops them."""

    name = "filter"
    engine = STAGE
    output = "filtered.pickle"
    section = "filter"
    keeps = KEPT
    requests = 1.1

    def call(self, run: RunContext) -> Counts:
        """Write the key set of the short documents. Raises InputError for a line of the keep list that fits none."""
        spec = run.config.filter
        return list_short(
            run.facts,
            run.short_documents,
            spec.threshold,
            run.options,
            spec.unit,
            run.config.keep_list,
            run.first_texts,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the minimum size, and its unit."""
        return {"threshold": run.config.filter.threshold, "unit": run.config.filter.unit}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a threshold out of range."""
        check_threshold(config.filter.threshold)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return f"give longer documents, or a smaller --filter.threshold than {config.filter.threshold}"


class ChooseByScore(StageSpec):
    """List the documents whose scores are too low; the mix drops them."""

    name = "choose_by_score"
    engine = CHOOSE_BY_SCORE
    output = "low_scores.parquet"
    added_by = "scores"
    after: After = "rules"
    title = "Scores"  # of what reports say of it
    report_section = "gristmill_cli.report.scores:read_section"
    keeps = KEPT
    requests = 2.1

    def call(self, run: RunContext) -> Counts:
        """Write the key set of the documents that go."""
        tables = tables_after(self.after, run.config.scores)
        facts = {step.score: step.fact for step in score_steps(tables)}
        choices = [_choice(name, options, facts) for name, options in tables.items()]
        bands = run.bands if have_bands(tables) else None
        output = self.path(run.config)
        counts, _ = list_low_scores(self.scores(run), output, choices, run.options, bands, self.engine)
        return counts

    def scores(self, run: RunContext) -> Path:
        """Return the folder of the facts with the scores."""
        return run.facts

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return what each score keeps."""
        tables = tables_after(self.after, run.config.scores)
        return {name: _describe(options) for name, options in tables.items()}

    def is_in_run(self, options: Mapping[str, Any]) -> bool:
        """Return whether a score is known after the rules, or, in a subclass, after copies."""
        return has_scores_after(self.after, options)

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise the error of a table or a model that cannot be used."""
        score_steps(config.scores)
        banded = [name for name, options in config.scores.items() if options.bands]
        require(
            len(banded) < 2,
            f"[scores]: expected bands in one table, got {' and '.join(banded)}; give the others min or quantile",
        )
        require(
            not banded or "train_text" not in config.keep,
            f"[scores.{' '.join(banded)}]: bands have no effect on --keep train_text; leave out one of them",
        )

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield what each score keeps."""
        yield f"\n## {self.title}\n"
        yield from markdown_table(("score", "documents that it keeps"), list(settings.items()))

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "try a smaller min or quantile, or a larger max, in the tables [scores.NAME]"

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield scores of models that are constant, or that the source or the length explains."""
        sums = read_score_sums(self.path(run.config), self.engine)
        of_models = dict[str, dict[str, ScoreSums]]()
        for name, by_source in sums.items():
            if not run.config.scores[name].measure:
                of_models[name] = by_source
        yield from odd_scores(of_models, run.config.alarms.score)


class ChooseAfterCopies(ChooseByScore):
    """List the documents that are no copies, and whose scores are too low; the mix drops them."""

    name = "choose_after_copies"
    engine = replace_stage(CHOOSE_BY_SCORE, name="choose_after_copies")
    output = "low_scores_after_copies.parquet"
    reads = ScoreAfterCopies.name
    after = "copies"
    title = "Scores after copies"

    def scores(self, run: RunContext) -> Path:
        """Return the folder of the facts with the scores."""
        return ScoreAfterCopies().path(run.config)

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for scores that the mix of texts would not know."""
        late = tables_after("copies", config.scores)
        require(
            not late or "train_text" not in config.keep,
            f"[scores.{' '.join(late)}]: after = 'copies' has no effect on --keep train_text; leave out one of them",
        )


def _choice(name: str, options: ScoreOptions, facts: Mapping[str, str]) -> Choice:
    """Return what a table keeps; `facts` are the names in the facts of the scores that are noted."""
    members = [facts[member] for member in options.mean_of]
    return Choice(
        name,
        facts.get(name, ""),
        options.min,
        options.quantile,
        options.of == "all",
        parse_bands(options.bands),
        options.keep,
        options.max,
        tuple(members),
    )


def _describe(options: ScoreOptions) -> str:
    """Return what a score keeps, in a few words."""
    if options.mean_of:
        members = ", ".join(options.mean_of)
        return f"mean of ranks by {members} of {options.of}: {_describe(replace(options, mean_of=()))}"
    limits = spell_limits(options.min, options.max)
    if limits:
        return ", ".join(limits)
    if options.quantile is not None:
        return f"quantile {options.quantile:g} of {options.of}"
    if options.bands:
        return _describe_bands(options)
    if options.keep:
        points = [f"{score:g}:{chance:g}" for score, chance in options.keep]
        return f"keep {' '.join(points)}"
    return "noted"


def _describe_bands(options: ScoreOptions) -> str:
    """Return the bands of a table with their limits and weights."""
    of = ""
    bands = list[str]()
    for band in parse_bands(options.bands):
        bands.append(f"{band.name} {_limit_of(band)}x{band.weight:g}")
        if band.quantile:
            of = f" of {options.of}"
    return f"bands{of}: {', '.join(bands)}"


def _limit_of(band: Band) -> str:
    if band.min is not None:
        return f"{band.min:g} "
    if band.quantile is not None:
        return f"{band.quantile:g} "
    return ""
