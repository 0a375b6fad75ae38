"""Steps on documents: what a step is given, what it returns, and how steps run one after another on a batch.

A step looks at some documents of one file and returns new texts, reasons to remove documents, and facts (a value for
each document). It changes nothing in place, and knows neither files nor the engine. A filter is a class of ten lines:

    @dataclass(frozen=True)
    class EnoughWords(DocumentStep):
        name = "too few words"
        min_words: int = 50

        def apply(self, batch: Batch) -> Outcome:
            words = [len(text.split()) for text in batch.texts]
            return self.keep_if([count >= self.min_words for count in words], words)
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from itertools import compress
from operator import is_not
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.counts import FAILED, WORKER_DIED
from gristmill.errors import GristmillError, UsageError

MANY_FAILING = 20  # documents: if so many fail, and most of a batch, the function is wrong and not the documents
VALUE_TYPES = ("bool", "int64", "uint64", "float32", "float64", "string")
# facts whose readers need not know the steps that note them
FORM_CHARACTERS = "form_characters"  # the length of the matching form
FORM_BYTES = "form_bytes"
TOKENS = "tokens"
VECTOR = "uint32["  # begins the type of a fact that is a row of numbers, such as uint32[128]
Facts = Mapping[str, NDArray[Any]]


class StepError(UsageError):
    """A step raised an error."""


class AnswerError(ValueError):
    """The answer of a function or model for a text is of no use; the message says all, the traceback nothing.

    On a few documents alone it sets these aside, as any error of theirs.
    """


@dataclass(frozen=True)
class Batch:
    """Some documents of one file, as earlier steps left them.

    `texts` are their texts, `facts` what earlier steps noted: an array by name, with a value for each document.
    `read_field` returns a field of the record of a document by its number, `place` where it is, for messages.
    """

    texts: tuple[str, ...]
    facts: Facts = field(default_factory=dict)
    read_field: Callable[[int, str], Any] = lambda number, name: None  # noqa: ARG005
    place: Callable[[int], str] = lambda number: f"document {number}"

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, numbers: Sequence[int], texts: Sequence[str], facts: Facts) -> "Batch":
        """Return the documents of these numbers as a batch, with other texts and facts."""
        return Batch(
            tuple(texts),
            facts,
            lambda at, name: self.read_field(numbers[at], name),
            lambda at: self.place(numbers[at]),
        )

    def column(self, name: str) -> list[Any]:
        """Return the value of another field of each document's record, such as its url; None where it has none."""
        return [self.read_field(number, name) for number in range(len(self.texts))]


@dataclass(frozen=True)
class Outcome:
    """The verdicts of a step on the documents of a batch. Each list has one item for each document.

    `texts` replace the texts. `reasons` say why a document is removed, '' keeps it; `values` are the measures that
    this was decided by, `details` a few words about them. `facts` are arrays or lists by name, those that the step
    `makes`.
    """

    texts: Sequence[str] | None = None
    reasons: Sequence[str] | None = None
    values: Sequence[float] | None = None
    details: Sequence[str] | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)


class DocumentStep(ABC):
    """A step on documents: a frozen dataclass, whose fields are its parameters.

    It must depend on its parameters and the documents alone. Raise `version` when a change of its code changes what it
    says.
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """Return the step's name, which no other step of a pass has; the reason of what it removes, by default."""

    @property
    def version(self) -> int:
        """Return the version of its code."""
        return 1

    @property
    def libraries(self) -> tuple[str, ...]:
        """Return the distributions whose versions decide what it says; see gristmill.engine.task.LIBRARIES."""
        return ()

    @property
    def needs(self) -> tuple[str, ...]:
        """Return the facts of earlier steps that it reads."""
        return ()

    @property
    def makes(self) -> Mapping[str, str]:
        """Return the facts that it notes, and the type of each: one of VALUE_TYPES, or a vector such as uint32[128]."""
        return {}

    @property
    def removes(self) -> bool:
        """Return whether it may remove documents: a run then writes a table of the removed ones."""
        return True

    @property
    def foreign(self) -> str:
        """Return the name of a user's function that it calls, or ''."""
        return ""

    @abstractmethod
    def apply(self, batch: Batch) -> Outcome:
        """Return what it says of the documents of a batch."""

    def keep_if(self, keep: Iterable[Any], values: Sequence[float] | None = None) -> Outcome:
        """Return an outcome that keeps the documents for which `keep` is true, and removes the others by its name."""
        return Outcome(reasons=["" if kept else self.name for kept in keep], values=values)


