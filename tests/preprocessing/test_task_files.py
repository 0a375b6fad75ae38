"""decontaminate --against TASK.yaml: lm-eval's task files, without running their code."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import GristmillError
from gristmill.storage import hub as hub_module
from preprocessing.contamination.report import read_report, report_paths
from preprocessing.decontaminate import decontaminate
from tests.hub_server import DATASET, running_hub

OPTIONS = RunOptions(workers=1, quiet=True)
QUESTION = "Which of the four winds drives the oldest mill that stands on the hill above the village?"
CHOICES = ["the wind of the sea that comes over the dunes in the early autumn nights", "no wind"]
ROW = {"question": QUESTION, "choices": {"text": CHOICES, "label": ["A", "B"]}, "answerKey": "A", "note": "n " * 20}
TASK = """\
task: winds
dataset_path: json
dataset_kwargs:
  data_files: {test: items.jsonl, train: other.jsonl}
output_type: multiple_choice
test_split: test
doc_to_text: "Question: {{question.strip()}}\\nAnswer:"
doc_to_choice: "{{choices.text}}"
doc_to_target: "{{choices.label.index(answerKey)}}"
metric_list:
  - metric: !function utils.agree
"""


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    (tmp_path / "corpus/web").mkdir(parents=True)
    texts = [f"One asked: {QUESTION}", "None knew but " + CHOICES[0], "n " * 20, "the mill grinds", "other " * 20]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (tmp_path / "corpus/web/a.jsonl").write_text(lines)
    return tmp_path / "corpus"


def write_task(folder: Path, task: str = TASK, rows: tuple[dict[str, Any], ...] = (ROW,)) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "winds.yaml").write_text(task)
    (folder / "items.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "other.jsonl").write_text(json.dumps({"question": "other " * 20}) + "\n")
    return folder / "winds.yaml"


def found(corpus: Path, against: Path, **options: Any) -> tuple[set[int], set[str]]:
    """Rows of the corpus that have an item, and the benchmarks."""
    target = corpus.parent / "out"
    decontaminate(corpus, target, (against,), OPTIONS, policy="report", **options)
    table, report = report_paths(target)
    return set(pq.read_table(table)["row"].to_pylist()), set(read_report(report).benchmarks)


def test_the_fields_that_templates_name_are_looked_for_in_the_split_that_is_evaluated(corpus: Path) -> None:
    task = write_task(corpus.parent / "tasks")
    assert found(corpus, task) == ({0, 1}, {"winds"})  # not the note, and no item of the other split
    assert found(corpus, task, template="{note}") == ({2}, {"winds"})


def test_a_folder_of_tasks_with_what_they_include(corpus: Path) -> None:
    folder = corpus.parent / "tasks"
    write_task(folder, "task: own\ninclude: _base.yaml\ndoc_to_choice: null\n")
    (folder / "_base.yaml").write_text(TASK)
    (folder / "all.yaml").write_text("group: weather\ntask: [own]\n")
    assert found(corpus, folder) == ({0}, {"own"})


def test_a_data_set_of_the_hub_by_its_configuration_and_split(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def parquet(*rows: dict[str, Any]) -> bytes:
        sink = pa.BufferOutputStream()
        pq.write_table(pa.Table.from_pylist(list(rows)), sink)
        return bytes(sink.getvalue())

    task = f"dataset_path: {DATASET}\ndataset_name: easy\nvalidation_split: validation\ndoc_to_text: question\n"
    path = write_task(corpus.parent / "tasks", task)
    hub_module._open.cache_clear()
    with running_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        hub.commit({
            "README.md": b"a card",
            "easy/validation-00000-of-00001.parquet": parquet({"question": QUESTION}),
            "easy/train-00000-of-00001.parquet": parquet({"question": CHOICES[0]}),
            "hard/validation-00000-of-00001.parquet": parquet({"question": "other " * 20}),
        })  # fmt: skip
        assert found(corpus, path) == ({0}, {"winds"})
        path.write_text(task.replace("easy", "middle"))
        fault = "expected files of middle validation in hf://datasets/org/name, got easy/train.*; try --against"
        with pytest.raises(GristmillError, match=fault):
            found(corpus, path)
    hub_module._open.cache_clear()


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ('"Question: {{question.strip()}}\\nAnswer:"', "!function utils.text",
         "got the code !function utils.text as doc_to_text, which is not run; name the fields .* --template"),
        ("task: winds", "process_docs: !function utils.docs", "got the code !function utils.docs as process_docs"),
        ("{{question.strip()}}", "{{question", "doc_to_text is no Jinja template"),
        ("items.jsonl", "none.jsonl", "expected its data file none.jsonl, but there is none"),
        ("dataset_path: json", "group: all", "expected a task with a dataset_path, got none"),
        ("task: winds", "task: [", "expected a task file of lm-eval, got broken YAML"),
        ("{{choices.text}}", "{{options}}", "no options, only question.*; name the fields that there are"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_refused_by_name(corpus: Path, old: str, new: str, fault: str) -> None:
    assert old in TASK
    with pytest.raises(GristmillError, match=fault):
        found(corpus, write_task(corpus.parent / "tasks", TASK.replace(old, new)))


def test_a_task_without_fields_is_refused(corpus: Path) -> None:
    task = "dataset_path: json\ndataset_kwargs: {data_files: items.jsonl}\ndoc_to_choice: ['yes', 'no']\n"
    with pytest.raises(GristmillError, match="expected fields in doc_to_text, doc_to_choice, doc_to_target, got none"):
        found(corpus, write_task(corpus.parent / "tasks", task))


def test_items_within_the_corpus_are_refused(corpus: Path) -> None:
    task = write_task(corpus.parent / "tasks", TASK.replace("items.jsonl", str(corpus / "web/a.jsonl")))
    with pytest.raises(GristmillError, match="items of the benchmark would also be read as documents"):
        found(corpus, task)
