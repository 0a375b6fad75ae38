"""Lists of domains and addresses: what is listed, what a long one takes, and what is refused."""

import re
import tracemalloc
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import RunConfig
from preprocessing.filter_quality import filter_quality, removed_path
from preprocessing.quality.lists import UrlEntries, read_urls
from preprocessing.quality.recipe import load_recipe
from tests.preprocessing.test_decontaminate import write

LIST = """# by domain
spam.example
https://www.Shop.example/sale/   # by beginning
mill.example:8080
\ufeffxn--mhle-0ra.example
"""
ADDRESSES = {
    "http://spam.example/": "spam.example",
    "https://a.b.SPAM.example/x?y": "spam.example",
    "https://notspam.example/": "",
    "http://www.shop.example/sale": "www.shop.example/sale",
    "http://www.shop.example/sale/9/?id=1": "www.shop.example/sale",
    "http://www.shop.example/sales": "",
    "http://shop.example/sale": "",
    "http://mill.example:9/": "mill.example",
    "spam.example/page": "spam.example",
    "http://[broken": "",
    "": "",
}


@pytest.mark.parametrize("url", ADDRESSES)
def test_an_address_is_listed_by_domain_or_beginning(tmp_path: Path, url: str) -> None:
    (tmp_path / "list.txt").write_text(LIST.replace("\ufeff", ""), encoding="utf-8-sig")
    assert read_urls(tmp_path / "list.txt").find(url) == ADDRESSES[url]


def test_a_long_list_takes_8_bytes_an_entry(tmp_path: Path) -> None:
    count = 100_000
    (tmp_path / "list.txt").write_text("".join(f"site{n}.of.example.org\n" for n in range(count)))
    tracemalloc.start()
    entries = read_urls(tmp_path / "list.txt")
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 12 * count and peak < 60 * count
    assert entries.find(f"http://site{count - 1}.of.example.org/") and not entries.find("http://of.example.org/")


def test_an_empty_list_has_nothing() -> None:
    assert UrlEntries.of([]).find("http://spam.example/") == ""


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"spam.example\nthe mill on the river\n",
            "list.txt line 2: expected a domain or an address per line, such as",
        ),
        (b'{"domain": "spam.example"}\n', "list.txt line 1: expected a domain or an address per line, such as"),
        (b"mail@spam.example\n", "list.txt line 1: expected a domain or an address per line, such as"),
        (
            b"\xff\xfe\x00",
            "list.txt: expected a domain or an address per line, such as example.com or example.com/shop, in UTF-8",
        ),
    ],
)
@pytest.mark.parametrize("rule", ["listed_urls", "allowed_urls"])
def test_a_file_that_is_no_list_is_refused(tmp_path: Path, rule: str, content: bytes, message: str) -> None:
    (tmp_path / "list.txt").write_bytes(content)
    (tmp_path / "own.toml").write_text(f'{rule} = {{ file = "list.txt" }}\n')
    with pytest.raises(UsageError, match=re.escape(message)):
        load_recipe(str(tmp_path / "own.toml"))


def test_documents_outside_a_list_go_and_the_report_counts_domains(tmp_path: Path) -> None:
    urls = [
        "http://mill.example/a",
        "http://www.mill.example/b",
        "http://other.example/",
        "http://other.example/2",
        None,
    ]
    write(
        tmp_path / "corpus/web/a.jsonl", [{"text": f"The mill {n} grinds.", "url": url} for n, url in enumerate(urls)]
    )
    (tmp_path / "list.txt").write_text("mill.example\n")
    own = tmp_path / "own.toml"
    own.write_text('allowed_urls = { file = "list.txt" }\n')
    filter_quality(tmp_path / "corpus", tmp_path / "out", str(own), RunOptions(workers=1, quiet=True))
    rows = pq.read_table(removed_path(tmp_path / "out")).to_pylist()
    assert [(row["row"], row["detail"]) for row in rows] == [(2, "other.example"), (3, "other.example"), (4, "")]
    config = RunConfig(tmp_path / "corpus", tmp_path / "run", workers=1, recipe=str(own), until="normalize_text")
    run(config)
    report((config.out,))
    page = re.sub(r"<[^>]+>", " ", (config.out / "report.html").read_text())
    assert re.search(r"other.example: allowed_urls\s+2\s", page)
