"""Stage of a run: find the clusters of near-duplicates."""

from collections.abc import Iterator
from math import ceil
from typing import Any

from dedup.candidates.cluster_samples import warn_of_clusters
from dedup.clustering.union_find import union_find_bytes, union_find_fits
from dedup.generate_connected_components import STAGE, generate_connected_components
from dedup.generate_exact_pairs import remove_exact_pairs
from dedup.to_hash import SIGNED
from gristmill.counts import Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import DocumentSeconds, RunContext, StageSpec


class GenerateConnectedComponents(StageSpec):
    """Find the clusters of documents that candidate pairs and copies connect."""

    name = "generate_connected_components"
    engine = STAGE
    command = "cluster"
    output = "dup/connected_components.parquet"
    section = "dedup"
    reads = "to_hash"
    reads_reasons = (SIGNED,)
    reads_bytes = False
    requests = 4.1

    def call(self, run: RunContext) -> Counts:
        """Write the table of the clusters."""
        spec = run.config.dedup
        if not spec.exact:
            remove_exact_pairs(run.exact_pairs)  # left by a run with `exact`: all pair files are read
        return generate_connected_components(
            run.exact_pairs.parent,
            run.clusters,
            run.config.signatures,
            spec.range,
            spec.bands,
            spec.index,
            spec.scope,
            spec.threshold,
            options=run.options,
        )

    def seconds_a_document(self, config: RunConfig, documents: int) -> DocumentSeconds:
        """Return the costs of bands, and of joining their edges in memory if the labels of all documents fit."""
        memory = config.run_options.memory_bytes
        if union_find_fits(documents, memory // 2):
            return DocumentSeconds(1.7e-6, 0.2e-6)
        needed = ceil(2 * union_find_bytes(documents) / (1 << 30))
        note = (
            f"The end of cluster works on disk: the labels of {documents:,} documents do not fit half of --memory, "
            f"{memory / (1 << 30):.1f} GiB here.\nWith --memory {needed}GiB it takes an eighth."
        )
        return DocumentSeconds(3e-6, 1.6e-6, note)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the bands, and which documents are compared."""
        spec = run.config.dedup
        rows, bands = spec.chosen_bands
        return {"range": rows, "bands": bands, "index": spec.index, "scope": spec.scope}

    def stage_read(self, run: RunContext) -> str | None:
        """Return to_hash, but for exact copies, which are compared without a signature."""
        if run.config.dedup.exact:
            return None
        return self.reads

    def alarms(self, run: RunContext, counts: Counts) -> Iterator[str]:
        """Yield clusters that are very large, or whose documents are not alike."""
        limits = run.config.alarms
        is_verified = run.config.dedup.measure is not None
        for line in warn_of_clusters(counts.clusters, limits.cluster, limits.alike, is_verified):
            yield f"{line}: look at gristmill duplicates OUT --largest 5"
