"""`gristmill report` of training runs: its numbers are those of metrics.jsonl, and several runs are in one picture."""

import gzip
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from gristmill.errors import UsageError
from gristmill_cli.report.write import report
from gristmill_planner.hardware import Cluster, find_device
from gristmill_planner.memory import RankMemory
from gristmill_planner.planned_run import PlannedRun
from tests.gristmill_cli.in_process import gristmill
from tests.gristmill_cli.pages import Numbers, check_recorded, dumped, in_a_browser
from training.experimental.parallel_config import ParallelConfig
from training.model.model_config import ModelConfig
from training.reporting.plot import plot

HOSTILE = "<script>document.title = 'ran'</script> & so on"


def write_run(folder: Path, steps: int, lr: float, asked: int = 0) -> Path:
    """A training run of 1,000 tokens a step, with two sources and another holdout."""
    records: list[dict[str, Any]] = [
        {"kind": "run", "step": 0, "parameters": 1234, "processes": 2, "tokens_per_step": 1000, "unigram_loss": 6.5,
         "layout": {"dp": 1, "tp": 2}}
    ]  # fmt: skip
    for step in range(1, steps + 1):
        records.append(
            {"kind": "step", "step": step, "lr": lr, "loss": 9 - step / 100, "grad_norm": 1 + step % 7,
             "tokens_per_second": 5000 + step, "memory_bytes": 1 << 30}
        )  # fmt: skip
        if step % 50 == 0:
            of = {name: {"loss": 8 - step / 90 + at, "bits_per_byte": 3.5 + at} for at, name in enumerate(("a/b", "c"))}
            records.append(
                {"kind": "eval", "step": step, "loss": 8.5 - step / 90, "bits_per_byte": 3.25, "sources": of,
                 "holdouts": {"law": {"loss": 7.5, "bits_per_byte": 3.0}}, "text": f"{HOSTILE} {step}"}
            )  # fmt: skip
            seen = {"a/b": {"tokens": step * 1000, "share": 1.0, "requested": 0.75}}
            records.append({"kind": "data", "step": step, "sources": seen})
    folder.mkdir(parents=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "run.json").write_text(json.dumps({"steps": asked or steps, "optim.lr": lr, "seed": 1}))
    return folder


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_run(tmp_path / "model", 1000, 0.25)


def test_numbers_are_those_of_the_records(model: Path) -> None:
    report((model,))
    page = (model / "report.html").read_text()
    named = check_recorded(model, page)
    assert {"step/1000/loss", "eval/1000/loss", "run/0/parameters", "eval/1000/sources/a~1b/loss", "step/1/grad_norm",
            "eval/1000/holdouts/law/bits_per_byte", "data/1000/sources/a~1b/tokens", "step/1000/lr"} <= {
        name.removeprefix("metrics.jsonl#/") for name in named
    }  # fmt: skip
    values = {it["data-value"] for it in Numbers(page).found}
    assert '<td class="text">parallel.tp</td>' in page
    assert {"5500.5", "1000000"} <= values  # the median speed, the tokens seen
    assert len(re.findall("<svg", page)) == 6 and 'class="warn"' not in page
    assert "script" not in Numbers(page).tags and f"{HOSTILE} 50" in Numbers(page).text and len(page) < 1e6
    report((model,), model / "again.html")
    assert (model / "again.html").read_text() == page


def test_duration_and_starts_are_shown(model: Path) -> None:
    """Of the last report, and from run.json."""
    start = {"date": "2026-11-29T08:00:00+00:00", "host": "node1", "processes": 8, "device": "NVIDIA H100",
             "versions": {"torch": "2.13.0"}, "command": "gristmill train <x>"}  # fmt: skip
    options = json.loads((model / "run.json").read_text())
    (model / "run.json").write_text(json.dumps(options | {"starts": [start]}))
    with (model / "metrics.jsonl").open("a") as file:
        for record in ({"kind": "run", "step": 1000, "device": "cuda"}, {"kind": "step", "step": 1001, "loss": 3.0,
                       "elapsed_seconds": 7384.5, "device_hours": 16.41}):  # fmt: skip
            file.write(json.dumps(record) + "\n")
    report((model,))
    page = (model / "report.html").read_text()
    named = {name.removeprefix("metrics.jsonl#/") for name in check_recorded(model, page)}
    assert {"step/1001/elapsed_seconds", "step/1001/device_hours"} <= named
    text = Numbers(page).text
    assert "2:03:04" in text and "GPU hours" in text and "node1" in text and "torch 2.13.0" in text
    assert "gristmill train <x>" in text and "'date'" not in text


