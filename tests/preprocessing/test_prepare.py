"""prepare: one read of a raw corpus gives the documents, key sets and signatures that five stages give."""

import gzip
import io
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.ipc
import pyarrow.parquet as pq
import pytest

from dedup.candidates.signature_shards import SUFFIX, open_shard
from dedup.from_facts.exact_copies import pair_exact_copies
from dedup.from_facts.signatures import select_signatures
from dedup.generate_exact_pairs import generate_exact_pairs
from dedup.minhash.signatures import Sketch
from dedup.steps.fingerprint import Fingerprint
from dedup.to_hash import to_hash
from gristmill.counts import WRITTEN, Counts
from gristmill.engine.options import RunOptions
from gristmill.errors import InputError, UsageError
from gristmill.io.compression.streams import decompress
from gristmill.io.facts import read_index
from gristmill.io.lines import read_lines
from gristmill.steps import DocumentStep
from preprocessing.filter import filter as find_short
from preprocessing.filter_quality import filter_quality
from preprocessing.from_facts.short_documents import list_short
from preprocessing.normalize_text import normalize_text
from preprocessing.prepare import prepare
from preprocessing.steps.normalise import Normalise
from preprocessing.steps.recipe_rules import RecipeRules
from preprocessing.steps.text_digest import TextDigest
from tests.patience import found_below, patience

ROOT = Path(__file__).resolve().parents[2]
ALSO = ("csv", "txt")
SKETCH = Sketch(permutations=16)
RECIPE = """
words.min = 3
personal = { mail = true }
listed_urls = { file = "domains.txt" }
"""


def text_of(number: int) -> str:
    """A text with letters that NFC composes, addresses, and of any length; some are copies of others."""
    chance = random.Random(number % 53)
    words = ["".join(chance.choices("abcdeéо水", k=chance.randint(1, 9))) for _ in range(chance.randrange(60))]
    text = " ".join(words).replace("b", "a\u0301")
    if number % 7 == 0:
        text = text.upper() + "!"
    return text + " me@here.org" * (number % 11 == 0)


def records(first: int, count: int) -> list[dict[str, Any]]:
    urls = ["http://www.bad.com/x", "https://good.org", None]
    return [
        {"id": number, "text": text_of(number), "url": urls[number % 3], "score": 1.50}
        for number in range(first, first + count)
    ]


def to_lines(found: list[dict[str, Any]]) -> bytes:
    return b"".join(json.dumps(record).replace('"score": 1.5', '"score":  1.50').encode() + b"\n" for record in found)


