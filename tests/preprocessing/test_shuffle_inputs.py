"""shuffle_holdout: what both passes read, refuse and redo; killed, in small files, and in a sandbox."""

import os
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from dedup.dedup_train import dedup_train
from gristmill.engine import key_sets
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, UsageError
from gristmill.io import readers as reading
from gristmill.io.keys import write_keys
from preprocessing.filter import filter as find_short
from preprocessing.shuffle_holdout import pass1, pass2
from tests.gristmill.engine.sandbox import sandboxed
from tests.preprocessing.conftest import keys_of, write_provenance

ALL = 10**9
KILLED = """
import os, signal, sys
from pathlib import Path
from gristmill.engine.options import RunOptions
from preprocessing.shuffle_holdout import pass1

def kill(event, arguments):  # as the second of two bucket files is published
    if event == "os.rename" and "pass1/c4/" in str(arguments[1]):
        os.kill(os.getpid(), signal.SIGKILL)

sys.addaudithook(kill)
pass1(Path("norm"), Path("pass1"), Path("dup.pickle"), options=RunOptions(workers=1, quiet=True))
"""


def test_pass1_killed_while_it_rewrites_is_refused_and_then_redone(
    tmp_path: Path, quiet: RunOptions, corpus, write, mix, start, read
) -> None:
    """A cluster with a copy in each source: book's is kept first, then c4's."""
    norm, out = corpus(files=1, book=6, c4=6), tmp_path / "train"
    for source in ("book", "c4"):
        write(norm / source / "copy.jsonl", [{"text": "a copy in both"}])

    def mixed() -> list[str]:
        pass2(0, ALL, 1, tmp_path / "pass1", out, tmp_path / "holdout", 0.0, quiet)
        return keys_of(read(out))

    write_keys(tmp_path / "dup.pickle", {"c4/copy.jsonl": np.array([0])})
    pass1(norm, tmp_path / "pass1", tmp_path / "dup.pickle", options=quiet)
    assert "book/copy.jsonl@0" in mixed()
    write_keys(tmp_path / "dup.pickle", {"book/copy.jsonl": np.array([0])})
    killed = start("-c", KILLED)
    _, errors = killed.communicate()
    assert killed.returncode == -signal.SIGKILL, errors
    with pytest.raises(
        InputError, match=r"pass1 is not complete: pass1, .*was interrupted, or is still at work\. Run pass1 again"
    ):
        mixed()
    pass1(norm, tmp_path / "pass1", tmp_path / "dup.pickle", options=quiet)
    keys = mixed()
    assert "c4/copy.jsonl@0" in keys and "book/copy.jsonl@0" not in keys and len(keys) == 13


@pytest.mark.parametrize("change", ["bucket", "holdout.zst"])
def test_pass2_is_redone_where_a_file_of_pass1_changed(
    tmp_path: Path, corpus, quiet: RunOptions, digest, capsys, change: str
) -> None:
    """Only pass1.json was an input of pass 2."""
    folders = (tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout")
    pass1(corpus(book=40), folders[0], options=quiet)
    pass2(0, ALL, 1, *folders, 0.1, quiet)
    before = digest(tmp_path / "train")
    path = next(folders[0].rglob(f"*.{change}"))
    data, times = path.read_bytes(), path.stat()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 255]))
    with pytest.raises(InputError):
        pass2(0, ALL, 1, *folders, 0.1, quiet)
    path.write_bytes(data)
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    pass2(0, ALL, 1, *folders, 0.1, quiet)
    assert digest(tmp_path / "train") == before


