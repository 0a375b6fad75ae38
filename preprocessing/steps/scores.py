"""Base of all scores of documents: a step that notes one number of each text as a fact.

A score is a fact, float32, whose name has the model's version: edu@3f9c2a1b. Choosing by it is another stage's matter
(preprocessing/from_facts/low_scores.py), so that a new limit reads no text.
"""

from abc import abstractmethod
from dataclasses import dataclass

import numpy as np

from gristmill.steps import AnswerError, Batch, DocumentStep, Outcome

_SHOWN_DIGITS = 8  # of a model's version in the name of a score


@dataclass(frozen=True)
class ModelScore(DocumentStep):
    """Note a score of each text as a fact, which is named after `score` and the model's `version`, a SHA-256."""

    score: str
    model_version: str

    @property
    def name(self) -> str:
        return f"score {self.score}"

    @property
    def fact(self) -> str:
        """Return the name of the fact."""
        return f"{self.score}@{self.model_version[:_SHOWN_DIGITS]}"

    @property
    def makes(self) -> dict[str, str]:
        return {self.fact: "float32"}

    def apply(self, batch: Batch) -> Outcome:
        return Outcome(facts={self.fact: finite_scores(self.compute(batch.texts))})

    @abstractmethod
    def compute(self, texts: tuple[str, ...]) -> np.ndarray:
        """Return the score of each text."""

    @abstractmethod
    def describe(self) -> str:
        """Return the score in a few words, as settings of a run show it."""


def finite_scores(scores: np.ndarray) -> np.ndarray:
    """Return scores, without a negative zero. Raises AnswerError for one that is not finite."""
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise AnswerError(f"expected a finite score, got {scores[wrong[0]]}; try to repair the function or the model")
    return scores + np.float32(0)
