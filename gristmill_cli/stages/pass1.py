"""Stage of a run: drop short documents and duplicates, weigh the sources, and scatter documents over random parts."""

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

from gristmill.counts import REPEATED, WRITTEN, Counts
from gristmill.errors import require
from gristmill.storage.files import read_file
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.amounts import differing_amount
from gristmill_cli.stages.odd_files import FEW_DOCUMENTS
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.datasets import DEFAULT_WEIGHT, WEIGHTS, kept_by_mix, source_amounts, source_weights
from preprocessing.mixing.sampling import check_seed
from preprocessing.shuffle_holdout import check_holdout, pass1

_SHOWN_DIGITS = 12  # of the SHA-256 of a keep list


class Pass1(StageSpec):
    """Drop short documents and duplicates, weigh the sources, and scatter documents over random parts."""

    name = "pass1"
    output = "pass1"
    section = "mix"
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "gristmill duplicates OUT --source {source}"
    requests = 11.0

    def call(self, run: RunContext) -> Counts:
        """Write the bucket files of the mix."""
        config = run.config
        return pass1(
            run.corpus,
            self.path(config),
            run.duplicates,
            run.short_documents,
            config.weights,
            config.mix_seed,
            run.options,
            config.text_column,
            bytes=config.mix.bytes,
            tokens=config.mix.tokens,
            tokenizer=config.tokenizer.file if config.mix.tokens else None,
            keep_list=config.keep_list,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return how much of each source the mix asks for, and the documents that are kept or dropped by name."""
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

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for amounts, weights or seeds that the stage would refuse."""
        source_weights(config.weights, sources)
        require(
            not config.mix.tokens or config.tokenizer.file is not None,
            "--tokens needs a tokenizer that is there before the mix: expected --tokenizer.file; try --mix.bytes",
        )
        tokenizer = config.tokenizer.file if config.mix.tokens else None
        source_amounts(config.mix.bytes, config.mix.tokens, tokenizer, config.weights, sources)
        check_holdout(config.mix.holdout)
        check_seed(config.mix_seed)

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield sources of which the mix has not what was asked for."""
        config = run.config
        for source in sorted(counts.tallies):
            written = counts.total(WRITTEN, source)
            kept = kept_by_mix(counts, source)[0]
            weight = config.weights.get(source, WEIGHTS.get(source, DEFAULT_WEIGHT))
            distinct = written.documents - counts.total(REPEATED, source).documents
            if source in config.mix.bytes:
                yield from differing_amount(config, source, config.mix.bytes[source], written.bytes, "bytes")
            elif source not in config.mix.tokens and max(kept, distinct) >= FEW_DOCUMENTS:
                yield from differing_amount(config, source, weight * kept, written.documents, "documents")

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "look at --mix.weights, --dedup.index and --filter.threshold"