def check_steps(steps: Sequence[DocumentStep], reserved: Iterable[str] = ()) -> None:
    """Raise UsageError unless the steps can run in this order. `reserved` are names that no fact may have."""
    names = set[str]()
    makers = dict.fromkeys(reserved, "every pass")
    for step in steps:
        if not is_dataclass(step):
            raise UsageError(f"step {step.name!r}: expected a dataclass, got the class {type(step).__name__}")
        if step.name in names:
            raise UsageError(f"two steps are named {step.name!r}: give one of them another name")
        names.add(step.name)
        for fact in step.needs:
            if fact not in makers:
                later = next((other.name for other in steps if fact in other.makes), "")
                advice = "add the step that makes it"
                if later:
                    advice = f"move it behind {later!r}"
                raise UsageError(f"step {step.name!r} needs the fact {fact!r}, which no step before it makes: {advice}")
        for fact, kind in step.makes.items():
            if fact in makers:
                raise UsageError(f"step {step.name!r} makes the fact {fact!r}, and so does {makers[fact]!r}: rename it")
            if kind not in VALUE_TYPES and not is_vector(kind):
                expected = f"{', '.join(VALUE_TYPES)} or {VECTOR}n]"
                raise UsageError(f"step {step.name!r}: fact {fact!r} has the type {kind!r}; expected {expected}")
            makers[fact] = step.name


def is_vector(kind: str) -> bool:
    """Return whether a fact of this type is a row of numbers."""
    return kind.startswith(VECTOR) and kind.endswith("]") and kind[len(VECTOR) : -1].isdecimal()


def vector_length(kind: str) -> int:
    """Return how many numbers a vector has.

    >>> vector_length("uint32[128]")
    128
    """
    return int(kind[len(VECTOR) : -1])


@dataclass
class Processed:
    """A batch after all steps. Positions are positions in the batch that went in.

    `texts` (n) are None for documents that were removed. `facts` have, by name, the positions of the documents that
    the step saw, and their values.
    """

    texts: list[str | None]
    is_rewritten: NDArray[np.bool_]
    reasons: list[str]
    values: list[float | None]
    details: list[str]
    facts: dict[str, tuple[NDArray[np.int64], NDArray[Any]]]


def run_steps(steps: Sequence[DocumentStep], batch: Batch, deaths: Mapping[int, str] | None = None) -> Processed:
    """Run steps one after another on a batch; each sees the documents that the steps before it kept.

    `deaths` are documents on which a worker process died before, by number, and how: they are removed first.

    A document on which a step fails, and on others not, is removed, for a reason that begins with FAILED. Raises
    UsageError, which names the step and the document, if one fails on most documents, or returns what it may not.
    """
    count = len(batch)
    done = Processed([*batch.texts], np.zeros(count, np.bool_), [""] * count, [None] * count, [""] * count, {})
    left = np.arange(count)
    facts = dict(batch.facts)
    if deaths:
        left, facts = _set_aside(WORKER_DIED, done, left, facts, deaths)
    for step in steps:
        if not len(left):
            break
        current = _take_left(batch, done, left, facts)
        try:
            outcome = _apply(step, current)
        except StepError:
            errors = _find_failing(step, current)
            is_systematic = len(errors) >= MANY_FAILING and len(errors) > len(current) // 2
            if not errors or is_systematic:
                raise
            details = {at: describe_error(error) for at, error in errors.items()}
            left, facts = _set_aside(step.name, done, left, facts, details)
            if not len(left):
                break
            outcome = _apply(step, _take_left(batch, done, left, facts))
        numbers = left.tolist()
        for name, values in outcome.facts.items():
            done.facts[name] = (left, values)
            facts[name] = values
        if outcome.texts is not None:
            for number, text in zip(numbers, outcome.texts, strict=True):
                if text != done.texts[number]:
                    done.texts[number] = text
                    done.is_rewritten[number] = True
        if outcome.reasons is not None:
            is_kept = np.array([not reason for reason in outcome.reasons], np.bool_)
            for at in np.flatnonzero(~is_kept).tolist():
                number = numbers[at]
                done.texts[number] = None
                done.reasons[number] = outcome.reasons[at]
                if outcome.values is not None:
                    done.values[number] = float(outcome.values[at])
                if outcome.details is not None:
                    done.details[number] = outcome.details[at]
            left = left[is_kept]
            facts = {name: _read_only(values[is_kept]) for name, values in facts.items()}
    return done


def _take_left(batch: Batch, done: Processed, left: NDArray[np.int64], facts: Facts) -> Batch:
    """Return the documents that are left, as the steps so far left them."""
    numbers = left.tolist()
    return batch.take(numbers, [done.texts[number] or "" for number in numbers], facts)


def _set_aside(
    step: str, done: Processed, left: NDArray[np.int64], facts: Facts, details: Mapping[int, str]
) -> tuple[NDArray[np.int64], dict[str, NDArray[Any]]]:
    """Remove the documents on which a step fails; return the numbers of the others, and their facts.

    `details`, what went wrong, are by position among the documents that were left.
    """
    is_kept = np.ones(len(left), np.bool_)
    for at, detail in details.items():
        number = int(left[at])
        is_kept[at] = False
        done.texts[number] = None
        done.reasons[number] = f"{FAILED}: {step}"
        done.details[number] = detail
    return left[is_kept], {name: _read_only(values[is_kept]) for name, values in facts.items()}


