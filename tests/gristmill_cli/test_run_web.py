"""From a folder of web archives to token shards of a model's tokenizer, by one run: on disk, by shards, in a bucket."""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from random import Random
from typing import NamedTuple

import msgspec
import pyarrow.parquet as pq
import pytest

from gristmill.io.token_shards import Manifest, open_shards
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill_cli.funnel import Funnel
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from tests.gristmill.io.test_web_archives import gzipped, page, record, response
from tests.gristmill_cli.corpus import ROOT, tree
from tests.gristmill_cli.corpus import WORDS as ALL_WORDS
from tests.gristmill_cli.in_process import gristmill
from tests.object_store import object_store
from tests.patience import patience
from tests.tokenizers_of_models import BEGIN, END, PROSE, content_of

WORDS = [word for word in ALL_WORDS if word.isascii() and word.isalpha()]
TOPICS = ["mill", "river", "bread", "stone", "wheel", "grain", "sack", "water", "flour", "oven"]


def pages(count: int) -> list[bytes]:
    """Pages of different texts, one of which is there twice, one that is short, and an image."""
    texts = [
        " ".join(
            f"The {chosen} of place {i} is near {number}."
            for number, chosen in enumerate(Random(i).choices(TOPICS, k=25))
        )
        for i in range(count)
    ]
    found = [response(f"http://site/{i}", page(text, PROSE[i % 6]).encode()) for i, text in enumerate(texts)]
    found += [found[3], response("http://site/short", page("Nothing.").encode())]
    return [*found, response("http://site/image", b"\x89PNG" * 50, "image/png")]


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    for name in ("news", "wiki"):
        (tmp_path / "corpus" / name).mkdir(parents=True)
    (tmp_path / "corpus/news/a.warc.gz").write_bytes(gzipped(pages(40)))
    texts = [" ".join(f"word{i}x{j}" for j in range(60)) for i in range(20)]
    wet = [record("conversion", f"http://w/{i}", text.encode(), "text/plain") for i, text in enumerate(texts)]
    (tmp_path / "corpus/wiki/b.warc.wet.gz").write_bytes(gzipped(wet))
    (tmp_path / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    return RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(threshold=50), mix=Mix(holdout=0.1),
        tokenizer=Tokenizer(file=tmp_path / "tokenizer.json", bos=BEGIN, eos=END),
    )  # fmt: skip


def test_web_archives_become_tokens_with_every_page_accounted_for(config: RunConfig) -> None:
    funnel = run(config)
    assert funnel is not None
    train, holdout = (Manifest.load(config.out / "tokens" / name) for name in ("train", "holdout"))
    assert train.documents + holdout.documents == 40 + 20  # without the copy, the short one and the image
    went = {reason: tally.documents for reason, tally in funnel.tallies["news"].items() if tally.documents}
    assert went == {
        "read": 43, "duplicate": 1, "short": 1, "holdout": went["holdout"], "train": 40 - went["holdout"],
        "skipped: neither HTML nor text": 1,
    }  # fmt: skip
    reference = open_tokenizer(config.out / "tokens/train/tokenizer.json")
    begin, end = reference.id_of(BEGIN), reference.id_of(END)
    shard = open_shards(config.out / "tokens/train")[1][0]
    decoded = [reference.decode(ids.tolist()) for ids in shard]
    assert all(ids[0] == begin and ids[-1] == end for ids in shard)
    assert sum(text.startswith("The ") for text in decoded) > 30 and not any("Home" in text for text in decoded)


def article(number: int) -> list[str]:
    """Paragraphs of sentences that no rule of FineWeb objects to; the words of each article are its own."""
    chance = Random(number)
    common = ("the", "of", "and", "that", "to")
    return [
        " ".join(
            " ".join(chance.choice(common) if i % 4 == 1 else chance.choice(WORDS) for i in range(14)).capitalize()
            + "."
            for _ in range(3)
        )
        for _ in range(5)
    ]


RARE = [f"{word[:6]}{end}" for end in ("", "ing", "ed", "ly") for word in WORDS if len(word) > 4]  # no stop words
REMOVED = {  # pages by the rule that removes them
    "lorem_ipsum": [*article(1000), "Lorem ipsum dolor sit amet."],
    "curly_brackets": [*article(1001), "function f() { return 1; } and no more of that."],
    "words": [f"{' '.join(RARE[:40])}."],
    "stop_words": [" ".join(RARE[i : i + 12]) + "." for i in range(0, 120, 12)],
    "repeated_paragraphs": [article(1002)[0]] * 9,
}


