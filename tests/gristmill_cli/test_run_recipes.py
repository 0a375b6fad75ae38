"""`gristmill recipe`: each recipe that ships runs, shortened and in small, from a corpus to a checkpoint."""

import json
import random
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from gristmill.config import load_config
from gristmill_cli.recipes.command import DATA, TRAINING, RunRecipe
from gristmill_cli.run_config import RunConfig
from tests.gristmill_cli.corpus import WORDS, make_corpus
from tests.gristmill_cli.in_process import gristmill
from tests.preprocessing.chats import make_tokenizer
from tests.training.hf_models import build_theirs
from training.config import TrainConfig
from training.hugging_face.hf_config import find_family
from training.model.decoder import meta_decoder

RECIPES = [recipe.name for recipe in RunRecipe.all()]
PLANNED = {"llama-1b", "llama-8b"}
SHORT = shlex.split(
    "--optim.steps 4 --optim.warmup_steps 1 --optim.cooldown_steps 0 --optim.schedule constant --eval.every 4 "
    "--eval.sequences 4 --eval.sample_tokens 0 --data.seq_len 32 --data.batch_size 4 --precision fp32 --compile false "
    "--device cpu --metrics.tensorboard false --mix.holdout 0.1 --parallel.pp 1 --parallel.schedule 1f1b "
    "--parallel.virtual_stages 1 --parallel.micro_batches 1 --parallel.tp 1 --parallel.sequence_parallel false"
)
SMALL = shlex.split("--model.layers 2 --model.width 64 --model.heads 2 --model.kv_heads 1 --model.ffn_width 64")
NEW_TOKENIZER = shlex.split("--tokenizer.vocab_size 420 --tokenizer.exact false --model.vocab_size 0")


def corpus_of(name: str, folder: Path) -> Path:
    """A corpus of the kind that a recipe reads."""
    if name not in ("shakespeare-10m", "moe-8m"):
        return make_corpus(folder)
    chosen = random.Random(1)
    speeches = [f"MILLER:\n{' '.join(chosen.choices(WORDS, k=40))}" for _ in range(1200)]
    (folder / "plays").mkdir(parents=True)
    (folder / "plays/input.txt").write_text("\n\n".join(speeches))
    return folder


@pytest.mark.thorough
@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_runs_from_a_corpus_to_a_checkpoint(name: str, tmp_path: Path) -> None:
    corpus = corpus_of(name, tmp_path / "corpus")
    options = [*SMALL, *NEW_TOKENIZER]
    if name.startswith(("llama", "web")):
        options.append("--recipe=")  # whose rules leave nothing of made-up words
    if name == "qwen3-continue":
        folder = make_tokenizer(tmp_path / "hf")
        build_theirs("qwen3", folder, vocab_size=600)
        imported = [sys.executable, "-m", "gristmill_cli", "import-hf", str(folder), str(tmp_path / "imported")]
        subprocess.run(imported, check=True, capture_output=True)
        options = ["--tokenizer.file", str(tmp_path / "imported"), "--init_from", str(tmp_path / "imported")]
    if name == "llama-8b":  # has a tokenizer of its own
        options += ["--model.preset", "llama"]
    command = [sys.executable, "-m", "gristmill_cli", "recipe", "run", name, "--corpus", str(corpus)]
    command += ["--out", str(tmp_path / "out"), *SHORT, *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "out/model/summary.json").read_text())
    assert summary["steps"] == 4 and 0 < summary["holdout_loss"] < 10
    assert Path(summary["checkpoint"]).is_dir()


@pytest.mark.parametrize("name", RECIPES)
def test_its_files_are_right_and_its_page_says_what_to_expect(name: str) -> None:
    recipe = RunRecipe.named(name)
    load_config(RunConfig, ["--config", str(recipe.folder / DATA), "--corpus", "c", "--out", "o"])
    folders = ["--data.train", "t", "--data.holdout", "h", "--out_dir", "m"]
    config = load_config(TrainConfig, ["--config", str(recipe.folder / TRAINING), *folders])
    config.check()
    find_family(config.model.resolve(1024, config.data.seq_len))  # raises for what cannot be exported and pushed
    assert f"gristmill recipe run {name} " in recipe.page
    assert recipe.summary.endswith(".") and len(recipe.summary) < 200
    if name in PLANNED:
        answer = (recipe.folder / "plan.txt").read_text()
        planned = tomllib.loads(answer[answer.index("# The first choice") :])
        ours = tomllib.loads((recipe.folder / TRAINING).read_text())
        for section in ("parallel", "memory"):
            for key, value in ours.get(section, {}).items():
                assert planned[section][key] == value
        assert planned["data"] == {key: ours["data"][key] for key in planned["data"]}
    else:
        assert (recipe.folder / "loss.svg").read_bytes().startswith(b"<?xml") and "loss.svg" in recipe.page
        assert "holdout loss" in recipe.page


def test_the_model_that_was_continued_is_a_qwen3_of_the_size_that_its_page_says() -> None:
    page = RunRecipe.named("qwen3-continue").page.replace("\\\n", " ")
    (line,) = [line for line in page.splitlines() if line.startswith("gristmill train ")]
    config = load_config(TrainConfig, shlex.split(line)[2:])
    config.check()
    model = config.model.resolve(4096, config.data.seq_len)
    assert find_family(model).model_type == "qwen3"
    parameters = sum(p.numel() for p in meta_decoder(model).parameters())
    assert f"{parameters / 1e6:.1f} million parameters" in " ".join(page.split())


def test_they_are_listed_and_shown() -> None:
    listed = gristmill("recipe", "list")
    assert listed.returncode == 0 and all(name in listed.stdout for name in RECIPES)
    assert gristmill("recipe", "show", "moe-8m").stdout.startswith("# ")
    assert {"shakespeare-10m", "web-17m", "qwen3-continue", "moe-8m", *PLANNED} == set(RECIPES)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["run", "moe-8n"], "expected a recipe, got 'moe-8n'; try llama-1b"),
        (["run", "moe-8m"], "needs --corpus FOLDER and --out DIR"),
        (
            ["run", "moe-8m", "--corpus", "c", "--out", "o", "--processes", "none"],
            "--processes none: expected a number",
        ),
        (["run", "moe-8m", "--corpus", "c", "--out", "o", "--optim.stepz", "3"], "optim.stepz"),
        (
            ["run", "shakespeare-10m", "--corpus", "c", "--out", "o", "--model.width", "64"],
            "model.width 64 is not divisible by model.heads 6",
        ),
        (["fetch"], "expected list, show or run, got 'fetch'"),
    ],
)
def test_what_cannot_be_run_is_refused_in_one_sentence(words: list[str], message: str) -> None:
    done = gristmill("recipe", *words)
    assert done.returncode == 2 and message in done.stderr and done.stderr.count("\n") == 1, done.stderr
