"""Explain: where a row of the certificate first differs from one process, and what the difference looks like."""

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from gristmill_parity.cases import Case
from gristmill_parity.recorded_case import record_case
from gristmill_parity.recording.compare import compare
from gristmill_parity.recording.files import RecordingError
from gristmill_parity.recording.perturb import reference_runs
from gristmill_parity.recording.verdict import Verdict
from gristmill_parity.runs.run_case import RunCase
from training.distributed.rank_pool import RankError, RankPool

Job = Callable[..., Any]


class Explainer:
    """Runs rows with recorders, in a pool of ranks; the recordings of a reference are kept for further rows."""

    def __init__(self, ranks: RankPool, job: Job = record_case) -> None:
        """`job` is what each rank of a row runs; tests pass one with a planted fault."""
        self.ranks = ranks
        self.job = job
        self._folder = tempfile.TemporaryDirectory()
        self._references: dict[Case, Path] = {}

    def verdict(self, case: Case) -> Verdict:
        """Record both sides of a row and compare them. Raises RankError, or RecordingError if it cannot be said."""
        reference = self._reference(case)
        with tempfile.TemporaryDirectory() as folder:
            self.ranks.run(case.processes, self.job, case, Path(folder))
            return compare(reference, folder)

    def explain(self, case: Case) -> str:
        """Return what is wrong with a red row, in a few sentences."""
        refusal = why_not(case)
        if refusal:
            return refusal
        if isinstance(case, RunCase):
            return self._explain_run(case)
        try:
            verdict = self.verdict(case)
        except RecordingError as error:
            return f"Not located: {error}."
        except RankError as error:
            return f"Not located: a rank failed: {str(error).splitlines()[-1]}."
        if verdict.is_clean and case.reference != "one process":
            return f"{verdict} The layout computes what one process does, which is not what the {case.reference} does."
        return str(verdict)

    def _explain_run(self, case: RunCase) -> str:
        """Explain the steps of a run's layout; its data, checkpoints and evaluations are not recorded."""
        options = {field.name: getattr(case, field.name) for field in fields(Case)}
        text = self.explain(Case(**options))
        if text.startswith("No difference"):
            text += " The steps are right: look at what the run does besides, at data, checkpoints and evaluations."
        return text

    def close(self) -> None:
        """Remove the recordings."""
        self._folder.cleanup()

    def _reference(self, case: Case) -> Path:
        """Return the recordings of one process, in the row's own precision: it rounds as the row does."""
        one = replace(case, reference="one process", device="cpu").of_reference
        if one not in self._references:
            folder = Path(self._folder.name) / str(len(self._references))
            for run in reference_runs(folder, case.precision):
                self.ranks.run(1, record_case, one, run.folder, run.perturb)
            self._references[one] = folder
        return self._references[one]


RED_ROWS = 3
"""Rows that are explained unasked: each takes a few seconds."""


def explain_rows(cases: Sequence[Case], device: str) -> Iterator[tuple[Case, str]]:
    """Yield each case and what is wrong with it."""
    size = max(case.processes for case in cases)
    with RankPool(size, device=device) as ranks:
        explainer = Explainer(ranks)
        try:
            for case in cases:
                yield case, explainer.explain(case)
        finally:
            explainer.close()


def why_not(case: Case) -> str:
    """Return why a case cannot be explained; empty if it can."""
    if case.layout.local_steps or case.layout.compression != "none":
        return "Not located: replicas have weights or sums of their own here, which one process has not."
    if case.compiled:
        return "Not located: compiled blocks call no hooks; run the row without compilation."
    return ""