def test_many_small_files_give_few_bucket_files_and_the_same_documents(
    tmp_path: Path, corpus, mix, digest, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm = corpus(files=60, book=60, c4=90)
    write_keys(tmp_path / "short.pickle", {f"book/{i}.jsonl": np.array([0]) for i in range(0, 60, 7)})
    sets = {"short_docs": tmp_path / "short.pickle", "weights": "book=1.5", "holdout": 0.1}
    keys = mix(norm, "grouped", **sets)
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    assert mix(norm, "alone", **sets) == keys and len(keys) == 90 + 51 + 26
    buckets = {name: len(list((tmp_path / name / "pass1").rglob("*.bucket"))) for name in ("grouped", "alone")}
    assert buckets["grouped"] < 10 and buckets["alone"] == 120
    for kind in ("train", "holdout"):
        assert digest(tmp_path / "grouped" / kind) == digest(tmp_path / "alone" / kind)


@pytest.mark.parametrize("fan_out", [256, 5])
def test_tasks_open_only_what_they_declare(
    tmp_path: Path, corpus, mix, digest, monkeypatch: pytest.MonkeyPatch, fan_out: int
) -> None:
    """In one level and in several."""
    monkeypatch.setattr("preprocessing.shuffle_holdout.FAN_OUT", fan_out)
    monkeypatch.setattr(reading, "SLICE_BYTES", 400)
    norm = corpus(files=3, book=40, c4=20)
    write_keys(tmp_path / "short.pickle", {"book/0.jsonl": np.array([0])})
    write_keys(tmp_path / "dup.pickle", {"book/0.jsonl": np.array([3])})
    write_provenance(tmp_path / "dup.parquet", [("book/0.jsonl", 3, "book/0.jsonl", 0)])
    sets = {"short_docs": tmp_path / "short.pickle", "duplicates": tmp_path / "dup.pickle", "weights": "book=0.5"}
    plain = mix(norm, "plain", 0.1, **sets)
    with sandboxed(tmp_path, plans=("pass1.json",)):
        folders = [tmp_path / "mixed" / name for name in ("pass1", "train", "holdout")]
        pass1(norm, folders[0], options=RunOptions(workers=1, quiet=True), **sets)
        pass2(0, ALL, 1, *folders, 0.1, RunOptions(workers=1, quiet=True))
    assert len(plain) == 20 + 20
    for name in ("train", "holdout"):
        assert digest(tmp_path / "mixed" / name) == digest(tmp_path / "plain" / name)


def test_folders_in_each_other_are_refused(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    norm, out = corpus(book=6), tmp_path / "out"
    for folder in (norm, norm / "book", tmp_path):
        with pytest.raises(UsageError, match="give"):
            pass1(norm, folder, options=quiet)
    pass1(norm, out / "pass1", options=quiet)
    for train, holdout in (("pass1", "b"), ("a", "pass1/b"), ("a", "a/b"), ("a/b", "a")):
        with pytest.raises(UsageError, match=r"give|give two separate folders"):
            pass2(0, ALL, 1, out / "pass1", out / train, out / holdout, options=quiet)
    assert sorted(path.name for path in out.iterdir()) == ["pass1"]


def test_wrong_key_set_or_folder_leaves_no_mark(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    norm, other = corpus(book=6), corpus("other", book=6)
    write_keys(tmp_path / "keys.pickle", {"other/0.jsonl": np.array([1])})
    pass1(norm, tmp_path / "pass1", options=quiet)
    with pytest.raises(InputError, match="does not have"):
        pass1(norm, tmp_path / "pass1", tmp_path / "keys.pickle", options=quiet)
    with pytest.raises(UsageError, match="would lose it"):
        pass1(other, tmp_path / "pass1", options=quiet)
    pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", options=quiet)


def test_another_pass_1_into_one_train_set_is_refused(tmp_path: Path, quiet: RunOptions, corpus, digest) -> None:
    folders = (tmp_path / "train", tmp_path / "holdout")
    for name in ("one", "two"):
        pass1(corpus(name, book=60), tmp_path / f"pass1_{name}", options=quiet)
    pass2(0, 10, 1, tmp_path / "pass1_one", *folders, 0.1, quiet)
    pass2(10, 20, 2, tmp_path / "pass1_one", *folders, 0.1, quiet)
    before = digest(tmp_path / "train")
    for parts, error in (((0, ALL), "some of the same work again"), ((0, 10), "would be there twice")):
        with pytest.raises((UsageError, OutputError), match=error):
            pass2(*parts, 3, tmp_path / "pass1_two", *folders, 0.1, quiet)
    assert digest(tmp_path / "train") == before


def test_another_holdout_folder_does_not_empty_the_first(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    pass1(corpus(book=60), tmp_path / "pass1", options=quiet)
    pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "one", 0.1, quiet)
    with pytest.raises(UsageError, match=r"was split with --holdout_dir .*one, which would lose its files"):
        pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "two", 0.1, quiet)
    assert len(list((tmp_path / "one/chunk1").iterdir())) == 20


def test_a_copied_train_set_does_not_replace_files_of_others(tmp_path: Path, quiet: RunOptions, corpus) -> None:
    pass1(corpus(book=60), tmp_path / "pass1", options=quiet)
    pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.1, quiet)
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "train", other / "train")
    precious = other / "holdout/chunk1/example_holdout_3.jsonl.zst"
    precious.parent.mkdir(parents=True)
    precious.write_text("precious")
    with pytest.raises(OutputError, match=r"is not the holdout of .*train, which was copied without it"):
        pass2(0, ALL, 1, tmp_path / "pass1", other / "train", other / "holdout", 0.1, quiet)
    assert precious.read_text() == "precious"
    shutil.rmtree(other)
    for name in ("train", "holdout"):
        shutil.copytree(tmp_path / name, other / name)
    pass2(0, ALL, 1, tmp_path / "pass1", other / "train", other / "holdout", 0.1, quiet)


