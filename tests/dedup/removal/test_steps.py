"""Steps of the stage: the same bytes after kills and for any memory and workers; redone for changed inputs."""

import pickle
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dedup import generate_duplicates_dict
from dedup.removal.fetching import FETCHED
from gristmill.engine.options import RunOptions
from gristmill.engine.staleness.ledger import Ledger
from gristmill.errors import InputError, TooManyMalformed, UsageError
from gristmill.io.files import STATE_DIR
from tests.dedup.removal.clustered_corpus import (
    CLUSTERS,
    COMMAND,
    QUIET,
    read_removed,
    removed_by,
    verified_plainly,
    write_corpus,
    write_pickle,
    write_table,
)
from tests.gristmill.engine.opens import count_opens
from tests.gristmill.engine.sandbox import sandboxed
from tests.patience import found_below, patience


def test_neither_memory_nor_workers_nor_the_hash_seed_change_a_byte(
    chained: tuple, chained_norm: Path, tmp_path: Path, run: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    found = []
    for number, resources in enumerate(["--workers 1 --memory 2MiB", "--workers 2 --memory 1GiB"]):
        out = tmp_path / str(number)
        options = f"--verify jaccard --threshold 0.7 --corpus '{chained_norm}' {resources}"
        ended = run(COMMAND.format(clusters=table, out=out / "d.pickle", options=options), PYTHONHASHSEED=str(number))
        assert "verified 228 candidates: " in ended.stderr
        assert "MB of text in" in ended.stderr
        found.append(contents(out))
        assert not [path for path in out.rglob("*") if path.suffix in (".bin", ".text", ".index", ".partial")]
    assert found[0] == found[1]
    assert len(found[0]) == 2


def test_a_document_whose_shingles_do_not_fit_is_refused_by_name_where_it_is_compared(
    tmp_path: Path, write: Callable
) -> None:
    write(tmp_path / "norm/book/a.jsonl", ["short", "long " * 40_000, "long " * 39_000])
    table = write_table(tmp_path / "c.parquet", [[("book/a.jsonl", 1), ("book/a.jsonl", 2)]])
    small, options = RunOptions(workers=1, memory="4MiB"), {"corpus": tmp_path / "norm", "verify": "jaccard"}
    with pytest.raises(UsageError, match=r"^book/a.jsonl@1, which --verify .* about 8 MiB .*: give --memory 9MiB or"):
        generate_duplicates_dict(table, tmp_path / "d.pickle", small, **options)
    generate_duplicates_dict(table, tmp_path / "d.pickle", small, keep="longest", corpus=tmp_path / "norm")
    enough = RunOptions(workers=1, memory="9MiB")
    assert generate_duplicates_dict(table, tmp_path / "e.pickle", enough, **options).total("duplicate").documents == 1


def test_killed_anywhere_and_started_again(
    chained: tuple, chained_norm: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable
) -> None:
    table = write_table(tmp_path / "c.parquet", chained[1])
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    options = f"--verify jaccard --keep longest --corpus '{chained_norm}' --workers 2 --memory 2MiB"
    line = COMMAND.format(clusters=table, out=killed / "d.pickle", options=options)
    run(line.replace(str(killed), str(whole)))
    for pattern in ("members.bin", "*.index", "decided/*"):
        process = start(line)
        end = time.monotonic() + patience(60)
        while process.poll() is None and not found_below(killed, pattern) and time.monotonic() < end:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not (killed / "d.pickle").exists()
    (decided,) = killed.rglob("decided")
    (decided / "000000.bin.later").write_bytes(
        bytes(3 * FETCHED.itemsize)
    )  # as a kill in the middle of a round leaves it
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
    with pytest.raises(InputError, match=r"arxiv/a\.jsonl has no row 99999, and had it before"):
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
        ({"index": (str(folder),), "width": 5, "unit": "word"}, "expected --width 13 --unit character"),
        ({"index": (str(tmp_path / "none"),)}, "expected the folder that to_hash wrote to"),
    ]:
        with pytest.raises(UsageError, match=message):
            removed_by(tmp_path, clusters, **(options | change))
    with pytest.raises(UsageError, match=r"holds signatures of \d+ of the \d+ documents that clusters name"):
        missing = [("index:2022:arxiv/a.jsonl", 99999), ("arxiv/a.jsonl", 0)]
        removed_by(tmp_path, [missing], **options, index=(str(folder),))


def test_tasks_name_all_that_they_read(chained_norm: Path, indexed: tuple, tmp_path: Path, contents: Callable) -> None:
    table = write_table(tmp_path / "c.parquet", indexed[1])
    (tmp_path / "short.pickle").write_bytes(pickle.dumps({"arxiv/a.jsonl": {0, 2}}))
    for number, settings in enumerate([{"verify": "jaccard", "index": (str(indexed[0]),)}, {"keep": "longest"}, {}]):
        options = {"corpus": chained_norm, "dropped": (tmp_path / "short.pickle",)} | settings
        plain, boxed = tmp_path / f"plain{number}" / "d.pickle", tmp_path / f"boxed{number}" / "d.pickle"
        generate_duplicates_dict(table, plain, QUIET, **options)
        with sandboxed(tmp_path) as sandbox:
            generate_duplicates_dict(table, boxed, QUIET, **options)
        assert sandbox.tasks >= 2
        assert contents(boxed.parent) == contents(plain.parent)


