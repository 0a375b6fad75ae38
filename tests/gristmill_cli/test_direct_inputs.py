"""Between stages: a folder that lacks a file which a stage wrote, or holds another one, is read by no stage."""

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dedup import (
    dedup_train,
    generate_connected_components,
    generate_duplicate_pairs,
    generate_duplicates_dict,
    generate_exact_pairs,
    to_hash,
)
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError
from preprocessing import normalize_text, tokenize_corpus, train_tokenizer
from preprocessing.filter import filter as find_short
from preprocessing.shuffle_holdout import pass1, pass2

QUIET = RunOptions(workers=1, quiet=True)
PART = "chunk1/example_train_3.jsonl.zst"
HELD_OUT = "chunk1/example_holdout_3.jsonl.zst"
Stage = Callable[[Path, Path], Any]  # of the folder of a run, and a folder for the output
READERS: list[tuple[str, str, str, Stage]] = [  # a stage, what is missing, who wrote that, a call of the stage
    ("normalize", f"train/{PART}", "pass2", lambda run, out: normalize_text(run / "train", out, options=QUIET)),
    ("filter", "normalized/book/b.jsonl.zst", "normalize_text",
     lambda run, out: find_short(run / "normalized", out / "f.pickle", 0, "all", 200, QUIET)),
    ("exact", "normalized/book/b.jsonl.zst", "normalize_text",
     lambda run, out: generate_exact_pairs(run / "normalized", out / "duplicate_pairs.txt", options=QUIET)),
    ("to_hash", "normalized/book/b.jsonl.zst", "normalize_text",
     lambda run, out: to_hash("all", run / "normalized", out, 0, "0", 0, 100, options=QUIET)),
    ("to_hash of a source", "normalized/c4/a.jsonl.zst", "normalize_text",
     lambda run, out: to_hash("c4", run / "normalized/c4", out / "c4", 0, "0", 0, 100, options=QUIET)),
    ("pairs", "minhash/book/b.jsonl.zst+0.signatures.arrow", "to_hash",
     lambda run, out: generate_duplicate_pairs(run / "minhash", out / "duplicate_pairs.txt", options=QUIET)),
    ("clusters", "minhash/book/b.jsonl.zst+0.signatures.arrow", "to_hash",
     lambda run, out: generate_connected_components(run / "dup", out / "c.parquet", run / "minhash", options=QUIET)),
    ("verify", "normalized/book/b.jsonl.zst", "normalize_text",
     lambda run, out: generate_duplicates_dict(
         run / "dup/connected_components.parquet", out / "d.parquet", QUIET, verify="jaccard",
         corpus=run / "normalized")),
    ("pass1", "normalized/book/b.jsonl.zst", "normalize_text",
     lambda run, out: pass1(run / "normalized", out, options=QUIET)),
    ("pass2", "pass1/book/b.jsonl.zst+0.bucket", "pass1",
     lambda run, out: pass2(0, 20, 1, run / "pass1", out / "train", out / "holdout", options=QUIET)),
    ("dedup_train", f"train/{PART}", "pass2",
     lambda run, out: dedup_train(1, run / "train", run / "holdout", out, options=QUIET)),
    ("dedup_train's holdout", f"holdout/{HELD_OUT}", "pass2",
     lambda run, out: dedup_train(1, run / "train", run / "holdout", out, options=QUIET)),
    ("train_tokenizer", f"train_deduped/{PART}", "dedup_train",
     lambda run, out: train_tokenizer(run / "train_deduped", out, 400, options=QUIET)),
    ("tokenize", f"train_deduped/{PART}", "dedup_train",
     lambda run, out: tokenize_corpus(run / "train_deduped", run / "tokenizer/tokenizer.model", out, QUIET)),
    ("tokenize the holdout", f"holdout/{HELD_OUT}", "pass2",
     lambda run, out: tokenize_corpus(run / "holdout", run / "tokenizer/tokenizer.model", out, QUIET)),
]  # fmt: skip


@pytest.fixture(scope="module")
def copied(finished, tmp_path_factory) -> Path:
    """A copy of a finished run."""
    return shutil.copytree(finished[1], tmp_path_factory.mktemp("copied") / "out")


@pytest.mark.parametrize(("missing", "stage", "call"), [it[1:] for it in READERS], ids=[it[0] for it in READERS])
def test_a_missing_output_is_noticed_by_each_stage_that_reads_it(
    copied: Path, tmp_path: Path, missing: str, stage: str, call: Stage
) -> None:
    (copied / missing).rename(tmp_path / "away")
    try:
        with pytest.raises(InputError, match=rf"{missing.replace('+', '.')}, which {stage} wrote, is missing\. Run"):
            call(copied, tmp_path / "out")
    finally:
        (tmp_path / "away").rename(copied / missing)


