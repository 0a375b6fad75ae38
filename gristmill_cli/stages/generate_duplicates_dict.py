"""Stage of a run: list the duplicates to remove."""

from pathlib import Path
from typing import Any

from dedup.generate_connected_components import CLUSTERED
from dedup.generate_duplicates_dict import STAGE, generate_duplicates_dict
from gristmill.counts import Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import DocumentSeconds, RunContext, StageSpec, settings_of


class GenerateDuplicatesDict(StageSpec):
    """List the duplicates to remove: of each cluster all but one, as far as their texts confirm it."""

    name = "generate_duplicates_dict"
    engine = STAGE
    command = "remove"
    output = "dup/duplicates.parquet"
    section = "dedup"
    reads = "generate_connected_components"
    reads_reasons = (CLUSTERED,)
    reads_bytes = False
    requests = 11.2
    reads_documents = True

    def call(self, run: RunContext) -> Counts:
        """Write the table of the duplicates."""
        spec = run.config.dedup
        dropped: tuple[Path, ...] = (run.short_documents,)
        if run.low_scores:
            dropped += (run.low_scores,)
        compared: dict[str, Any] = {}
        if spec.measure:
            compared = settings_of(spec, "threshold", "width", "unit", "index")
        if spec.measure or spec.keep.startswith(("longest", "newest")):
            compared |= {"corpus": run.corpus, "text_column": run.config.text_column}
        return generate_duplicates_dict(
            run.clusters,
            run.duplicates,
            options=run.options,
            keep=spec.keep,
            dropped=dropped,
            verify=spec.measure,
            **compared,
        )

    def seconds_a_document(self, config: RunConfig, documents: int) -> DocumentSeconds:
        """Return what writing the table of removals costs."""
        return DocumentSeconds(serial=0.3e-6)

    def seconds_a_compared_byte(self, config: RunConfig) -> float:
        """Return what a run on 221 MB with 14 % of duplicates took, where texts are compared."""
        if not config.dedup.measure:
            return 0.0
        return 0.04e-6

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return which document of a cluster is kept, and how copies are confirmed."""
        spec = run.config.dedup
        settings: dict[str, Any] = {"keep": spec.keep, "verify": spec.verify}
        if spec.measure:
            settings["threshold"] = spec.threshold
        return settings
