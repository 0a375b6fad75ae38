"""The page on filters: its examples run as a reader types them, and count, remove and note what it says."""

import importlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dedup.clustering import keep_policy
from dedup.clustering.keep_policy import Candidate, KeepPolicy
from gristmill.config import load_config
from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from gristmill.steps import AnswerError, Batch
from gristmill_cli import run_check
from gristmill_cli.documents.trace import trace
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig
from gristmill_cli.run_records import load_record
from gristmill_cli.stages import normalize_text
from gristmill_cli.stages.normalize_text import document_steps
from preprocessing import user_code
from preprocessing.steps.user_function import StepOptions, UserFunction
from tests.gristmill_cli.corpus import ROOT
from tests.gristmill_cli.documentation import PAGES, commands, examples
from tests.gristmill_cli.in_process import gristmill

PAGE = "guides/add-a-filter.md"
GOOD = "This text is long enough to be kept by both rules, as it has many words in it."
SHORT = "Too few words in this one."
SIGNS = "1 2 3 4 5 6 7 8 9 10 11 12 13 14 words at the end"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the page's files, and a corpus of a text of each kind; it is the working folder."""
    (tmp_path / "corpus/web").mkdir(parents=True)
    records = [{"text": text, "id": name} for name, text in (("a", SHORT), ("b", GOOD), ("c", SIGNS))]
    lines = "".join(json.dumps(record) + "\n" for record in records)
    (tmp_path / "corpus/web/a.jsonl").write_text(lines)
    (tmp_path / "my_rules.py").write_text(examples(PAGE)[0])
    (toml,) = re.findall(r"```toml\n(.*?)```", PAGES[PAGE], re.DOTALL)
    (tmp_path / "pipeline.toml").write_text(toml)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(user_code, "_hashes", {})
    yield tmp_path
    for file in tmp_path.glob("*.py"):
        sys.modules.pop(file.stem, None)


