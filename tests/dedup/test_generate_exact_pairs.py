"""Exact copies equal a plain search's, byte for byte however the stage runs; other stages unite and skip them."""

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import pyarrow.parquet
import pytest

from dedup import generate_connected_components
from dedup.candidates import digest_join, exact_copies
from dedup.candidates.exact_copies import COPY
from dedup.generate_exact_pairs import UNIQUE, generate_exact_pairs, remove_exact_pairs
from gristmill.counts import READ
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, OutputError, TooManyMalformed, UsageError
from gristmill.io.corpus import list_corpus
from gristmill.io.files import STATE_DIR
from gristmill.io.keys import read_keys
from gristmill.text import matching_form
from tests.gristmill.engine.opens import count_opens
from tests.gristmill.engine.sandbox import sandboxed
from tests.patience import found_below, patience

QUIET = RunOptions(workers=1, quiet=True)
OUT = "duplicate_pairs_exact.txt"
LINE = "python dedup/generate_exact_pairs.py --input_dir {norm} --out_file {out} --workers {workers} --memory {memory}"
CORPUS = {
    "arxiv/a.jsonl": ["One, two.", "three", "", "THREE!", "ÄÖ ü", "?!"],
    "arxiv/b.jsonl.zst": ["one two", "äö\u3000Ü", "four", "  ", "Three!!"],
    "book/a @1 ::.jsonl": ["?!", "four", "one  two", "five", "ONE two", ""],
}
GLOBAL = [
    "arxiv/a.jsonl@3 :: arxiv/a.jsonl@1",
    "arxiv/b.jsonl.zst@0 :: arxiv/a.jsonl@0",
    "arxiv/b.jsonl.zst@1 :: arxiv/a.jsonl@4",
    "arxiv/b.jsonl.zst@4 :: arxiv/a.jsonl@1",
    "book/a @1 ::.jsonl@0 :: arxiv/a.jsonl@5",
    "book/a @1 ::.jsonl@1 :: arxiv/b.jsonl.zst@2",
    "book/a @1 ::.jsonl@2 :: arxiv/a.jsonl@0",
    "book/a @1 ::.jsonl@4 :: arxiv/a.jsonl@0",
    "book/a @1 ::.jsonl@5 :: arxiv/a.jsonl@2",
]
Write = Callable[[Path, list[str]], None]


