"""`--eval.tasks`: a run's scores are those that lm_eval has of its checkpoint, under any layout."""

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gristmill.errors import UsageError
from tests.training.conftest import small_run, train_with_options
from tests.training.tasks.conftest import ITEMS
from training.distributed.process_group import init_distributed
from training.language_model import open_language_model
from training.reporting.metrics_file import METRICS, read_metrics
from training.tasks.run_tasks import run_tasks

ANSWER = """\
task: mill_answer
dataset_path: json
dataset_kwargs:
  data_files: {{test: {folder}/items.jsonl}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: " {{{{choices[answer]}}}}"
metric_list:
  - metric: perplexity
"""
GENERATED = ANSWER.replace("loglikelihood", "generate_until").replace("perplexity", "exact_match")


@pytest.fixture
def options(corpus: Path, tasks: Path) -> list[str]:
    (tasks / "mill_answer.yaml").write_text(ANSWER.format(folder=tasks))
    chosen = ["--eval.tasks", "mill_choice", "mill_answer", "--eval.task_folder", str(tasks)]
    run = [*small_run(corpus), "--optim.steps", "6", "--eval.every", "3", "--data.seq_len", "64"]
    return [*run, *chosen, "--eval.sample_tokens", "0", "--optim.lr", "0.01", "--optim.warmup_steps", "1"]


def scores(out_dir: Path) -> list[dict[str, Any]]:
    found = []
    for record in read_metrics(out_dir / METRICS):
        if record["kind"] == "eval":
            assert record["tasks"].pop("seconds") > 0 and 0 < record["tasks"].pop("share") < 1
            found.append(record["tasks"])
    return found


def test_scores_are_those_of_the_checkpoint(
    tmp_path: Path, options: list[str], tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train_with_options(tmp_path / "run", options)
    first, last = scores(tmp_path / "run")
    assert first != last
    with init_distributed("cpu") as device:
        model = open_language_model(tmp_path / "run", device)
        expected = run_tasks(model, ["mill_choice", "mill_answer"], tasks, 0, None, 4)
    assert last["mill_choice"]["acc"] == expected["mill_choice"]["acc"]
    assert last["mill_answer"]["acc"] is None and last["mill_answer"]["items"] == len(ITEMS)
    nats = math.log(expected["mill_answer"]["perplexity"]) * len(ITEMS)  # lm_eval's is of answers, not of tokens
    size = sum(len(f" {item['choices'][item['answer']]}") for item in ITEMS)
    assert last["mill_answer"]["bits_per_byte"] == pytest.approx(nats / math.log(2) / size, rel=1e-5)
    assert last["mill_choice"]["bits_per_byte"] > 1
    said = capsys.readouterr().out
    assert re.search(r"^tasks took \d+\.\d s, \d+\.\d% of the time since the evaluation before$", said, re.MULTILINE)
    assert "task mill_choice after step 6: acc " in said and " bits per byte of the answer (4 items)" in said
    board = EventAccumulator(str(tmp_path / "run/tensorboard")).Reload()
    (event,) = [event for event in board.Scalars("eval/tasks/mill_choice/bits_per_byte") if event.step == 6]
    assert event.value == pytest.approx(last["mill_choice"]["bits_per_byte"])


@pytest.mark.parametrize(
    ("ranks", "layout"),
    [
        (3, {"dp": 3}),
        (2, {"tp": 2, "sequence_parallel": "true"}),
        (2, {"pp": 2}),
        (2, {"cp": 2}),
        (2, {"zero": 3}),
    ],
)
def test_scores_do_not_depend_on_the_layout(
    tmp_path: Path,
    options: list[str],
    train_in_ranks: Callable[[int, Path, list[str]], None],
    ranks: int,
    layout: dict[str, Any],
) -> None:
    same = ["--precision", "fp64", "--data.batch_size", "6", "--model.kv_heads", "2"]
    train_with_options(tmp_path / "one", [*options, *same])
    words = [word for name, value in layout.items() for word in (f"--parallel.{name}", str(value))]
    train_in_ranks(ranks, tmp_path / "many", [*options, *same, *words])
    for one, many in zip(scores(tmp_path / "one"), scores(tmp_path / "many"), strict=True):
        for task in one:
            assert many[task] == pytest.approx(one[task], abs=1e-9)


def test_what_cannot_be_scored_is_refused(tmp_path: Path, options: list[str], tasks: Path) -> None:
    (tasks / "mill_answer.yaml").write_text(GENERATED.format(folder=tasks))
    with pytest.raises(UsageError, match=r"task mill_answer is of the kind generate_until; expected multiple_choice"):
        train_with_options(tmp_path / "run", options)
    (tasks / "mill_answer.yaml").write_text(ANSWER.format(folder=tasks))
    with pytest.raises(UsageError, match=r"task mill_\w+ has an answer of \d+ tokens .* data.seq_len, 2, after"):
        train_with_options(tmp_path / "run", [*options, "--data.seq_len", "2"])
