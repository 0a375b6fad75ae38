"""Stage of a run: decide which documents are in the train set, how often, and which are held out."""

from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

from gristmill.counts import REPEATED, WRITTEN, Counts
from gristmill.errors import require
from gristmill.storage.files import read_file
from gristmill.wording import markdown_table
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.odd_files import FEW_DOCUMENTS
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.datasets import DEFAULT_WEIGHT, WEIGHTS, kept_by_mix, mixed_tally, source_amounts, source_weights
from preprocessing.mix import STAGE, mix_facts
from preprocessing.mixing.mix_manifest import MixManifest
from preprocessing.mixing.sampling import check_seed
from preprocessing.mixing.split import check_holdout
from preprocessing.steps.model_score import have_bands, tables_after

_SHOWN_DIGITS = 12  # of the SHA-256 of a keep list


class DecideMix(StageSpec):
    """Drop short documents and duplicates, weigh the sources, and hold documents out, all without a text."""

    name = "mix"
    engine = STAGE
    command = "decide"
    output = "mix"
    section = "mix"
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "gristmill duplicates OUT --source {source}"
    requests = 16.3

    def call(self, run: RunContext) -> Counts:
        """Write the decisions on all documents."""
        config = run.config
        return mix_facts(
            run.facts,
            self.path(config),
            run.duplicates,
            run.short_documents,
            config.weights,
            config.mix_seed,
            config.mix.holdout,
            run.options,
            bytes=config.mix.bytes,
            tokens=config.mix.tokens,
            tokenizer=config.counting_tokenizer,
            keep_list=config.keep_list,
            low_scores=run.low_scores,
            bands=run.bands,
            first=run.first_texts,
            low_after_copies=run.low_after_copies,
            failed=run.failed_after_copies,
            scored=_scored_for_bands(run),
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how much of each source the mix asks for, what is held out, and what is kept or dropped by name."""
        return mix_settings(run) | {"holdout": run.config.mix.holdout}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for amounts, weights or seeds that the stage would refuse."""
        source_weights(config.weights, sources)
        require(
            not config.mix.tokens or config.tokenizer.file is not None,
            "--tokens needs a tokenizer that is there before the mix: expected --tokenizer.file; try --mix.bytes",
        )
        source_amounts(config.mix.bytes, config.mix.tokens, config.counting_tokenizer, config.weights, sources)
        check_holdout(config.mix.holdout)
        check_seed(config.mix_seed)

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield sources of which the mix has not what was asked for."""
        config = run.config
        for source in sorted(counts.tallies):
            mixed = mixed_tally(counts, source)
            kept = kept_by_mix(counts, source)[0]
            weight = config.weights.get(source, WEIGHTS.get(source, DEFAULT_WEIGHT))
            distinct = mixed.documents - counts.total(REPEATED, source).documents
            if source in config.mix.bytes:
                yield from differing_amount(config, source, config.mix.bytes[source], mixed.bytes, "bytes")
            elif source not in config.mix.tokens and max(kept, distinct) >= FEW_DOCUMENTS and not run.bands:
                yield from differing_amount(config, source, weight * kept, mixed.documents, "documents")

    def card(self, out: Path, options: Mapping[str, Any], settings: Mapping[str, Any]) -> Iterator[str]:
        """Yield how often the mix has the documents of each band of a score, if there are bands."""
        bands = MixManifest.load(out / self.output).bands
        if not bands:
            return
        yield "\n## Bands of the score\n"
        rows = list[tuple[str, ...]]()
        for share in bands:
            rows.append((share.source, share.band, f"{share.documents:,}", f"{share.weight:g}", f"{share.mixed:,}"))
        yield from markdown_table(("source", "band", "documents", "epochs", "in the mix"), rows)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return (
            f"give more documents, a smaller --mix.holdout than {config.mix.holdout}, or look at --mix.weights, "
            "--dedup.index and --filter.threshold"
        )


def _scored_for_bands(run: RunContext) -> Path | None:
    """Return the scores after copies if the bands are of one of them."""
    tables = tables_after("copies", run.config.scores)
    return run.scores_after_copies if have_bands(tables) else None


def mix_settings(run: RunContext) -> dict[str, Any]:
    """Return how much of each source a mix asks for, and the documents that are kept or dropped by name."""
    config = run.config
    settings: dict[str, Any] = {"weights": config.weights, "seed": config.mix_seed}
    if config.mix.bytes:
        settings["bytes"] = config.mix.bytes
    if config.mix.tokens:
        settings["tokens"] = config.mix.tokens
        settings["tokenizer"] = str(config.tokenizer.file)
    if config.keep_list:
        settings["keep_list"] = sha256(read_file(config.keep_list)).hexdigest()[:_SHOWN_DIGITS]
    return settings


def differing_amount(config: RunConfig, source: str, asked: float, got: int, unit: str) -> Iterator[str]:
    """Yield a sentence if the amount of a source differs from what was asked for by more than --alarms.mix."""
    limit = config.alarms.mix
    if limit and abs(got - asked) > limit * max(asked, 1):
        yield (
            f"the mix has {got:,} {unit} of {source}, and {asked:,.0f} were asked for: look at the shares of the mix "
            "in gristmill report OUT"
        )
