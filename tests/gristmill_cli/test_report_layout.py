"""The charts of a report on a screen, a telephone and paper, as Chromium shows them: none is empty, cut or covered."""

import json
import re
import zlib
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.pages import Browser, driven_browser, with_a_mouse

pytestmark = with_a_mouse
PAPER = 718  # pixels of a sheet of A4 between its margins
CHARTS = """
const box = it => { const r = it.getBoundingClientRect(); return [r.left, r.top, r.right, r.bottom]; };
return [...document.querySelectorAll("figure svg")].map(svg => ({
  box: box(svg), shapes: svg.querySelectorAll("path, rect, use").length,
  texts: [...svg.querySelectorAll("text")].map(it =>
    [it.textContent.trim(), box(it), /rotate\\(-35/.test(it.outerHTML)]),
}));
"""
Box = list[float]  # left, top, right, bottom, in pixels


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a run of many sources with long names, some with thousands of times the documents of others."""
    root = tmp_path_factory.mktemp("layout")
    for number in range(9):
        source = root / f"corpus/a source with a long name, number {number}"
        source.mkdir(parents=True)
        texts = [f"{number} " + " ".join(f"w{row % 50}x{at}" for at in range(60)) for row in range(3 ** (8 - number))]
        texts += ["short"] * number
        (source / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    run(
        RunConfig(
            root / "corpus", root / "out", workers=1, mix=Mix(holdout=0.05), filter=Filter(threshold=10),
            dedup=Dedup(verify="none"), tokenizer=Tokenizer(vocab_size=400, exact=False),
        )
    )  # fmt: skip
    report((root / "out",))
    return root / "out/report.html"


@pytest.fixture(scope="module")
def browser(page: Path) -> Iterator[Browser]:
    with driven_browser() as found:
        found.open(page.as_uri())
        yield found


def overlap(one: Box, other: Box) -> float:
    """By how many pixels two boxes cover one another, in the direction in which that is less."""
    return min(min(one[at + 2], other[at + 2]) - max(one[at], other[at]) for at in (0, 1))


@pytest.mark.parametrize(("width", "media"), [(1280, "screen"), (400, "screen"), (PAPER, "print")])
def test_no_chart_is_empty_cut_or_covered(browser: Browser, width: int, media: str) -> None:
    browser.resize(width, media)
    charts: list[dict[str, Any]] = browser.find(CHARTS)
    assert len(charts) >= 8
    assert browser.find("return document.documentElement.scrollWidth") <= width
    for chart in charts:
        left, top, right, bottom = chart["box"]
        names = [name for name, *_ in chart["texts"]]
        assert chart["shapes"] > 5 and right - left > 200 and bottom - top > 60, names
        assert left >= 0 and right <= width, names
        for name, box, _ in chart["texts"]:
            assert box[0] > left - 1 and box[1] > top - 1 and box[2] < right + 1 and box[3] < bottom + 1, (name, names)
        level = [(name, box) for name, box, is_slanted in chart["texts"] if not is_slanted]  # those fill no box
        for (name, one), (other, two) in combinations(level, 2):
            assert overlap(one, two) < 3, (name, other)
    for one, two in combinations(charts, 2):
        assert overlap(one["box"], two["box"]) <= 0


def test_each_chart_is_printed(browser: Browser) -> None:
    def drawn() -> int:
        """Bytes of drawing in the PDF."""
        streams = re.findall(rb"stream\r?\n(.*?)\nendstream", browser.printed(), re.DOTALL)
        return sum(len(zlib.decompressobj().decompress(it)) for it in streams if it[:1] == b"x")

    everything = drawn()
    for number in range(browser.find('return document.querySelectorAll("figure svg").length')):
        chart = f'document.querySelectorAll("figure svg")[{number}].style.visibility'
        browser.find(f'{chart} = "hidden"')
        assert drawn() < everything - 500, number
        browser.find(f'{chart} = ""')
