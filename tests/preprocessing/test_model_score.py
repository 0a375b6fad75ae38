"""Scores of fastText models are those of fastText itself, and facts beside the documents; wrong models are refused."""

import json
import re
import zlib
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.steps import Batch, DocumentStep, Outcome, run_steps
from preprocessing.prepare import prepare
from preprocessing.scoring.fasttext_file import read_fasttext
from preprocessing.scoring.score_choice import BandTable
from preprocessing.steps.model_score import FastTextScore, ScoreOptions, score_step
from preprocessing.steps.scores import finite_scores
from tests.preprocessing.fasttext_models import SUPERVISED, TEXTS, scores_of, write_model


def write_texts(folder: Path, texts: list[str], files: int = 1) -> Path:
    for number in range(files):
        path = folder / "web" / f"{number}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[number::files]))
    return folder


def facts_in(folder: Path) -> pa.Table:
    return pa.concat_tables([pq.read_table(path) for path in sorted(folder.rglob("*.facts.parquet"))])


@pytest.mark.parametrize("name", SUPERVISED)
def test_scores_are_fasttexts_own(tmp_path: Path, name: str) -> None:
    model = write_model(name, tmp_path / name)
    step = score_step("edu", ScoreOptions(fasttext=str(model), label="hq"))
    found = step.apply(Batch(tuple(TEXTS))).facts[step.fact]
    assert found.dtype == np.float32
    expected = [max(score, 0) for score in scores_of(name)]
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6)
    assert max(expected) > 0.99 and min(expected) < 0.01
    assert isinstance(step, FastTextScore) and step.uses_library == (name != "softmax.bin")
    assert step.libraries == (("fasttext-predict",) if step.uses_library else ())


def test_scores_are_facts_named_by_the_models_version_whatever_the_workers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)  # a task for each file
    texts = [text for text in TEXTS * 30 if text.strip()]
    corpus = write_texts(tmp_path / "corpus", texts, files=5)
    model = write_model("softmax.bin", tmp_path / "softmax.bin")
    step = score_step("edu", ScoreOptions(fasttext=str(model), label="__label__hq"))
    for workers in (1, 2):
        prepare(corpus, None, tmp_path / f"facts{workers}", [step], RunOptions(workers=workers, quiet=True))
    one, two = (sorted((tmp_path / f"facts{n}").rglob("*.parquet")) for n in (1, 2))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]
    assert len(one) == 5
    table = facts_in(tmp_path / "facts1")
    assert table.schema.field(step.fact).type == pa.float32()
    known = dict(zip(TEXTS, scores_of("softmax.bin"), strict=True))
    expected = [known[text] for number in range(5) for text in texts[number::5]]
    np.testing.assert_allclose(table.column(step.fact).to_numpy(), expected, rtol=0, atol=1e-6)
    other = score_step("edu", ScoreOptions(fasttext=str(write_model("hs.bin", tmp_path / "b.bin")), label="hq"))
    assert step.fact.startswith("edu@") and other.fact.startswith("edu@") and step.fact != other.fact


