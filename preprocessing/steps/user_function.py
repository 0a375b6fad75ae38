"""Step: a function of the user, which keeps, scores or rewrites the documents of a batch."""

from dataclasses import dataclass
from typing import Any, Literal, Self

import msgspec
import numpy as np

from gristmill.errors import UsageError
from gristmill.steps import AnswerError, Batch, DocumentStep, Outcome
from preprocessing.steps.scores import finite_scores
from preprocessing.user_code import load_function, version_of

Kind = Literal["keep", "score", "rewrite"]


class StepOptions(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A table [[steps]] of a run's TOML: one of `keep`, `score` and `rewrite` names a function, as module:function.

    The function takes a list of texts and returns a list with a value for each: whether to keep it, True or False; its
    score, a finite number; or its new text. A document whose score is below `min` or above `max` is removed. `fields`
    name fields of the records, which the function takes as further lists, after the texts. `name` is the reason of what
    is removed; by default the function's own name.
    """

    keep: str = ""
    score: str = ""
    rewrite: str = ""
    min: float | None = None
    max: float | None = None
    fields: tuple[str, ...] = ()
    name: str = ""

    @property
    def given(self) -> dict[Kind, str]:
        """Return the functions that are named, by kind."""
        functions: dict[Kind, str] = {"keep": self.keep, "score": self.score, "rewrite": self.rewrite}
        return {kind: function for kind, function in functions.items() if function}


@dataclass(frozen=True)
class UserFunction(DocumentStep):
    """Call a user's `function`, module:function, whose code has the version `code`. See StepOptions."""

    kind: Kind
    function: str
    code: str
    given_name: str = ""
    fields: tuple[str, ...] = ()
    min: float | None = None
    max: float | None = None

    @classmethod
    def of(cls, options: StepOptions) -> Self:
        """Return the step that a table of options describes. Raises UsageError if it names no function, or several."""
        given = options.given
        if len(given) != 1:
            raise UsageError(
                f"[[steps]]: expected one of keep, score and rewrite, such as keep = 'my_rules:keep', "
                f"got {' and '.join(given) or 'none of them'}"
            )
        kind, function = next(iter(given.items()))
        if kind != "score" and (options.min, options.max) != (None, None):
            raise UsageError(f"[[steps]]: min and max are limits of a score; {kind} = {function!r} has none")
        return cls(kind, function, version_of(function), options.name, options.fields, options.min, options.max)

    @property
    def name(self) -> str:
        return self.given_name or self.function.partition(":")[2]

    @property
    def foreign(self) -> str:
        return self.function

    @property
    def makes(self) -> dict[str, str]:
        return {self.name: "float64"} if self.kind == "score" else {}

    def apply(self, batch: Batch) -> Outcome:
        function = load_function(self.function)
        if version_of(self.function) != self.code:
            raise UsageError(f"{self.function} was changed while it was at work: run the same command again")
        results = function(list(batch.texts), *(batch.column(name) for name in self.fields))
        values = self._to_list(results)
        if self.kind == "rewrite":
            return Outcome(texts=values)
        if self.kind == "keep":
            return self.keep_if([self._is_kept(value) for value in values])
        scores = finite_scores(np.array([float(value) for value in values])).tolist()
        removing = self.keep_if(map(self._is_within, scores), scores)
        return Outcome(reasons=removing.reasons, values=scores, facts={self.name: scores})

    def _is_within(self, score: float) -> bool:
        return (self.min is None or score >= self.min) and (self.max is None or score <= self.max)

    def _is_kept(self, value: Any) -> bool:
        """Return an answer of the function. Raises AnswerError for one that is not True or False: any text is true."""
        if value not in (True, False):
            raise AnswerError(f"{self.function} returned {value!r:.40} for a text: expected True or False")
        return bool(value)

    def _to_list(self, results: Any) -> list[Any]:
        """Return what the function returned as a list. Raises AnswerError unless it is one."""
        if isinstance(results, str) or not hasattr(results, "__len__"):
            kind = type(results).__name__
            raise AnswerError(f"{self.function} returned a {kind}: expected a list with an item for each text")
        return list(results)
