"""Steps of the stage: the same bytes after kills and for any memory and workers; redone for changed inputs."""

import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dedup.removal.texts import FETCHED
from gristmill.errors import InputError, TooManyMalformed, UsageError
from tests.dedup.removal.clustered_corpus import (
    CLUSTERS,
    COMMAND,
    removed_by,
    verified_plainly,
    write_corpus,
    write_table,
)


def test_neither_memory_nor_workers_nor_the_hash_seed_change_a_byte(
    chained: tuple, chained_norm: Path, tmp_path: Path, run: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    found = []
    for number, resources in enumerate(["--workers 1 --memory 1K", "--workers 2 --memory 1GiB"]):
        out = tmp_path / str(number)
        options = f"--verify jaccard --threshold 0.7 --corpus '{chained_norm}' {resources}"
        ended = run(COMMAND.format(clusters=table, out=out / "d.pickle", options=options), PYTHONHASHSEED=str(number))
        assert "verified 228 candidates: " in ended.stderr
        assert "MB of text in" in ended.stderr
        found.append(contents(out))
        assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".text", ".index", ".partial")]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_killed_anywhere_and_started_again(
    chained: tuple, chained_norm: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = f"--verify jaccard --keep longest --corpus '{chained_norm}' --workers 2 --memory 1K"
    line = COMMAND.format(clusters=table, out=killed / "d.pickle", options=options)
    run(line.replace(str(killed), str(whole)))
    for pattern in ("members.bin", "*.index", "decided/*"):
        process = start(line)
        end = time.monotonic() + 60
        while process.poll() is None and not list(killed.rglob(pattern)) and time.monotonic() < end:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "d.pickle").exists()
    (decided,) = killed.rglob("decided")
    (decided / "000000.later").write_bytes(bytes(3 * FETCHED.itemsize))  # as a kill in the middle of a round leaves it
    run(line)
    assert contents(killed) == contents(whole)
    assert "done already" in run(line).stderr
    assert not list(killed.rglob("*.text"))


def test_another_corpus_or_an_option_changed_is_not_passed_over(
    tmp_path: Path, chained: tuple, chained_norm: Path
) -> None:
    files, clusters = chained
    shutil.copytree(chained_norm, tmp_path / "NORM")
    options = {"verify": "jaccard", "corpus": tmp_path / "NORM"}
    first = removed_by(tmp_path, clusters, **options)
    assert removed_by(tmp_path, clusters, **options, threshold=0.5) != first
    changed = {name: ["nothing alike" * (i + 9) for i in range(len(texts))] for name, texts in files.items()}
    write_corpus(tmp_path / "NORM", changed)
    again = removed_by(tmp_path, clusters, **options)
    assert (
        again == {key: kept for key, (kept, _) in verified_plainly(changed, clusters, "jaccard", 0.8).items()} != first
    )


def test_a_corpus_that_is_not_the_one_that_was_signed(tmp_path: Path, chained: tuple, chained_norm: Path) -> None:
    with pytest.raises(UsageError, match=r"3 files that --corpus does not have, 'a/x' the first; it has 'arxiv/a"):
        removed_by(tmp_path, CLUSTERS, verify="jaccard", corpus=chained_norm)
    with pytest.raises(InputError, match=r"no document in row 99999, and a cluster names arxiv/a\.jsonl@99999"):
        removed_by(tmp_path, [[("arxiv/a.jsonl", 0), ("arxiv/a.jsonl", 99999)]], verify="jaccard", corpus=chained_norm)
    write_corpus(tmp_path / "NORM", {"a/x.jsonl": ["one", {"no text": 1}, "two"]})
    with pytest.raises((InputError, TooManyMalformed)):
        removed_by(tmp_path, [[("a/x.jsonl", 0), ("a/x.jsonl", 1)]], verify="jaccard", corpus=tmp_path / "NORM")


def test_an_index_that_cannot_be_compared(chained: tuple, chained_norm: Path, indexed: tuple, tmp_path: Path) -> None:
    folder, clusters = indexed
    options = {"verify": "jaccard", "corpus": chained_norm}
    for change, message in [
        ({}, "documents of an index, such as those of 'index:2022:arxiv/a.jsonl': give --index"),
        ({"index": (f"2021={folder}",)}, "give --index as"),
        ({"index": (str(folder),), "verify": "containment"}, "only estimate Jaccard"),
        ({"index": (str(folder),), "width": 5, "unit": "word"}, "wanted --width 13 --unit character"),
        ({"index": (str(tmp_path / "none"),)}, "wanted the folder that to_hash wrote to"),
    ]:
        with pytest.raises(UsageError, match=message):
            removed_by(tmp_path, clusters, **(options | change))
    with pytest.raises(UsageError, match=r"holds signatures of \d+ of the \d+ documents that clusters name"):
        missing = [("index:2022:arxiv/a.jsonl", 99999), ("arxiv/a.jsonl", 0)]
        removed_by(tmp_path, [missing], **options, index=(str(folder),))