@pytest.fixture
def raw(tmp_path: Path) -> Path:
    """A corpus of all formats, with malformed lines and a damaged file, whose files change their order by new names."""
    root = tmp_path / "raw"
    for source in ("book", "web", "wiki"):
        (root / source).mkdir(parents=True)
    odd = b'\n{"text": 7}\n{"no": "text"}\n\xff\n'
    (root / "book/a.jsonl").write_bytes(odd + to_lines(records(0, 40)) + odd)
    (root / "book/b.jsonl.gz").write_bytes(gzip.compress(to_lines(records(40, 30))))
    (root / "book/c.jsonl").write_bytes(b"{broken\n")
    (root / "wiki/a.ndjson").write_bytes(to_lines(records(70, 40)))
    (root / "wiki/a.jz.jsonl").write_bytes(to_lines(records(90, 40)))  # before a.ndjson, and behind a.jsonl
    (root / "wiki/big.jsonl").write_bytes(to_lines(records(130, 200)) + odd + to_lines(records(330, 200)))
    (root / "wiki/torn.jsonl.gz").write_bytes(gzip.compress(to_lines(records(530, 50)))[:-30])
    table = pa.Table.from_pylist(records(580, 40))
    pq.write_table(table, root / "web/a.parquet", row_group_size=9)
    with pa.ipc.new_stream(root / "web/b.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=8)
    (root / "web/c.csv").write_text("text,url\n" + "".join(f"some words of {n},u{n}\n" for n in range(9)) + "x\n")
    (root / "web/d.txt").write_text("a text that is a file")
    return root


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    path = tmp_path / "rules.toml"
    path.write_text(RECIPE)
    (tmp_path / "domains.txt").write_text("bad.com\n")
    return str(path)


def steps_of(recipe: str = "") -> list[DocumentStep]:
    rules = [RecipeRules.of(recipe)] if recipe else []
    return [Normalise(), *rules, TextDigest(), Fingerprint(SKETCH)]


def files_in(folder: Path) -> dict[str, bytes]:
    """What a stage wrote to a folder, but for its records."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(paths)
        if ".gristmill" not in path.relative_to(folder).parts
    }


def without_frames(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files, those of .zst decompressed."""
    return {
        name: b"".join(decompress(io.BytesIO(data), "zst")) if name.endswith(".zst") else data
        for name, data in files.items()
    }


def signed_in(folder: Path) -> dict[str, tuple[list[int], list[list[int]]]]:
    """The rows and signatures of each corpus file, from all its shards."""
    found = dict[str, tuple[list[int], list[list[int]]]]()
    shards = [open_shard(path) for path in folder.rglob(f"*{SUFFIX}")]
    for shard in sorted(shards, key=lambda shard: shard.rows()[:1].tolist()):
        if len(shard):
            rows, values = found.setdefault(shard.header.file, ([], []))
            rows += shard.rows().tolist()
            values += np.concatenate([*shard.signatures()]).tolist()
    return found


def five_stages(raw: Path, out: Path, recipe: str, options: RunOptions) -> dict[str, Counts]:
    """What the stages give that prepare replaces."""
    normal = out / "documents" if not recipe else out / "normal"
    read = normalize_text(raw, normal, zst=True, read_also=ALSO, options=options)
    if recipe:
        read = filter_quality(out / "normal", out / "documents", recipe, options)
    short = find_short(out / "documents", out / "short.pickle", 0, "all", 60, options)
    pairs = out / "dup/duplicate_pairs_exact.txt"
    copies = generate_exact_pairs(out / "documents", pairs, options=options)
    signed = to_hash(
        "all", out / "documents", out / "minhash", 0, "0", 0, 1 << 40, hash=SKETCH.hash,
        permutations=SKETCH.permutations, skip=pairs.with_suffix(".parquet"), options=options,
    )  # fmt: skip
    return {"read": read, "short": short, "copies": copies, "signed": signed}


def one_pass(raw: Path, out: Path, steps: list[DocumentStep], options: RunOptions) -> dict[str, Counts]:
    """The same by prepare, and by joins that read its facts."""
    read, _ = prepare(raw, out / "documents", out / "facts", steps, options, read_also=ALSO)
    return {"read": read, **join_facts(out, options)}


def join_facts(out: Path, options: RunOptions) -> dict[str, Counts]:
    pairs = out / "dup/duplicate_pairs_exact.txt"
    short = list_short(out / "facts", out / "short.pickle", 60, options)
    copies = pair_exact_copies(out / "facts", pairs, options=options)
    signed = select_signatures(out / "facts", out / "minhash", SKETCH, pairs.with_suffix(".parquet"), options)
    return {"short": short, "copies": copies, "signed": signed}


def documents_of(counts: Counts) -> dict[tuple[str, str], tuple[int, int, int]]:
    """Documents, bytes and files by source and reason."""
    return {
        (source, reason): (tally.documents, tally.bytes, tally.files)
        for source, reason, tally in counts.rows()
        if tally.documents or tally.files
    }


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("is_judged", [False, True])
@pytest.mark.parametrize("slice_bytes", [1 << 26, 5000])
def test_one_pass_gives_what_five_stages_give(
    raw: Path,
    recipe: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    workers: int,
    is_judged: bool,
    slice_bytes: int,
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", slice_bytes)
    options = RunOptions(workers=workers, quiet=True, max_malformed=0.9)
    rules = recipe if is_judged else ""
    expected = five_stages(raw, tmp_path / "five", rules, options)
    found = one_pass(raw, tmp_path / "one", steps_of(rules), options)

    documents = files_in(tmp_path / "five/documents")
    if is_judged:
        documents |= {name: data for name, data in files_in(tmp_path / "five/normal").items() if "malformed" in name}
    found_documents = files_in(tmp_path / "one/documents")
    # a pass compresses less, and a .zst that is written in pieces has a frame for each, which two stages cut otherwise
    assert without_frames(found_documents) == without_frames(documents)
    for name in ("short.pickle", "dup/duplicate_pairs_exact.txt", "dup/duplicate_pairs_exact.parquet"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "five" / name).read_bytes(), name
    assert signed_in(tmp_path / "one/minhash") == signed_in(tmp_path / "five/minhash")
    assert len(signed_in(tmp_path / "one/minhash")) > 5
    for stage in ("short", "copies", "signed"):
        assert documents_of(found[stage]) == documents_of(expected[stage]), stage
    if not is_judged:
        assert documents_of(found["read"]) == documents_of(expected["read"])
    assert found["read"].total(WRITTEN).documents == expected["read"].total(WRITTEN).documents
    assert found["copies"].total("copy").documents > 20
    assert found["read"].damaged.keys() == {"wiki/torn.jsonl.gz"}


@pytest.mark.parametrize("slice_bytes", [1 << 26, 5000])
def test_facts_say_of_each_raw_record_what_became_of_it(
    raw: Path, recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, slice_bytes: int
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", slice_bytes)
    options = RunOptions(workers=1, quiet=True, max_malformed=0.9)
    counts, _ = prepare(raw, tmp_path / "documents", tmp_path / "facts", steps_of(recipe), options, read_also=ALSO)
    index = read_index(tmp_path / "facts/index.json")
    rows = [row for file in index for row in pq.read_table(tmp_path / "facts" / file.path).to_pylist()]
    assert len(rows) == sum(file.records for file in index) == counts.total("read").documents
    keys = [(row["file"], row["row"]) for row in rows if row["row"] is not None]
    assert keys == sorted(keys)
    assert len({*keys}) == len(keys) == counts.total(WRITTEN).documents
    by_raw = [(row["raw_file"], row["raw_row"]) for row in rows]
    assert len({*by_raw}) == len(by_raw)
    assert [place for place in by_raw if place[0] == "book/a.jsonl"] == sorted(
        place for place in by_raw if place[0] == "book/a.jsonl"
    )
    reasons = {row["reason"] for row in rows}
    assert {"", "words", "listed_urls", "malformed: invalid UTF-8"} <= reasons
    for row in rows:
        assert (row["reason"] == "") == (row["row"] is not None) == (row["sha256_high"] is not None), row
        if row["reason"] == "words":
            assert row["value"] < 3 and row["id"] is not None, row
        if row["reason"] == "listed_urls":
            assert row["detail"] == "bad.com"
    of_big = {row["raw_row"]: row for row in rows if row["raw_file"] == "wiki/big.jsonl"}
    lines = (raw / "wiki/big.jsonl").read_bytes().split(b"\n")
    written = list(read_lines(tmp_path / "documents/wiki/big.jsonl.zst"))
    for number, row in of_big.items():
        if row["row"] is not None:
            assert json.loads(written[row["row"]])["id"] == json.loads(lines[number])["id"]


def test_facts_of_a_corpus_that_another_stage_wrote_are_those_of_the_pass_that_writes_it(
    raw: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 5000)
    options = RunOptions(workers=2, quiet=True, max_malformed=0.9)
    one_pass(raw, tmp_path / "one", steps_of(), options)
    prepare(tmp_path / "one/documents", None, tmp_path / "again/facts", steps_of()[1:], options)
    join_facts(tmp_path / "again", options)
    for name in ("short.pickle", "dup/duplicate_pairs_exact.txt", "dup/duplicate_pairs_exact.parquet"):
        assert (tmp_path / "again" / name).read_bytes() == (tmp_path / "one" / name).read_bytes(), name
    assert signed_in(tmp_path / "again/minhash") == signed_in(tmp_path / "one/minhash")
    with pytest.raises(UsageError, match=r"changed or removed .*this pass writes no documents"):
        prepare(raw, None, tmp_path / "third", [Normalise()], options)


def test_what_has_changed_is_done_again_and_nothing_else(raw: Path, recipe: str, tmp_path: Path, capsys: Any) -> None:
    options = RunOptions(workers=1, max_malformed=0.9)
    arguments = (raw, tmp_path / "documents", tmp_path / "facts")

    def tasks_run(steps: list[DocumentStep]) -> bool:
        capsys.readouterr()
        prepare(*arguments, steps, options, read_also=ALSO)
        said = capsys.readouterr()
        return "done already" not in said.err

    assert tasks_run(steps_of(recipe))
    assert not tasks_run(steps_of(recipe))
    assert tasks_run([*steps_of(recipe)[:3], Fingerprint(replace(SKETCH, seed=2))])
    (tmp_path / "domains.txt").write_text("bad.com\ngood.org\n")
    assert tasks_run(steps_of(recipe))
    assert not tasks_run(steps_of(recipe))
    before = files_in(tmp_path / "documents")
    (raw / "book/b.jsonl.gz").unlink()
    assert tasks_run(steps_of(recipe))
    assert files_in(tmp_path / "documents").keys() == before.keys() - {"book/b.jsonl.zst"}
    assert not [path for path in (tmp_path / "facts").rglob("*") if "b.jsonl.gz" in path.name]


@pytest.mark.parametrize("unit", ["character", "byte"])
def test_another_threshold_reads_no_text(raw: Path, tmp_path: Path, unit: Any) -> None:
    options = RunOptions(workers=1, quiet=True, max_malformed=0.9)
    prepare(raw, tmp_path / "documents", tmp_path / "facts", steps_of(), options)
    shutil.copytree(tmp_path / "documents", tmp_path / "kept")
    for path in (tmp_path / "documents").rglob("*.jsonl*"):
        path.unlink()
    for threshold in (1, 60, 200):
        found = list_short(tmp_path / "facts", tmp_path / f"{threshold}.pickle", threshold, options, unit)
        expected = find_short(
            tmp_path / "kept", tmp_path / f"five{threshold}.pickle", 0, "all", threshold, options, unit=unit
        )
        assert documents_of(found) == documents_of(expected)
        assert (tmp_path / f"{threshold}.pickle").read_bytes() == (tmp_path / f"five{threshold}.pickle").read_bytes()


def test_damaged_facts_are_refused(raw: Path, tmp_path: Path, quiet: RunOptions) -> None:
    lenient = replace(quiet, max_malformed=0.9)
    prepare(raw, tmp_path / "documents", tmp_path / "facts", steps_of(), lenient)
    path = next((tmp_path / "facts").rglob("*.facts.parquet"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(InputError, match="is not what prepare wrote"):
        list_short(tmp_path / "facts", tmp_path / "short.pickle", 60, lenient)
    with pytest.raises(UsageError, match="expected the facts of a corpus, got no index"):
        list_short(tmp_path, tmp_path / "short.pickle", 60, lenient)


KILLED = """
import sys
from pathlib import Path
from gristmill.engine.options import RunOptions
from preprocessing.prepare import prepare
from tests.preprocessing.test_prepare import ALSO, steps_of

if __name__ == "__main__":
    raw, out, recipe, workers = sys.argv[1:]
    options = RunOptions(workers=int(workers), max_malformed=0.9)
    prepare(Path(raw), Path(out, "documents"), Path(out, "facts"), steps_of(recipe), options, read_also=ALSO)
"""


@pytest.mark.parametrize("workers", [1, 2])
def test_a_killed_pass_goes_on_and_gives_the_same_bytes(raw: Path, recipe: str, tmp_path: Path, workers: int) -> None:
    for number in range(20):
        (raw / f"more{number:02}").mkdir()
        (raw / f"more{number:02}/a.jsonl").write_bytes(to_lines(records(1000 * number, 200)))
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    command = [sys.executable, str(script), str(raw), str(tmp_path / "killed"), recipe, str(workers)]
    killed = subprocess.Popen(command, env={"PYTHONPATH": str(ROOT)}, stderr=subprocess.DEVNULL)
    end = time.monotonic() + patience(60)
    while len(found_below(tmp_path / "killed/documents", "*.jsonl.zst")) < 4:
        assert killed.poll() is None, "it ended before it could be stopped"
        assert time.monotonic() < end
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL
    with pytest.raises(InputError, match="prepare"):
        list_short(tmp_path / "killed/facts", tmp_path / "short.pickle", 60)
    again = subprocess.run(command, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=True)
    assert "tasks done before" in again.stderr
    options = RunOptions(workers=1, quiet=True, max_malformed=0.9)
    prepare(raw, tmp_path / "whole/documents", tmp_path / "whole/facts", steps_of(recipe), options, read_also=ALSO)
    assert files_in(tmp_path / "killed/documents") == files_in(tmp_path / "whole/documents")
    assert files_in(tmp_path / "killed/facts") == files_in(tmp_path / "whole/facts")
