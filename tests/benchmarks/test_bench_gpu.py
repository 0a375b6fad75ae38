"""The report of bench_gpu, made on a CPU with tiny models by the command that a GPU's machine runs."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks.bench_gpu import bench_gpu
from benchmarks.gpu_sections import SECTIONS, estimated_peak, sizes_of
from gristmill.errors import GristmillError, UsageError

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu.sh"


def test_the_script_writes_a_whole_report(tmp_path: Path) -> None:
    out = tmp_path / "report.md"
    command = ["bash", str(SCRIPT), "--tiny", "--device", "cpu", "--out", out.name, "--leave_out", "compiled"]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    text = out.read_text() if out.exists() else ""
    assert done.returncode == 0, done.stdout + done.stderr + text
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert sections.keys() == SECTIONS.keys() and len(text) < 100_000 and "failed" not in text
    assert "| eager |" in sections["speed"] and "| compiled |" not in sections["speed"]
    assert "| `aten::" in sections["speed"]
    assert [sections["recomputation"].count(f"| {mode} |") for mode in ("none", "selective", "full")] == [1, 1, 1]
    assert "| moments: cpu |" in sections["offload"] and "are the same bit for bit" in sections["resuming"]
    assert "| dense |" in sections["experts"] and "| 1 of 4 experts |" in sections["experts"]
    assert "0 red" in sections["certificate"] and "SKIPPED" in sections["tests"]


def test_a_section_that_fails_is_told_and_the_others_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.bench_gpu.SECTIONS", {"bad": lambda _: 1 / 0, "good": lambda _: ["fine"]})
    with pytest.raises(GristmillError, match="failed: bad; see"):
        bench_gpu(tmp_path / "r.md", "cpu", tiny=True)
    text = (tmp_path / "r.md").read_text()
    assert "ZeroDivisionError" in text and "## good\n\nfine" in text
    bench_gpu(tmp_path / "r.md", "cpu", tiny=True, minutes=0)
    assert "not begun in 0 minutes" in (tmp_path / "r.md").read_text()


@pytest.mark.parametrize("wrong", [{"minutes": float("nan")}, {"leave_out": ["speeed"]}])
def test_wrong_options_are_refused_at_the_start(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match=r"--minutes is nan|--leave_out has speeed; expected names among speed"):
        bench_gpu(tmp_path / "r.md", "cpu", tiny=True, **wrong)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", ["nowhere", "empty"])
def test_a_folder_without_wheels_is_refused_before_anything_is_made(tmp_path: Path, folder: str) -> None:
    (tmp_path / "empty").mkdir()
    command = ["bash", str(SCRIPT), "--wheels", folder, "--tiny", "--device", "cpu"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHON": "false"}, capture_output=True, text=True)
    assert done.returncode == 2 and f"error: there are no wheels (*.whl) in {folder}" in done.stderr


def test_a_python_without_torch_is_told(tmp_path: Path) -> None:
    (tmp_path / "some.whl").touch()
    for wheels in ([], ["--wheels", str(tmp_path)]):
        environment = os.environ | {"PYTHON": "false"}
        done = subprocess.run(["bash", str(SCRIPT), *wheels], env=environment, capture_output=True, text=True)
        assert done.returncode == 2 and done.stderr.startswith("error: false cannot import torch; name one that can")


def test_a_machine_without_a_gpu_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(UsageError, match="try --tiny --device cpu"):
        bench_gpu()


def test_the_formula_counts_states_and_activations() -> None:
    llama = sizes_of(False).llama
    modes = [estimated_peak(llama | {"memory.recompute": mode}, "cuda") for mode in ("none", "selective", "full")]
    parameters = 1_105_000_000
    assert modes[0] > modes[1] > modes[2] > 16 * parameters
    on_cpu = estimated_peak(llama | {"memory.optimizer": "cpu"}, "cuda")
    assert abs(modes[0] - on_cpu - 8 * parameters) < 0.02 * 8 * parameters
