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


def cut_plainly(text: str, unit: str) -> list[tuple[str, str]]:
    """The units of a text, each with the break after it, found line by line."""
    lines = re.findall(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+\Z", text)
    ended = [(line.rstrip("\r\n"), line[len(line.rstrip("\r\n")) :]) for line in lines]
    if unit == "line":
        return ended
    units, is_open = list[tuple[str, str]](), False
    for content, newline in ended:
        if is_open and (content.strip() or not units[-1][1]):
            before, ending = units[-1]
            units[-1] = (before + ending + content, newline)
        elif units and not content.strip() and newline:
            units[-1] = (units[-1][0], units[-1][1] + content + newline)
        else:
            units.append((content, newline))
        is_open = bool(content.strip())
    return units


def plain_lines(texts: list[str], unit: str, keep: str, min_count: int, shortest: int, count_by: str) -> list[str]:
    """What is left of each text."""
    counts = Counter[str]()
    first = dict[str, int]()
    for number, text in enumerate(texts):
        contents = [content.strip() for content, _ in cut_plainly(text, unit)]
        counts.update(set(contents) if count_by == "document" else contents)
        for content in contents:
            first.setdefault(content, number)
    seen, left = set[str](), []
    for number, text in enumerate(texts):
        kept = list[tuple[str, str]]()
        units = cut_plainly(text, unit)
        last_is_gone, ending = False, units[-1][1]
        for content, newline in units:
            key = content.strip()
            is_first = first[key] == number if count_by == "document" else key not in seen
            is_repeat = len(key) >= shortest and counts[key] >= min_count
            seen.add(key)
            last_is_gone = is_repeat and not (keep == "first" and is_first)
            if not last_is_gone:
                kept.append((content, newline))
        if kept and last_is_gone:
            kept[-1] = (kept[-1][0], ending)
        left.append("".join(content + newline for content, newline in kept))
    return left


@pytest.mark.parametrize("unit", ["line", "paragraph"])
@pytest.mark.parametrize("keep", ["first", "none"])
@pytest.mark.parametrize("count_by", ["occurrence", "document"])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
def test_what_is_left_equals_a_plain_program(tmp_path: Path, unit: str, keep: str, count_by: str, newline: str) -> None:
    chosen = random.Random(f"{unit} {keep} {count_by} {newline}")
    known = [f"{' ' * (n % 5)}unit {n} of the text" for n in range(30)] + ["}", "ab", "\u3000\u3000a unit  "]
    weights = [1 / (1 + n) for n in range(30)] + [1, 1, 1]
    texts = []
    for _ in range(60):
        units = chosen.choices(known, weights, k=chosen.randint(1, 6))
        breaks = [newline * (1 if unit == "line" else chosen.choice([1, 2, 3])) for _ in units]
        breaks[-1] = chosen.choice(["", newline])
        texts.append("".join(content + ending for content, ending in zip(units, breaks, strict=True)))
    for name in ("web", "book"):
        half = texts[::2] if name == "book" else texts[1::2]
        write(tmp_path / f"corpus/{name}/a.jsonl", [{"text": text} for text in half])
    texts = [*texts[::2], *texts[1::2]]  # in the order of the corpus
    assert all("".join(map("".join, cut_plainly(text, unit))) == text for text in texts)
    left = plain_lines(texts, unit, keep, min_count=4, shortest=3, count_by=count_by)
    counts = remove_lines(
        tmp_path / "corpus", tmp_path / "out", unit, OPTIONS,
        keep=keep, min_count=4, min_characters=3, count_by=count_by,  # type: ignore[arg-type]
    )  # fmt: skip
    assert [document.text for document in read_corpus(tmp_path / "out")] == [text for text in left if text.strip()]
    assert counts.total("all of it repeated").documents == sum(not text.strip() for text in left)
    lost = {(row["file"], row["row"]): row for row in pq.read_table(lost_path(tmp_path / "out")).to_pylist()}
    keys = [str(document.key).rpartition("@") for document in read_corpus(tmp_path / "corpus")]
    for (file, _, row), text, kept in zip(keys, texts, left, strict=True):
        found = lost.get((file, int(row)))
        assert (found["bytes"] if found else 0) == len(text.encode()) - len(kept.encode())
    assert len(lost) == sum(a != b for a, b in zip(texts, left, strict=True)) > 10


OWN = "    def own_{n}():\r\n\r\n        return {n}"
CODE = f"import sys\r\nfrom a import b\r\n\r\n\r\n{OWN}\r\n \t\r\nif a == b:\r\n    main()\r\n"
PROSE = "\u3000\u3000own {n}\r\n\r\nif a == b:\r\n\r\n\r\n\u3000\u3000end {n}"


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize(
    ("unit", "text", "kept"),
    [
        ("paragraph", CODE, f"{OWN}\r\n"),
        ("paragraph", CODE.rstrip(), OWN),
        ("paragraph", PROSE, "\u3000\u3000own {n}\r\n\r\n\u3000\u3000end {n}"),
        ("line", "from a import b\r\n    own {n}\r\n\r\n\tif a == b:\r\n", "    own {n}\r\n\r\n"),
    ],
)
def test_what_stays_keeps_indentation_and_newlines(
    tmp_path: Path, unit: str, text: str, kept: str, newline: str
) -> None:
    texts = [text.replace("\r\n", newline).replace("{n}", str(n)) for n in range(8)]
    write(tmp_path / "corpus/code/a.jsonl", [{"text": text} for text in texts])
    remove_lines(tmp_path / "corpus", tmp_path / "out", unit, OPTIONS, keep="none", min_characters=9)  # type: ignore[arg-type]
    expected = [kept.replace("\r\n", newline).replace("{n}", str(n)) for n in range(8)]
    assert [document.text for document in read_corpus(tmp_path / "out")] == expected


REFRAIN = "And round and round the great wheel goes."


def test_counted_by_documents_the_refrain_of_one_poem_stays(tmp_path: Path) -> None:
    poem = "\n".join(f"Verse {n}.\n{REFRAIN}" for n in range(7))
    write(tmp_path / "corpus/book/a.jsonl", [{"text": poem}, *({"text": f"Poem {n}.\n{REFRAIN}"} for n in range(4))])
    for count_by, least, first, others in (("occurrence", 6, 1, 0), ("document", 6, 7, 4), ("document", 5, 7, 0)):
        target = tmp_path / f"{count_by}{least}"
        remove_lines(tmp_path / "corpus", target, "line", OPTIONS, min_count=least, count_by=count_by)  # type: ignore[arg-type]
        refrains = [document.text.count(REFRAIN) for document in read_corpus(target)]
        assert (refrains[0], sum(refrains[1:])) == (first, others)


def test_sources_are_left_alone(tmp_path: Path) -> None:
    texts = [{"text": f"def f{n}():\n    raise NotImplementedError\n"} for n in range(8)]
    for source in ("code", "web"):
        write(tmp_path / f"corpus/{source}/a.jsonl", texts if source == "code" else texts[:5])
    counts = remove_lines(tmp_path / "corpus", tmp_path / "out", "line", OPTIONS, leave_alone=("code",))
    assert counts.total("changed").documents == 0  # of the five of the web: those of code do not count
    remove_lines(tmp_path / "corpus", tmp_path / "less", "line", OPTIONS, leave_alone=("code",), min_count=5)
    left = [(document.key.file[:3], "raise" in document.text) for document in read_corpus(tmp_path / "less")]
    assert sum(has for file, has in left if file == "cod") == 8 and sum(has for file, has in left if file == "web") == 1
    with pytest.raises(UsageError, match="--leave_alone: expected sources of the corpus, got 'cod'; did you mean code"):
        remove_lines(tmp_path / "corpus", tmp_path / "other", "line", OPTIONS, leave_alone=("cod",))


def test_documents_without_repeats_keep_their_bytes(tmp_path: Path) -> None:
    rows = [{"text": f"  one {n}\n\n\n two {n} \n", "more": [n]} for n in range(9)]
    path = write(tmp_path / "corpus/web/a.jsonl", rows)
    for unit in ("line", "paragraph"):
        remove_lines(tmp_path / "corpus", tmp_path / unit, unit, OPTIONS, min_count=2, min_characters=0)  # type: ignore[arg-type]
        texts = [document.text for document in read_corpus(tmp_path / unit)]
        assert texts == [row["text"] for row in rows] and path.exists()


def test_sources_alone_or_together(tmp_path: Path) -> None:
    for source in ("a", "b"):
        write(tmp_path / f"corpus/{source}/x.jsonl", [{"text": f"{source}{n}\nnotice of all"} for n in range(3)])
    for scope, kept in (("global", 1), ("per-source", 6)):
        target = tmp_path / scope
        remove_lines(tmp_path / "corpus", target, "line", OPTIONS, min_count=4, min_characters=5, scope=scope)  # type: ignore[arg-type]
        assert sum("notice" in document.text for document in read_corpus(target)) == kept


@pytest.mark.parametrize("keep", ["first", "none"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7, 50])
@pytest.mark.parametrize("count_by", ["occurrence", "document"])
def test_blocks_cut_anywhere_give_the_same_repeats(keep: str, cut: int, count_by: str) -> None:
    units = np.zeros(50, CORPUS_UNIT)
    units["document"] = np.sort(np.random.default_rng(cut + 1).integers(0, 25, 50))
    units["low"] = np.sort(np.random.default_rng(cut).integers(0, 9, 50))
    units["unit"] = np.arange(50)
    found = find_repeats((units[at : at + cut] for at in range(0, 50, cut)), 4, keep, count_by)  # type: ignore[arg-type]
    expected = []
    for value in range(9):
        (places,) = np.nonzero(units["low"] == value)
        documents = units["document"][places]
        is_first = documents == documents[:1] if count_by == "document" else places == places[:1]
        count = len(set(documents.tolist())) if count_by == "document" else len(places)
        removed = places[~is_first] if keep == "first" else places
        expected += [] if count < 4 else removed.tolist()
    assert [int(unit) for block in found for unit in block["unit"]] == expected


def test_small_memory_and_workers_change_no_byte(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    more = [{"text": f"text {n} of its own\na notice that all of these share\nits end {n % 3}"} for n in range(3000)]
    write(corpus / "web/notices.jsonl", more)
    with sandboxed(corpus):
        remove_lines(corpus, tmp_path / "one", "line", OPTIONS)
    remove_lines(corpus, tmp_path / "three", "line", RunOptions(workers=3, memory="96MiB"))
    assert re.search(
        r"remove_lines: 2,999 lines \([\d,]+ bytes\) removed from 2,999 documents", capsys.readouterr().err
    )
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
        corpus, tmp_path / "out", workers=1, lines=Lines("line", min_count=9), mix=Mix(holdout=0.05),
        tokenizer=Tokenizer(vocab_size=420),
    )  # fmt: skip
    funnel = run(config)
    assert funnel is not None and clean_corpus(config) == tmp_path / "out/lines"
    assert sum("Share this page" in document.text for document in read_corpus(clean_corpus(config))) == 1
    with pytest.raises(UsageError, match=r"--lines.min_count has no effect with --lines.unit none; try --lines.unit"):
        run(replace(config, out=tmp_path / "other", lines=Lines(min_count=3)))
    with pytest.raises(UsageError, match=r"expected 2 or more, got 1; try 6"):
        run(replace(config, out=tmp_path / "other", lines=Lines("line", min_count=1)))
