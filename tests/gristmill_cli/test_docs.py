"""Every command of the pages on the data pipeline is run, and SlimPajama's command lines give what one run gives."""

import json
import re
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.config import load_config
from gristmill.io.readers import read_corpus
from gristmill.io.token_shards import Manifest, ShardRecord, SourceRecord, TokenizerRecord
from gristmill_cli.__main__ import GROUPS
from gristmill_cli.run_config import RunConfig
from tests.gristmill_cli.corpus import ROOT, make_corpus, tree
from tests.gristmill_cli.documentation import PAGES, commands, shell
from tests.tokenizers_of_models import content_of

TRAINING = {
    "README.md",
    "guides/training.md",
    "concepts/parallelism.md",
    "guides/checkpoints.md",
    "guides/experts.md",
    "guides/generation.md",
    "guides/benchmarks.md",
}  # run by test_readme.py
FILTERS = {"guides/add-a-filter.md"}  # run by test_add_a_filter.py
FORMATS = {"guides/formats.md"}  # run by test_formats.py
SCORES = {"guides/scores.md"}  # run by test_run_scores.py
NODES = {"guides/cluster.md"}  # run by tests/training/test_cluster.py
CHATS = {"guides/chats.md"}  # run by tests/preprocessing/test_tokenize_chats.py
BUCKETS = {"guides/buckets.md"}  # run by tests/training/checkpoint/test_remote_run.py
SPANS = {"guides/spans.md"}  # run by tests/dedup/test_remove_spans.py
TRACES = {"guides/trace.md"}  # run by test_trace.py
CHECKS = {"guides/check.md"}  # run by tests/training/parity/test_check.py
REWINDS = {"guides/rewind.md"}  # run by test_rewind.py
DATA = {
    "guides/pipeline.md",
    "guides/dedup.md",
    "guides/tokenizers.md",
    "guides/tokens-of-others.md",
    "guides/recipes.md",
    "guides/decontamination.md",
    "guides/report.md",
}


def test_every_page_with_commands_is_run_by_a_test() -> None:
    tutorials = {page for page in PAGES if page.startswith("tutorials/")}  # run by test_tutorials.py
    elsewhere = TRAINING | NODES | BUCKETS | CHATS | FILTERS | SCORES | SPANS | FORMATS | TRACES | REWINDS | CHECKS
    assert {page for page in PAGES if commands(page)} == elsewhere | DATA | tutorials


def test_the_whole_file_of_a_run_is_one(tmp_path: Path) -> None:
    (block,) = re.findall(r"### A whole file\n.*?```toml\n(.*?)```", PAGES["guides/pipeline.md"], re.DOTALL)
    (tmp_path / "run.toml").write_text(block)
    config = load_config(RunConfig, ["--config", str(tmp_path / "run.toml")])
    assert config.weights == {"web": 1.0, "books": 2.5} and config.dedup.keep == "longest"


def test_the_page_of_commands_has_all_of_them() -> None:
    page = PAGES["reference/commands.md"]
    for group in GROUPS.values():
        for name, command in group.items():
            assert f"| `gristmill {name}` | {command.help}" in page


def test_the_trainer_has_one_spelling() -> None:
    """`gristmill train` in one process, `-m gristmill_cli.train` under a launcher: both work in any folder."""
    files = [path for path in (*ROOT.glob("configs/**/*"), *ROOT.glob("scripts/*.py")) if path.is_file()]
    texts = PAGES | {str(path): path.read_text() for path in files}
    others = re.compile(
        r"(?:python|torchrun)[^`\n]*(?:training/train\.py|-m (?:training\.train|gristmill_cli train)\b)"
    )
    assert {name: found[0] for name, text in texts.items() if (found := others.search(text))} == {}


