"""Every command of the pages on the data pipeline is run, and SlimPajama's command lines give what one run gives."""

from pathlib import Path

import pyarrow.parquet as pq

from tests.gristmill_cli.corpus import tree
from tests.gristmill_cli.documentation import PAGES, commands, shell

TRAINING = {"README.md", "training.md", "parallelism.md", "checkpoints.md"}  # run by test_readme.py
DATA = {"slimpajama.md", "dedup.md"}


def test_every_page_with_commands_is_run_by_a_test() -> None:
    assert {page for page in PAGES if commands(page)} == TRAINING | DATA


def test_stages_by_hand(finished: tuple[Path, Path, str], tmp_path: Path) -> None:
    """As a reader types them, with the options of the finished run, whose bytes they must give."""
    corpus, run, _ = finished
    whole, by_hand = commands("slimpajama.md")
    same = {'0 "$s" 200': '0 "$s" 100', "--vocab_size 1000": "--vocab_size 420"}
    same |= {'--holdout_dir "$OUT/holdout"': '--holdout_dir "$OUT/holdout" --holdout 0.05'}
    for shown, used in same.items():
        assert shown in by_hand
        by_hand = by_hand.replace(shown, used)
    whole = whole.replace("--tokenizer.vocab_size 1000", "--tokenizer.vocab_size 420 --mix.holdout 0.05")
    curve, near = commands("dedup.md")
    done = shell(by_hand + curve + near + whole, CORPUS=str(corpus), OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for folder in ("train", "holdout", "train_deduped", "tokens"):
        assert tree(tmp_path / folder) == tree(run / folder)
    assert tree(tmp_path / "NORM") == tree(run / "normalized")
    assert "9 bands" in done.stdout and "skipped" in done.stderr and "confirmed" in done.stderr
    similar = pq.read_table(tmp_path / "NEAR" / "duplicates.parquet").column("similarity").to_pylist()
    assert similar and min(similar) >= 0.8
    assert done.stdout.count("funnel: documents") == 2
