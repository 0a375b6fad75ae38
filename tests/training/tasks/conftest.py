"""Checkpoints of small random models, as in tests/training/generation, and tasks with local data."""

import json
from pathlib import Path

import pytest

from tests.training.generation.conftest import checkpoint_of

__all__ = ["checkpoint_of"]

ITEMS = [
    {"question": "What turns the wheel?", "choices": ["water", "bread", "the miller"], "answer": 0},
    {"question": "Who carries grain?", "choices": ["a river", "the miller"], "answer": 1},
    {"question": "What is fine?", "choices": ["flour", "stone"], "answer": 0},
    {"question": "What is slow?", "choices": ["morning", "the wheel", "water"], "answer": 1},
]
CHOICE = """\
task: mill_choice
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/items.jsonl}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
metric_list:
  - metric: acc
  - metric: acc_norm
"""
WHOLE = """\
task: mill_text
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/items.jsonl}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{question}}}}"
metric_list:
  - metric: bits_per_byte
"""
WRITTEN = """\
task: mill_written
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/items.jsonl}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[answer]}}}}"
generation_kwargs:
  until: ["\\n"]
  max_gen_toks: 8
metric_list:
  - metric: exact_match
"""
TASKS = ["mill_choice", "mill_text", "mill_written"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def tasks(tmp_path: Path) -> Path:
    """A folder of three tasks and their data."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    for name, text in zip(TASKS, (CHOICE, WHOLE, WRITTEN), strict=True):
        (folder / f"{name}.yaml").write_text(text.format(folder=folder))
    return folder
