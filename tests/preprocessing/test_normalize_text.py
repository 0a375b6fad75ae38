"""normalize_text: NFC and no other change, large files in pieces, reruns after a changed argument."""

import bz2
import gzip
import json
import unicodedata
from dataclasses import replace
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.counts import MALFORMED, READ, WRITTEN, Tally
from gristmill.engine.options import RunOptions
from gristmill.errors import TooManyMalformed, UsageError
from gristmill.io import readers as reading
from preprocessing.normalize_text import normalize_text
from preprocessing.steps.normalise import sort_marks

DECOMPOSED = "cafe\u0301, A\u030a, \u1112\u1161\u11ab, \u212b, \u0344"
KEPT = "“quotes”，中文标点：（）；！ ﬁ ½ … \r\n\t&amp; \ufeff ﾊﾟ"  # what ftfy or NFKC would change


def test_texts_become_nfc_and_nothing_else_changes(tmp_path: Path, quiet: RunOptions, read, read_texts) -> None:
    line = f'{{"id":1.00,"text":"{DECOMPOSED}","e\u0301":"e\u0301"}}'
    untouched = f'{{"text":{json.dumps(KEPT)},"big":123456789012345678901}}'
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.jsonl").write_text(f"{line}\n{untouched}\n", encoding="utf-8")
    counts = normalize_text(tmp_path / "in", tmp_path / "out", options=quiet)
    wanted = unicodedata.normalize("NFC", DECOMPOSED)
    assert wanted != DECOMPOSED
    assert read_texts(tmp_path / "out") == [wanted, KEPT]
    assert (tmp_path / "out" / "a.jsonl").read_text(encoding="utf-8") == (
        line.replace(f'"text":"{DECOMPOSED}"', f'"text":"{wanted}"') + f"\n{untouched}\n"
    )
    assert counts.total(WRITTEN) == Tally(2, len((wanted + KEPT).encode()))
    assert counts.total(READ) == Tally(2, len((DECOMPOSED + KEPT).encode()), 1)


@given(st.text(), st.sampled_from(["NFC", "NFD", "NFKD"]))
def test_any_text_becomes_nfc(tmp_path_factory: pytest.TempPathFactory, text: str, form: str) -> None:
    folder = tmp_path_factory.mktemp("any")
    given_text = unicodedata.normalize(form, text)
    (folder / "in").mkdir()
    (folder / "in" / "a.jsonl").write_bytes(msgspec.json.encode({"text": given_text}))
    normalize_text(folder / "in", folder / "out", options=RunOptions(workers=1, quiet=True))
    written = msgspec.json.decode((folder / "out" / "a.jsonl").read_bytes())
    assert written == {"text": unicodedata.normalize("NFC", given_text)}


def test_ftfy_runs_only_with_its_option(tmp_path: Path, quiet: RunOptions, write, read_texts) -> None:
    write(tmp_path / "in" / "a.jsonl", [{"text": KEPT}, {"text": "schÃ¶n"}])
    normalize_text(tmp_path / "in", tmp_path / "out", options=quiet)
    assert read_texts(tmp_path / "out") == [KEPT, "schÃ¶n"]
    normalize_text(tmp_path / "in", tmp_path / "out", ftfy=True, options=quiet)
    assert read_texts(tmp_path / "out")[1] == "schön"


@pytest.mark.parametrize("zst", [False, True])
def test_every_format_is_written_as_jsonl(tmp_path: Path, quiet: RunOptions, write, read_texts, zst: bool) -> None:
    write(tmp_path / "in" / "s" / "a.b.jsonl", [{"text": "plain"}])
    pa.parquet.write_table(pa.table({"text": ["table"], "n": [1]}), tmp_path / "in" / "s" / "t.parquet")
    (tmp_path / "in" / "s" / "c.JSON.gz").write_bytes(gzip.compress(b'{"text":"lines"}'))
    (tmp_path / "in" / "s" / "d.ndjson.bz2").write_bytes(bz2.compress(b'{"text":"lines"}'))
    normalize_text(tmp_path / "in", tmp_path / "out", zst=zst, options=quiet)
    names = sorted(path.name for path in (tmp_path / "out" / "s").iterdir())
    lines = [f"a.b.jsonl{'.zst' if zst else ''}", f"c.jsonl{'.zst' if zst else '.gz'}"]
    assert names == [*lines, "d.jsonl.zst", "t.jsonl.zst"]
    assert read_texts(tmp_path / "out") == ["plain", "lines", "lines", "table"]