def test_scores_in_tasks_are_drawn_over_steps(model: Path) -> None:
    with (model / "metrics.jsonl").open("a") as file:
        for step in (50, 1000):
            score = {"bits_per_byte": 4 - step / 1000, "acc": 0.25 + step / 4000, "items": 8}
            record = {"kind": "eval", "step": step, "tasks": {"quiz": score, "seconds": 0.5}}
            file.write(json.dumps(record) + "\n")
    report((model,))
    text = Numbers((model / "report.html").read_text()).text
    assert "accuracy in tasks" in text and "answers of tasks (bits per byte)" in text
    values = {it["data-value"] for it in Numbers((model / "report.html").read_text()).found}
    assert {"3.95", "3.0", "0.2625", "0.5"} <= values


def test_a_sparse_model_s_experts_are_drawn(model: Path) -> None:
    with (model / "metrics.jsonl").open("a") as file:
        for step in (500, 1000):
            of_layers = {"1": 1.5 - step / 4000, "2": 1.25}
            record = {"kind": "experts", "step": step, "max_load": of_layers, "entropy": {"1": 0.9, "2": 0.95}}
            record |= {"loads": {"1": [0.5, 1.25, 1.25], "2": [1.0, 1.25, 0.75]}} if step == 500 else {}
            file.write(json.dumps(record) + "\n")
    report((model,))
    page = (model / "report.html").read_text()
    named = {name.removeprefix("metrics.jsonl#/") for name in check_recorded(model, page)}
    assert {"experts/500/max_load/1", "experts/1000/entropy/2"} <= named
    assert "loads by layer and expert at step 500" in Numbers(page).text
    assert len(re.findall("<svg", page)) == 9


def test_several_runs_are_in_one_picture(model: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "other", 30, 0.5, asked=60)
    page = tmp_path / "two.html"
    assert gristmill("report", model, other, "--out", page).returncode == 0
    named, found = check_recorded(tmp_path, page.read_text()), Numbers(page.read_text())
    assert {"model/metrics.jsonl#/step/1000/loss", "other/metrics.jsonl#/step/30/loss"} <= named
    first = page.read_text().partition("<svg")[2].partition("</svg>")[0]
    assert all(label in first for label in ("model train", "other train", "model holdout"))
    assert "other: The run has not finished: 30 of 60 steps recorded." in found.text
    differ = page.read_text().partition('id="differ"')[2].partition("</table>")[0]
    assert "optim.lr" in differ and "seed" not in differ


