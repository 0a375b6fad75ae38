"""remove_lines: against a plain program, by counts, on a run, under workers and shards of memory."""

import random
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dedup.candidates.repeated_units import CORPUS_UNIT, find_repeats
from dedup.remove_lines import lost_path, remove_lines
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from gristmill_cli.run import run
from gristmill_cli.run_config import Lines, Mix, RunConfig, Tokenizer
from gristmill_cli.stages.pipeline import clean_corpus
from tests.gristmill.engine.sandbox import sandboxed
from tests.gristmill_cli.corpus import make_corpus, tree
from tests.preprocessing.test_decontaminate import write

OPTIONS = RunOptions(workers=1, quiet=True)


def plain_lines(texts: list[str], joint: str, keep: str, least: int, shortest: int) -> list[str]:
    """What is left of each text; a text of which nothing is left is empty."""
    counts = Counter(it.strip() for text in texts for it in text.split(joint))
    seen, left = set[str](), []
    for text in texts:
        units = []
        for it in text.split(joint):
            is_repeat = len(it.strip()) >= shortest and counts[it.strip()] >= least
            if not is_repeat or (keep == "first" and it.strip() not in seen):
                units.append(it)
            seen.add(it.strip())
        left.append(text if units == text.split(joint) else joint.join(units).strip())
    return left


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@pytest.mark.parametrize("keep", ["first", "none"])
@pytest.mark.parametrize("seed", range(3))
def test_what_is_left_equals_a_plain_program(tmp_path: Path, unit: str, keep: str, seed: int) -> None:
    chosen, joint = random.Random(seed), {"line": "\n", "paragraph": "\n\n"}[unit]
    known = [f"unit {n} of the text" for n in range(30)] + ["}", "ab", " spaced unit  "]
    weights = [1 / (1 + n) for n in range(30)] + [1, 1, 1]
    texts = [joint.join(chosen.choices(known, weights, k=chosen.randint(1, 6))).strip() for _ in range(60)]
    for name in ("web", "book"):
        half = texts[::2] if name == "book" else texts[1::2]
        write(tmp_path / f"corpus/{name}/a.jsonl", [{"text": text} for text in half])
    texts = [*texts[::2], *texts[1::2]]  # in the order of the corpus
    left = plain_lines(texts, joint, keep, least=4, shortest=3)
    counts = remove_lines(
        tmp_path / "corpus", tmp_path / "out", unit, OPTIONS, keep=keep, least=4, min_characters=3  # type: ignore[arg-type]
    )  # fmt: skip
    assert [document.text for document in read_corpus(tmp_path / "out")] == [text for text in left if text]
    assert counts.total("all of it repeated").documents == left.count("")
    lost = {(row["file"], row["row"]): row for row in pq.read_table(lost_path(tmp_path / "out")).to_pylist()}
    keys = [str(document.key).rpartition("@") for document in read_corpus(tmp_path / "corpus")]
    for (file, _, row), text, kept in zip(keys, texts, left, strict=True):
        found = lost.get((file, int(row)))
        assert (found["bytes"] if found else 0) == len(text) - len(kept)
        assert found is None or found["of"] == len(text.split(joint))
    assert len(lost) == sum(a != b for a, b in zip(texts, left, strict=True)) > 10


def test_documents_without_repeats_keep_their_bytes(tmp_path: Path) -> None:
    rows = [{"text": f"  one {n}\n\n\n two {n} \n", "more": [n]} for n in range(9)]
    path = write(tmp_path / "corpus/web/a.jsonl", rows)
    for unit in ("line", "paragraph"):
        remove_lines(tmp_path / "corpus", tmp_path / unit, unit, OPTIONS, least=2, min_characters=0)  # type: ignore[arg-type]
        texts = [document.text for document in read_corpus(tmp_path / unit)]
        assert texts == [row["text"] for row in rows] and path.exists()


def test_sources_alone_or_together(tmp_path: Path) -> None:
    for source in ("a", "b"):
        write(tmp_path / f"corpus/{source}/x.jsonl", [{"text": f"{source}{n}\nnotice of all"} for n in range(3)])
    for scope, kept in (("global", 1), ("per-source", 6)):
        target = tmp_path / scope
        remove_lines(tmp_path / "corpus", target, "line", OPTIONS, least=4, min_characters=5, scope=scope)  # type: ignore[arg-type]
        assert sum("notice" in document.text for document in read_corpus(target)) == kept


@pytest.mark.parametrize("keep", ["first", "none"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50])
def test_blocks_cut_anywhere_give_the_same_repeats(keep: str, cut: int) -> None:
    units = np.zeros(50, CORPUS_UNIT)
    units["low"] = np.sort(np.random.default_rng(cut).integers(0, 9, 50))
    units["unit"] = np.arange(50)
    found = find_repeats((units[at : at + cut] for at in range(0, 50, cut)), 5, keep)  # type: ignore[arg-type]
    expected = []
    for value in range(9):
        (places,) = np.nonzero(units["low"] == value)
        expected += [] if len(places) < 5 else places[keep == "first" :].tolist()
    assert [int(unit) for block in found for unit in block["unit"]] == expected


def test_small_memory_and_workers_change_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    more = [{"text": f"text {n} of its own\na notice that all of these share\nits end {n % 3}"} for n in range(3000)]
    write(corpus / "web/notices.jsonl", more)
    with sandboxed(corpus):
        remove_lines(corpus, tmp_path / "one", "line", OPTIONS)
    remove_lines(corpus, tmp_path / "three", "line", RunOptions(workers=3, memory="96MiB"))
    assert re.search(r"remove_lines: 2,999 lines left out of 2,999 documents, [\d,]+ bytes", capsys.readouterr().err)
    assert tree(tmp_path / "one") == tree(tmp_path / "three")
    assert lost_path(tmp_path / "one").read_bytes() == lost_path(tmp_path / "three").read_bytes()
    assert sum("a notice" in document.text for document in read_corpus(tmp_path / "one")) == 1


def test_a_run_leaves_repeated_lines_out(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    documents = [document.text for document in read_corpus(corpus)]
    write(
        corpus / "web/more.jsonl",
        [{"text": f"{text}\nShare this page with all your friends!"} for text in documents[:50]],
    )
    config = RunConfig(
        corpus, tmp_path / "out", workers=1, lines=Lines("line", least=9), mix=Mix(holdout=0.05),
        tokenizer=Tokenizer(vocab_size=420),
    )  # fmt: skip
    funnel = run(config)
    assert funnel is not None and clean_corpus(config) == tmp_path / "out/lines"
    assert sum("Share this page" in document.text for document in read_corpus(clean_corpus(config))) == 1
    assert sum("Share this page" in document.text for document in read_corpus(tmp_path / "out/train")) <= 1
    with pytest.raises(UsageError, match=r"--lines.least has no effect with --lines.unit none; try --lines.unit line"):
        run(replace(config, out=tmp_path / "other", lines=Lines(least=3)))
    with pytest.raises(UsageError, match=r"expected 2 or more, got 1; try 6"):
        run(replace(config, out=tmp_path / "other", lines=Lines("line", least=1)))
