"""Each page on a kind of parallelism has a figure that is drawn, a formula, its line of the table and real tests."""

import re
from pathlib import Path

import pytest

from scripts.draw_pictures import DRAWN

ROOT = Path(__file__).resolve().parents[3]
PARTS = ["Formula", "In the placement table", "Proof"]
PAGES = sorted((ROOT / "docs/concepts/parallelism").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_has_its_parts_and_names_tests_that_exist(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert [title for title in titles if title in PARTS] == PARTS
    pictures = re.findall(r"\.\./pictures/(\w+)\.svg", text)
    assert pictures and set(pictures) <= DRAWN.keys()
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)
    assert named and all(f"def {test}(" in (ROOT / file).read_text(encoding="utf-8") for file, test in named)


def test_the_index_links_every_page_and_every_picture_is_shown() -> None:
    index = (ROOT / "docs/concepts/parallelism.md").read_text(encoding="utf-8")
    assert len(PAGES) >= 5 and all(f"(parallelism/{page.name})" in index for page in PAGES)
    shown = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    assert all(f"pictures/{name}.svg" in shown for name in DRAWN)
