"""Stage of a run: apply a user's function to every document."""

from typing import Any

from gristmill.counts import WRITTEN, Counts
from gristmill_cli.run_config import RunConfig
from gristmill_cli.stages.spec import RunContext, StageSpec
from preprocessing.apply import STAGE, apply
from preprocessing.user_code import version_of

_SHOWN_DIGITS = 12  # of the SHA-256 of a function's source


class ApplyFunction(StageSpec):
    """Apply a user's function to every document."""

    name = "apply"
    engine = STAGE
    output = "applied"
    section = "apply"
    added_by = "apply.function"
    rewrites = True
    is_in_funnel = True
    keeps = WRITTEN
    look_at = "what your function leaves out"
    requests = 3.0
    reads_documents = True

    def call(self, run: RunContext) -> Counts:
        """Write what the function yields for each document."""
        config = run.config
        return apply(
            run.corpus,
            self.path(config),
            str(config.apply.function),
            text_column=config.text_column,
            max_failed=config.max_failed,
            options=run.options,
        )

    def settings(self, run: RunContext) -> dict[str, Any]:
        """Return the function, and its version or the beginning of its source's SHA-256."""
        function = str(run.config.apply.function)
        code = version_of(function)
        if not code.startswith("version "):
            code = code[:_SHOWN_DIGITS]
        return {"function": function, "code": code}

    def check(self, config: RunConfig, sources: set[str]) -> None:
        """Raise UsageError if the function cannot be imported."""
        if config.apply.function:
            version_of(config.apply.function)

    def hint(self, config: RunConfig) -> str:
        """Return what to try if no document is left."""
        return f"look at what {config.apply.function} yields"