def test_labels_are_read_from_the_file(tmp_path: Path) -> None:
    for name in SUPERVISED:
        assert read_fasttext(write_model(name, tmp_path / name)).labels in (
            ("__label__cc", "__label__hq"),
            ("__label__hq", "__label__cc"),
        )


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({}, UsageError, r"\[scores.edu\]: expected one of fasttext, .* such as fasttext = 'model.bin', got none"),
        ({"fasttext": "a.bin", "transformers": "org/name"}, UsageError, "got a.bin and org/name"),
        (
            {"fasttext": "a.bin", "label": "hq", "device": "cuda"},
            UsageError,
            "have no effect on a.bin",
        ),
        ({"fasttext": "none.bin"}, UsageError, "none.bin: expected a fastText model, and there is no such file"),
        ({"fasttext": "text.bin"}, UsageError, "text.bin: expected a fastText model .*, got another file"),
        ({"fasttext": "empty.bin"}, UsageError, "empty.bin: expected a fastText model"),
        ({"fasttext": "cut.bin", "label": "hq"}, InputError, "cut.bin is truncated: expected a whole fastText model"),
        ({"fasttext": "skip.bin", "label": "hq"}, UsageError, "expected a supervised fastText model, got one of kind"),
        ({"fasttext": "a.bin"}, UsageError, "expected label to be one of hq, cc, got ''"),
        ({"fasttext": "a.bin", "label": "edu"}, UsageError, "expected label to be one of hq, cc, got 'edu'"),
        ({"fasttext": "a.bin", "label": "hq", "min": 0.5, "quantile": 0.5}, UsageError, "keep, got min and quantile"),
        ({"fasttext": "a.bin", "label": "hq", "quantile": 1.0}, UsageError, "quantile 1.0: expected a number between"),
        ({"fasttext": "a.bin", "label": "hq", "min": float("nan")}, UsageError, "min nan: expected a finite number"),
        (
            {"fasttext": "a.bin", "label": "hq", "bands": {"high": BandTable()}},
            UsageError,
            "two bands or more, one wit",
        ),
        (
            {"fasttext": "a.bin", "label": "hq", "bands": {"a": BandTable(1, 0.5), "b": BandTable(1, None, 0.5)}},
            UsageError,
            "expected two bands or more, one without a limit .*, got a, b",
        ),
        (
            {"fasttext": "a.bin", "label": "hq", "bands": {"a": BandTable(0, 0.5), "b": BandTable(0)}},
            UsageError,
            "expected weights of bands from 0 to 1,000, one of them above 0",
        ),
        ({"fasttext": "a.bin", "label": "hq", "keep": ((0.5, 0.1),)}, UsageError, "keep: expected two points or more"),
        (
            {"fasttext": "a.bin", "label": "hq", "keep": ((0.5, 0), (0.6, 2))},
            UsageError,
            "expected chances from 0 to 1",
        ),
        ({"fasttext": "a.bin", "label": "hq", "of": "all"}, UsageError, "of = 'all' has no effect without quantile"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(
    tmp_path: Path, monkeypatch, options: dict, kind: type, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    content = write_model("softmax.bin", tmp_path / "a.bin").read_bytes()
    write_model("unsupervised.bin", tmp_path / "skip.bin")
    Path("cut.bin").write_bytes(content[:200])
    Path("text.bin").write_text("the mill " * 50)
    Path("empty.bin").write_bytes(b"")
    with pytest.raises(kind, match=message) as refused:
        score_step("edu", ScoreOptions(**options))
    assert "\n" not in str(refused.value)


def test_an_unknown_key_and_a_wrong_type_are_refused() -> None:
    for table in ({"fastext": "a.bin"}, {"fasttext": "a.bin", "of": "sources"}, {"min": "high"}):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(table, ScoreOptions)


@pytest.mark.parametrize("name", SUPERVISED)
def test_a_model_that_is_cut_anywhere_is_refused(tmp_path: Path, name: str) -> None:
    path = write_model(name, tmp_path / name)
    content = path.read_bytes()
    read_fasttext(path)
    for size in [*range(64, len(content), 97), len(content) - 1]:
        path.write_bytes(content[:size])
        with pytest.raises(InputError, match=f"{re.escape(name)} is truncated: expected a whole fastText model"):
            read_fasttext(path)


@dataclass(frozen=True)
class Wrong(DocumentStep):
    name = "wrong"
    makes = {"wrong": "float32"}  # noqa: RUF012

    def apply(self, batch: Batch) -> Outcome:
        scores = np.array([np.nan if "bad" in text else 1.0 for text in batch.texts], np.float32)
        return Outcome(facts={"wrong": finite_scores(scores)})


def test_a_score_of_nan_sets_its_document_aside() -> None:
    done = run_steps([Wrong()], Batch(("good", "bad")))
    assert done.texts == ["good", None] and done.reasons == ["", "failed: wrong"]
    assert done.details[1] == "expected a finite score, got nan; try to repair the function or the model"
    with pytest.raises(UsageError, match=r"step 'wrong' failed at document 0: expected a finite score, got nan; try"):
        run_steps([Wrong()], Batch(("bad",) * 30))


def test_a_function_scores_and_its_code_is_its_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = tmp_path / "my_scores_here.py"
    module.write_text("def length(texts):\n    return [len(text) for text in texts]\n")
    step = score_step("size", ScoreOptions(function="my_scores_here:length"))
    assert step.foreign == "my_scores_here:length"
    assert step.apply(Batch(("ab", ""))).facts[step.fact].tolist() == [2.0, 0.0]
    module.write_text("def length(texts):\n    return [len(text) + 1 for text in texts]\n")
    changed = score_step("size", ScoreOptions(function="my_scores_here:length"))
    assert changed.fact != step.fact
    assert changed.apply(Batch(("ab", ""))).facts[changed.fact].tolist() == [3.0, 1.0]
    with pytest.raises(UsageError, match="my_scores_here:length was changed while it was at work"):
        step.apply(Batch(("ab",)))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return [1]", "step 'score s' returned 1 s@.* for 40 documents, document 0 to document 39"),
        ("return 3", r"my_wrong_\w+:f returned a int: expected a list with a score for each text"),
        ("return ['x' for _ in texts]", r"document 0: my_wrong_\w+:f returned 'x' for a text: expected a number$"),
        ("return [float('inf') for _ in texts]", "expected a finite score, got inf"),
    ],
)
def test_a_function_that_returns_no_scores(tmp_path: Path, monkeypatch, body: str, message: str) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    name = f"my_wrong_{zlib.crc32(body.encode())}"  # another module each time, as Python keeps those it has imported
    (tmp_path / f"{name}.py").write_text(f"def f(texts):\n    {body}\n")
    step = score_step("s", ScoreOptions(function=f"{name}:f"))
    with pytest.raises(UsageError, match=message):
        run_steps([step], Batch(("a", "b") * 20))  # on a few documents they would be set aside


def test_a_function_has_no_label() -> None:
    with pytest.raises(UsageError, match="label has no effect on a function"):
        score_step("s", ScoreOptions(function="os:getcwd", label="hq"))
    with pytest.raises(UsageError, match="there is no module 'no_such_scores'"):
        score_step("s", ScoreOptions(function="no_such_scores:f"))
