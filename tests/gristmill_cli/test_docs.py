"""Every command of the pages on the data pipeline is run, and SlimPajama's command lines give what one run gives."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq

from tests.gristmill_cli.corpus import make_corpus, tree
from tests.gristmill_cli.documentation import PAGES, commands, shell

TRAINING = {"README.md", "training.md", "parallelism.md", "checkpoints.md"}  # run by test_readme.py
DATA = {"slimpajama.md", "dedup.md"}


def test_every_page_with_commands_is_run_by_a_test() -> None:
    assert {page for page in PAGES if commands(page)} == TRAINING | DATA


def test_stages_by_hand(tmp_path: Path) -> None:
    """As a reader types them: the bytes are those of one run, which the page begins with."""
    corpus = make_corpus(tmp_path / "corpus")
    for source in ("code", "tiny", "web"):  # each source is three processes of seconds
        shutil.rmtree(corpus / source)
    whole, by_hand = commands("slimpajama.md")
    for block, option in ((whole, "--mix.weights book 2.5 "), (by_hand, '--holdout_dir "$OUT/holdout"')):
        assert option in block
    whole = whole.replace("--mix.weights book 2.5 ", "--mix.holdout 0.05 ").replace("vocab_size 1000", "vocab_size 420")
    by_hand = by_hand.replace('--holdout_dir "$OUT/holdout"', '--holdout_dir "$OUT/holdout" --holdout 0.05')
    by_hand = by_hand.replace("vocab_size 1000", "vocab_size 420")
    curve, near = commands("dedup.md")
    done = shell(by_hand + curve + near + whole, on_one_core=True, CORPUS=str(corpus), OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    run = tmp_path / "run"
    for folder in ("train", "holdout", "train_deduped", "tokens"):
        assert tree(tmp_path / folder) == tree(run / folder)
    assert tree(tmp_path / "NORM") == tree(run / "normalized")
    assert "9 bands" in done.stdout and "skipped" in done.stderr and "confirmed" in done.stderr
    similar = pq.read_table(tmp_path / "NEAR" / "duplicates.parquet").column("similarity").to_pylist()
    assert similar and min(similar) >= 0.8
    assert done.stdout.count("funnel: documents") == 2