def test_parts_that_a_later_pass_1_does_not_make_are_refused_or_removed(
    tmp_path: Path, quiet: RunOptions, corpus, read, monkeypatch: pytest.MonkeyPatch
) -> None:
    folders = (tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout")
    norm = corpus(book=60)
    for parts in (30, 20):
        monkeypatch.setattr("preprocessing.shuffle_holdout.MIN_PARTS", parts)
        pass1(norm, folders[0], options=quiet)
        if parts == 30:
            pass2(0, ALL, 1, *folders, 0.1, quiet)
    with pytest.raises(UsageError, match="some of the same work again"):
        pass2(0, 10, 1, *folders, 0.1, quiet)
    pass2(0, ALL, 1, *folders, 0.1, quiet)
    assert len(keys_of(read(folders[1])) + keys_of(read(folders[2]))) == 60


def test_the_text_may_be_in_another_column(tmp_path: Path, quiet: RunOptions, write, read) -> None:
    records = [{"body": f"text {i}", "text": None} for i in range(30)]
    write(tmp_path / "norm" / "book" / "a.jsonl", records)
    find_short(tmp_path / "norm", tmp_path / "short.pickle", 0, "all", 7, quiet, "body")
    pass1(tmp_path / "norm", tmp_path / "pass1", None, tmp_path / "short.pickle", options=quiet, text_column="body")
    pass2(0, ALL, 1, tmp_path / "pass1", tmp_path / "train", tmp_path / "holdout", 0.1, quiet)
    held_out = shutil.copytree(tmp_path / "holdout", tmp_path / "own", ignore=shutil.ignore_patterns(".gristmill"))
    write(held_out / "chunk1" / "own.jsonl", records[20:22])
    dedup_train(1, tmp_path / "train", held_out, tmp_path / "clean", quiet, "body")
    texts = {record["body"] for record in read(tmp_path / "clean")}
    held = {record["body"] for record in read(held_out)}
    assert not texts & held and texts | held == {f"text {i}" for i in range(10, 30)}


def test_pass1_refuses_short_documents_of_a_filter_that_was_interrupted(
    tmp_path: Path, corpus, quiet: RunOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    norm, short = corpus(book=40), tmp_path / "short.pickle"
    find_short(norm, short, 0, "all", 30, quiet)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(key_sets, "merge_keys", interrupt)
        find_short(norm, short, 0, "all", 10_000, quiet)
    with pytest.raises(InputError, match=r"short\.pickle is not up to date: filter-short\.pickle, .*Run filter again"):
        pass1(norm, tmp_path / "pass1", short_docs=short, options=quiet)
    find_short(norm, short, 0, "all", 10_000, quiet)
    assert pass1(norm, tmp_path / "pass1", short_docs=short, options=quiet).total("short").documents == 40


def interrupt(*_: object, **__: object) -> None:
    raise KeyboardInterrupt
