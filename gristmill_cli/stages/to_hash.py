"""Stage of a run: compute the signatures of the documents."""

from pathlib import Path
from typing import Any

from dedup.candidates.input_shards import check_index, reject_own_index
from dedup.clustering.keep_policy import check_sources, parse_keep
from dedup.clustering.similarity import SimilarityCheck
from dedup.from_facts.signatures import select_signatures
from dedup.to_hash import STAGE
from gristmill.counts import Counts
from gristmill.errors import UsageError
from gristmill_cli.run_config import Dedup, RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec, settings_of


class ToHash(StageSpec):
    """Compute a MinHash signature of each document that is no exact copy."""

    name = "to_hash"
    engine = STAGE
    output = "minhash"
    section = "dedup"
    requests = 6.0

    def call(self, run: RunContext) -> Counts:
        """Write the signature shards, of what the pass signed."""
        copies: Path | None = None
        if run.config.dedup.exact:
            copies = run.exact_pairs.with_suffix(".parquet")
        return select_signatures(run.facts, run.config.signatures, run.config.sketch, copies, run.options)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the parameters of the signatures."""
        return settings_of(run.config.dedup, "hash", "unit", "width", "permutations", "seed", "exact")

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise the error of any option of [dedup]; reads the header of one signature shard of each index."""
        spec = config.dedup
        sketch = config.sketch
        check_sources(parse_keep(spec.keep), sources)
        compared = sketch if spec.measure and spec.index else None
        SimilarityCheck(spec.measure or "jaccard", spec.threshold, spec.width, spec.unit, compared)
        _ = spec.chosen_bands  # raises
        has_bands = (spec.range, spec.bands) != (None, None)
        if not spec.measure and spec.threshold != Dedup().threshold and has_bands:
            raise UsageError(
                f"--dedup.threshold {spec.threshold:g} has no effect with --dedup.verify none and given bands: leave "
                "out --dedup.range and --dedup.bands, which it then chooses, or verify"
            )
        reject_own_index(spec.index, config.signatures)
        check_index(spec.index, sketch)
