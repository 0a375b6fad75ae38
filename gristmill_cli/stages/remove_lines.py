"""Stage of a run: leave out lines or paragraphs that the corpus repeats."""

from pathlib import Path
from typing import Any

from dedup.candidates.repeated_units import check_left_alone
from dedup.remove_lines import STAGE, check_limits, remove_lines
from gristmill.counts import WRITTEN, Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec, reject_options_without_effect


class RemoveLines(StageSpec):
    """Leave out lines or paragraphs that the corpus repeats."""

    name = "remove_lines"
    engine = STAGE
    output = "lines"
    section = "lines"
    added_by = "lines.unit"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    losses = Path("lines.lines.parquet")  # lines that documents lost
    look_at = f"OUT/{losses}"
    report_section = "gristmill_cli.report.losses:read_lines"
    requests = 9.0
    reads_documents = True

    def call(self, run: RunContext) -> Counts:
        """Write the corpus without repeated lines."""
        lines = vars(run.config.lines)
        text_column = run.config.text_column
        return remove_lines(run.corpus, self.path(run.config), options=run.options, text_column=text_column, **lines)

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return what counts as a repeated line."""
        return {**vars(run.config.lines)}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError for a limit out of range, an unknown source, or options without effect."""
        check_limits(config.lines.min_count, config.lines.min_characters)
        if config.lines.unit == "none":
            reject_options_without_effect(config.lines, "with --unit none", "--lines.unit line")
        check_left_alone(config.lines.leave_alone, sources)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return "try a larger --lines.min_count"

    def describe_loss(self, rows: list[dict[str, Any]]) -> str:
        """Return how many units a document lost."""
        (row,) = rows
        return f"lost {row['units']:,} of {row['of']:,} lines or paragraphs, {row['bytes']:,} bytes"
