"""Steps: scores of documents by models, noted as facts; a table [scores.NAME] of a run describes one (scores.py)."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from hashlib import sha256
from importlib.util import find_spec
from math import isfinite
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from gristmill.errors import UsageError, require
from gristmill.steps import AnswerError
from preprocessing.scoring.classifier import Classifier, read_classifier
from preprocessing.scoring.fasttext_file import read_fasttext, version_of_file
from preprocessing.scoring.fasttext_products import keep_products
from preprocessing.scoring.fasttext_scores import FastTextScorer, can_score
from preprocessing.scoring.score_choice import BandTable, check_choice
from preprocessing.steps.scores import ModelScore
from preprocessing.user_code import load_function, version_of

Of = Literal["source", "all"]
Device = Literal["cpu", "cuda"]
After = Literal["rules", "copies"]


class ScoreOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table [scores.NAME] of a run's TOML: a model, and which documents its score keeps.

    `fasttext` is a supervised model, .bin or .ftz; `transformers` a sequence classifier, as a folder or a repository
    ORG/NAME, which reads the first `max_tokens` of a text on a `device`. The score is the probability of `label`, or
    the output of a classifier that has one alone. Or `function`, module:function, takes a list of texts and returns a
    list of scores. Or `measure` is one of the measures that the rules of recipes compare. Or it is an ensemble: the
    mean of a document's ranks, from 0 to 1, by the scores that `mean_of` names, among those `of` its source or of all.

    Documents are scored `after` the rules, as the corpus is written for the last time, or after copies: only those of
    which no copy is kept in their place, which are read once more.

    A document whose score is below `min` or above `max` goes; or, with `quantile`, one that is below this quantile of
    the scores, `of` its source or of all. Or documents are in `bands`, whose weights multiply those of sources; or they
    are kept by chance, that of their score on the curve `keep`. Without any of these, scores are noted and nothing
    goes.
    """

    fasttext: str = ""
    transformers: str = ""
    function: str = ""
    measure: str = ""
    mean_of: tuple[str, ...] = ()
    label: str = ""
    max_tokens: int = 512
    device: Device = "cpu"
    after: After = "rules"
    min: float | None = None
    max: float | None = None
    quantile: float | None = None
    of: Of = "source"
    bands: dict[str, BandTable] = {}
    keep: tuple[tuple[float, float], ...] = ()

    @property
    def is_after_copies(self) -> bool:
        """Return whether only documents are scored that are no copies."""
        return self.after == "copies"

    def check(self, name: str) -> None:
        """Raise UsageError for options that contradict each other, or that the model does not allow."""
        table = f"[scores.{name}]"
        named = ", ".join(self.mean_of)
        given = [model for model in (self.fasttext, self.transformers, self.function, self.measure, named) if model]
        require(
            len(given) == 1,
            f"{table}: expected one of fasttext, transformers, function, measure and mean_of, such as "
            f"fasttext = 'model.bin', got {' and '.join(given) or 'none'}",
        )
        require(
            not self.mean_of or len(set(self.mean_of)) == len(self.mean_of) > 1,
            f"{table}: mean_of: expected two tables of scores or more, each once, got {named}",
        )
        require(not (self.mean_of and self.label), f"{table}: label has no effect on mean_of; leave it out")
        require(
            bool(self.transformers) or (self.max_tokens, self.device) == (512, "cpu"),
            f"{table}: max_tokens and device have no effect on {given[0]}; leave them out",
        )
        require(
            not (self.mean_of and self.is_after_copies),
            f"{table}: after has no effect on mean_of, which is known where its scores are; leave it out",
        )
        require(not (self.function and self.label), f"{table}: label has no effect on a function; leave it out")
        require(not (self.measure and self.label), f"{table}: label has no effect on a measure; leave it out")
        require(self.max_tokens > 0, f"{table}: max_tokens {self.max_tokens}: expected 1 or more")
        limits = dict[str, float]()
        if self.min is not None:
            limits["min"] = self.min
        if self.max is not None:
            limits["max"] = self.max
        chosen = list[str]()
        if limits:
            chosen.append(" and ".join(limits))
        if self.quantile is not None:
            chosen.append("quantile")
        if self.bands:
            chosen.append("bands")
        if self.keep:
            chosen.append("keep")
        require(
            len(chosen) < 2,
            f"{table}: expected min and max, quantile, bands or keep, got {' and '.join(chosen)}; leave one out, or "
            "make a second table",
        )
        check_choice(table, self.bands, self.keep)
        for limit, value in limits.items():
            require(isfinite(value), f"{table}: {limit} {value}: expected a finite number")
        require(
            self.min is None or self.max is None or self.min <= self.max,
            f"{table}: min {self.min} and max {self.max}: expected min below max",
        )
        require(
            self.quantile is None or 0 < self.quantile < 1,
            f"{table}: quantile {self.quantile}: expected a number between 0 and 1, such as 0.9 for the best tenth",
        )
        require(
            self.of == "source"
            or bool(self.mean_of)
            or self.quantile is not None
            or any(band.quantile for band in self.bands.values()),
            f"{table}: of = 'all' has no effect without quantile; leave it out",
        )


