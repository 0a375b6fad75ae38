"""Origins: clusters are verified on the corpus that they were made of, and files of an index are none of that."""

import shutil
from pathlib import Path

import pytest

from dedup import generate_connected_components, generate_duplicates_dict, to_hash
from gristmill.counts import WRITTEN
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from preprocessing import normalize_text
from preprocessing.shuffle_holdout import pass1

QUIET = RunOptions(workers=1, quiet=True)


def write(path: Path, seed: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    texts = (" ".join(f"{seed}{i % 4}x{j}" for j in range(40)) for i in range(6))
    path.write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))


def sign(folder: Path, target: Path) -> Path:
    to_hash("all", folder, target, 0, "0", 0, 9, options=QUIET)
    return target


@pytest.fixture
def norm(tmp_path: Path) -> Path:
    write(tmp_path / "raw/book/a.jsonl", "new")
    normalize_text(tmp_path / "raw", tmp_path / "norm", options=QUIET)
    return tmp_path / "norm"


def test_duplicates_are_not_verified_on_another_corpus_with_the_same_names(norm: Path, tmp_path: Path) -> None:
    signatures, clusters = sign(norm, tmp_path / "hash"), tmp_path / "c.pickle"
    generate_connected_components(tmp_path, clusters, signatures, options=QUIET)
    write(tmp_path / "other/book/a.jsonl", "other")
    for options in ({"verify": "jaccard"}, {"keep": "longest"}):
        with pytest.raises(
            InputError, match=r"c\.pickle was .*other/book/a.jsonl has .* or give the corpus that it has"
        ):
            generate_duplicates_dict(clusters, tmp_path / "d.pickle", QUIET, corpus=tmp_path / "other", **options)
        shutil.copytree(norm, tmp_path / "copy", dirs_exist_ok=True, ignore=shutil.ignore_patterns(".gristmill"))
        generate_duplicates_dict(clusters, tmp_path / "d.pickle", QUIET, corpus=tmp_path / "copy", **options)


@pytest.mark.parametrize("options", [{"keep": "longest"}, {"verify": "jaccard"}])
def test_a_corpus_without_duplicates_of_which_no_text_was_read(norm: Path, tmp_path: Path, options: dict) -> None:
    """Its file has the name of the raw one, which has other content."""
    (tmp_path / "dup").mkdir()
    (tmp_path / "dup/duplicate_pairs.txt").touch()
    generate_connected_components(tmp_path / "dup", tmp_path / "c.pickle", options=QUIET)
    generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", QUIET, corpus=norm, **options)
    assert pass1(norm, tmp_path / "pass1", tmp_path / "d.pickle", options=QUIET).total(WRITTEN).documents == 6


def test_an_index_that_grew_is_named_and_not_the_corpus(norm: Path, tmp_path: Path) -> None:
    """Its new file has a name that a file of the corpus has, too."""
    write(tmp_path / "old/book/b.jsonl", "old")
    index = sign(tmp_path / "old", tmp_path / "index")
    generate_connected_components(
        tmp_path, tmp_path / "c.pickle", sign(norm, tmp_path / "hash"), index=(f"old={index}",), options=QUIET
    )
    generate_duplicates_dict(tmp_path / "c.pickle", tmp_path / "d.pickle", QUIET)
    write(tmp_path / "old/book/a.jsonl", "old")
    sign(tmp_path / "old", index)
    with pytest.raises(
        InputError, match=r"generate_connected_components has not read .*index/book/a.jsonl.*, which to_hash"
    ):
        pass1(norm, tmp_path / "pass1", tmp_path / "d.pickle", options=QUIET)