@pytest.mark.thorough
def test_stages_by_hand(tmp_path: Path) -> None:
    """As a reader types them: the bytes are those of one run, which the page begins with."""
    corpus = make_corpus(tmp_path / "corpus")
    for source in ("code", "tiny", "web"):  # each source is three processes of seconds
        shutil.rmtree(corpus / source)
    whole, amounts, by_hand = commands("guides/pipeline.md")
    for block, option in ((whole, "--mix.weights book 2.5 "), (by_hand, '--holdout_dir "$OUT/holdout"')):
        assert option in block
    whole = whole.replace("--mix.weights book 2.5 ", "--keep train_text --mix.holdout 0.05 ")
    whole = whole.replace("vocab_size 8000", "vocab_size 420")
    by_hand = by_hand.replace('--holdout_dir "$OUT/holdout"', '--holdout_dir "$OUT/holdout" --holdout 0.05')
    by_hand = by_hand.replace("vocab_size 8000", "vocab_size 420")
    curve, near, shown = commands("guides/dedup.md")
    shown = shown.replace("--largest 5", "--largest 5 >/dev/null").replace("--show 3", "--show 3 >/dev/null")
    page, trained = commands("guides/report.md")
    (tmp_path / "model").mkdir()
    (tmp_path / "model/metrics.jsonl").write_text('{"kind": "step", "step": 1, "loss": 2.5}\n')
    done = shell(
        by_hand + curve + near + whole + shown + page + trained + amounts,
        on_one_core=True,
        CORPUS=str(corpus),
        OUT=str(tmp_path),
    )
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for folder in ("train", "holdout", "train_deduped"):
        assert tree(tmp_path / folder) == tree(run / folder)
    for folder in ("train", "holdout"):
        by_stages = Manifest.load(tmp_path / "tokens" / folder)
        by_run = Manifest.load(run / "tokens" / folder)
        assert (by_stages.documents, by_stages.bytes) == (by_run.documents, by_run.bytes)
    assert tree(tmp_path / "NORM") == tree(run / "normalized")
    assert "9 bands" in done.stdout and "skipped" in done.stderr and "confirmed" in done.stderr
    similar = pq.read_table(tmp_path / "NEAR" / "duplicates.parquet").column("similarity").to_pylist()
    assert similar and min(similar) >= 0.8
    assert done.stdout.count("funnel: documents") == 2 and "100,000 → " in done.stdout


def test_benchmarks_are_kept_out(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    text = next(document.text for document in read_corpus(corpus) if len(document.text) > 600)
    quiz, out = tmp_path / "quiz.jsonl", tmp_path / "out"
    quiz.write_text(json.dumps({"question": text[200:500]}) + "\n")
    (block,) = commands("guides/decontamination.md")
    block = block.rstrip() + " --tokenizer.vocab_size 420 --mix.holdout 0.05"
    done = shell(block, on_one_core=True, CORPUS=str(corpus), OUT=str(out), BENCHMARKS=str(quiz))
    assert done.returncode == 0, done.stderr
    assert "quiz: 1 of 1 item found" in done.stderr
    assert (out / "decontaminated.contamination.parquet").exists()


def test_tokens_of_other_programs_are_imported_and_trained_on(tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    for name, size in (("train", 20_000), ("val", 2_000)):
        np.where(random.random(size) < 0.01, 50_256, random.integers(0, 50_256, size)).astype(np.uint16).tofile(
            tmp_path / f"{name}.bin"
        )
    (block,) = commands("guides/tokens-of-others.md")
    done = shell(block, on_one_core=True, DATA=str(tmp_path), OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "1 file not copied (hard links)" in done.stderr and "step 5/5" in done.stdout
    assert (tmp_path / "out/train/tokens_00000.bin").samefile(tmp_path / "train.bin")
    assert "bits per byte" not in done.stdout


def test_the_page_of_the_layout_names_every_field_of_a_manifest() -> None:
    page = PAGES["reference/token-shards.md"]
    named = re.findall(r"^\| `([\w.*\[\]]+)` \|", page, re.MULTILINE)
    shard = ShardRecord.__struct_fields__
    fields = [f"tokenizer.{name}" for name in TokenizerRecord.__struct_fields__]
    fields += [f"shards[].{name}" for name in shard] + [f"sources.*.{name}" for name in SourceRecord.__struct_fields__]
    fields += [name for name in Manifest.__struct_fields__ if name != "tokenizer"]
    assert sorted(named) == sorted(fields)


def test_tokenizers_of_models_and_byte_level_ones(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    for source in ("code", "tiny", "web"):
        shutil.rmtree(corpus / source)
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"))
    (block,) = commands("guides/tokenizers.md")
    block = block.replace("vocab_size 8000", "vocab_size 420 --mix.holdout 0.05")
    done = shell(block, on_one_core=True, CORPUS=str(corpus), OUT=str(tmp_path / "out"), MODEL=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert Manifest.load(tmp_path / "out/tokens").tokenizer.vocab_size == 500
    for folder in ("train", "holdout"):
        found = Manifest.load(tmp_path / "out/own/tokens" / folder)
        assert (found.tokenizer.path, found.tokenizer.vocab_size, found.tokenizer.end_of_document) == (
            "tokenizer.json",
            420,
            0,
        )
