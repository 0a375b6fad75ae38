"""Every command that the README shows is run, and what it says of the house is so."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from tests.gristmill_cli.corpus import ROOT, make_corpus

README = (ROOT / "README.md").read_text(encoding="utf-8")
SHELL = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def shell(script: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a block as a reader would, from the root, and stop at its first error."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("readme") / "corpus")


def test_quickstart_on_a_corpus(corpus: Path, tmp_path: Path) -> None:
    assert SHELL[0].strip() == "bash scripts/quickstart.sh"
    small = "--optim.steps 12 --eval.every 6 --model.width 64 --model.layers 2 --data.seq_len 32 --data.batch_size 4"
    options = f"{small} --parallel.micro_batches 2"
    done = shell(
        f"bash scripts/quickstart.sh {corpus} {options}", OUT=str(tmp_path / "out"), QUICKSTART_VOCABULARY="420"
    )
    assert done.returncode == 0, done.stderr
    shown = re.findall(r"^== .*", README, re.MULTILINE)
    assert [line for line in done.stdout.splitlines() if line.startswith("== ")][1:] == shown[1:]
    assert "= train" in done.stdout and "holdout after step 12" in done.stdout and "· train" in done.stdout
    assert (tmp_path / "out" / "model" / "loss.svg").is_file()


def test_the_test_command_is_what_ci_runs() -> None:
    assert SHELL[1].strip() == "bash scripts/test.sh"
    assert SHELL[1].strip() in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


def test_run_pipeline_then_train(corpus: Path, tmp_path: Path) -> None:
    words = ("run_pipeline.sh", "torchrun", "_hf", "parity")
    pipeline, *training = (block for block in SHELL if any(word in block for word in words))
    assert len(training) == 4
    block = pipeline.replace("--tokenizer.vocab_size 1000", "--tokenizer.vocab_size 420 --mix.holdout 0.05")
    done = shell(block + "".join(training), CORPUS=str(corpus), OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "funnel: documents" in done.stdout and "+ repeated" in done.stdout and "step 20/20" in done.stdout
    assert "tp 2 with sequence parallelism x pp 2" in done.stdout and "step 30/30" in done.stdout
    assert (tmp_path / "out/hf/model.safetensors").is_file() and list((tmp_path / "out/from_hf").iterdir())


def test_stages_by_hand(corpus: Path, tmp_path: Path) -> None:
    block = next(block for block in SHELL if "normalize_text.py" in block).removeprefix(". .venv/bin/activate\n")
    block = block.replace("--vocab_size 1000", "--vocab_size 420")
    curve, near = (block for block in SHELL if "gristmill bands" in block or "generate_exact_pairs" in block)
    done = shell(block + curve + near, CORPUS=str(corpus), OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "tokens" / "holdout" / "manifest.json").is_file()
    assert "9 bands" in done.stdout and "skipped" in done.stderr and "confirmed" in done.stderr
    similar = pq.read_table(tmp_path / "out" / "NEAR" / "duplicates.parquet").column("similarity").to_pylist()
    assert similar and min(similar) >= 0.8


def test_library_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = re.findall(r"```python\n(.*?)```", README, re.DOTALL)[0]
    exec(code, {})
    promised = re.findall(r"# (\[.*)", code)
    assert capsys.readouterr().out.splitlines() == promised


def test_the_tree_names_every_file() -> None:
    tree = README.partition("## The house")[2].partition("```\n")[2].partition("```")[0]
    found = {
        f"{folder}/{path.name}"
        for folder in ("pipeline", "preprocessing", "dedup", "training", "gristmill")
        for path in (ROOT / folder).glob("*.py")
        if not path.name.startswith("__")
    }
    shown, folder = set(), ""
    for line in tree.splitlines():
        name = line.split()[0]
        folder = name.rstrip("/") if name.endswith("/") and not line.startswith(" ") else folder
        if name.endswith(".py") and line.startswith("  ") and folder != "scripts":
            shown.add(f"{folder}/{name}")
    assert shown == found
