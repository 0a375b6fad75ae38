"""From a folder of web archives to token shards of a model's tokenizer, by one run."""

from pathlib import Path
from random import Random

import pytest

from gristmill.io.token_manifest import Manifest
from gristmill.io.token_shards import open_shards
from gristmill.io.tokenizer_file import open_tokenizer
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from tests.gristmill.io.test_web_records import gzipped, page, record, response
from tests.tokenizers_of_models import BEGIN, END, PROSE, content_of

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
    assert went == {"read": 42, "duplicate": 1, "short": 1, "holdout": went["holdout"], "train": 40 - went["holdout"]}
    reference = open_tokenizer(config.out / "tokens/train/tokenizer.json")
    begin, end = reference.id_of(BEGIN), reference.id_of(END)
    shard = open_shards(config.out / "tokens/train")[1][0]
    decoded = [reference.decode(ids.tolist()) for ids in shard]
    assert all(ids[0] == begin and ids[-1] == end for ids in shard)
    assert sum(text.startswith("The ") for text in decoded) > 30 and not any("Home" in text for text in decoded)
