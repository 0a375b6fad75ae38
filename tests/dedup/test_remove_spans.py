"""remove_spans: against all windows compared, on planted spans, under workers, memory and slices, and in a run."""

import re
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from benchmarks.process_memory import measure_peak
from dedup.remove_spans import cut_path, remove_spans
from dedup.spans.cuts import trim
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.documents import DocKey
from gristmill.io.readers import read_corpus
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.run import run
from gristmill_cli.run_config import Mix, RunConfig, Spans, Tokenizer
from gristmill_cli.stages.pipeline import clean_corpus
from tests.dedup.spans.brute_force import repeated_runs
from tests.dedup.spans.suffixes import repeated_bytes
from tests.gristmill.engine.sandbox import sandboxed
from tests.gristmill_cli.corpus import ROOT, make_corpus, tree, write_records
from tests.gristmill_cli.documentation import PAGES, commands, shell
from tests.patience import patience
from tests.preprocessing.test_decontaminate import write

OPTIONS = RunOptions(workers=1, quiet=True)
KEEP_ALL = {"min_left": 0, "min_share": 0.0}


def words(seed: int, count: int) -> str:
    """Random words of which no 16 bytes occur twice."""
    random = np.random.Generator(np.random.PCG64(seed))
    lengths = random.integers(4, 10, count)
    letters = random.integers(97, 123, int(lengths.sum()), np.uint8)
    letters[np.cumsum(lengths) - 1] = 32
    return letters[:-1].tobytes().decode()


def lost_bytes(target: Path) -> dict[DocKey, list[tuple[int, int]]]:
    """The bytes that each document lost, by the table, in runs."""
    lost: dict[DocKey, list[tuple[int, int]]] = defaultdict(list)
    for row in pq.read_table(cut_path(target)).to_pylist():
        runs = lost[DocKey(row["file"], row["row"])]
        start = row["start"]
        if runs and runs[-1][1] == start:
            start, _ = runs.pop()
        runs.append((start, row["start"] + row["bytes"]))
    return lost


def check_kept(corpus: Path, target: Path, size: int) -> None:
    """Check that the table's bytes are in the document that kept them, which was written but for less than `size`."""
    texts = {document.key: document.text.encode() for document in read_corpus(corpus)}
    rows = pq.read_table(cut_path(target)).to_pylist()
    lost = lost_bytes(target)
    removed = {DocKey(row["file"], row["row"]) for row in rows if row["removed"]}
    for row in rows:
        kept = DocKey(row["kept_file"], row["kept_row"])
        cut = texts[DocKey(row["file"], row["row"])][row["start"] : row["start"] + row["bytes"]]
        assert texts[kept][row["kept_start"] : row["kept_start"] + row["bytes"]] == cut
        if kept in removed:
            left = bytearray(b"1" * len(texts[kept]))
            for start, end in lost[kept]:
                left[start:end] = b"0" * (end - start)
            assert b"1" * size not in left[row["kept_start"] : row["kept_start"] + row["bytes"]]


@pytest.mark.parametrize("keep", ["first", "none"])
def test_what_is_left_equals_all_windows_compared(tmp_path: Path, keep: str) -> None:
    random = np.random.Generator(np.random.PCG64(7))
    phrases = [words(seed, 8) for seed in range(12)] + [
        "磨坊的水车慢慢地转着，面粉落在地上。",
        "🌾👩‍🌾🇫🇷" * 9,
        "- " * 40,
    ]
    texts = [" ".join(random.choice(phrases, random.integers(1, 7))) + words(99 + n, 3) for n in range(80)]
    for name in ("web", "book"):
        half = texts[::2] if name == "book" else texts[1::2]
        write(tmp_path / f"corpus/{name}/a.jsonl", [{"text": text, "more": 1} for text in half])
    ordered = [text.encode() for text in [*texts[::2], *texts[1::2]]]
    remove_spans(tmp_path / "corpus", tmp_path / "out", 40, OPTIONS, keep=keep, **KEEP_ALL)  # type: ignore[arg-type]
    expected = list[str]()
    for text, runs in zip(ordered, repeated_runs(ordered, 40, keep), strict=True):
        left = text
        for start, end in reversed([trim(text, *stretch) for stretch in runs]):
            left = left[:start] + left[end:]
        expected.append(left.decode())
    documents = list(read_corpus(tmp_path / "out"))
    assert [document.text for document in documents] == [text for text in expected if text.strip()]
    assert all(document.value("more") == 1 for document in documents)
    assert sum(map(len, expected)) < 0.7 * sum(map(len, texts))
    if keep == "first":
        check_kept(tmp_path / "corpus", tmp_path / "out", 40)


