"""Inputs that were made of something else than what is there now: refused by name, at any number of stages behind."""

import itertools
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

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
from gristmill.errors import InputError, UsageError
from preprocessing import normalize_text
from preprocessing.filter import filter as find_short
from preprocessing.shuffle_holdout import pass1, pass2

QUIET = RunOptions(workers=1, quiet=True)
normalize = partial(normalize_text, options=QUIET)


def write(path: Path, seed: int = 0) -> None:
    """A corpus file of six documents, of which one is short and one is a copy."""
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = ["short", *(" ".join(f"w{seed}x{i % 4}x{j}" for j in range(60)) for i in range(5))]
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A corpus of two sources."""
    for seed, name in enumerate(("book/a.jsonl", "book/b.jsonl", "web/a.jsonl")):
        write(tmp_path / "raw" / name, seed)
    return tmp_path / "raw"


def find(folder: Path, out_file: Path, source: str = "all") -> None:
    find_short(folder, out_file, 0, source, 200, QUIET)


def by_source(stage: Callable[[Path, Path], object], source: Path, target: Path) -> None:
    for name in ("book", "web"):
        stage(source / name, target / name)


def whole(stage: Callable[[Path, Path], object], source: Path, target: Path) -> None:
    stage(source, target)


@pytest.mark.parametrize(("first", "second"), [(by_source, whole), (whole, by_source), (by_source, by_source)])
def test_an_outdated_corpus_is_noticed_in_whichever_parts_it_was_made(
    first: Callable[..., None], second: Callable[..., None], raw: Path, tmp_path: Path
) -> None:
    norm, clean = tmp_path / "norm", tmp_path / "clean"
    first(normalize, raw, norm)
    second(normalize, norm, clean)
    find(clean, tmp_path / "f.pickle")
    write(raw / "book/a.jsonl", 7)
    first(normalize, raw, norm)
    with pytest.raises(
        InputError, match=r"clean is not up to date: normalize_text has not read .*norm/book/a.jsonl as"
    ):
        find(clean, tmp_path / "f.pickle")
    second(normalize, norm, clean)
    find(clean, tmp_path / "f.pickle")


def test_an_outdated_corpus_is_noticed_two_stages_later_and_where_all_was_moved(raw: Path, tmp_path: Path) -> None:
    folders = [tmp_path / "run" / name for name in ("norm", "clean", "cleaner")]

    def make(*folders: Path) -> None:
        for source, target in itertools.pairwise(folders):
            normalize(source, target)

    make(raw, *folders)
    moved = shutil.copytree(tmp_path / "run", tmp_path / "moved")
    write(raw / "book/a.jsonl", 7)
    make(raw, folders[0])
    find(moved / "cleaner", tmp_path / "f.pickle")
    with pytest.raises(
        InputError, match=r"cleaner is not up to date.* Run normalize_text again, and the stages after it"
    ):
        find(folders[2], tmp_path / "g.pickle")
    shutil.copytree(folders[2], tmp_path / "own", ignore=shutil.ignore_patterns(".gristmill"))
    find(tmp_path / "own", tmp_path / "g.pickle")
    make(*folders)
    find(folders[2], tmp_path / "h.pickle")
    shutil.rmtree(folders[0])
    find(folders[2], tmp_path / "i.pickle")


def test_files_that_joined_and_files_that_went_are_noticed_two_stages_later(raw: Path, tmp_path: Path) -> None:
    norm, clean = tmp_path / "norm", tmp_path / "clean"
    normalize(raw, norm)
    normalize(norm, clean)
    write(raw / "news/a.jsonl")  # the content of another file
    normalize(raw, norm)
    with pytest.raises(InputError, match=r"clean is not up to date: .* has not read .*norm/news/a.jsonl, which normal"):
        find(clean, tmp_path / "f.pickle")
    normalize(norm, clean)
    shutil.rmtree(raw / "news")
    normalize(raw, norm)
    with pytest.raises(InputError, match=r"has read .*norm/news/a.jsonl, which normalize_text has removed since\. Run"):
        find(clean, tmp_path / "f.pickle")
    normalize(norm, clean)
    find(clean, tmp_path / "f.pickle")


@pytest.mark.parametrize("is_normalised", [True, False])
def test_a_file_that_joined_a_source_is_not_mixed_with_key_sets_of_before(
    is_normalised: bool, raw: Path, tmp_path: Path
) -> None:
    short, norm = tmp_path / "f.pickle", tmp_path / "norm"

    def prepare() -> Path:
        return normalize(raw, norm) and norm if is_normalised else raw

    find(prepare(), short)
    pass1(prepare(), tmp_path / "pass1", short_docs=short, options=QUIET)
    shutil.copy(raw / "book/a.jsonl", raw / "book/joined.jsonl")
    corpus = prepare()
    with pytest.raises(
        InputError, match=r"f.pickle was made .*book/joined.jsonl has joined it since\. Run filter again"
    ):
        pass1(corpus, tmp_path / "pass1", short_docs=short, options=QUIET)
    own = tmp_path / "own/f.pickle"
    own.parent.mkdir()
    shutil.copy(short, own)
    pass1(corpus, tmp_path / "pass1", short_docs=own, options=QUIET)
    find(corpus, short)
    pass1(corpus, tmp_path / "pass1", short_docs=short, options=QUIET)


def test_signatures_of_an_index_that_changed_are_noticed(raw: Path, tmp_path: Path) -> None:
    dup, old = tmp_path / "dup", tmp_path / "old"
    pairs, clusters, duplicates = dup / "duplicate_pairs.txt", dup / "clusters.pickle", dup / "duplicates.pickle"
    sign = partial(to_hash, "all", n_docs=0, iter="0", index_start=0, index_end=9, options=QUIET)
    normalize(raw / "book", tmp_path / "norm/book")
    sign(tmp_path / "norm", tmp_path / "minhash")
    sign(raw, old)

    def compare() -> None:
        generate_duplicate_pairs(tmp_path / "minhash", pairs, index=(f"old={old}",), options=QUIET)
        generate_connected_components(dup, clusters, options=QUIET)
        generate_duplicates_dict(clusters, duplicates, QUIET)

    def mix() -> None:
        pass1(tmp_path / "norm", tmp_path / "pass1", duplicates, options=QUIET)

    compare()
    mix()
    write(raw / "web/a.jsonl", 9)
    sign(raw, old)
    with pytest.raises(
        InputError, match=r"duplicates.pickle is not up to date: generate_duplicate_pairs has not read .*"
    ):
        mix()
    with pytest.raises(InputError, match=r"clusters.pickle is not up to date: generate_duplicate_pairs has not read"):
        generate_duplicates_dict(clusters, duplicates, QUIET)
    compare()
    mix()


@pytest.mark.parametrize("find", ["pairs", "clusters"])
def test_duplicates_are_verified_with_the_index_that_they_were_found_with(raw: Path, tmp_path: Path, find: str) -> None:
    dup, folders, norm = tmp_path / "dup", [tmp_path / "a/old", tmp_path / "b/old"], tmp_path / "norm"
    sign = partial(to_hash, "all", n_docs=0, iter="0", index_start=0, index_end=9, options=QUIET)
    normalize(raw / "book", norm / "book")
    sign(norm, tmp_path / "minhash")
    sign(raw, folders[0])
    write(raw / "book/a.jsonl", 9)
    sign(raw, folders[1])
    index = (str(folders[0]),)
    if find == "pairs":
        generate_duplicate_pairs(tmp_path / "minhash", dup / "duplicate_pairs.txt", index=index, options=QUIET)
        generate_connected_components(dup, dup / "c.parquet", options=QUIET)
    else:
        generate_connected_components(dup, dup / "c.parquet", tmp_path / "minhash", index=index, options=QUIET)
    shutil.copytree(folders[0], tmp_path / "c/old", ignore=shutil.ignore_patterns(".gristmill"))
    for folder, is_right in ((folders[0], True), (folders[1], False), (tmp_path / "c/old", True)):
        verify = partial(
            generate_duplicates_dict, dup / "c.parquet", dup / "d.parquet", QUIET, verify="jaccard", corpus=norm
        )
        if is_right:
            verify(index=(str(folder),))
        else:
            with pytest.raises(UsageError, match=r"c.parquet was made with other signatures .* as generate_"):
                verify(index=(str(folder),))


@pytest.mark.parametrize("link", ["norm/book", "norm", "minhash"])
@pytest.mark.parametrize("is_moved", [False, True])
def test_a_folder_that_is_a_link_is_up_to_date(raw: Path, tmp_path: Path, link: str, is_moved: bool) -> None:
    """The ledger lies behind the link, and is seen through it, too."""
    minhash, place, real = tmp_path / "minhash", tmp_path / link, tmp_path / "disk" / link
    clusters, sources = tmp_path / "dup/clusters.pickle", ["book", "web"] if link == "norm/book" else [""]

    def run() -> None:
        for source in sources:
            norm = tmp_path / "norm" / source
            normalize(raw / source, norm)
            to_hash(source or "all", norm, minhash / source, 0, "0", 0, 9, options=QUIET)
        generate_connected_components(tmp_path / "dup", clusters, minhash, options=QUIET)
        generate_duplicates_dict(clusters, tmp_path / "dup/d.pickle", QUIET)
        pass1(tmp_path / "norm", tmp_path / "pass1", tmp_path / "dup/d.pickle", options=QUIET)

    if is_moved:
        run()
        real.parent.mkdir(parents=True)
        place.rename(real)
    else:
        real.mkdir(parents=True)
        place.parent.mkdir(exist_ok=True)
    place.symlink_to(real)
    run()
    write(raw / "web/a.jsonl", 9)
    run()


def test_copies_of_an_earlier_corpus_are_not_skipped(raw: Path, tmp_path: Path) -> None:
    norm, copies = tmp_path / "norm", tmp_path / "dup/duplicate_pairs.parquet"
    normalize(raw, norm)
    generate_exact_pairs(norm, copies.with_suffix(".txt"), options=QUIET)
    sign = partial(to_hash, "all", norm, tmp_path / "minhash", 0, "0", 0, 9, skip=copies, options=QUIET)
    sign()
    write(raw / "book/a.jsonl", 7)
    normalize(raw, norm)
    with pytest.raises(InputError, match=r"is not up to date: generate_exact_pairs has not read"):
        sign()


@pytest.fixture
def chunks(raw: Path, tmp_path: Path) -> Path:
    """A train set in two chunks, both decontaminated, and what it was made of."""
    pass1(raw, tmp_path / "pass1", options=QUIET)
    for chunk, parts in enumerate(((0, 10), (10, 20)), 1):
        split(tmp_path, *parts, chunk)
    for chunk in (1, 2):
        decontaminate(tmp_path, chunk)
    return tmp_path


def split(run: Path, start: int, end: int, chunk: int) -> None:
    pass2(start, end, chunk, run / "pass1", run / "train", run / "holdout", 0.2, QUIET)


def decontaminate(run: Path, chunk: int) -> None:
    dedup_train(chunk, run / "train", run / "holdout", run / "deduped", QUIET)


def test_a_pass1_that_was_run_again_without_pass2_is_noticed(chunks: Path, raw: Path) -> None:
    find(chunks / "deduped", chunks / "f.pickle")
    pass1(raw, chunks / "pass1", weights={"book": 2}, options=QUIET)
    for folder in ("train", "holdout", "deduped"):
        with pytest.raises(InputError, match=rf"{folder} is not up to date: pass2 has not read .*pass1/.*Run pass2"):
            find(chunks / folder, chunks / "f.pickle")
    with pytest.raises(InputError, match=r"not up to date: pass2 has not read"):
        decontaminate(chunks, 1)


def test_parts_that_all_moved_to_another_chunk_are_noticed(chunks: Path) -> None:
    split(chunks, 0, 20, 3)
    with pytest.raises(
        InputError, match=r"deduped is not up to date: dedup_train has read .*, which pass2 has removed"
    ):
        find(chunks / "deduped", chunks / "f.pickle")


def test_a_line_that_a_ledger_lost_is_made_again(raw: Path, tmp_path: Path) -> None:
    norm, short = tmp_path / "norm", tmp_path / "f.pickle"
    normalize(raw, norm)
    find(norm, short)
    for ledger, name in (
        (norm / ".gristmill/normalize_text.ledger", b"book/a.jsonl"),
        (tmp_path / ".gristmill/filter-f.pickle.ledger", b"book/a.jsonl"),
    ):
        lines = ledger.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if not (name in line and b'"step":"' in line and b'"step":""' not in line)]
        assert len(kept) < len(lines)
        ledger.write_bytes(b"".join(kept))
    (norm / "book/a.jsonl").touch()
    with pytest.raises(
        InputError, match=r"normalize_text.ledger is damaged, and does not name it\. Run normalize_text"
    ):
        find(norm, short)
    normalize(raw, norm)
    find(norm, short)
