"""The text of pages: main content keeps what an article says, without menus; all is all of it."""

import subprocess
import sys

import pytest

from gristmill.io.web.extraction import text_of_page

LONG = "The mill grinds the grain that the farmers bring, and the water turns its wheel all day long."
MENU = "<nav><ul><li><a href='/'>Home</a></li><li><a href='/b'>All our products</a></li></ul></nav>"
LIST = "<ul><li>Two sacks of wheat<ul><li>and one of rye</li></ul></li><li>Three loaves of bread</li></ul>"
LIST_TEXT = "  • Two sacks of wheat\n    • and one of rye\n  • Three loaves of bread"
LINKS = "<ul>" + "".join(f"<li><a href='/{number}'>Page {number} of the shop</a></li>" for number in range(9)) + "</ul>"


def main_text(content: str) -> str:
    return text_of_page(f"<html><head><title>T</title></head><body>{MENU}{content}</body></html>")


@pytest.mark.parametrize("around", ["%s", "<main>%s</main>", "<div><div>%s</div></div>", "<div><p>Bread</p>%s</div>"])
def test_lists_near_the_top_of_a_page_stay(around: str) -> None:
    text = main_text(around % LIST + f"<p>{LONG}</p>")
    assert text.removeprefix("Bread\n\n") == f"{LIST_TEXT}\n\n{LONG}"
    assert LIST_TEXT in main_text(f"<p>{LONG}</p>" + around % LIST)
    assert main_text(around % LINKS + f"<p>{LONG}</p>").removeprefix("Bread\n\n") == LONG  # menus do not


FIGURES = {
    "<table><tr><td>Wheat</td><td>2</td></tr></table><figcaption>Sacks</figcaption>": "Wheat\t\t2\nSacks",
    "<pre><code>def mill():\n    return 1</code></pre>": "def mill():\n    return 1",
    "<blockquote><p>It grinds.</p></blockquote><figcaption>A miller</figcaption>": "It grinds.\n\nA miller",
}


@pytest.mark.parametrize("content", FIGURES)
def test_tables_code_and_quotations_in_figures_stay(content: str) -> None:
    page = f"<p>{LONG}</p><figure>{content}</figure><figure><img alt='Alt'><figcaption>Photo</figcaption></figure>"
    assert main_text(page).split("\n", 1) == [LONG, "\n" + FIGURES[content]]  # captions of pictures do not
    assert text_of_page(page, "all").endswith("\nPhoto")


@pytest.mark.parametrize(
    ("page", "expected"),
    [
        ("<a href=/a>北京</a>的<a href=/b>上海</a><ruby>漢<rt>かん</rt></ruby>", "北京的上海漢かん"),
        ("<b>&ldquo;</b>It grinds<b>&#8221;</b> &mdash;<i>he</i>\n–\n<i>said</i>", "“It grinds” —he – said"),
        ("<i class=icon>\ue001</i>Bread<i>&#xf101;</i><b>\u200b</b><a href=#x>¶</a>", "Bread"),
        ("<b>漢</b>x\ufdd0", "x\ufdd0"),  # a page with our mark is read as it is
    ],
)
def test_characters_that_stand_alone_stay(page: str, expected: str) -> None:
    assert main_text(f"<p>{page}</p>") == expected


def test_characters_at_both_ends_of_a_page_stay() -> None:
    assert text_of_page("漢<br>x<br>\ufffd") == "漢\nx\n\ufffd"


def test_dates_in_sentences_and_titles_on_buttons_stay() -> None:
    page = f"""<p>On <time datetime=2026-06-05>5 June</time> it stood still.</p><div><time>Yesterday</time></div>
    <h2><button aria-expanded=false>Who grinds?</button></h2><p>{LONG}</p><button>Send</button>"""
    assert main_text(page) == f"On 5 June it stood still.\n\nWho grinds?\n\n{LONG}"


def test_a_summary_is_a_line_of_its_own() -> None:
    page = f"<details><summary>Who grinds?</summary>{LONG}</details>"
    assert main_text(page) == text_of_page(page, "all") == f"Who grinds?\n{LONG}"


@pytest.mark.parametrize("page", ["", " ", "<frameset><frame src=a></frameset>", "<script>var x</script>"])
def test_pages_without_text_are_empty(page: str) -> None:
    assert text_of_page(page) == text_of_page(page, "all") == ""


def test_all_is_everything_but_scripts_and_forms() -> None:
    page = f"""<html><head><style>p {{}}</style></head><body>{MENU}{LIST}<p hidden>Hidden</p><form><label>Name</label>
    <button>Send</button></form><noscript>No script</noscript><img alt="Alt"><footer>Imprint</footer>"""
    expected = f"  • Home\n  • All our products\n{LIST_TEXT}\n\nHidden\n\nImprint"
    assert text_of_page(page, "all") == expected


MEASURE = """
import sys
from pathlib import Path
from gristmill.io.web.extraction import page_memory, text_of_page

def kilobytes(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))

text_of_page("<p>warm up</p>")
page = sys.argv[1] * (1_500_000 // len(sys.argv[1]))
Path("/proc/self/clear_refs").write_text("5")  # the peak is that of now
before = kilobytes("VmRSS")
text_of_page(page)
print((kilobytes("VmHWM") - before) * 1024, page_memory(page.encode()), 24 * len(page))
"""


@pytest.mark.parametrize(
    "unit", ["<p>a", "<ul><li>a</ul>", "<li>a", "<i a=b c=d>", "<br>", "<b>漢</b>", "<p>The mill grinds.</p>"]
)
def test_the_memory_of_a_page_is_estimated_by_its_tags(unit: str) -> None:
    done = subprocess.run([sys.executable, "-c", MEASURE, unit], capture_output=True, text=True, check=True)
    used, estimated, by_size = map(int, done.stdout.split())
    assert used <= estimated
    assert unit.startswith(("<p>The", "<b>")) or used > by_size  # so the size alone would not do