def test_files_that_are_not_read_are_named_and_counted(tmp_path: Path, run, write) -> None:
    write(tmp_path / "in" / "book" / "a.jsonl", [{"text": "a"}])
    for name in ("b.csv", "c.csv", "README.md"):
        (tmp_path / "in" / "book" / name).write_bytes(b"text")
    for _ in range(2):
        done = run("preprocessing/normalize_text.py", "-d", tmp_path / "in", "-t", tmp_path / "out")
        assert (
            "1 read = 1 written | files not read: 2 .csv (see --read_also), 1 .md (see --read_also) | " in done.stderr
        )
        assert done.stdout.splitlines()[-1].split()[-9:-2] == ["1", "2", ".csv", "(see", "--read_also),", "1", ".md"]


def test_a_share_is_not_written_into_the_whole(tmp_path: Path, quiet: RunOptions, write, digest) -> None:
    for i in range(70):
        write(tmp_path / "in" / f"{i:03}.jsonl", [{"text": f"{i}"}])
    normalize_text(tmp_path / "in", tmp_path / "out", options=quiet)
    before = digest(tmp_path / "out")
    with pytest.raises(UsageError, match=r"holds what normalize_text wrote, .*; give another output folder"):
        normalize_text(tmp_path / "in", tmp_path / "out", idx=0, options=quiet)
    assert digest(tmp_path / "out") == before


def test_idx_selects_64_files_and_all_indices_give_the_whole(tmp_path: Path, quiet: RunOptions, write, digest) -> None:
    for i in range(70):
        write(tmp_path / "in" / f"{i:03}.jsonl", [{"text": f"{i}"}])
    counts = [normalize_text(tmp_path / "in", tmp_path / "shares", idx=i, options=quiet) for i in (1, 0)]
    assert [count.total(READ).documents for count in counts] == [6, 64]
    normalize_text(tmp_path / "in", tmp_path / "whole", options=quiet)
    assert digest(tmp_path / "shares") == digest(tmp_path / "whole")
    with pytest.raises(UsageError, match="expected 0 to 1"):
        normalize_text(tmp_path / "in", tmp_path / "shares", idx=2, options=quiet)


def test_one_block_removes_what_it_wrote_of_inputs_that_are_gone(tmp_path: Path, quiet: RunOptions, write) -> None:
    for name in ("a", "b"):
        write(tmp_path / "in" / "book" / f"{name}.jsonl", [{"text": name}])
    normalize_text(tmp_path / "in", tmp_path / "out", idx=0, options=quiet)
    (tmp_path / "in" / "book" / "b.jsonl").unlink()
    normalize_text(tmp_path / "in", tmp_path / "out", idx=0, options=quiet)
    assert [path.name for path in (tmp_path / "out" / "book").iterdir()] == ["a.jsonl"]


def test_a_second_input_does_not_replace_the_first(tmp_path: Path, quiet: RunOptions, write) -> None:
    for name in ("book", "c4"):
        write(tmp_path / "in" / name / "a.jsonl", [{"text": name}])
    normalize_text(tmp_path / "in" / "book", tmp_path / "out", options=quiet)
    with pytest.raises(UsageError, match=r"what normalize_text made of .*/book, and would lose it if .*/c4 were read"):
        normalize_text(tmp_path / "in" / "c4", tmp_path / "out", options=quiet)
    assert "book" in (tmp_path / "out" / "a.jsonl").read_text()


def test_output_of_a_removed_input_is_removed(tmp_path: Path, quiet: RunOptions, write) -> None:
    for name in ("a", "web/1/b", "web/2/c"):
        write(tmp_path / "in" / f"{name}.jsonl", [{"text": name}])
    normalize_text(tmp_path / "in", tmp_path / "out", options=quiet)
    (tmp_path / "in/web/1/b.jsonl").unlink()
    (tmp_path / "out/mine").mkdir()
    normalize_text(tmp_path / "in", tmp_path / "out", zst=True, options=quiet)
    found = {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("[!.]*")}
    assert {name for name in found if ".gristmill" not in name} == {
        "a.jsonl.zst", "mine", "web", "web/2", "web/2/c.jsonl.zst"
    }  # fmt: skip


