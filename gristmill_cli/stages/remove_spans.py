"""Stage of a run: cut spans of text that the corpus repeats."""

from pathlib import Path
from typing import Any

from dedup.candidates.repeated_units import check_left_alone
from dedup.remove_spans import STAGE, check_limits, remove_spans
from gristmill.counts import WRITTEN, Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec, reject_options_without_effect


class RemoveSpans(StageSpec):
    """Cut spans of text that the corpus repeats."""

    name = "remove_spans"
    engine = STAGE
    output = "spans"
    section = "spans"
    added_by = "spans.min"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    losses = Path("spans.spans.parquet")  # spans that documents lost
    look_at = f"OUT/{losses}"
    report_section = "gristmill_cli.report.losses:read_spans"
    requests = 19.0
    reads_documents = True

    def call(self, run: RunContext) -> Counts:
        """Write the corpus without repeated spans."""
        spans = vars(run.config.spans)
        text_column = run.config.text_column
        return remove_spans(run.corpus, self.path(run.config), options=run.options, text_column=text_column, **spans)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return what counts as a repeated span, and as a fragment."""
        return {**vars(run.config.spans)}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a limit out of range, an unknown source, or options without effect."""
        spec = config.spans
        if spec.min is None:
            reject_options_without_effect(spec, "without --min", "--spans.min 100")
            return
        check_limits(spec.min, spec.min_left, spec.min_share)
        check_left_alone(spec.leave_alone, sources)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "try a larger --spans.min, or a smaller --spans.min_share"

    def describe_loss(self, rows: list[dict[str, Any]]) -> str:
        """Return what a document lost, and for which documents."""
        size = 0
        keys = set[str]()
        for row in rows:
            size += row["bytes"]
            if row["kept_file"] is not None:
                keys.add(f"{row['kept_file']}@{row['kept_row']}")
        lost = f"lost {size:,} bytes that repeat"
        keepers = sorted(keys)
        if not keepers:
            return lost
        named = ", ".join(keepers[:3])
        if len(keepers) > 3:
            named += f" and {len(keepers) - 3:,} more"
        return f"{lost}, which {named} kept"