def score_steps(scores: Mapping[str, ScoreOptions]) -> list[ModelScore]:
    """Return the steps of tables [scores.NAME]: of all but ensembles, which need no text.

    Raises UsageError, or InputError, for a table or a model that cannot be used.
    """
    steps = list[ModelScore]()
    for name, options in scores.items():
        if not options.mean_of:
            steps.append(score_step(name, options))
            continue
        options.check(name)
        after = set[After]()
        described = list[str]()
        for member in options.mean_of:
            if member not in scores or scores[member].mean_of:
                expected = ", ".join(other for other, table in scores.items() if not table.mean_of)
                raise UsageError(f"[scores.{name}]: mean_of: expected tables of scores ({expected}), got {member!r}")
            after.add(scores[member].after)
            described.append(f"{member} after {scores[member].after}")
        require(
            len(after) == 1,
            f"[scores.{name}]: mean_of: expected scores after rules, or scores after copies, got "
            f"{' and '.join(described)}; try after = 'copies' in all of their tables",
        )
    return steps


def have_bands(scores: Mapping[str, ScoreOptions]) -> bool:
    """Return whether a table has bands."""
    return any(options.bands for options in scores.values())


def tables_after(place: After, scores: Mapping[str, ScoreOptions]) -> dict[str, ScoreOptions]:
    """Return the tables of scores that are known after rules, or after copies; of ensembles those of their scores."""
    tables = dict[str, ScoreOptions]()
    for name, options in scores.items():
        first = options
        if options.mean_of:
            first = scores.get(options.mean_of[0], options)
        if first.after == place:
            tables[name] = options
    return tables


def score_step(name: str, options: ScoreOptions) -> ModelScore:
    """Return the step of a table [scores.NAME]. UsageError, or InputError, if its model cannot be used."""
    options.check(name)
    if options.measure:
        from preprocessing.steps.measure_score import MeasureScore  # here, as it imports all measures

        return MeasureScore.of(name, options.measure)
    if options.function:
        version = sha256(version_of(options.function).encode()).hexdigest()
        return FunctionScore(name, version, options.function)
    if options.transformers:
        require(
            find_spec("transformers") is not None and find_spec("torch") is not None,
            f"[scores.{name}]: a classifier needs transformers and torch: pip install 'gristmill[classifier]'",
        )
        classifier = read_classifier(options.transformers, options.label)
        return ClassifierScore(
            name,
            classifier.version,
            classifier.files,
            classifier.output,
            classifier.is_multi,
            options.max_tokens,
            options.device,
        )
    model = Path(options.fasttext)
    require(model.is_file(), f"[scores.{name}]: {model}: expected a fastText model, and there is no such file")
    content = read_fasttext(model)
    label = content.find_label(model, options.label)
    uses_library = not can_score(content)
    require(
        not uses_library or find_spec("fasttext") is not None,
        f"[scores.{name}]: {model}, a model that is quantized, has many labels or no softmax, needs the library "
        "fasttext: pip install 'gristmill[fasttext]'",
    )
    version = version_of_file(model)
    if not uses_library:
        keep_products(model, content, version, label)
    return FastTextScore(name, version, model, label, uses_library)