class TestPieces:
    """A file above SLICE_BYTES is normalised in pieces, which are then joined."""

    @pytest.fixture(autouse=True)
    def small_slices(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(reading, "SLICE_BYTES", 200)

    @pytest.fixture
    def large(self, tmp_path: Path, write) -> Path:
        records = [{"text": f"cafe\u0301 schÃ¶n {i}", "i": i} for i in range(40)]
        write(tmp_path / "in" / "book" / "a.jsonl", records)
        return tmp_path / "in"

    @pytest.mark.parametrize("zst", [False, True])
    def test_are_the_whole(self, tmp_path: Path, quiet: RunOptions, large: Path, read, monkeypatch, zst: bool) -> None:
        pieces = normalize_text(large, tmp_path / "out", zst=zst, options=quiet)
        assert [record["i"] for record in read(tmp_path / "out")] == list(range(40))
        assert not list((tmp_path / "out").rglob("*pieces/*/*/*/*"))  # they are gone again
        monkeypatch.setattr(reading, "SLICE_BYTES", 1 << 20)
        whole = normalize_text(large, tmp_path / "whole", zst=zst, options=quiet)
        assert read(tmp_path / "out") == read(tmp_path / "whole") and pieces == whole
        assert zst or (tmp_path / "out/book/a.jsonl").read_bytes() == (tmp_path / "whole/book/a.jsonl").read_bytes()

    def test_are_made_again_for_another_argument(self, tmp_path: Path, quiet: RunOptions, large: Path, read) -> None:
        normalize_text(large, tmp_path / "out", options=quiet)
        normalize_text(large, tmp_path / "out", ftfy=True, options=quiet)
        assert read(tmp_path / "out")[0]["text"] == "café schön 0"
        normalize_text(large, tmp_path / "out", options=quiet)
        assert read(tmp_path / "out")[0]["text"] == "café schÃ¶n 0"

    def test_of_another_share_are_left_alone(self, tmp_path: Path, quiet: RunOptions, large: Path) -> None:
        other = tmp_path / "out" / ".gristmill" / "normalize_text_pieces" / "nfc" / "other.jsonl" / "0.jsonl"
        other.parent.mkdir(parents=True)
        other.touch()
        normalize_text(large, tmp_path / "out", idx=0, options=quiet)
        assert other.exists()

    def test_share_the_limit_of_malformed_records(self, tmp_path: Path, quiet: RunOptions, large: Path, write) -> None:
        bad = {"text": None}
        write(large / "book" / "a.jsonl", [{"text": "x" * 50} for _ in range(9)] + [bad])
        for i in range(9):
            write(large / "book" / f"{i}.jsonl", [{"text": "short"}])
        limited = replace(quiet, max_malformed=0.06)
        counts = normalize_text(large, tmp_path / "out", options=limited)  # 1 of 19, though 1 of 10 in the large file
        assert counts.total(f"{MALFORMED}: text is null").documents == 1
        rejects = (tmp_path / "out" / "book" / "a.jsonl.malformed").read_bytes()
        assert msgspec.json.decode(rejects)["line"] == 10
        with pytest.raises(TooManyMalformed, match=r"a\.jsonl line 10: text is null"):
            normalize_text(large, tmp_path / "out", options=replace(quiet, max_malformed=0.05))


@given(st.lists(st.tuples(st.sampled_from("ae\u00e9\u0f40\u1100"), st.integers(0, 300), st.randoms()), max_size=4))
def test_sorted_marks_have_the_same_nfc(parts: list) -> None:
    marks = "\u0301\u0323\u0344\u0327\u0f71\u0f73\u0f72"
    text = "".join(start + "".join(random.choices(marks, k=count)) for start, count, random in parts)
    assert unicodedata.normalize("NFC", sort_marks(text)) == unicodedata.normalize("NFC", text)


@pytest.mark.parametrize("marks", ["\u0301\u0323", "\u0f73", "\u0344\u0323"])
def test_nfc_has_nothing_left_to_sort_in_a_million_marks(marks: str) -> None:
    """unicodedata moves a mark before each one of a higher class: the pairs in wrong order are its work."""
    text = sort_marks("a" + marks * 500_000 + "b")
    classes = [unicodedata.combining(c) for c in unicodedata.normalize("NFC", text)[1:-1]]
    assert len(classes) >= 499_999 and classes == sorted(classes)
    decomposed = [unicodedata.combining(c) for c in text[1:-1]]
    assert all(decomposed) and decomposed == sorted(decomposed)
