"""Steps: scores of documents by models, noted as facts; a table [scores.NAME] of a run describes one.

A score is a fact, float32, whose name has the model's version: edu@3f9c2a1b. Choosing by it is another stage's matter
(preprocessing/choose_by_score.py), so that a new limit reads no text.
"""

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from gristmill.errors import UsageError, require
from gristmill.steps import Batch, DocumentStep, Outcome
from preprocessing.scoring.fasttext_file import read_fasttext, version_of_file

Of = Literal["source", "all"]
_SHOWN_DIGITS = 8  # of a model's version in the name of a score


class ScoreOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table [scores.NAME] of a run's TOML: a model, and which documents its score keeps.

    `fasttext` is a supervised model, .bin or .ftz, whose probability of `label` is the score. A document whose score is
    below `min` goes; or, with `quantile`, one that is below this quantile of the scores, `of` its source or of all.
    Without either, scores are noted and nothing goes.
    """

    fasttext: str = ""
    label: str = ""
    min: float | None = None
    quantile: float | None = None
    of: Of = "source"

    def check(self, name: str) -> None:
        """Raise UsageError for options that contradict each other, or that the model does not allow."""
        table = f"[scores.{name}]"
        require(bool(self.fasttext), f"{table}: expected a model, such as fasttext = 'model.bin', got none")
        require(
            self.min is None or self.quantile is None,
            f"{table}: expected min or quantile, got both; leave one out, or make a second table",
        )
        require(self.min is None or isfinite(self.min), f"{table}: min {self.min}: expected a finite number")
        require(
            self.quantile is None or 0 < self.quantile < 1,
            f"{table}: quantile {self.quantile}: expected a number between 0 and 1, such as 0.9 for the best tenth",
        )
        require(
            self.of == "source" or self.quantile is not None,
            f"{table}: of = 'all' has no effect without quantile; leave it out",
        )


def score_step(name: str, options: ScoreOptions) -> "FastTextScore":
    """Return the step of a table [scores.NAME]. UsageError, or InputError, if its model cannot be used."""
    options.check(name)
    require(
        find_spec("fasttext") is not None,
        f"[scores.{name}]: a fastText model needs the library fasttext: pip install 'gristmill[fasttext]'",
    )
    model = Path(options.fasttext)
    require(model.is_file(), f"[scores.{name}]: {model}: expected a fastText model, and there is no such file")
    label = read_fasttext(model).find_label(model, options.label)
    return FastTextScore(name, model, label, version_of_file(model))


@dataclass(frozen=True)
class FastTextScore(DocumentStep):
    """Note a fastText model's probability of `label` for each text, whose line ends count as spaces.

    Where the model says nothing of a text, such as an empty one, the score is 0.
    """

    score: str
    model: Path
    label: str
    sha256: str

    @property
    def name(self) -> str:
        return f"score {self.score}"

    @property
    def fact(self) -> str:
        """The name of the fact."""
        return f"{self.score}@{self.sha256[:_SHOWN_DIGITS]}"

    def describe(self) -> str:
        """Return the score in a few words, as settings of a run show it."""
        return f"{self.fact} {self.model.name} {self.label}"

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("fasttext-predict",)

    @property
    def makes(self) -> dict[str, str]:
        return {self.fact: "float32"}

    def apply(self, batch: Batch) -> Outcome:
        model = _load(self.model, self.sha256)
        scores = np.fromiter((self._score(model, text) for text in batch.texts), np.float32, len(batch))
        return Outcome(facts={self.fact: finite_scores(scores)})

    def _score(self, model: Any, text: str) -> float:
        labels, probabilities = model.predict(text.replace("\n", " "), k=-1)
        for label, probability in zip(labels, probabilities, strict=True):
            if label == self.label:
                return float(probability)
        return 0.0


@lru_cache(maxsize=4)
def _load(path: Path, _sha256: str) -> Any:
    """Return a model, which stays in memory. UsageError if the library refuses it."""
    import fasttext  # here, as it is an extra

    try:
        return fasttext.load_model(str(path))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UsageError(f"{path} is no fastText model that can be read ({error}); fetch it again") from error


def finite_scores(scores: np.ndarray) -> np.ndarray:
    """Return scores, without a negative zero. Raises ValueError for one that is not finite."""
    wrong = np.flatnonzero(~np.isfinite(scores))
    if len(wrong):
        raise ValueError(f"expected a finite score, got {scores[wrong[0]]}")
    return scores + np.float32(0)