def crawl(folder: Path) -> dict[str, int]:
    """Write the archives of a crawl; returns the documents that each reason is to have."""
    (folder / "news").mkdir(parents=True)
    (folder / "wiki").mkdir()
    pages = [response(f"http://site/{i}", page(*article(i)).encode()) for i in range(60)]
    copy = response("http://other/3", page(*article(3)).encode())
    near = response("http://other/5", page(*[*article(5)[:4], article(5)[4].replace(".", ";", 1)]).encode())
    lies = response(
        "http://site/lies", page(*article(700), "Gr\u00f6\u00dfe.").encode("cp1252"), "text/html; charset=nonsense"
    )
    huge = response("http://site/huge", b"<p>" + b"grain " * (200_000_000 // 6))
    skipped = [
        response("http://site/image", b"\x89PNG" * 50, "image/png"),
        response("http://site/gone", b"gone", status=404),
    ]
    refused = [response(f"http://bad/{rule}", page(*text).encode()) for rule, text in REMOVED.items()]
    (folder / "news/a.warc.gz").write_bytes(gzipped([*pages[:30], copy, *skipped, *refused]))
    (folder / "news/b.warc").write_bytes(b"".join([*pages[30:45], near]))
    (folder / "wiki/c.warc.gz").write_bytes(gzipped([*pages[45:], lies, huge]))
    (folder / "wiki/cut.warc").write_bytes(b"".join(pages[:3])[:-300])
    return {
        **dict.fromkeys(REMOVED, 1), "read": 60 + 6 + len(REMOVED), "duplicate": 2,
        "malformed: page over 67,108,864 bytes": 1, "skipped: neither HTML nor text": 1,
        "skipped: status other than 200": 1,
    }  # fmt: skip


class Crawl(NamedTuple):
    """The folder of archives, a tokenizer's file, the folder of a finished run, and what it had to count."""

    corpus: Path
    tokenizer: Path
    out: Path
    expected: dict[str, int]

    def words(self, corpus: Path | str, out: Path | str, *more: str) -> list[str]:
        return [
            sys.executable, "-m", "gristmill_cli", "run", "--recipe", "fineweb", "--corpus", str(corpus),
            "--out", str(out), "--tokenizer.file", str(self.tokenizer), "--tokenizer.bos", BEGIN,
            "--tokenizer.eos", END, "--mix.holdout", "0.1", "--max_malformed", "1", "--workers", "1", *more,
        ]  # fmt: skip


@pytest.fixture(scope="module")
def crawled(tmp_path_factory: pytest.TempPathFactory) -> Crawl:
    folder = tmp_path_factory.mktemp("crawl")
    (folder / "tokenizer.json").write_text(content_of("Llama 3"), encoding="utf-8")
    found = Crawl(folder / "corpus", folder / "tokenizer.json", folder / "out", crawl(folder / "corpus"))
    done = gristmill(*found.words(found.corpus, found.out)[3:])
    assert done.returncode == 0, done.stderr
    return found


def test_a_crawl_is_accounted_for_by_rule(crawled: Crawl) -> None:
    funnel = msgspec.json.decode((crawled.out / "funnel.json").read_bytes(), type=Funnel)
    went = Counter[str]()
    for reasons in funnel.tallies.values():
        went.update({reason: tally.documents for reason, tally in reasons.items() if tally.documents})
    kept = went.pop("train") + went.pop("holdout")
    assert went == crawled.expected and kept == went["read"] - len(REMOVED) - 5
    assert list(funnel.damaged) == ["wiki/cut.warc"] and "damaged archive" in funnel.damaged["wiki/cut.warc"]
    removed = pq.read_table(crawled.out / "normalized.removed.parquet").column("rule").to_pylist()
    assert sorted(removed) == sorted(REMOVED)
    (rejected,) = (crawled.out / "normalized").rglob("*.malformed")
    assert "http://site/huge" in rejected.read_text()
    tokens = sum(Manifest.load(crawled.out / "tokens" / name).documents for name in ("train", "holdout"))
    assert tokens == kept


@pytest.mark.thorough
def test_three_shards_write_the_bytes_of_one_process(crawled: Crawl, tmp_path: Path) -> None:
    words = crawled.words(crawled.corpus, tmp_path / "out")
    started = [subprocess.Popen([*words, "--shard", f"{i}/3"], cwd=ROOT, stdout=subprocess.DEVNULL) for i in range(3)]
    assert [process.wait(patience(240)) for process in started] == [0, 0, 0]
    assert tree(tmp_path / "out") == tree(crawled.out)


@pytest.mark.thorough
def test_a_bucket_gets_the_bytes_of_a_disk(crawled: Crawl, tmp_path: Path) -> None:
    with object_store() as store:
        store.upload_tree(crawled.corpus, "corpus")
        words = crawled.words("s3://bucket/corpus", "s3://bucket/out", "--scratch", str(tmp_path))
        done = subprocess.run(
            words, cwd=ROOT, env={**os.environ, **store.environment}, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        found = store.tree("out")
    written = {name: data for name, data in found.items() if ".gristmill/" not in name and name != "run.json"}
    expected = tree(crawled.out)
    assert written.keys() == expected.keys() and [name for name in expected if written[name] != expected[name]] == []