def test_what_goes_equals_a_suffix_array(tmp_path: Path) -> None:
    random = np.random.Generator(np.random.PCG64(8))
    pages = [words(1000 + n, 300) for n in range(120)]
    for number in range(1, 120):  # of an earlier page a passage of up to 400 bytes
        source = pages[random.integers(number)]
        start = int(random.integers(len(source)))
        at = int(random.integers(len(pages[number])))
        pages[number] = pages[number][:at] + source[start : start + int(random.integers(400))] + pages[number][at:]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in pages])
    remove_spans(tmp_path / "corpus", tmp_path / "out", 100, OPTIONS, **KEEP_ALL)  # type: ignore[arg-type]
    lost = lost_bytes(tmp_path / "out")
    texts = [text.encode() for text in pages]
    total = 0
    for row, (text, repeats) in enumerate(zip(texts, repeated_bytes(texts, 100), strict=True)):
        edges = np.flatnonzero(np.diff(np.concatenate([[0], repeats.astype(int), [0]])))
        runs = [trim(text, int(start), int(end)) for start, end in edges.reshape(-1, 2)]
        assert lost[DocKey("web/a.jsonl", row)] == [run for run in runs if run[0] < run[1]]
        total += len(runs)
    assert total > 50


PLANTED = {
    "latin": words(1, 2000),
    "han": "".join(chr(0x4E00 + int(code)) for code in np.random.Generator(np.random.PCG64(2)).integers(0, 9000, 2000)),
    "emoji": "".join(chr(0x1F400 + int(c)) for c in np.random.Generator(np.random.PCG64(3)).integers(0, 60, 1500)),
}


@pytest.mark.parametrize("script", PLANTED)
@pytest.mark.parametrize("size", [60, 99, 100, 101, 5000])
@pytest.mark.parametrize("where", ["documents", "sources", "one document"])
def test_planted_spans(tmp_path: Path, script: str, size: int, where: str) -> None:
    text = PLANTED[script].encode()[: size - 6].decode(errors="ignore")
    planted = f" {text}{'y' * (size - 3 - len(text.encode()))}. "
    assert len(planted.encode()) == size
    first = f"{words(10, 40)}||{planted}||{words(11, 40)}"
    second = f"{words(12, 40)}##{planted}##{words(13, 40)}"
    name = "z/a.jsonl" if where == "sources" else "a/b.jsonl"
    if where == "one document":
        write(tmp_path / "corpus/a/b.jsonl", [{"text": f"{first} {second}"}])
    else:
        write(tmp_path / "corpus/a/a.jsonl", [{"text": first}])
        write(tmp_path / f"corpus/{name}", [{"text": second}])
    remove_spans(tmp_path / "corpus", tmp_path / "out", 100, OPTIONS, **KEEP_ALL)  # type: ignore[arg-type]
    texts = [document.text for document in read_corpus(tmp_path / "out")]
    expected = second if size < 100 else second.replace(planted, " ")
    assert texts == ([f"{first} {expected}"] if where == "one document" else [first, expected])


def test_text_that_overlaps_itself_keeps_its_first_period(tmp_path: Path) -> None:
    period = "the wheel turns and "
    write(tmp_path / "corpus/a/a.jsonl", [{"text": period * 50 + "stops."}, {"text": words(5, 90) + " " + period * 9}])
    remove_spans(tmp_path / "corpus", tmp_path / "out", 100, OPTIONS, **KEEP_ALL)  # type: ignore[arg-type]
    first, second = (document.text for document in read_corpus(tmp_path / "out"))
    assert first == period + "stops."
    assert second == words(5, 90)


BANNER = "We use cookies to improve your visit. By going on you agree to our terms of use and our notice on privacy. "


