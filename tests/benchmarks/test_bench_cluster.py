"""The report of bench_cluster, made by the command that GPU nodes run: two nodes of one process each, over gloo."""

import os
import re
import subprocess
import sys
from pathlib import Path

from benchmarks.bench_cluster import SECTIONS, _layouts
from tests.patience import patience
from tests.training.test_cluster import free_port

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks/gpu.sh"


def test_two_nodes_write_one_report(tmp_path: Path) -> None:
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1", "NODES": "2", "GPUS": "1"}
    environment |= {"PORT": str(free_port())}
    started = []
    for node in range(2):
        (tmp_path / f"node{node}").mkdir()
        command = ["bash", str(SCRIPT), "--tiny", "--device", "cpu", "--out", "report.md"]
        started.append(
            subprocess.Popen(
                command, cwd=tmp_path / f"node{node}", env=environment, stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT, text=True,
            )
        )  # fmt: skip
    try:
        said = [process.communicate(timeout=patience(120))[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [0, 0], said
    (report,) = tmp_path.glob("node*/report.md")  # of the node of rank 0
    text = report.read_text()
    sections = {part.partition("\n")[0]: part for part in text.split("\n## ")[1:]}
    assert sections.keys() == SECTIONS.keys()
    assert "2 processes over gloo" in sections["nodes"] and sections["nodes"].count("| 1 | CPU |") == 2
    for collective in ("all-reduce", "all-to-all"):
        rates = re.findall(rf"^\| {collective} \| \S+ \| \S+ \| (\S+) \|", sections["collectives"], re.MULTILINE)
        assert len(rates) == 2 and all(float(rate) > 0 for rate in rates)
    layouts = [name for name, _ in _layouts(2)]
    assert layouts == ["dp", "ZeRO-1", "ZeRO-3", "tp", "pp", "cp"]
    assert all(re.search(rf"^\| {name} \| \S+e-\d\d \| green \|", sections["parity"], re.MULTILINE) for name in layouts)
    assert "red" not in sections["parity"]
    assert all(f"| {name} |" in sections["speed"] for name in ("GPT-2 124M", "Llama 1.1B", "Llama 3.1 8B"))


def test_it_is_said_how_it_is_started() -> None:
    command = [sys.executable, str(SCRIPT.with_name("bench_cluster.py")), "--device", "cpu"]
    environment = {name: value for name, value in os.environ.items() if name != "WORLD_SIZE"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and done.stderr.startswith("error: expected to be started by torchrun; try NODES=1")