def _apply(step: DocumentStep, batch: Batch) -> Outcome:
    """Return the outcome of a step, its facts as arrays. Raises UsageError for an outcome that it may not have."""
    try:
        outcome = step.apply(batch)
    except GristmillError:
        raise
    except (Exception, SystemExit) as error:
        failing = _find_failing(step, batch, 1)
        place = _span(batch)
        cause: BaseException = error
        for number, first_error in failing.items():
            place = batch.place(number)
            cause = first_error
        raise StepError(f"step {step.name!r} failed at {place}: {describe_error(cause)}") from cause
    if not isinstance(outcome, Outcome):
        kind = type(outcome).__name__
        raise UsageError(f"step {step.name!r} returned a {kind} for {_span(batch)}: expected an Outcome")
    lists = {"texts": outcome.texts, "reasons": outcome.reasons, "values": outcome.values, "details": outcome.details}
    for what, items in [*lists.items(), *outcome.facts.items()]:
        if items is not None and len(items) != len(batch):
            raise UsageError(
                f"step {step.name!r} returned {len(items):,} {what} for {len(batch):,} documents, {_span(batch)}: "
                "expected one for each"
            )
    if outcome.texts is not None and outcome.texts is not batch.texts:
        is_new = map(is_not, outcome.texts, batch.texts)
        _check_strings(step, batch, "texts", compress(enumerate(outcome.texts), is_new))
    _check_strings(step, batch, "reasons", enumerate(outcome.reasons or ()))
    _check_strings(step, batch, "details", enumerate(outcome.details or ()))
    if outcome.facts.keys() != step.makes.keys():
        said = f"made the facts {sorted(outcome.facts)} of {_span(batch)}, and announces {sorted(step.makes)}"
        raise UsageError(f"step {step.name!r} {said}: expected the same")
    facts = {name: _to_array(step, batch, name, outcome.facts[name], kind) for name, kind in step.makes.items()}
    return replace(outcome, facts=facts)


def _span(batch: Batch) -> str:
    """Return where the documents of a batch are, for messages."""
    first = batch.place(0)
    if len(batch) == 1:
        return first
    return f"{first} to {batch.place(len(batch) - 1)}"


def _check_strings(step: DocumentStep, batch: Batch, what: str, items: Iterable[tuple[int, Any]]) -> None:
    for number, item in items:
        if type(item) is str and (item.isascii() or _is_unicode(item)):
            continue
        got = f"a {type(item).__name__}"
        if isinstance(item, str):
            got = "a lone surrogate"
        said = f"step {step.name!r} returned {got} among its {what} for {batch.place(number)}"
        raise UsageError(f"{said}: expected strings of Unicode")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _to_array(step: DocumentStep, batch: Batch, name: str, values: Any, kind: str) -> NDArray[Any]:
    """Return the values of a fact as an array that cannot be written to. UsageError if they are not of its type."""
    shape: tuple[int, ...] = (len(batch),)
    if is_vector(kind):
        shape = (len(batch), vector_length(kind))
        kind = "uint32"
    dtype: np.dtype[Any] = np.dtype(object if kind == "string" else kind)
    try:
        array = np.asarray(values)
        if kind != "string" and not np.can_cast(array.dtype, dtype, "same_kind"):
            raise TypeError(f"{array.dtype} is not {kind}")
        array = array.astype(dtype, copy=False)
    except (TypeError, ValueError, OverflowError) as error:
        said = f"step {step.name!r}: fact {name!r} of {_span(batch)}"
        raise UsageError(f"{said}: expected {kind}, got {error}") from error
    if array.shape != shape:
        raise UsageError(f"step {step.name!r}: fact {name!r} has the shape {array.shape}; expected {shape}")
    return _read_only(array)


def _read_only(array: NDArray[Any]) -> NDArray[Any]:
    view = array.view()
    view.flags.writeable = False
    return view


def _find_failing(step: DocumentStep, batch: Batch, limit: int | None = None) -> dict[int, BaseException]:
    """Return the errors of the documents on which a step fails alone, by number: of the first `limit`, or of all."""
    errors = dict[int, BaseException]()
    for number, text in enumerate(batch.texts):
        facts = {name: values[number : number + 1] for name, values in batch.facts.items()}
        try:
            step.apply(batch.take([number], [text], facts))
        except (Exception, SystemExit) as error:
            errors[number] = error
            if len(errors) == limit:
                break
    return errors


def describe_error(error: BaseException) -> str:
    """Return an error of a user's code in one line: its class, its message, and where it was raised."""
    if isinstance(error, AnswerError):
        return str(error)
    frame = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{message and ': ' + message} ({frame.filename}, line {frame.lineno})"