def test_fragments_go_unless_others_lost_text_for_them(tmp_path: Path) -> None:
    page, essay = words(20, 150), words(21, 40)
    texts = [
        page,
        f"{page} {words(22, 12)}",
        f"{page} {essay}",
        f"{essay} {words(23, 80)}",
        page,
        BANNER + words(24, 90),
    ]
    texts.append(BANNER + words(25, 90))
    write(tmp_path / "corpus/a/a.jsonl", [{"text": text} for text in texts])
    counts = remove_spans(tmp_path / "corpus", tmp_path / "out", 100, OPTIONS, min_share=0.3)
    left = [document.text.strip() for document in read_corpus(tmp_path / "out")]
    # The second is a fragment. So is the third, but for the essay, which the fourth loses. The fifth is a copy.
    assert left == [page, essay, words(23, 80), BANNER + words(24, 90), words(25, 90)]
    assert counts.total("fragment").documents == 1 and counts.total("all of it repeated").documents == 1
    assert counts.total("changed").bytes == sum(map(len, texts)) - sum(
        len(document.text) for document in read_corpus(tmp_path / "out")
    ) - len(texts[1]) - len(page)
    check_kept(tmp_path / "corpus", tmp_path / "out", 100)
    few = remove_spans(tmp_path / "corpus", tmp_path / "few", 100, OPTIONS, min_share=0.0, min_left=60)
    assert few.total("fragment").documents == 0
    more = remove_spans(tmp_path / "corpus", tmp_path / "more", 100, OPTIONS, min_share=0.0, min_left=99)
    assert more.total("fragment").documents == 1


