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
    ("filter", "normalized/book/b.jsonl", "normalize_text",
     lambda run, out: find_short(run / "normalized", out / "f.pickle", 0, "all", 200, QUIET)),
    ("exact", "normalized/book/b.jsonl", "normalize_text",
     lambda run, out: generate_exact_pairs(run / "normalized", out / "duplicate_pairs.txt", options=QUIET)),
    ("to_hash", "normalized/book/b.jsonl", "normalize_text",
     lambda run, out: to_hash("all", run / "normalized", out, 0, "0", 0, 100, options=QUIET)),
    ("to_hash of a source", "normalized/c4/a.jsonl.gz", "normalize_text",
     lambda run, out: to_hash("c4", run / "normalized/c4", out / "c4", 0, "0", 0, 100, options=QUIET)),
    ("pairs", "minhash/book/b.jsonl+0.signatures.arrow", "to_hash",
     lambda run, out: generate_duplicate_pairs(run / "minhash", out / "duplicate_pairs.txt", options=QUIET)),
    ("clusters", "minhash/book/b.jsonl+0.signatures.arrow", "to_hash",
     lambda run, out: generate_connected_components(run / "dup", out / "c.parquet", run / "minhash", options=QUIET)),
    ("verify", "normalized/book/b.jsonl", "normalize_text",
     lambda run, out: generate_duplicates_dict(
         run / "dup/connected_components.parquet", out / "d.parquet", QUIET, verify="jaccard",
         corpus=run / "normalized")),
    ("pass1", "normalized/book/b.jsonl", "normalize_text",
     lambda run, out: pass1(run / "normalized", out, options=QUIET)),
    ("pass2", "pass1/book/b.jsonl+0.bucket", "pass1",
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
    (norm / "book/b.jsonl").unlink()
    shutil.copytree(norm / "c4", norm / "more")
    shutil.rmtree(norm / ".gristmill")
    assert set(find(norm, tmp_path / "f.pickle").tallies) == {"c4", "code", "more", "tiny", "web"}


def test_a_source_that_is_a_link_to_a_part_of_an_output_is_compared_with_it(norm: Path, tmp_path: Path) -> None:
    (tmp_path / "linked").mkdir()
    for source in ("book", "c4"):
        (tmp_path / "linked" / source).symlink_to(norm / source)
    find(tmp_path / "linked", tmp_path / "f.pickle")
    file = norm / "book/b.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match=r"linked/book/b.jsonl is not what normalize_text wrote"):
        find(tmp_path / "linked", tmp_path / "g.pickle")
    file.unlink()
    with pytest.raises(InputError, match=r"linked/book/b.jsonl, which normalize_text wrote, is missing"):
        find(tmp_path / "linked", tmp_path / "g.pickle")


def test_a_source_that_is_a_link_to_an_output_beside_another_of_its_stage(copied: Path, tmp_path: Path) -> None:
    """As OUT/train, beside which pass2 wrote OUT/holdout: that is not beside the link."""
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked/web").symlink_to(copied / "train")
    assert set(find(tmp_path / "linked", tmp_path / "f.pickle").tallies) == {"web"}
    moved = shutil.copytree(copied, tmp_path / "moved")
    (moved / "train").rename(tmp_path / "train")
    (moved / "train").symlink_to(tmp_path / "train")
    (moved / "holdout" / HELD_OUT).unlink()
    with pytest.raises(InputError, match=rf"holdout/{HELD_OUT}, which pass2 wrote, is missing"):
        find(moved / "holdout", tmp_path / "g.pickle")


def test_a_holdout_behind_a_link_above_it_is_compared_with_what_pass2_wrote(copied: Path, tmp_path: Path) -> None:
    shutil.copytree(copied, tmp_path / "real/out")
    (tmp_path / "data").symlink_to(tmp_path / "real")
    holdout = tmp_path / "data/out/holdout"
    find(holdout, tmp_path / "f.pickle")
    (holdout / HELD_OUT).unlink()
    with pytest.raises(InputError, match=rf"holdout/{HELD_OUT}, which pass2 wrote, is missing"):
        find(holdout, tmp_path / "g.pickle")


def test_a_file_that_the_stage_did_not_write_is_noticed(norm: Path, tmp_path: Path) -> None:
    shutil.copytree(norm / "c4", norm / "more")
    with pytest.raises(InputError, match=r"norm/more/a.jsonl.gz is in the output of normalize_text, which did not"):
        find(norm, tmp_path / "f.pickle")


def test_a_damaged_ledger_does_not_tell_users_to_remove_their_files(norm: Path, tmp_path: Path) -> None:
    ledger = norm / ".gristmill/normalize_text.ledger"
    ledger.write_bytes(ledger.read_bytes().replace(b"book/b.jsonl", b"book/?.jsonl"))
    with pytest.raises(InputError, match=r"normalize_text.ledger is damaged, and does not name it\. Run normalize_tex"):
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


def test_a_train_set_is_decontaminated_again_after_another_pass2(copied: Path, tmp_path: Path) -> None:
    for name in ("pass1", "train", "holdout", "train_deduped"):
        shutil.copytree(copied / name, tmp_path / name)
    sets = tmp_path / "train", tmp_path / "holdout"
    pass2(0, 20, 1, tmp_path / "pass1", *sets, 0.1, QUIET)
    with pytest.raises(InputError, match=r"train_deduped is not up to date: dedup_train has not read .*Run dedup_tr"):
        train_tokenizer(tmp_path / "train_deduped", tmp_path / "out", 400, options=QUIET)
    dedup_train(1, *sets, tmp_path / "train_deduped", options=QUIET)
    find(tmp_path / "train_deduped", tmp_path / "f.pickle")


def test_a_train_set_that_was_removed_is_made_again_beside_its_holdout(copied: Path, tmp_path: Path) -> None:
    for name in ("pass1", "holdout"):
        shutil.copytree(copied / name, tmp_path / name)
    before = {path: path.read_bytes() for path in (tmp_path / "holdout").rglob("*.zst")}
    pass2(0, 20, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.05, QUIET)
    assert len(before) == 20 and {path: path.read_bytes() for path in (tmp_path / "holdout").rglob("*.zst")} == before
    with pytest.raises(OutputError, match="exists, and pass2 did not write it"):
        pass2(0, 20, 1, tmp_path / "pass1", tmp_path / "other/train", tmp_path / "holdout", 0.05, QUIET)


def test_a_file_that_joined_an_input_folder_is_noticed(finished, tmp_path: Path) -> None:
    raw, norm, clean = tmp_path / "raw", tmp_path / "norm", tmp_path / "clean"
    shutil.copytree(finished[0] / "book", raw / "book")
    normalize_text(raw, norm, options=QUIET)
    normalize_text(norm, clean, options=QUIET)
    (raw / "book/new.jsonl").write_text('{"text": "A grain of wheat joins the mill."}\n')
    normalize_text(raw, norm, options=QUIET)
    with pytest.raises(InputError, match=r"clean is not up to date: normalize_text has not read .*book/new.jsonl"):
        find(clean, tmp_path / "f.pickle")


def test_duplicates_of_an_earlier_corpus_are_refused(finished, tmp_path: Path) -> None:
    raw, norm, dup = tmp_path / "raw", tmp_path / "norm", tmp_path / "dup"
    clusters, duplicates = dup / "clusters.parquet", dup / "duplicates.parquet"
    shutil.copytree(finished[0] / "book", raw / "book")
    dup.mkdir()
    (dup / "duplicate_pairs_own.txt").write_text("book/b.jsonl@1 :: book/b.jsonl@2\n")
    making: dict[str, Callable[[], object]] = {
        "normalize_text": lambda: normalize_text(raw, norm, options=QUIET),
        "to_hash": lambda: to_hash("all", norm, tmp_path / "minhash", 0, "0", 0, 100, options=QUIET),
        "generate_duplicate_pairs": lambda: generate_duplicate_pairs(
            tmp_path / "minhash", dup / "duplicate_pairs.txt", options=QUIET
        ),
        "generate_connected_components": lambda: generate_connected_components(dup, clusters, options=QUIET),
        "generate_duplicates_dict": lambda: generate_duplicates_dict(clusters, duplicates, QUIET),
    }

    def mix() -> None:
        pass1(norm, tmp_path / "pass1", duplicates, options=QUIET)

    for make in making.values():
        make()
    mix()
    (dup / "duplicate_pairs_own.txt").unlink()
    making["generate_connected_components"]()
    making["generate_duplicates_dict"]()
    lines = (raw / "book/b.jsonl").read_bytes().splitlines(keepends=True)
    (raw / "book/b.jsonl").write_bytes(b"".join(lines[40:] + lines[:40]))
    for stage, make in making.items():
        state = "made from another state of the corpus" if stage == "to_hash" else "not up to date"
        if stage != "normalize_text":
            with pytest.raises(InputError, match=rf"duplicates\.parquet (was|is) {state}: .* Run {stage} again"):
                mix()
        make()
    mix()


def rename(corpus: Path) -> None:
    """The latest file becomes an old one, and another is the latest now."""
    (corpus / "book/2024").mkdir()
    (corpus / "book/latest/b.jsonl").rename(corpus / "book/2024/b.jsonl")
    (corpus / "book/c.jsonl").rename(corpus / "book/latest/b.jsonl")


def exchange(corpus: Path) -> None:
    """Two files exchange their names."""
    (corpus / "book/c.jsonl").rename(corpus / "c")
    (corpus / "book/latest/b.jsonl").rename(corpus / "book/c.jsonl")
    (corpus / "c").rename(corpus / "book/latest/b.jsonl")


def reverse(corpus: Path) -> None:
    """The size of a file remains, and its rows do not."""
    file = corpus / "book/latest/b.jsonl"
    file.write_bytes(b"".join(reversed(file.read_bytes().splitlines(keepends=True))))


@pytest.mark.parametrize("change", [rename, exchange, reverse])
@pytest.mark.parametrize("is_normalised", [True, False])
def test_short_documents_of_files_that_changed_places_are_refused(
    change: Callable[[Path], None], is_normalised: bool, tmp_path: Path
) -> None:
    raw, norm, short = tmp_path / "raw", tmp_path / "norm", tmp_path / "f.pickle"
    (raw / "book/latest").mkdir(parents=True)
    (raw / "book/latest/b.jsonl").write_text("".join(f'{{"text": "{"x" * 60 * n}"}}\n' for n in range(1, 9)))
    (raw / "book/c.jsonl").write_text("".join(f'{{"text": "{"y" * 60 * n}"}}\n' for n in range(9, 1, -1)))

    def prepare() -> Path:
        return normalize_text(raw, norm, options=QUIET) and norm if is_normalised else raw

    find_short(prepare(), short, 0, "all", 200, QUIET)
    pass1(prepare(), tmp_path / "pass1", short_docs=short, options=QUIET)
    change(raw)
    corpus = prepare()
    with pytest.raises(InputError, match=r"made from another state of the corpus: .* Run filter again"):
        pass1(corpus, tmp_path / "pass1", short_docs=short, options=QUIET)


def test_a_copy_without_ledgers_is_compared_with_what_was_read(norm: Path, tmp_path: Path) -> None:
    find_short(norm, tmp_path / "f.pickle", 0, "all", 200, QUIET)
    copy = shutil.copytree(norm, tmp_path / "copy", ignore=shutil.ignore_patterns(".gristmill"))
    pass1(copy, tmp_path / "pass1", short_docs=tmp_path / "f.pickle", options=QUIET)
    lines = (copy / "book/b.jsonl").read_bytes().splitlines(keepends=True)
    (copy / "book/b.jsonl").write_bytes(b"".join(lines[1:]))
    with pytest.raises(InputError, match=r"made from another state of the corpus: .*copy/book/b.jsonl has changed"):
        pass1(copy, tmp_path / "pass1", short_docs=tmp_path / "f.pickle", options=QUIET)
