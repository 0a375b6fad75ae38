"""Steps on documents: what they may return, in which order they run, and what is said of one that does otherwise."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pytest

from gristmill.errors import UsageError
from gristmill.steps import Batch, DocumentStep, Outcome, check_steps, run_steps


@dataclass(frozen=True)
class Words(DocumentStep):
    name = "words"
    makes = {"words": "int64"}  # noqa: RUF012

    def apply(self, batch: Batch) -> Outcome:
        return Outcome(facts={"words": [len(text.split()) for text in batch.texts]})


@dataclass(frozen=True)
class FewWords(DocumentStep):
    name = "few words"
    needs = ("words",)
    min_words: int = 2

    def apply(self, batch: Batch) -> Outcome:
        words = batch.facts["words"]
        return self.keep_if(words >= self.min_words, words)


@dataclass(frozen=True)
class Upper(DocumentStep):
    name = "upper"

    def apply(self, batch: Batch) -> Outcome:
        return Outcome(texts=[text.upper() for text in batch.texts])


@dataclass(frozen=True)
class Odd(DocumentStep):
    """Returns what it is given."""

    outcome: object = None
    announced: Mapping[str, str] | None = None
    name = "odd"

    @property
    def makes(self) -> Mapping[str, str]:
        return self.announced or {}

    def apply(self, batch: Batch) -> Outcome:
        return self.outcome(batch) if callable(self.outcome) else self.outcome


def batch_of(*texts: str) -> Batch:
    return Batch(texts, place=lambda number: f"book/a.jsonl line {number + 10}")


def test_each_step_sees_what_those_before_it_kept_and_wrote() -> None:
    done = run_steps([Words(), FewWords(), Upper(), TextLengths()], batch_of("a b", "c", "D E"))
    assert done.texts == ["A B", None, "D E"]
    assert done.reasons == ["", "few words", ""]
    assert done.values == [None, 1.0, None]
    assert done.is_rewritten.tolist() == [True, False, False]
    assert [values.tolist() for values in done.facts["words"]] == [[0, 1, 2], [2, 1, 2]]
    assert [values.tolist() for values in done.facts["lengths"]] == [[0, 2], [3, 3]]


@dataclass(frozen=True)
class TextLengths(DocumentStep):
    name = "lengths"
    makes = {"lengths": "int64"}  # noqa: RUF012
    needs = ("words",)

    def apply(self, batch: Batch) -> Outcome:
        assert batch.facts["words"].tolist() == [len(text.split()) for text in batch.texts]
        return Outcome(facts={"lengths": [len(text) for text in batch.texts]})


def test_fields_are_those_of_the_documents_that_are_left() -> None:
    seen = []
    steps = [Words(), FewWords(), Odd(lambda batch: (seen.extend(batch.column("url")), Outcome())[1])]
    given = Batch(("a", "b c", "d e"), read_field=lambda number, name: f"{name} {number}")
    run_steps(steps, given)
    assert seen == ["url 1", "url 2"]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([Words(), Words()], "two steps are named 'words'"),
        ([FewWords()], "step 'few words' needs the fact 'words', which no step before it makes: add the step"),
        ([FewWords(), Words()], "move it behind 'words'"),
        ([Words(), Odd(None, {"words": "int64"})], "step 'odd' makes the fact 'words', and so does 'words'"),
        ([Odd(None, {"row": "int64"})], "makes the fact 'row', and so does 'every pass'"),
        ([Odd(None, {"a": "int3"})], "fact 'a' has the type 'int3'; expected bool, int64"),
    ],
)
def test_steps_that_do_not_fit_together_are_refused_before_they_run(steps: list[DocumentStep], said: str) -> None:
    with pytest.raises(UsageError, match=said.replace("[", r"\[")):
        check_steps(steps, reserved=["row"])


def assign(batch: Batch) -> Outcome:
    batch.texts[0] = "changed"  # type: ignore[index]
    return Outcome()


def write_fact(batch: Batch) -> Outcome:
    batch.facts["words"][0] = 7
    return Outcome()


def fail_at_third(batch: Batch) -> Outcome:
    if "three" in batch.texts:
        raise ZeroDivisionError("no division")
    return Outcome()


@pytest.mark.parametrize(
    ("outcome", "failing", "said"),
    [
        (fail_at_third, [2], "ZeroDivisionError: no division ("),
        (assign, [0, 1, 2], "TypeError: 'tuple' object does not support item"),
        (write_fact, [0, 1, 2], "ValueError: assignment destination is read-only"),
    ],
)
def test_documents_on_which_a_step_fails_are_set_aside(outcome: object, failing: list[int], said: str) -> None:
    done = run_steps([Words(), Odd(outcome, None)], batch_of("one", "two", "three"))
    assert [number for number, reason in enumerate(done.reasons) if reason == "failed: odd"] == failing
    assert [number for number, text in enumerate(done.texts) if text is None] == failing
    assert all(done.details[number].startswith(said) for number in failing)


def test_a_step_that_fails_on_most_documents_is_named() -> None:
    with pytest.raises(UsageError, match=r"step 'odd' failed at book/a\.jsonl line 10: TypeError: 'tuple' object"):
        run_steps([Odd(assign, None)], batch_of(*"abcdefghijklmnopqrstuvwxyz"))


@pytest.mark.parametrize(
    ("outcome", "announced", "said"),
    [
        (Outcome(texts=["a"]), None, "step 'odd' returned 1 texts for 3 documents, book/a.jsonl line 10 to .*line 12"),
        (Outcome(reasons=[""] * 4), None, "returned 4 reasons for 3 documents"),
        (Outcome(texts=["a", None, "b"]), None, "returned a NoneType among its texts for book/a.jsonl line 11"),
        (Outcome(texts=["a", "b", "\ud800"]), None, "a lone surrogate among its texts for book/a.jsonl line 12"),
        ([True, False, True], None, "step 'odd' returned a list for book/a.jsonl line 10 to .*: expected an Outcome"),
        (Outcome(facts={"a": [1, 2, 3]}), None, r"made the facts \['a'\] of .*, and announces \[\]"),
        (Outcome(), {"a": "int64"}, r"made the facts \[\] of .*, and announces \['a'\]"),
        (Outcome(facts={"a": ["x", "y", "z"]}), {"a": "int64"}, "fact 'a' of book.*: expected int64, got"),
        (Outcome(facts={"a": np.zeros((3, 2), np.uint32)}), {"a": "uint32[4]"}, r"shape \(3, 2\); expected \(3, 4\)"),
    ],
    ids=range(9),
)
def test_what_a_step_may_not_do_is_said_with_its_name_and_the_document(
    outcome: object, announced: Mapping[str, str] | None, said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        run_steps([Words(), Odd(outcome, announced)], batch_of("one", "two", "three"))