def test_what_is_written_again_has_no_other_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two steps of one name would take the tasks of each other for ones that are gone."""
    text = words(1, 60)
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text}, {"text": words(2, 60) + text}])
    remove_spans(tmp_path / "corpus", tmp_path / "out", 100, OPTIONS)
    (tmp_path / "out/web/a.jsonl").unlink()
    remove_spans(tmp_path / "corpus", tmp_path / "out", 100, replace(OPTIONS, explain=True))
    said = capsys.readouterr().err
    assert "write: 1 of 1 task runs: outputs of 1 task were removed" in said and "gone" not in said, said


def test_sources_are_left_alone(tmp_path: Path) -> None:
    for source in ("code", "web"):
        write(tmp_path / f"corpus/{source}/a.jsonl", [{"text": BANNER + words(30 + n, 90)} for n in range(3)])
    remove_spans(tmp_path / "corpus", tmp_path / "out", 50, OPTIONS, leave_alone=("code",))
    has = [(document.source, BANNER in document.text) for document in read_corpus(tmp_path / "out")]
    assert has == [("code", True)] * 3 + [("web", True), ("web", False), ("web", False)]
    with pytest.raises(UsageError, match="--leave_alone: expected sources of the corpus, got 'cod'; did you mean code"):
        remove_spans(tmp_path / "corpus", tmp_path / "other", 50, OPTIONS, leave_alone=("cod",))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"min": 15}, "--min 15: expected 16 to 1,048,576 bytes, as shorter spans repeat in any text; try 100"),
        ({"min": 1 << 21}, "--min 2097152: expected 16 to 1,048,576 bytes"),
        ({"min_left": -1}, "--min_left -1: expected 0 or more bytes; try 200"),
        ({"min_share": 1.5}, "--min_share 1.5: expected a share from 0 to 1; try 0.2"),
    ],
)
def test_limits_out_of_range_are_refused(tmp_path: Path, options: dict, message: str) -> None:
    write(tmp_path / "corpus/web/a.jsonl", [{"text": "a"}])
    with pytest.raises(UsageError, match=re.escape(message)):
        remove_spans(tmp_path / "corpus", tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def make_repeating(root: Path) -> Path:
    """Files of all formats; a passage of each document is in another."""
    corpus = make_corpus(root)
    passages = [words(40 + n, 40) for n in range(30)]
    more = [{"text": f"{words(200 + n, 30)} {passages[n % 30]} {words(900 + n, 9)}", "id": n} for n in range(400)]
    write_records(corpus / "web/more.jsonl", more)
    write_records(
        corpus / "code/more.parquet", [{"text": record["text"], "id": str(record["id"])} for record in more[::-1]]
    )
    return corpus


def test_memory_workers_and_slices_change_no_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = make_repeating(tmp_path / "corpus")
    with sandboxed(corpus):
        remove_spans(corpus, tmp_path / "one", 100, OPTIONS)
    remove_spans(corpus, tmp_path / "three", 100, RunOptions(workers=3, memory="96MiB", quiet=True))
    assert tree(tmp_path / "one") == tree(tmp_path / "three")
    assert cut_path(tmp_path / "one").read_bytes() == cut_path(tmp_path / "three").read_bytes()
    monkeypatch.setattr("gristmill.io.readers.SLICE_BYTES", 1 << 13)
    monkeypatch.setattr("dedup.candidates.digest_join.BLOCK", 37)
    monkeypatch.setattr("dedup.candidates.repeated_spans.BLOCK", 11)
    monkeypatch.setattr("gristmill.io.external_sort.MAX_HELD", 3)
    remove_spans(corpus, tmp_path / "slices", 100, OPTIONS)
    documents = [(document.key, document.text) for document in read_corpus(tmp_path / "one")]
    assert documents == [(document.key, document.text) for document in read_corpus(tmp_path / "slices")]
    assert pq.read_table(cut_path(tmp_path / "one")) == pq.read_table(cut_path(tmp_path / "slices"))
    assert len(pq.read_table(cut_path(tmp_path / "one"))) > 500
    check_kept(corpus, tmp_path / "one", 100)


def test_memory_does_not_grow_with_the_corpus(tmp_path: Path) -> None:
    """A text of one word over and over has the most blocks, and a block in each file the most places."""
    line = {"text": "word " * 60_000 + words(1, 20_000)}
    peaks = list[int]()
    for copies in (1, 6):
        corpus = tmp_path / f"corpus{copies}"
        for number in range(copies):
            write(corpus / f"a/{number}.jsonl", [line, {"text": words(2 + number, 20_000)}])
        command = [sys.executable, "-m", "gristmill_cli", "remove-spans", str(corpus), str(tmp_path / f"out{copies}")]
        peak = measure_peak([*command, "--memory", "64MiB", "--workers", "1"], {"PYTHONPATH": str(ROOT)})
        assert peak.exit_code == 0, peak.output
        peaks.append(peak.bytes)
    assert peaks[1] - peaks[0] < 64 << 20


@pytest.mark.thorough
def test_shards_write_the_same_bytes(tmp_path: Path) -> None:
    corpus = make_repeating(tmp_path / "corpus")
    remove_spans(corpus, tmp_path / "one", 100, OPTIONS)
    command = [sys.executable, "-m", "gristmill_cli", "remove-spans", str(corpus), str(tmp_path / "two"), "--quiet"]
    shards = [subprocess.Popen([*command, "--shard", f"{number}/2"], cwd=ROOT) for number in range(2)]
    assert [shard.wait(patience(180)) for shard in shards] == [0, 0]
    assert tree(tmp_path / "one") == tree(tmp_path / "two")
    assert cut_path(tmp_path / "one").read_bytes() == cut_path(tmp_path / "two").read_bytes()


def test_a_run_cuts_spans_and_says_so(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    documents = [document.text for document in read_corpus(corpus)][:60]
    write(corpus / "web/more.jsonl", [{"text": f"{BANNER}{n} {text}"} for n, text in enumerate(documents)])
    config = RunConfig(
        corpus,
        tmp_path / "out",
        workers=1,
        spans=Spans(100),
        mix=Mix(holdout=0.05),
        tokenizer=Tokenizer(vocab_size=420),
    )
    funnel = run(config)
    assert funnel is not None and clean_corpus(config) == tmp_path / "out/spans"
    texts = [document.text for document in read_corpus(clean_corpus(config))]
    assert sum("We use cookies" in text for text in texts) == 1
    ((_, fates),) = Tracer(config).find("web/more.jsonl@7")
    assert fates[1].stage == "remove_spans"
    assert re.match(r"(removed: )?lost [\d,]+ bytes that repeat, which \S+@\d+", fates[1].outcome)
    with pytest.raises(UsageError, match=r"--spans.min_left has no effect without --spans.min; try --spans.min 100"):
        run(replace(config, out=tmp_path / "other", spans=Spans(min_left=3)))
    with pytest.raises(UsageError, match=r"--spans.min 15: expected 16 to 1,048,576 bytes"):
        run(replace(config, out=tmp_path / "other", spans=Spans(15)))


def test_the_commands_of_the_page(tmp_path: Path) -> None:
    done = shell("\n".join(commands("guides/spans.md")), on_one_core=True, OUT=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "remove_spans: 8 spans cut from 4 documents (906 bytes left out)" in done.stderr
    assert "remove_lines: 0 paragraphs (0 bytes) removed from 0 documents" in done.stderr
    assert done.stdout.splitlines()[-1] in PAGES["guides/spans.md"]
    texts = [document.text for document in read_corpus(tmp_path / "cut")]
    assert [("MILL JOURNAL" in text, "cookies" in text, "gave work" in text) for text in texts] == [
        (True, True, True), *[(False, False, True)] * 4
    ]  # fmt: skip


def test_rows_of_the_table_ascend(tmp_path: Path) -> None:
    corpus = make_repeating(tmp_path / "corpus")
    remove_spans(corpus, tmp_path / "out", 64, OPTIONS)
    rows = pq.read_table(cut_path(tmp_path / "out")).to_pylist()
    for before, after in pairwise(rows):
        if (before["file"], before["row"]) == (after["file"], after["row"]):
            assert before["start"] + before["bytes"] <= after["start"]