find = partial(find_short, n_docs=0, dataset_name="all", threshold=200, options=QUIET)


@pytest.fixture
def norm(copied: Path, tmp_path: Path) -> Path:
    """A copy of the normalised corpus."""
    return shutil.copytree(copied / "normalized", tmp_path / "norm")


def test_a_holdout_that_was_copied_in_part_and_alone_is_noticed(copied: Path, tmp_path: Path) -> None:
    holdout = shutil.copytree(copied / "holdout", tmp_path / "holdout")
    find(holdout, tmp_path / "f.pickle")
    (holdout / HELD_OUT).unlink()
    with pytest.raises(InputError, match=rf"holdout/{HELD_OUT}, which pass2 wrote, is missing"):
        find(holdout, tmp_path / "g.pickle")


def test_a_copy_without_its_ledger_is_a_corpus_of_ones_own(norm: Path, tmp_path: Path) -> None:
    (norm / "book/b.jsonl.zst").unlink()
    shutil.copytree(norm / "c4", norm / "more")
    shutil.rmtree(norm / ".gristmill")
    assert set(find(norm, tmp_path / "f.pickle").tallies) == {"c4", "code", "more", "tiny", "web"}


def test_a_file_that_the_stage_did_not_write_is_noticed(norm: Path, tmp_path: Path) -> None:
    shutil.copytree(norm / "c4", norm / "more")
    with pytest.raises(InputError, match=r"norm/more/a.jsonl.zst is in the output of normalize_text, which did not"):
        find(norm, tmp_path / "f.pickle")


def test_a_damaged_ledger_does_not_tell_users_to_remove_their_files(norm: Path, tmp_path: Path) -> None:
    ledger = norm / ".gristmill/normalize_text.ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b"book/b.jsonl", b"book/?.jsonl"))
    with pytest.raises(InputError, match=r"normalize_text.ledger is damaged\. Run normalize_text"):
        find(norm, tmp_path / "f.pickle")


def test_sources_that_were_normalised_one_by_one_are_looked_at_together(
    copied: Path, tmp_path: Path, finished: tuple[Path, Path, str]
) -> None:
    for source in ("book", "c4"):
        normalize_text(finished[0] / source, tmp_path / "norm" / source, options=QUIET)
    shutil.copytree(finished[0] / "web", tmp_path / "norm/web")  # of a user
    find(tmp_path / "norm", tmp_path / "f.pickle")
    (tmp_path / "norm/book/b.jsonl").unlink()  # the only file of its folder
    with pytest.raises(InputError, match=r"book/b.jsonl, which normalize_text wrote, is missing\."):
        find(tmp_path / "norm", tmp_path / "g.pickle")


def test_a_train_set_that_was_removed_is_made_again_beside_its_holdout(copied: Path, tmp_path: Path) -> None:
    for name in ("pass1", "holdout"):
        shutil.copytree(copied / name, tmp_path / name)
    before = {path: path.read_bytes() for path in (tmp_path / "holdout").rglob("*.zst")}
    pass2(0, 20, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.05, QUIET)
    assert len(before) == 20 and {path: path.read_bytes() for path in (tmp_path / "holdout").rglob("*.zst")} == before
    with pytest.raises(OutputError, match="exists, and pass2 did not write it"):
        pass2(0, 20, 1, tmp_path / "pass1", tmp_path / "other/train", tmp_path / "holdout", 0.05, QUIET)


def test_a_line_that_a_ledger_lost_is_made_again(tmp_path: Path) -> None:
    raw, norm, short = tmp_path / "raw", tmp_path / "norm", tmp_path / "f.pickle"
    for name in ("book/a.jsonl", "book/b.jsonl", "web/a.jsonl"):
        (raw / name).parent.mkdir(parents=True, exist_ok=True)
        (raw / name).write_text('{"text": "A grain of wheat."}\n')
    normalize_text(raw, norm, options=QUIET)
    find(norm, short, dataset_name="all")
    for ledger, name in (
        (norm / ".gristmill/normalize_text.ledger", b"book/a.jsonl"),
        (tmp_path / ".gristmill/filter-f.pickle.ledger", b"book/a.jsonl"),
    ):
        lines = ledger.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not (name in line and b'"step":"' in line and b'"step":""' not in line)]
        assert len(kept) < len(lines)
        ledger.write_bytes(b"".join(kept))
    (norm / "book/a.jsonl").touch()
    with pytest.raises(InputError, match=r"normalize_text.ledger is damaged\. Run normalize_text"):
        find(norm, short, dataset_name="all")
    normalize_text(raw, norm, options=QUIET)
    find(norm, short, dataset_name="all")
