"""Recordings locate faults in trainers that others wrote, two of them reported in public; right runs differ nowhere."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import gristmill_parity.recording
from gristmill_parity.recording import compare, reference_runs
from tests.training.parity import other_trainers
from tests.training.test_cluster import free_port
from training.distributed.rank_pool import RankPool

ROOT = Path(__file__).resolve().parents[3]


def test_megatron_s_norm_that_is_not_marked_is_not_summed(rank_pool: RankPool, tmp_path: Path) -> None:
    """NVIDIA/Megatron-LM #599 and #1446: with sequence parallelism ranks have other tokens."""
    pytest.importorskip("megatron.core")
    for run in reference_runs(tmp_path / "reference", "fp64", 2):
        rank_pool.run(1, other_trainers.megatron, run.folder, run.perturb)
    rank_pool.run(2, other_trainers.megatron, tmp_path / "right")
    assert compare(tmp_path / "reference", tmp_path / "right").is_clean
    rank_pool.run(2, other_trainers.megatron, tmp_path / "wrong", None, "norm not marked")
    verdict = compare(tmp_path / "reference", tmp_path / "wrong")
    assert verdict.tensor == "norm.weight gradient"
    assert (verdict.pattern.kind, verdict.pattern.axes) == ("not summed", ("tp",))


def test_tokens_that_the_trainer_of_transformers_averages_per_rank(rank_pool: RankPool, tmp_path: Path) -> None:
    """huggingface/transformers #34242."""
    pytest.importorskip("accelerate")
    for run in reference_runs(tmp_path / "reference", "fp64", 2):
        rank_pool.run(1, other_trainers.hugging_face, run.folder, run.perturb)
    rank_pool.run(2, other_trainers.hugging_face, tmp_path / "right")
    assert compare(tmp_path / "reference", tmp_path / "right").is_clean
    rank_pool.run(2, other_trainers.hugging_face, tmp_path / "wrong", None, "tokens averaged per rank")
    verdict = compare(tmp_path / "reference", tmp_path / "wrong")
    assert verdict.tensor == "lm_head output gradient"
    assert verdict.pattern.kind == "factor" and "times what is right on rank" in str(verdict)


@pytest.mark.parametrize(
    ("fault", "name", "kind", "axis"),
    [
        ("", "", "none", ""),
        ("output not reduced", "model.layers.0.mlp", "not summed", "tp"),
        ("gradients not averaged", "", "factor", "dp"),
    ],
    ids=["right", "output", "gradients"],
)
def test_fsdp_and_tensor_parallelism_of_torch(
    rank_pool: RankPool, tmp_path: Path, fault: str, name: str, kind: str, axis: str
) -> None:
    pytest.importorskip("transformers")
    for run in reference_runs(tmp_path / "reference", "fp64", 2):
        rank_pool.run(1, other_trainers.llama_reference, run.folder, run.perturb)
    rank_pool.run(4, other_trainers.fsdp_with_tp, tmp_path / "run", fault)
    verdict = compare(tmp_path / "reference", tmp_path / "run")
    assert verdict.pattern.kind == kind, str(verdict)
    assert verdict.name.startswith(name) and axis in ("", *verdict.pattern.axes[:1])


def test_the_guide_s_example_says_what_the_guide_says(tmp_path: Path) -> None:
    code, shown = _example()
    (tmp_path / "find.py").write_text(code)
    reference = [sys.executable, "find.py", "recordings"]
    subprocess.run(reference, cwd=tmp_path, check=True, env=_environment())
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "find.py", "recordings"]
    done = subprocess.run(launcher, cwd=tmp_path, check=True, env=_environment(), capture_output=True, text=True)
    lines = shown.strip().splitlines()
    assert lines[0].partition(":")[0] in done.stdout and lines[2] in done.stdout


BARE = """
import runpy
import sys

# torch, what it needs itself, and numpy
ALLOWED = {*sys.stdlib_module_names, "torch", "torchgen", "functorch", "numpy", "gristmill_parity", "typing_extensions",
           "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"}

class Only:
    def __init__(self, finder):
        self.finder = finder

    def find_spec(self, name, path=None, target=None):
        is_allowed = name.partition(".")[0] in ALLOWED or name.startswith("_sysconfigdata")  # of Python's own
        return self.finder.find_spec(name, path, target) if is_allowed else None

sys.meta_path = [Only(finder) for finder in sys.meta_path]
for name in ("gristmill", "training", "tyro", "scipy"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(f"{name} can be imported")
runpy.run_path("find.py", run_name="__main__")
import gristmill_parity.recording
print("from", gristmill_parity.recording.__file__)
"""


@pytest.mark.thorough
def test_torch_and_numpy_are_enough(tmp_path: Path) -> None:
    """Two ranks record and compare where nothing else can be imported, from a copy of the package alone."""
    code, shown = _example()
    shutil.copytree(ROOT / "gristmill_parity", tmp_path / "alone" / "gristmill_parity")
    (tmp_path / "find.py").write_text(code)
    (tmp_path / "bare.py").write_text(BARE)
    command = [sys.executable, "bare.py", "recordings"]
    own = {**os.environ, "PYTHONPATH": str(tmp_path / "alone"), "OMP_NUM_THREADS": "1"}
    subprocess.run(command, cwd=tmp_path, check=True, env=own, timeout=300)
    own |= {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    ranks = [
        subprocess.Popen(command, cwd=tmp_path, env={**own, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert shown.strip().splitlines()[2] in outputs[0]
    assert all(f"from {tmp_path}" in output for output in outputs)


def test_the_library_imports_torch_and_numpy_alone() -> None:
    code = (
        "import sys; import torch, numpy; before = set(sys.modules); import gristmill_parity.recording; "
        "print({name.partition('.')[0] for name in set(sys.modules) - before})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = ast.literal_eval(done.stdout)
    of_torch = {"torch", "sympy", "mpmath", "typing_extensions"}
    standard = set(sys.stdlib_module_names) | {"numpy", "gristmill_parity"} | of_torch
    assert loaded - standard <= set(), loaded - standard
    assert gristmill_parity.recording.__all__


def _example() -> tuple[str, str]:
    """Return the guide's first program, and what it prints."""
    page = (ROOT / "docs/guides/find-a-wrong-gradient.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    shown = re.findall(r"```text\n(.*?)```", page, re.DOTALL)[0]
    return code, shown


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
