"""Compare extractors of a page's main text: words that they keep, other words that they return, and time.

`python benchmarks/bench_extraction.py` reads 50 generated pages whose main text is known: 10 layouts, 5 pages each.
With `--real FOLDER`, a checkout of Zyte's article-extraction-benchmark, it reads the 181 articles there instead.
trafilatura is compared if it is installed.
"""

import argparse
import gzip
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import NamedTuple

from gristmill.io.web.extraction import text_of_page

WORDS = ["mill", "river", "bread", "stone", "wheel", "grain", "sack", "water", "flour", "oven", "farmer", "village"]
PAGES_OF_LAYOUT = 5
ROUNDS = 3
MENU = "<nav><ul>" + "".join(f"<li><a href='/{number}'>Menu {number}</a></li>" for number in range(8)) + "</ul></nav>"
SIDEBAR = "<aside><ul>" + "<li><a href='#'>Related pages of the sidebar</a></li>" * 9 + "</ul></aside>"
FOOTER = "<footer><p>Copyright, imprint, privacy, contact</p></footer>"
TITLE = "<h1>The title</h1>"
LAYOUTS = {  # "{paragraphs}" and the like are filled in
    "article": "<article>{title}{paragraphs}</article>",
    "containers": "<div class=content><div>{title}{paragraphs}</div></div>",
    "list first": "<main>{title}{list}{paragraphs}</main>",
    "list alone": "{title}{list}",
    "list last": "<article>{title}{paragraphs}{list}</article>",
    "table": "<main>{title}<figure><table>{rows}</table></figure></main>",
    "forum": "{posts}",
    "code": "<article>{title}{paragraphs}<figure><pre><code>{code}</code></pre></figure></article>",
    "short": "<div>{paragraph}</div>",
    "sidebar": "<article>{title}{paragraphs}</article>" + SIDEBAR,
}


class Page(NamedTuple):
    """A page, and the words of its main text."""

    html: str
    words: Counter[str]


class Score(NamedTuple):
    """Shares of the main text's words that were kept, and of the result's words that are others; seconds a page."""

    kept: float
    others: float
    seconds: float


def words_of(text: str) -> Counter[str]:
    return Counter(re.findall(r"\w+", text.lower()))


def generated_pages() -> Iterator[Page]:
    """Yield the pages of all layouts."""
    for name, layout in LAYOUTS.items():
        for number in range(PAGES_OF_LAYOUT):
            yield _generate(layout, Random(f"{name} {number}"))


def _generate(layout: str, chance: Random) -> Page:
    texts = [" ".join(_sentence(chance) for _ in range(4)) for _ in range(5)]
    items = [_sentence(chance) for _ in range(6)]
    paragraphs = [f"<p>{text}</p>" for text in texts]
    values = {
        "title": TITLE,
        "paragraphs": "".join(paragraphs),
        "paragraph": paragraphs[0],
        "list": "<ul>" + "".join(f"<li>{item}</li>" for item in items) + "</ul>",
        "rows": "".join(f"<tr><td>{text}</td></tr>" for text in texts),
        "posts": "".join(f"<div class=post><span>Miller</span><div>{text}</div></div>" for text in paragraphs),
        "code": "\n".join(items),
    }
    content = layout.removesuffix(SIDEBAR).format_map(values)
    main_text = re.sub("<[^>]*>", " ", content).replace("Miller", "")
    end = SIDEBAR if layout.endswith(SIDEBAR) else ""
    return Page(f"<!doctype html><title>t</title><body>{MENU}{content}{end}{FOOTER}", words_of(main_text))


def _sentence(chance: Random) -> str:
    return " ".join(chance.choices(WORDS, k=chance.randrange(8, 16))).capitalize() + "."


def real_pages(folder: Path) -> Iterator[Page]:
    """Yield the pages of a checkout of article-extraction-benchmark, with the text that people marked in them."""
    marked = json.loads((folder / "ground-truth.json").read_bytes())
    for name, page in sorted(marked.items()):
        content = gzip.decompress((folder / "html" / f"{name}.html.gz").read_bytes())
        yield Page(content.decode("utf-8", "replace"), words_of(page["articleBody"]))


def extractors() -> dict[str, Callable[[str], str]]:
    """Return the extractors that are installed, by name."""
    found: dict[str, Callable[[str], str]] = {
        "gristmill main": text_of_page,
        "gristmill all": lambda page: text_of_page(page, "all"),
        "resiliparse": _resiliparse,
    }
    if find_spec("trafilatura"):
        found["trafilatura"] = _trafilatura
    return found


def _resiliparse(page: str) -> str:
    from resiliparse.extract.html2text import extract_plain_text

    return str(extract_plain_text(page, main_content=True, alt_texts=False))


def _trafilatura(page: str) -> str:
    import trafilatura

    return trafilatura.extract(page, include_comments=False) or ""


def measure(extract: Callable[[str], str], pages: list[Page]) -> Score:
    """Return how an extractor does on pages; the time is that of its fastest round."""
    times = list[float]()
    for _ in range(ROUNDS):
        start = time.process_time()
        texts = [extract(page.html) for page in pages]
        times.append(time.process_time() - start)
    results = [words_of(text) for text in texts]
    kept = sum((result & page.words).total() for result, page in zip(results, pages, strict=True))
    returned = sum(result.total() for result in results)
    expected = sum(page.words.total() for page in pages)
    return Score(kept / expected, (returned - kept) / returned, min(times) / len(pages))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path, help="checkout of article-extraction-benchmark")
    arguments = parser.parse_args()
    pages = list(real_pages(arguments.real) if arguments.real else generated_pages())
    size = sum(len(page.html) for page in pages) / len(pages)
    print(f"{len(pages)} pages, {size:,.0f} characters each on average")
    for name, extract in extractors().items():
        score = measure(extract, pages)
        print(f"{name:15} {score.kept:6.1%} kept, {score.others:6.1%} others, {score.seconds * 1e3:.2f} ms a page")


if __name__ == "__main__":
    main()