def test_damage_and_divergence_head_the_page(model: Path) -> None:
    with (model / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "st\n')
        file.write('{"kind": "step", "step": 1001, "loss": null, "skipped": true}\n')
    (model / "run.json").write_text("{")
    report((model,))
    head = Numbers((model / "report.html").read_text().partition("<section>")[0]).text
    assert "1 damaged line of metrics.jsonl left out." in head
    assert "The loss is not finite at 1 step, first at step 1,001." in head
    assert "1 update skipped, first at step 1,001." in head and "run.json is missing or damaged" in head


def test_a_comparison_leaves_the_page_of_the_first_run(tmp_path: Path, model: Path) -> None:
    report((model,))
    own = (model / "report.html").read_bytes()
    shutil.copytree(model, tmp_path / "other")
    assert str(report((model, tmp_path / "other"))) == f"report: {model}/comparison.html"
    assert (model / "report.html").read_bytes() == own != (model / "comparison.html").read_bytes()


def test_a_run_that_has_not_begun_and_a_folder_of_none(tmp_path: Path, model: Path) -> None:
    (tmp_path / "new").mkdir()
    (tmp_path / "new/metrics.jsonl").touch()
    report((tmp_path / "new",))
    assert "No step is recorded." in (tmp_path / "new/report.html").read_text()
    with pytest.raises(UsageError, match="expected the --out_dir of a training run"):
        report((model, tmp_path))
    with pytest.raises(UsageError, match="nowhere: there is no such folder"):
        report((tmp_path / "nowhere",))
    with pytest.raises(UsageError, match=r"expected the --out_dir of a training run, got no metrics.jsonl"):
        plot(tmp_path)
    with pytest.raises(UsageError, match="got none"):
        report(())


@in_a_browser
def test_chromium_shows_the_same_numbers_and_runs_nothing(model: Path) -> None:
    report((model,))
    page = dumped(model / "report.html")
    check_recorded(model, page)
    assert Numbers(page).found == Numbers((model / "report.html").read_text()).found
    assert "<title>gristmill: model</title>" in page


def test_peak_memory_is_beside_the_formula_of_the_layout(model: Path) -> None:
    of = ModelConfig(layers=4, width=64, heads=4).resolve(300, 32)
    layout = ParallelConfig(pp=2, micro_batches=4).resolve(2, of, 32)
    options = {f"model.{name}": value for name, value in of.record().items() if name != "preset"}
    options |= {"data.seq_len": 32, "optim.name": "adamw", "optim.ema_decay": 0.0, "precision": "bf16"}
    (model / "run.json").write_text(json.dumps({"steps": 1000, **options}))
    began = {"kind": "run", "step": 1000, "tokens_per_step": 256, "device": "cuda", "layout": layout.record(),
             "recompute": "full", "moments": "device", "parameters_on": "device"}  # fmt: skip
    with (model / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(began) + "\n")
    report((model,))
    page = (model / "report.html").read_text()
    assert "metrics.jsonl#/step/1000/memory_bytes" in check_recorded(model, page)
    shown = page.partition('id="memory"')[2].partition("</table>")[0]
    formula = RankMemory(PlannedRun(of, layout, 8, 32, Cluster(find_device("h100"), 2), "full"), 0)
    values = [int(value) for value in re.findall(r'data-value="(\d+)"', shown)]
    assert values[:2] == [1 << 30, formula.peak] and formula.peak > 0
    assert values[2:] == [getattr(formula, kind) for kind in RankMemory.KINDS]
    with (model / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(began | {"parameters_on": "cpu"}) + "\n")  # is not in the formula
    report((model,))
    assert 'id="memory"' not in (model / "report.html").read_text()


def test_the_passes_of_a_traced_pipeline_are_drawn(model: Path) -> None:
    (model / "profile").mkdir()
    for rank in (0, 1):
        counts, events = {"F": 0, "B": 0}, list[dict[str, Any]]()
        for place, kind in enumerate({0: "FFBB", 1: "FBFB"}[rank]):
            name = f"1f1b pass {kind} of stage {rank}, micro-batch {counts[kind]}, rank {rank} of 2"
            counts[kind] += 1
            at = {"ts": 1e6 * (place + rank), "dur": 5e5}
            events.append({"ph": "X", "cat": "user_annotation", "name": name, **at})
        trace = gzip.compress(json.dumps({"traceEvents": events}).encode())
        (model / f"profile/steps-3-3.rank-{rank}.json.gz").write_bytes(trace)
    report((model,))
    page = (model / "report.html").read_text()
    assert "step 3, measured 1f1b: 2 micro-batches in 4.5 s, bubble ratio 1.250" in Numbers(page).text
    passes = page.partition('<section id="passes-of-the-pipeline">')[2].partition("</figure>")[0]
    assert passes.count("#d55e00") >= 4 and passes.count("<svg") == 1 and "rank 1" in passes
    (model / "profile/steps-3-3.rank-1.json.gz").unlink()  # of one rank alone there is no timeline
    report((model,))
    assert "Passes of the pipeline" not in (model / "report.html").read_text()
