"""Hostile documents pass a whole run with work that grows as their length, which is counted and not timed.

Counted are the calls of every function, of C too, in the process of a run with one worker; the bytes that it
reads and writes; and the steps that NFC's sort by insertion takes for the runs of marks that it is given: that is a
loop of C.
"""

import json
import random
import sys
import unicodedata
from collections import Counter
from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import psutil
import pytest

from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import documents

SIZE, TIMES = 15_000, 4
MOST = 1.25 * TIMES  # 16 times would be the square
FEW = 3_000  # calls of a function that are no growth


def hostile(n: int) -> dict[str, str]:
    """A record as JSON of each kind, of about `n` characters."""
    chance = random.Random(1)
    texts = {
        "marks": "a" + "\u0301\u0323" * (n // 2),
        "tibetan marks": "a" + "\u0f73" * n,
        "one letter": "a" * n,
        "no spaces": "".join(chance.choices("abcdefghij", k=n)),
        "digits": "".join(chance.choices("0123456789", k=n)),
        "spaces": "x" + " " * n + "y",
        "newlines": "x" + "\n" * n + "y",
        "carriage returns": "x" + "\r" * n + "y",
        "Chinese": "".join(chance.choices("的一是在不了有和人这中大为上个国", k=n)),
        "punctuation": "!?" * (n // 2),
        "emoji": "😀" * n,
        "joiners": "\u200d\u200b" * (n // 2),
        "control": "\x00" * n,
        "lengthened in lower case": "İ" * n,
        "words": "ab " * (n // 3),
    }
    lines = {name: json.dumps({"text": text}, ensure_ascii=False) for name, text in texts.items()}
    start = '{"text": "' + "some words of a document " * 20
    return lines | {
        "nested too deeply": f'{start}", "x": {"[" * n}{"]" * n}}}',
        "nested": f'{start}", "x": [{",".join(["[" * 400 + "]" * 400] * (n // 800))}]}}',
        "number": f'{start}", "x": {"1" * n}}}',
        "fraction": f'{start}", "x": 0.{"1" * n}e5}}',
        "fields": start + '", ' + ", ".join(f'"k{i}": NaN' for i in range(n // 10)) + "}",
        "escapes": start + r"\u0041" + r"\u00e9" * (n // 6) + '"}',
        "broken": f'{start}", "x": {"[1," * (n // 3)}',
    }


class Work:
    """What a run does, by function."""

    def __init__(self) -> None:
        self.calls = Counter[Any]()
        self.sorted = 0

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            self.calls[frame.f_code] += 1
        elif event == "c_call":
            self.calls[getattr(argument, "__qualname__", ""), frame.f_code] += 1

    def counted_nfc(self, normalize: Callable[[str, str], str]) -> Callable[[str, str], str]:
        def counted(form: str, text: str) -> str:
            if len(text) > 1000 and not text.isascii():
                runs = groupby(map(unicodedata.combining, text), bool)
                self.sorted += sum(steps_to_sort(list(run)) for has_class, run in runs if has_class)
            return normalize(form, text)

        return counted


def steps_to_sort(classes: list[int]) -> int:
    """How many pairs a sort by insertion exchanges: each class after a greater one."""
    seen, steps = Counter[int](), 0
    for found in classes:
        steps += sum(count for other, count in seen.items() if other > found)
        seen[found] += 1
    return steps


def work_of_a_run(
    folder: Path, size: int, monkeypatch: pytest.MonkeyPatch, until: str | None = None
) -> tuple[Work, int]:
    """The work of a run of hostile documents of a size, and the bytes that it reads and writes."""
    lines = [json.dumps(document) for document in documents("book", 60)] + list(hostile(size).values())
    (folder / "corpus/web").mkdir(parents=True)
    (folder / "corpus/web/a.jsonl").write_text("".join(line + "\n" for line in lines))
    config = RunConfig(
        folder / "corpus", folder / "out", workers=1, max_malformed=1.0, filter=Filter(0), mix=Mix(holdout=0.1),
        tokenizer=Tokenizer(vocab_size=420, exact=False), until=until,
    )  # fmt: skip
    work, process = Work(), psutil.Process()
    before = process.io_counters()
    with monkeypatch.context() as patched:
        patched.setattr(unicodedata, "normalize", work.counted_nfc(unicodedata.normalize))
        sys.setprofile(work.profile)
        try:
            run(config)
        finally:
            sys.setprofile(None)
    after = process.io_counters()
    return work, after.read_chars - before.read_chars + after.write_chars - before.write_chars


def grown(less: Work, more: Work) -> list[str]:
    """The functions that are called more often than the length of documents explains."""
    faults = {key: count for key, count in more.calls.items() if count > MOST * less.calls[key] + FEW}
    return [f"{less.calls[key]:,} → {count:,} calls: {spell(key)}" for key, count in faults.items()]


def spell(key: Any) -> str:
    builtin, code = ("", key) if isinstance(key, CodeType) else key
    return f"{builtin} in {code.co_name}, {code.co_filename}:{code.co_firstlineno}"


def test_the_work_of_a_run_grows_as_hostile_documents_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work_of_a_run(tmp_path / "warm", 100, monkeypatch)  # what is imported and compiled once
    less, few = work_of_a_run(tmp_path / "less", SIZE, monkeypatch)
    more, many = work_of_a_run(tmp_path / "more", TIMES * SIZE, monkeypatch)
    assert not grown(less, more)
    assert more.calls.total() <= MOST * less.calls.total()
    assert many <= MOST * few
    assert more.sorted <= MOST * less.sorted + FEW


@pytest.mark.thorough
def test_the_square_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of NFC's sort, where marks are not sorted before; and of a function that is called for pairs of characters."""

    def for_each_pair(text: str) -> str:
        for start in range(0, len(text), 500):
            for _ in range(start, len(text), 500):
                text.isascii()
        return text

    monkeypatch.setattr(sys.modules["preprocessing.normalize_text"], "sort_marks", for_each_pair)
    less, _ = work_of_a_run(tmp_path / "less", SIZE, monkeypatch, "normalize_text")
    more, _ = work_of_a_run(tmp_path / "more", TIMES * SIZE, monkeypatch, "normalize_text")
    assert "isascii in " in "".join(grown(less, more)) and more.sorted > 3 * MOST * less.sorted / 2
