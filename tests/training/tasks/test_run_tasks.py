"""`gristmill evaluate --tasks` and `gristmill lm-eval`, on local task files and without a network."""

import json
from collections.abc import Callable
from functools import cache, partialmethod
from pathlib import Path
from typing import Any

import pytest

from tests.gristmill_cli.in_process import gristmill
from tests.training.launch import be_command, launch_all, rank_variables
from tests.training.tasks.conftest import ITEMS, TASKS
from tests.training.test_cluster import free_port
from training.evaluate import main
from training.hugging_face.export_hf import export_hf
from training.tasks.item_scores import aggregate, read_item_scores


def words(run: Path, tasks: Path, *more: str) -> list[str]:
    return [str(run), "--tasks", *TASKS, "--task_folder", str(tasks), "--device", "cpu", *more]


def of_transformers(folder: Path, tasks: Path) -> dict[str, Any]:
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    found = simple_evaluate(
        "hf", f"pretrained={folder},dtype=float32", TASKS, device="cpu", task_manager=manager, batch_size=2
    )
    results: dict[str, Any] = found["results"]
    return results


def test_scores_are_those_of_lm_eval_s_own_backend(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = checkpoint_of("llama, grouped")
    export_hf(run, tmp_path / "hf", run / "train")
    main(words(run, tasks, "--out", str(tmp_path / "scores.json")))
    said = capsys.readouterr().out
    scores = json.loads((tmp_path / "scores.json").read_text())
    expected = of_transformers(tmp_path / "hf", tasks)
    assert set(scores) == set(TASKS) == set(expected)
    for task in TASKS:
        assert scores[task]["items"] == len(ITEMS)
        for name, value in expected[task].items():
            if isinstance(value, float) and "stderr" not in name:
                assert scores[task][name.removesuffix(",none")] == pytest.approx(value, abs=1e-5)
    assert 0 < scores["mill_choice"]["acc"] < 1 and scores["mill_text"]["bits_per_byte"] > 1
    for task in TASKS:
        assert f"{task}: " in said
    assert "4 items" in said and "acc 0." in said


def test_items_have_their_scores_and_the_texts_that_count(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], tasks: Path
) -> None:
    folder = checkpoint_of("llama, grouped")
    path = tmp_path / "items.jsonl"
    main(words(folder, tasks, "--out", str(tmp_path / "scores.json"), "--items", str(path)))
    scores = json.loads((tmp_path / "scores.json").read_text())
    items = read_item_scores(path)
    assert [(item.task, item.item) for item in items] == [(task, number) for task in TASKS for number in range(4)]
    for task in TASKS:
        own = [item for item in items if item.task == task]
        expected = {name: value for name, value in scores[task].items() if name != "items"}
        assert aggregate(own) == pytest.approx(expected)
    assert {"acc", "acc_norm"} == items[0].metrics.keys()
    assert items[0].texts == ["What turns the wheel?", "water"]  # and no wrong answer
    assert items[4].texts == ["What turns the wheel?"]


def test_ranks_have_the_scores_of_one_process(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], tasks: Path
) -> None:
    folder = checkpoint_of("llama, grouped")
    main(words(folder, tasks, "--out", str(tmp_path / "one.json")))
    out = ["--out", str(tmp_path / "two.json"), "--parallel.tp", "2"]
    port = free_port()
    variables = [rank_variables(rank, 2, port) for rank in range(2)]
    with launch_all(be_command, ("evaluate", *words(folder, tasks, *out)), variables, tmp_path) as launched:
        assert launched.codes() == [0, 0], launched.said()
        assert "".join(launched.printed()).count("mill_choice: ") == 1
    one, two = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "two"))
    for task in TASKS:
        assert two[task] == pytest.approx(one[task], abs=1e-5)