@pytest.fixture(scope="module")
def corpus(write: Write, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exact") / "NORM"
    for name, texts in CORPUS.items():
        write(root / name, texts)
    return root


@pytest.fixture(scope="module")
def large(write: Write, texts_of: Callable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of which each repeats texts of others, and its own."""
    root = tmp_path_factory.mktemp("exact") / "NORM"
    for number in range(12):
        few = [text[: 90 + number] for text in texts_of(150, 40 * number)]
        write(root / f"s{number % 3}/{number:02}.jsonl", few + few[::7])
    return root


def lines_of(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8").splitlines()


def search(texts: dict[str, list[str]], same: Callable[[str], str], of_source: bool = False) -> list[str]:
    """A plain reference: every document after the first of its group, with that one."""
    first: dict[tuple[str, str], str] = {}
    found = []
    for name in sorted(texts):
        for row, text in enumerate(texts[name]):
            group = (name.split("/")[0] if of_source else "", same(text) or text)
            key = f"{name}@{row}"
            if first.setdefault(group, key) != key:
                found.append(f"{key} :: {first[group]}")
    return found


def texts_in(root: Path) -> dict[str, list[str]]:
    return {
        file.name: [msgspec.json.decode(line)["text"] for line in file.path.read_bytes().splitlines()]
        for file in list_corpus(root)
    }


def test_copies_by_the_matching_form(corpus: Path, tmp_path: Path) -> None:
    counts = generate_exact_pairs(corpus, tmp_path / OUT, options=QUIET)
    assert lines_of(tmp_path / OUT) == GLOBAL == search(CORPUS, matching_form)
    found = {source: {why: tally.documents for why, tally in tallies.items()} for source, tallies in
             counts.tallies.items()}  # fmt: skip
    assert found == {"arxiv": {READ: 11, COPY: 4, UNIQUE: 7}, "book": {READ: 6, COPY: 5, UNIQUE: 1}}
    copied = [CORPUS[name][int(row)] for name, row in (line.split(" :: arxiv")[0].rsplit("@", 1) for line in GLOBAL)]
    assert counts.total(COPY).bytes == sum(len(text.encode()) for text in copied)


@pytest.mark.parametrize(
    ("chosen", "same"), [({"on": "bytes"}, str), ({"scope": "per-source"}, matching_form)], ids=["bytes", "per-source"]
)
def test_copies_by_the_text_or_within_a_source(corpus: Path, tmp_path: Path, chosen: dict, same: Callable) -> None:
    generate_exact_pairs(corpus, tmp_path / OUT, **chosen, options=QUIET)
    expected = search(CORPUS, same, "scope" in chosen)
    assert lines_of(tmp_path / OUT) == expected
    assert 0 < len(expected) < len(GLOBAL)


def test_another_text_column_is_another_result(tmp_path: Path) -> None:
    (tmp_path / "NORM").mkdir()
    (tmp_path / "NORM/a.jsonl").write_text('{"text": "one", "body": "same"}\n{"text": "two", "body": "same"}\n')
    for column, expected in (("text", []), ("body", ["a.jsonl@1 :: a.jsonl@0"]), ("text", [])):
        generate_exact_pairs(tmp_path / "NORM", tmp_path / "DUP" / OUT, text_column=column, options=QUIET)
        assert lines_of(tmp_path / "DUP" / OUT) == expected


def test_the_table_names_each_copy_and_what_is_kept(corpus: Path, tmp_path: Path) -> None:
    generate_exact_pairs(corpus, tmp_path / OUT, options=QUIET)
    table = pyarrow.parquet.read_table(tmp_path / OUT.replace("txt", "parquet"))
    assert table.column_names == ["file", "row", "kept_file", "kept_row"]
    rows = table.to_pylist()
    assert [f"{r['file']}@{r['row']} :: {r['kept_file']}@{r['kept_row']}" for r in rows] == GLOBAL
    keys = read_keys(tmp_path / OUT.replace("txt", "parquet"))
    assert keys["arxiv/b.jsonl.zst"].tolist() == [0, 1, 4]


def test_components_unite_them_with_the_other_pairs(corpus: Path, tmp_path: Path) -> None:
    generate_exact_pairs(corpus, tmp_path / OUT, options=QUIET)
    (tmp_path / "duplicate_pairs.txt").write_text("arxiv/b.jsonl.zst@2 :: arxiv/a.jsonl@0\n")
    generate_connected_components(tmp_path, tmp_path / "connected_components.parquet", options=QUIET)
    clusters = pyarrow.parquet.read_table(tmp_path / "connected_components.parquet").to_pylist()
    members = [f"{row['file']}@{row['row']}" for row in clusters if row["cluster"] == 0]
    assert set(members) == {"arxiv/a.jsonl@0", "arxiv/b.jsonl.zst@0", "arxiv/b.jsonl.zst@2", *(
        f"book/a @1 ::.jsonl@{row}" for row in (1, 2, 4))}  # fmt: skip


@pytest.mark.every(3)
@pytest.mark.parametrize(("memory", "workers"), [("4K", 1), ("40K", 2), ("1G", 2)])
def test_how_it_runs_changes_no_byte(
    large: Path, tmp_path: Path, memory: str, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = RunOptions(workers=workers, memory=memory, quiet=True)
    generate_exact_pairs(large, tmp_path / OUT, options=options)
    assert lines_of(tmp_path / OUT) == search(texts_in(large), matching_form)
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1 << 12)
    monkeypatch.setattr(exact_copies, "_BATCH_CHARACTERS", 500)
    monkeypatch.setattr(digest_join, "BLOCK", 5)
    generate_exact_pairs(large, tmp_path / "cut" / OUT, options=QUIET)
    for suffix in (".txt", ".parquet"):
        one, other = (tmp_path / OUT).with_suffix(suffix), (tmp_path / "cut" / OUT).with_suffix(suffix)
        assert one.read_bytes() == other.read_bytes()
    assert not list((tmp_path / STATE_DIR).glob("*/"))


def test_tasks_open_only_what_they_name(large: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1 << 13)
    with sandboxed(large, tmp_path) as sandbox:
        generate_exact_pairs(large, tmp_path / OUT, options=RunOptions(workers=1, memory="40K", quiet=True))
    assert sandbox.tasks > 20
    assert lines_of(tmp_path / OUT) == search(texts_in(large), matching_form)


def test_opens_grow_no_faster_than_the_corpus(tmp_path: Path, write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gristmill.engine.slices.SMALL_BYTES", 0)
    small, opens = RunOptions(workers=1, memory="4K", quiet=True), []
    for files in (12, 48):
        root = tmp_path / str(files)
        for number in range(files):
            write(root / f"NORM/s/{number:02}.jsonl", [f"text {number} {row}" for row in range(10)])
        with count_opens(root) as found:
            generate_exact_pairs(root / "NORM", root / "DUP" / OUT, options=small)
        opens.append(sum(found.values()) / files)
    assert opens[1] <= 1.1 * opens[0], opens


def test_too_many_malformed_records_publish_nothing(tmp_path: Path) -> None:
    (tmp_path / "NORM").mkdir()
    (tmp_path / "NORM/a.jsonl").write_text('{"text": "one"}\nno json\n{"text": "one"}\n')
    with pytest.raises(TooManyMalformed):
        generate_exact_pairs(tmp_path / "NORM", tmp_path / "DUP" / OUT, options=QUIET)
    assert not (tmp_path / "DUP" / OUT).exists()


@pytest.mark.every(2)
@pytest.mark.parametrize("pattern", ["digests/**/*.bin", "copies-*.bin"])
def test_killed_and_started_again(
    large: Path, tmp_path: Path, run: Callable, start: Callable, contents: Callable, pattern: str
) -> None:
    out = tmp_path / "killed" / OUT
    process: subprocess.Popen = start(LINE.format(norm=large, out=out, workers=1, memory="4K"))
    end = time.monotonic() + patience(60)
    while len(found_below(out.parent, pattern)) < 3:
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    ended = run(LINE.format(norm=large, out=out, workers=2, memory="100M"))
    assert " tasks done before" in ended.stderr
    generate_exact_pairs(large, tmp_path / "whole" / OUT, options=QUIET)
    assert contents(tmp_path / "killed") == contents(tmp_path / "whole")


def test_it_says_what_need_not_be_signed(corpus: Path, tmp_path: Path, run: Callable, write: Write) -> None:
    write(tmp_path / "NORM/wiki/a.jsonl", ["0123456789" * 50_000] * 5 + ["other"])
    line = LINE.format(norm=tmp_path / "NORM", out=tmp_path / "DUP" / OUT, workers=1, memory="1G")
    assert "1 group, 4 copies: 2.0 of 2.5 MB need no signature" in run(line).stderr
    assert "nothing to do" in run(line).stderr
    stamp = (tmp_path / "NORM/wiki/a.jsonl").stat().st_mtime_ns + 10**9
    write(tmp_path / "NORM/wiki/a.jsonl", ["other"] * 6)
    os.utime(tmp_path / "NORM/wiki/a.jsonl", ns=(stamp, stamp))
    assert "1 group, 5 copies: 0.0 of 0.0 MB" in run(line).stderr


@pytest.mark.parametrize("texts", [[], [""], ["a"], ["", ".", "!"]])
def test_nothing_to_pair(write: Write, tmp_path: Path, texts: list[str]) -> None:
    write(tmp_path / "NORM/a.jsonl", texts)
    counts = generate_exact_pairs(tmp_path / "NORM", tmp_path / "DUP" / OUT, options=QUIET)
    assert (tmp_path / "DUP" / OUT).read_bytes() == b""
    assert pyarrow.parquet.read_table((tmp_path / "DUP" / OUT).with_suffix(".parquet")).num_rows == 0
    assert counts.total(UNIQUE).documents == counts.total(READ).documents == len(texts)


def test_malformed_records_are_counted(tmp_path: Path) -> None:
    (tmp_path / "NORM").mkdir()
    (tmp_path / "NORM/a.jsonl").write_text('{"text": "one"}\nno json\n{"text": "one"}\n')
    with pytest.raises(TooManyMalformed, match=r"a\.jsonl line 2"):
        generate_exact_pairs(tmp_path / "NORM", tmp_path / "DUP" / OUT, options=QUIET)
    counts = generate_exact_pairs(
        tmp_path / "NORM", tmp_path / "DUP" / OUT, options=RunOptions(workers=1, quiet=True, max_malformed=0.6)
    )
    assert lines_of(tmp_path / "DUP" / OUT) == ["a.jsonl@2 :: a.jsonl@0"]
    assert (counts.total(READ).documents, counts.malformed, counts.total(COPY).documents) == (3, 1, 1)


@pytest.mark.parametrize("name", ["pairs.txt", "duplicate_pairs_exact.parquet", "duplicate_pairs_exact"])
def test_a_name_that_the_next_stage_would_not_read(corpus: Path, tmp_path: Path, name: str) -> None:
    with pytest.raises(UsageError, match=r"duplicate_pairs_exact\.txt"):
        generate_exact_pairs(corpus, tmp_path / name, options=QUIET)


def test_what_cannot_be_asked(corpus: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="matching_form or bytes"):
        generate_exact_pairs(corpus, tmp_path / OUT, on="texts", options=QUIET)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="lies in it"):
        generate_exact_pairs(corpus, corpus / "DUP" / OUT, options=QUIET)
    with pytest.raises(UsageError, match="holds no corpus file"):
        generate_exact_pairs(tmp_path, tmp_path.parent / "DUP" / OUT, options=QUIET)
    (tmp_path / "NORM").mkdir()
    (tmp_path / "NORM/a.jsonl.zst").write_bytes(b"no zstd")
    with pytest.raises(InputError, match=r"a\.jsonl\.zst"):
        generate_exact_pairs(tmp_path / "NORM", tmp_path / "DUP" / OUT, options=QUIET)


def test_only_what_the_stage_wrote_is_removed(corpus: Path, tmp_path: Path) -> None:
    outputs = [tmp_path / OUT, (tmp_path / OUT).with_suffix(".parquet")]
    for _ in range(2):
        generate_exact_pairs(corpus, outputs[0], options=QUIET)
        remove_exact_pairs(outputs[0])
        assert not any(path.exists() for path in outputs)
    for path in outputs:
        path.write_text("somebody's")
        with pytest.raises(OutputError, match=f"{re.escape(str(path))} exists, and generate_exact_pairs did not"):
            remove_exact_pairs(outputs[0])
        assert path.read_text() == "somebody's"
        path.unlink()