def run_in(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": f"{ROOT}:{folder}",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_functions_of_the_page_remove_count_and_note(folder: Path) -> None:
    (line,) = commands(PAGE)
    done = run_in(folder, "bash", "-c", f"{line.strip()} --filter.threshold 10")
    assert done.returncode == 0, done.stderr
    assert "normalize_text: 3 read = 1 written + 1 letters + 1 too few words" in done.stderr
    assert [document.text for document in read_corpus(folder / "out/normalized")] == [GOOD]
    removed = pq.read_table(folder / "out/normalized.removed.parquet").to_pylist()
    assert [(row["file"], row["row"], row["rule"], row["id"]) for row in removed] == [
        ("web/a.jsonl", 0, "too few words", "a"),
        ("web/a.jsonl", 2, "letters", "c"),
    ]
    assert removed[1]["value"] == pytest.approx(sum(map(str.isalpha, SIGNS)) / len(SIGNS))
    facts = pq.read_table(folder / "out/facts/web/a.jsonl+0.facts.parquet").to_pylist()
    assert [row["letters"] is None for row in facts] == [True, False, False]
    again = run_in(folder, "bash", "-c", f"{line.strip()} --filter.threshold 11 --explain")
    assert "normalize_text: 3 read = 1 written + 1 letters + 1 too few words | done already" in again.stderr
    shown = run_in(folder, "bash", "-c", f"{line.strip()} --dry_run")
    assert "keep my_rules:keep" in " ".join(shown.stdout.split()), shown.stdout


def test_the_report_shows_what_a_function_removed(folder: Path) -> None:
    """`keep` says no value, `score` does."""
    (line,) = commands(PAGE)
    done = run_in(folder, "bash", "-c", f"{line.strip()} --filter.threshold 10 && gristmill report out")
    assert done.returncode == 0, done.stderr
    page = (folder / "out/report.html").read_text()
    assert SHORT in page and SIGNS in page and "too few words: 1 document" in page


def test_a_changed_function_runs_again(folder: Path) -> None:
    config = load_config(RunConfig, ["--config", "pipeline.toml", "--until", "filter", "--filter.threshold", "10"])
    run(config)
    rules = folder / "my_rules.py"
    rules.write_text(rules.read_text().replace(">= 10", ">= 3"))
    run(config)
    record = load_record(folder / "out", "normalize_text")
    assert record is not None
    assert record.counts.total("too few words").documents == 0
    assert record.counts.total("written").documents == 2


def test_fields_and_rewrites(folder: Path) -> None:
    (folder / "more_rules.py").write_text(
        "def own(texts, ids):\n    return [name != 'b' for name in ids]\n"
        "def loud(texts):\n    return [text.upper() for text in texts]\n"
    )
    (folder / "pipeline.toml").write_text(
        "corpus = 'corpus'\nout = 'out'\n[filter]\nthreshold = 1\n"
        "[[steps]]\nkeep = 'more_rules:own'\nfields = ['id']\n[[steps]]\nrewrite = 'more_rules:loud'\n"
    )
    done = gristmill("run", "pipeline.toml", "--until", "filter", "--alarms.source_loss", "0")
    assert "normalize_text: 3 read = 2 written + 1 own" in done.stderr, done.stderr
    assert [document.text for document in read_corpus(folder / "out/normalized")] == [SHORT.upper(), SIGNS.upper()]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("return [1 / (len(text) - 26) for text in texts]", "step 'f' failed at .*a.jsonl line 1: ZeroDivisionError"),
        ("return [True]", "step 'f' returned 1 reasons for 3 documents, .*a.jsonl line 1 to .*a.jsonl line 3"),
        ("return True", "my_bad:f returned a bool: expected a list with an item for each text"),
    ],
)
def test_a_faulty_function_is_named_with_file_and_line(folder: Path, function: str, said: str) -> None:
    (folder / "my_bad.py").write_text(f"def f(texts):\n    {function}\n")
    (folder / "pipeline.toml").write_text("corpus = 'corpus'\nout = 'out'\n[[steps]]\nkeep = 'my_bad:f'\n")
    done = gristmill("run", "pipeline.toml", "--until", "filter")
    assert done.returncode == 2
    assert re.search(said, done.stderr), done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        ("keep", ["yes", "no"], "my_answers:f returned 'yes' for a text: expected True or False"),
        ("keep", [None, True], "my_answers:f returned None for a text: expected True or False"),
        ("score", [1.0, float("nan")], "expected a finite score, got nan"),
    ],
)
def test_answers_that_are_none_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, values: list[Any], said: str
) -> None:
    (tmp_path / "my_answers.py").write_text("def f(texts, answers=[]):\n    return answers\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "my_answers", raising=False)
    importlib.import_module("my_answers").f.__defaults__ = (values,)
    step = UserFunction.of(StepOptions(**{kind: "my_answers:f"}))
    with pytest.raises(AnswerError, match=re.escape(said)):
        step.apply(Batch(("a text", "another")))


def test_a_step_in_the_code_runs_from_python(folder: Path) -> None:
    _, step, call, _ = examples(PAGE)
    (folder / "own_step.py").write_text(step + "\n\n" + call)
    done = run_in(folder, sys.executable, "own_step.py")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "1"
    facts = pq.read_table(folder / "facts/web/a.jsonl+0.facts.parquet").to_pylist()
    assert [row["words"] for row in facts] == [len(text.split()) for text in (SHORT, GOOD, SIGNS)]


def test_a_step_in_the_code_is_a_line_of_a_list(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The step is shown, counted, listed and noted wherever those of the user are."""
    (folder / "own_step.py").write_text(examples(PAGE)[1])
    monkeypatch.delitem(sys.modules, "own_step", raising=False)
    own_step = importlib.import_module("own_step").EnoughWords()
    for module in (normalize_text, run_check):
        monkeypatch.setattr(module, "document_steps", lambda config: [*document_steps(config), own_step])
    options = ["--corpus", "corpus", "--out", "out", "--until", "filter", "--filter.threshold", "1", "--workers", "1"]
    config = load_config(RunConfig, options)
    run(config)
    assert "normalize_text: 3 read = 2 written + 1 too few words" in capsys.readouterr().err
    (removed,) = pq.read_table(folder / "out/normalized.removed.parquet").to_pylist()
    assert (removed["row"], removed["rule"], removed["value"]) == (0, "too few words", 6)
    assert pq.read_table(folder / "out/facts/web/a.jsonl+0.facts.parquet")["words"].to_pylist() == [
        len(text.split()) for text in (SHORT, GOOD, SIGNS)
    ]
    report((config.out,))
    page = (folder / "out/report.html").read_text()
    assert SHORT in page and "too few words: 1 document" in page
    capsys.readouterr()
    trace(config.out, ("web/a.jsonl@0",))
    assert "too few words" in capsys.readouterr().out
    monkeypatch.setattr(type(own_step), "version", 2)
    run(config)
    assert "version of the step 'too few words'" in capsys.readouterr().err


def test_a_document_on_which_a_function_fails_is_set_aside(folder: Path) -> None:
    """The error names it once all others are done; allowed, it is left out and listed, and nothing runs again."""
    (folder / "poisoned.py").write_text(
        f"def f(texts):\n    return [1 / (len(text) - {len(GOOD)}) for text in texts]\n"
    )
    (folder / "pipeline.toml").write_text(
        "corpus = 'corpus'\nout = 'out'\n[filter]\nthreshold = 1\n[[steps]]\nscore = 'poisoned:f'\n"
    )
    command = ["run", "pipeline.toml", "--until", "filter", "--alarms.source_loss", "0"]
    ended = gristmill(*command)
    assert ended.returncode == 2
    assert "failed on 1 of 3 documents, more than --max_failed 0.00% allows: step 'f' failed at " in ended.stderr
    assert "a.jsonl line 2: ZeroDivisionError" in ended.stderr
    passed = gristmill(*command, "--max_failed", "0.5", "--explain_tasks")
    assert passed.returncode == 0, passed.stderr
    assert "normalize_text: 3 read = 2 written + 1 failed: f" in passed.stderr
    assert "prepare" not in passed.stderr.partition("normalize_text: 3 read")[0]
    (removed,) = pq.read_table(folder / "out/normalized.removed.parquet").to_pylist()
    assert (removed["file"], removed["row"], removed["rule"]) == ("web/a.jsonl", 1, "failed: f")
    assert removed["detail"].startswith("ZeroDivisionError")


def test_a_function_that_fails_on_most_documents_ends_the_run_at_once(folder: Path) -> None:
    lines = [json.dumps({"text": f"a text of its own, number {number}"}) for number in range(50)]
    (folder / "corpus/web/a.jsonl").write_text("\n".join(lines))
    (folder / "wrong.py").write_text("def f(texts):\n    return [text.words for text in texts]\n")
    (folder / "pipeline.toml").write_text("corpus = 'corpus'\nout = 'out'\n[[steps]]\nkeep = 'wrong:f'\n")
    done = gristmill("run", "pipeline.toml", "--until", "filter", "--max_failed", "0.9")
    assert done.returncode == 2
    assert re.search(r"step 'f' failed at .*a\.jsonl line 1: AttributeError", done.stderr), done.stderr


def test_a_keep_policy_of_the_page_is_a_class_and_its_name_in_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    defined = dict[str, Any]()
    exec(examples(PAGE)[3], defined)
    monkeypatch.setattr(keep_policy, "POLICIES", (*keep_policy.POLICIES, defined["Shortest"]))
    policy = keep_policy.parse_keep("shortest")
    with pytest.raises(UsageError, match=r"longest, .*, shortest$"):
        keep_policy.parse_keep("shortest:text")
    ranks = [policy.rank_or_last(Candidate("web", text)) for text in ("two words", "a", "three whole words")]
    assert isinstance(policy, KeepPolicy) and ranks.index(min(ranks)) == 1
