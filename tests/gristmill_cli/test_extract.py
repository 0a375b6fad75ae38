"""All text of pages, menus included, wherever extraction is chosen: a command, a run, a source, a function."""

from pathlib import Path

import pytest

from gristmill.engine.options import RunOptions
from gristmill.io.corpus import Source
from gristmill.io.documents import Reading
from gristmill.io.readers import read_corpus
from preprocessing.normalize_text import normalize_text
from preprocessing.prepare import prepare
from preprocessing.steps.normalise import Normalise
from tests.gristmill.io.test_web_archives import LONG, page, response
from tests.gristmill_cli.in_process import gristmill

MENU_TEXT = "  • Home\n  • All our products\n\n"
OPTIONS = RunOptions(workers=1, quiet=True)


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """One page in an archive and in a file."""
    content = page(LONG).encode()
    for source, name, data in (("web", "a.warc", response("http://a/0", content)), ("pages", "b.html", content)):
        (tmp_path / "corpus" / source).mkdir(parents=True)
        (tmp_path / "corpus" / source / name).write_bytes(data)
    return tmp_path / "corpus"


def texts(folder: Path) -> dict[str, str]:
    return {document.source: document.text for document in read_corpus(folder)}


def do(*words: str) -> None:
    done = gristmill(*words)
    assert done.returncode == 0, done.stderr


def run_options(corpus: Path, *more: str) -> list[str]:
    where = ["--corpus", str(corpus), "--out", str(corpus.parent / "out")]
    return ["run", *where, "--workers", "1", "--until", "normalize_text", *more]


@pytest.mark.parametrize("extract", ["main", "all"])
def test_the_command_and_a_run_take_the_text_that_is_asked_for(corpus: Path, tmp_path: Path, extract: str) -> None:
    expected = MENU_TEXT * (extract == "all") + LONG
    words = ["normalize", "--data_dir", str(corpus), "--target_dir", str(tmp_path / "norm"), "--workers", "1"]
    do(*words, "--read_also", "html", "--extract", extract)
    assert texts(tmp_path / "norm") == {"web": expected, "pages": expected}
    do(*run_options(corpus, "--normalize.read_also", "html", "--normalize.extract", extract))
    assert texts(tmp_path / "out/normalized") == {"web": expected, "pages": expected}


def test_each_source_chooses_for_itself(corpus: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[sources.web]\nextract = "all"\n[sources.pages]\nformat = "html"\n')
    do(*run_options(corpus, "--config", str(tmp_path / "run.toml")))
    expected = {"web": MENU_TEXT + LONG, "pages": LONG}
    assert texts(tmp_path / "out/normalized") == expected
    sources = {"web": Source(extract="all"), "pages": Source(format="html")}
    normalize_text(corpus, tmp_path / "norm", sources=sources, options=OPTIONS)
    assert texts(tmp_path / "norm") == expected


def test_a_function_takes_the_text_that_is_asked_for(corpus: Path, tmp_path: Path) -> None:
    prepare(
        corpus,
        tmp_path / "norm",
        tmp_path / "facts",
        [Normalise()],
        read_also=("html",),
        extract="all",
        options=OPTIONS,
    )
    assert set(texts(tmp_path / "norm").values()) == {MENU_TEXT + LONG}
    found = read_corpus(corpus, read_also=("html",), reading=Reading(extract="all"))
    assert {document.text for document in found} == {MENU_TEXT + LONG}


def test_another_choice_reads_the_pages_again(corpus: Path, tmp_path: Path) -> None:
    for extract in ("main", "all", "main"):
        counts = normalize_text(corpus, tmp_path / "norm", extract=extract, options=OPTIONS)
        assert counts.total("written").documents == 1
        assert texts(tmp_path / "norm") == {"web": MENU_TEXT * (extract == "all") + LONG}