@dataclass(frozen=True)
class FastTextScore(ModelScore):
    """Score texts by a fastText model's probability of `label`; line ends count as spaces.

    Where the model says nothing of a text, such as an empty one, the score is 0. fastText's library computes only what
    FastTextScorer does not.
    """

    model: Path
    label: str
    uses_library: bool

    @property
    def version(self) -> int:
        return 5

    def describe(self) -> str:
        return f"{self.fact} {self.model.name} {self.label}"

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("fasttext-predict",) if self.uses_library else ()

    def compute(self, texts: tuple[str, ...]) -> np.ndarray:
        if not self.uses_library:
            return _load_scorer(self.model, self.model_version, self.label).score(texts)
        model = _load_fasttext(self.model, self.model_version)
        return np.fromiter((self._score(model, text) for text in texts), np.float32, len(texts))

    def _score(self, model: Any, text: str) -> float:
        labels, probabilities = model.predict(text.replace("\n", " "), k=-1)
        for label, probability in zip(labels, probabilities, strict=True):
            if label == self.label:
                return float(probability)
        return 0.0


@dataclass(frozen=True)
class ClassifierScore(ModelScore):
    """Score texts by a sequence classifier of these files; see ClassifierFiles."""

    files: tuple[Path, ...]
    output: int
    is_multi: bool
    max_tokens: int
    device: Device

    def describe(self) -> str:
        return f"{self.fact} {self.files[0].parent.name} output {max(self.output, 0)} of {self.max_tokens} tokens"

    @property
    def libraries(self) -> tuple[str, ...]:
        return ("transformers", "torch", "tokenizers")

    def compute(self, texts: tuple[str, ...]) -> np.ndarray:
        model = _load_classifier(self.files[0].parent, self.model_version, self.device, self.max_tokens)
        return model.score(texts, self.output, self.is_multi)


@dataclass(frozen=True)
class FunctionScore(ModelScore):
    """Score texts by a user's function, module:function, whose code has the version of the model."""

    function: str

    @property
    def foreign(self) -> str:
        return self.function

    def describe(self) -> str:
        return f"{self.fact} {self.function}"

    def compute(self, texts: tuple[str, ...]) -> np.ndarray:
        function = load_function(self.function)
        if sha256(version_of(self.function).encode()).hexdigest() != self.model_version:
            raise UsageError(f"{self.function} was changed while it was at work: run the same command again")
        scores = function(list(texts))
        if isinstance(scores, str) or not hasattr(scores, "__len__"):
            kind = type(scores).__name__
            raise AnswerError(f"{self.function} returned a {kind}: expected a list with a score for each text")
        return np.array([self._to_number(score) for score in scores], np.float32)

    def _to_number(self, score: Any) -> float:
        try:
            return float(score)
        except (TypeError, ValueError) as error:
            raise AnswerError(f"{self.function} returned {score!r:.40} for a text: expected a number") from error


@lru_cache(maxsize=4)
def _load_scorer(path: Path, version: str, label: str) -> FastTextScorer:
    """Return a model, which stays in memory."""
    return FastTextScorer.read(path, label, version)


@lru_cache(maxsize=4)
def _load_fasttext(path: Path, _version: str) -> Any:
    """Return a model, which stays in memory. UsageError if the library refuses it."""
    import fasttext  # here, as it is an extra

    try:
        return fasttext.load_model(str(path))
    except (ValueError, RuntimeError, MemoryError) as error:
        raise UsageError(f"{path} is no fastText model that can be read ({error}); fetch it again") from error


@lru_cache(maxsize=2)
def _load_classifier(folder: Path, _version: str, device: str, max_tokens: int) -> Classifier:
    """Return a classifier, which stays in memory."""
    return Classifier(folder, device, max_tokens)
