"""Every command of README, but for the quick start (test_wheel.py), and of the pages on training is run in order."""

import re
from pathlib import Path

import pytest

from tests.gristmill_cli.corpus import ROOT, make_corpus
from tests.gristmill_cli.documentation import DOCS, PAGES, commands, examples, shell

_, PIPELINE, TRAIN = commands("README.md")
GUIDES = ("training", "checkpoints", "experts", "generation", "benchmarks")
ON_TRAINING = [
    block
    for page in ("guides/training.md", "concepts/parallelism.md", *(f"guides/{name}.md" for name in GUIDES[1:]))
    for block in commands(page)
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_corpus(tmp_path_factory.mktemp("readme") / "corpus")


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """What README's commands write."""
    out = tmp_path_factory.mktemp("out")
    pipeline = PIPELINE.replace("--tokenizer.vocab_size 4096", "--tokenizer.vocab_size 420 --mix.holdout 0.05")
    done = shell(pipeline + TRAIN.removeprefix(". .venv/bin/activate\n"), CORPUS=str(corpus), OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert "funnel: documents" in done.stdout and "repeated" in done.stdout and "step 20/20" in done.stdout
    assert "\nThe mill" in done.stdout and "2 prompts: " in done.stderr
    return out


def test_the_pipeline_then_training(out: Path) -> None:
    assert list((out / "model/checkpoints").iterdir())


@pytest.mark.thorough
def test_the_commands_of_pages_on_training(out: Path) -> None:
    done = shell("\n".join(ON_TRAINING), OUT=str(out))
    assert done.returncode == 0, done.stderr
    assert "tp 2 with sequence parallelism x pp 2" in done.stdout and "step 30/30" in done.stdout
    assert (out / "hf/model.safetensors").is_file() and list((out / "from_hf").iterdir())


@pytest.mark.parametrize("page", ["README.md", "guides/dedup.md"])
def test_python_examples_print_what_they_promise(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = examples(page)
    exec(code, {})
    assert capsys.readouterr().out.splitlines() == re.findall(r"# (\[.*)", code)


def test_the_test_command_is_what_ci_runs() -> None:
    command = "bash scripts/test.sh"
    assert f"`{command}`" in PAGES["README.md"] and command in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_files_and_pages_that_are_named_exist(page: str) -> None:
    folder = ROOT if page == "README.md" else (DOCS / page).parent
    links = [target for target in re.findall(r"\]\(([^)#]+)\)", PAGES[page]) if "://" not in target]
    assert [link for link in links if not (folder / link).exists()] == []
    packages = "gristmill|gristmill_cli|preprocessing|dedup|training|benchmarks|scripts|configs"
    named = re.findall(rf"`((?:{packages})/[\w/.]+)`", PAGES[page])
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_readme_is_short() -> None:
    assert PAGES["README.md"].count("\n") <= 110