def test_the_command_line_of_lm_eval_knows_our_models(
    tmp_path: Path, checkpoint_of: Callable[[str], Path], tasks: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lm_eval.tasks import TaskManager

    with_no_others = partialmethod(TaskManager.__init__, include_defaults=False)  # its own take seconds to list
    monkeypatch.setattr(TaskManager, "__init__", with_no_others)
    folder = checkpoint_of("llama, grouped")
    main(words(folder, tasks, "--out", str(tmp_path / "ours.json"), "--limit", "3"))
    options = ["--tasks", str(tasks / "mill_choice.yaml"), "--limit", "3", "--output_path", str(tmp_path / "theirs")]
    done = gristmill("lm-eval", "--model_args", f"checkpoint={folder}", *options, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    (results,) = (tmp_path / "theirs").rglob("results*.json")
    found = json.loads(results.read_text())["results"]["mill_choice"]
    ours = json.loads((tmp_path / "ours.json").read_text())["mill_choice"]
    assert ours["items"] == 3 and found["acc,none"] == pytest.approx(ours["acc"])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as end:
        main([*arguments, "--device", "cpu"])
    said = capsys.readouterr().err.splitlines()
    assert end.value.code == 2 and len(said) == 1 and said[0].startswith("error: "), said
    return said[0]


@pytest.fixture
def _tasks_of_lm_eval_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """To list them all, as for the name of one that there is not, takes six seconds."""
    from lm_eval import tasks

    make = tasks.TaskManager
    all_tasks = cache(make)

    def manager(include_path: list[str] | None = None, **options: Any) -> Any:
        return make(include_path=include_path, **options) if include_path or options else all_tasks()

    monkeypatch.setattr(tasks, "TaskManager", manager)


@pytest.mark.usefixtures("_tasks_of_lm_eval_are_listed_once")
def test_what_cannot_be_is_refused_in_one_sentence(
    checkpoint_of: Callable[[str], Path], tasks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(checkpoint_of("llama, grouped"))
    choice = str(tasks / "mill_choice.yaml")
    missing = tasks / "none.yaml"
    assert refused(capsys, folder, "--tasks", str(missing)).startswith(f"error: {missing}: there is no such file")
    assert "tasks has no_such_task, which lm_eval does not know" in refused(capsys, folder, "--tasks", "no_such_task")
    assert "; did you mean hellaswag?" in refused(capsys, folder, "--tasks", "helaswag")
    assert f"{folder} is a folder: give it by --task_folder" in refused(capsys, folder, "--tasks", folder)
    assert "limit is given, but there are no --tasks" in refused(capsys, folder, "--text", choice, "--limit", "3")
    assert "parallel.zero is given" in refused(capsys, folder, "--tasks", choice, "--parallel.zero", "3")
    items = (tasks / "items.jsonl").read_text().splitlines()
    lacking = {name: value for name, value in json.loads(items[2]).items() if name != "answer"}
    (tasks / "items.jsonl").write_text("\n".join([*items[:2], json.dumps(lacking), items[3]]))
    expected = "task mill_choice has an item without a right answer (None); expected one of its choices"
    assert expected in refused(capsys, folder, "--tasks", choice)
    main([folder, "--tasks", choice, "--limit", "2", "--device", "cpu"])  # of which each has one
    capsys.readouterr()
    (tasks / "items.jsonl").unlink()
    said = refused(capsys, folder, "--tasks", choice)
    assert "the data of tasks mill_choice cannot be read" in said and "items.jsonl" in said
    (tasks / "mill_choice.yaml").write_text("task: [")
    assert "mill_choice.yaml" in refused(capsys, folder, "--tasks", choice)


def test_it_is_said_where_lm_eval_is_missing(
    checkpoint_of: Callable[[str], Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("training.tasks.harness.find_spec", lambda name: None)
    said = refused(capsys, str(checkpoint_of("llama, grouped")), "--tasks", "mill_choice")
    assert "--tasks needs lm_eval: pip install 'gristmill[eval]'" in said