def test_opens_grow_no_faster_than_the_corpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    monkeypatch.setattr("dedup.removal.clusters._MIN_PART_SIZE", 4)
    monkeypatch.setattr("dedup.removal.steps._MIN_BUNDLE", 1)
    opens = []
    for files in (12, 48):
        root = tmp_path / str(files)
        write_corpus(root / "NORM", {f"a/{number:03}.jsonl": [f"text {number // 2}"] * 2 for number in range(files)})
        clusters = [
            [(f"a/{number + i:03}.jsonl", row) for i in (0, 1)] for number in range(0, files, 2) for row in (0, 1)
        ]
        table = write_table(root / "c.parquet", clusters)
        with count_opens(root) as found:
            generate_duplicates_dict(table, root / "d.parquet", QUIET, verify="jaccard", corpus=root / "NORM", width=3)
        opens.append(sum(found.values()) / files)
        assert len(read_removed(root / "d.parquet")) == files
    assert opens[1] <= 1.1 * opens[0], opens


def test_a_kill_between_the_two_outputs_leaves_no_pair_that_disagrees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pickle of the run before is gone before the table of this run is there."""
    out = tmp_path / "d.pickle"
    generate_duplicates_dict(write_table(tmp_path / "c.parquet", CLUSTERS), out, QUIET)
    before = out.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr("dedup.removal.removal_table.write_stream", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            generate_duplicates_dict(tmp_path / "c.parquet", out, QUIET, keep="source:c")
    assert not out.exists()
    generate_duplicates_dict(tmp_path / "c.parquet", out, QUIET, keep="source:c")
    listed = {(file, row) for file, rows in pickle.loads(out.read_bytes()).items() for row in rows}
    assert listed == set(read_removed(out.with_suffix(".parquet"))) and out.read_bytes() != before


def _interrupt(*paths: Path) -> None:
    raise KeyboardInterrupt


def test_a_pickle_next_to_a_table_is_written_again_with_its_options(tmp_path: Path) -> None:
    table, out = write_table(tmp_path / "c.parquet", CLUSTERS), tmp_path / "d.pickle"
    generate_duplicates_dict(table, out, QUIET)
    before = out.read_bytes()
    generate_duplicates_dict(table, out.with_suffix(".parquet"), QUIET, keep="source:c")
    listed = {(file, row) for file, rows in pickle.loads(out.read_bytes()).items() for row in rows}
    assert listed == set(read_removed(out.with_suffix(".parquet"))) and out.read_bytes() != before


def test_an_input_is_not_overwritten(tmp_path: Path, chained_norm: Path) -> None:
    table = write_table(tmp_path / "c.parquet", CLUSTERS)
    before = table.read_bytes()
    with pytest.raises(UsageError, match=r"c\.parquet is an input, and would be overwritten: give --out_file"):
        generate_duplicates_dict(table, tmp_path / "c.pickle", QUIET)
    with pytest.raises(UsageError, match=r"chosen\.parquet is the input folder"):
        write_pickle(tmp_path / "c.pickle", CLUSTERS)
        out = chained_norm / "chosen.parquet"
        generate_duplicates_dict(tmp_path / "c.pickle", out, QUIET, verify="jaccard", corpus=chained_norm)
    assert table.read_bytes() == before


def test_small_files_share_tasks_and_nothing_runs_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture
) -> None:
    """For other workers or memory, a moved folder or an edited file in which no member is, too."""
    files = {f"a/{number:03}.jsonl": [f"text {number // 2}"] for number in range(100)}
    write_corpus(tmp_path / "one/NORM", files | {"b/other.jsonl": ["none"]})
    clusters = [[(f"a/{number:03}.jsonl", 0), (f"a/{number + 1:03}.jsonl", 0)] for number in range(0, 100, 2)]
    write_table(tmp_path / "one/c.parquet", clusters)

    def remove(folder: str, options: RunOptions) -> str:
        paths = (tmp_path / folder / "c.parquet", tmp_path / folder / "d.pickle")
        generate_duplicates_dict(*paths, options, verify="jaccard", corpus=tmp_path / folder / "NORM", width=3)
        return capfd.readouterr().err

    monkeypatch.setattr("gristmill.engine.slices._GROUP_FILES", 20)
    assert "100 read = 50 kept + 50 duplicate" in remove("one", RunOptions(workers=1))
    steps = [step for step, _ in Ledger(tmp_path / "one" / STATE_DIR, "generate_duplicates_dict-d").read()]
    assert steps.count("fetch") < 12
    (tmp_path / "one").rename(tmp_path / "two")
    write_corpus(tmp_path / "two/NORM", {"b/other.jsonl": ["edited"]})
    assert "done already, nothing to do" in remove("two", RunOptions(workers=2, memory="1K"))
