import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from gristmill.errors import OutputError
from training.reporting.metrics import METRICS, Reporter, memory_bytes, peak_tflops, read_metrics


def write(out_dir: Path, begin: int, steps: range, active: bool = True) -> None:
    with closing(Reporter(out_dir, active, tensorboard=True)) as reporter:
        reporter.start(begin)
        for step in steps:
            reporter.record("step", step, loss=1.0 / step, mfu=None)
        reporter.record("eval", steps[-1], loss=0.5, text="once upon")


def test_records_reach_the_file_and_tensorboard(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 4))
    records = list(read_metrics(tmp_path / METRICS))
    assert records[1] == {"kind": "step", "step": 2, "loss": 0.5, "mfu": None} and len(records) == 4
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("step/loss")][:2] == [(1, 1.0), (2, 0.5)]
    assert events.Scalars("eval/loss")[0].value == 0.5


def test_going_on_forgets_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    write(tmp_path, 0, range(1, 6))
    with (tmp_path / METRICS).open("a") as file:
        file.write('{"kind": "step", "st')  # the process was killed here
    write(tmp_path, 3, range(4, 7))
    steps = [record["step"] for record in read_metrics(tmp_path / METRICS) if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    assert all(json.loads(line) for line in (tmp_path / METRICS).read_text().splitlines())


def test_other_ranks_write_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, 0, range(1, 3), active=False)
    Reporter(tmp_path, False, False).say("hello")
    assert list(tmp_path.iterdir()) == [] and capsys.readouterr().out == ""


def test_an_out_dir_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="a part of that path is a file"):
        Reporter(tmp_path / "file" / "run", True, False).start(0)


def test_the_peak_of_a_cpu_is_not_known_and_of_a_gpu_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert peak_tflops(torch.device("cpu"), "bf16") is None and memory_bytes(torch.device("cpu")) > 1e7
    cards = {"NVIDIA H100 80GB HBM3": (989, 67), "NVIDIA H100 PCIe": (756, 51), "NVIDIA L40S": (362, 91.6)}
    for name, peaks in cards.items():
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device, name=name: name)
        assert (peak_tflops(torch.device("cuda"), "bf16"), peak_tflops(torch.device("cuda"), "fp32")) == peaks
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Something New")
    assert peak_tflops(torch.device("cuda"), "bf16") is None
