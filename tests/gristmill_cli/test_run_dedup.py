"""What `gristmill run` removes as duplicates by default, and what it says of it."""

from itertools import pairwise
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from dedup.candidates.cluster_samples import LargestClusters
from dedup.candidates.document_ids import DocumentIds
from dedup.clustering.union_find import LABEL, records
from gristmill.counts import Counts
from gristmill.errors import GristmillError
from gristmill.io.readers import read_corpus
from gristmill_cli.funnel import show_funnel
from gristmill_cli.run import run
from gristmill_cli.run_config import Alarms, Dedup, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.stages.spec import duplicates_path
from tests.dedup.template_pages import template_pages
from tests.gristmill_cli.corpus import write_records


def removed(folder: Path, texts: list[str], dedup: Dedup) -> list[int]:
    """Rows of the documents that a run of these texts removes."""
    (folder / "corpus" / "web").mkdir(parents=True, exist_ok=True)
    write_records(folder / "corpus" / "web" / "a.jsonl", [{"text": text} for text in texts])
    config = RunConfig(folder / "corpus", folder / "out", workers=1, filter=Filter(0), dedup=dedup)
    run(RunConfig(**{**vars(config), "until": "generate_duplicates_dict"}))
    return sorted(pq.read_table(duplicates_path(config)).column("row").to_pylist())


def test_pages_of_one_template_stay_and_copies_of_any_length_go(tmp_path: Path) -> None:
    texts = [*template_pages(600), "So true!", "So true!", "?", "", "so true", "?"]
    assert removed(tmp_path, texts, Dedup()) == [601, 604, 605]
    unverified = removed(tmp_path, texts, Dedup(verify="none", exact=False))
    assert len(unverified) > 10 and max(unverified) < 600


def test_a_threshold_chooses_the_bands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [[f"{number}word{i}" for i in range(100)] for number in range(12)]
    texts = [" ".join(some) for some in words] + [" ".join(some[:85] + some[:15]) for some in words]
    assert removed(tmp_path, texts, Dedup(threshold=0.5)) == list(range(12, 24))
    assert "25 bands of 5 rows find 55 % of the pairs of similarity 0.5, and 93 %" in capsys.readouterr().err
    few = removed(tmp_path, texts, Dedup(threshold=0.5, range=16, bands=8))
    assert len(few) < 12
    assert "8 bands of 16 rows find 0 % of the pairs of similarity 0.5" in capsys.readouterr().err


def test_a_cluster_and_a_source_that_look_wrong_are_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    others = [" ".join(f"{number}page{word}" for word in range(9)) for number in range(90)]
    for source, texts in (("web", template_pages(1200)), ("book", others)):
        (tmp_path / "corpus" / source).mkdir(parents=True)
        write_records(tmp_path / "corpus" / source / "a.jsonl", [{"text": text} for text in texts])
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(5), mix=Mix(holdout=0.1),
        dedup=Dedup(verify="none", range=8, bands=14), tokenizer=Tokenizer(vocab_size=300, exact=False),
        alarms=Alarms(cluster=300),
    )  # fmt: skip
    first, again = run(config), run(config)
    assert first is not None and again is not None and first.warnings == again.warnings
    large, unlike, source = first.warnings
    assert large.startswith("clusters of 300 documents or more: 1; the largest has 1,") and "web/a.jsonl.zst@" in large
    assert "largest clusters less than 50% of the sampled pairs are similar" in unlike
    assert source.startswith("the source web loses") and "the median of the others is 0.0%" in source
    assert all(f" {config.out} --" in line for line in first.warnings)  # where to look
    printed = capsys.readouterr().err
    assert all(f"warning: {line}\n" in printed for line in first.warnings)
    console = Console(width=400)
    with console.capture() as shown:
        console.print(show_funnel(config.out))
    assert all(f"warning: {line}" in shown.get() for line in first.warnings)
    verified = run(RunConfig(**{**vars(config), "dedup": Dedup(range=8, bands=14)}))
    assert verified is not None and verified.warnings == [large]
    assert not Counts(verified.tallies, []).total("duplicate").documents


def test_the_largest_clusters_are_noted_across_blocks() -> None:
    chance = np.random.default_rng(1)
    sizes = chance.permutation(np.arange(2, 400))
    labels = records(LABEL, np.arange(sizes.sum(), dtype=np.uint64), np.repeat(np.arange(len(sizes)), sizes))
    ends = [0, 1, *sorted(chance.integers(1, len(labels), 40).tolist()), len(labels)]
    largest = LargestClusters()
    blocks = [labels[start:end] for start, end in pairwise(ends) if start < end]
    assert sum(map(len, largest.watch(blocks))) == len(labels)
    samples = largest.samples(DocumentIds.of({"a.jsonl": len(labels)}))
    assert [sample.size for sample in samples] == list(range(399, 299, -1))
    for sample in samples:
        roots = {int(labels["root"][row]) for _, row in sample.members}
        assert len(sample.members) == 9 and [sizes[root] for root in roots] == [sample.size]


def test_a_list_of_yours_has_the_last_word(tmp_path: Path) -> None:
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(f"{number}{word}" for word in words) for number in range(20)]
    texts[10:12] = [texts[0], "tiny"]
    (tmp_path / "corpus/book").mkdir(parents=True)
    write_records(tmp_path / "corpus/book/a.jsonl", [{"text": text} for text in texts])
    listed = tmp_path / "list.txt"
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(20), mix=Mix(holdout=0.2), keep_list=listed,
        tokenizer=Tokenizer(vocab_size=300, exact=False), keep=("train_text",),
    )  # fmt: skip
    listed.write_text("# of mine\nkeep book/a.jsonl.zst@10\nkeep book/a.jsonl.zst@11\n\ndrop book/a.jsonl.zst@5\n")
    funnel = run(config)
    assert funnel is not None
    counts = Counts(funnel.tallies, [])
    reasons = ("read", "duplicate", "short", "in your list")
    assert [counts.total(reason).documents for reason in reasons] == [20, 0, 0, 1]
    kept = [document.text for name in ("train", "holdout") for document in read_corpus(tmp_path / "out" / name)]
    assert sorted(kept) == sorted(text for number, text in enumerate(texts) if number != 5)
    listed.write_text("drop book/a.jsonl.zst@10\n")  # the mix runs again
    changed = run(config)
    assert changed is not None
    counts = Counts(changed.tallies, [])
    assert [counts.total(reason).documents for reason in reasons] == [20, 0, 1, 1]
    for line, fault in (
        ("drop book/b.jsonl.zst@1", r"names book/b\.jsonl\.zst@1, and the run has no such document"),
        ("drop book/a.jsonl.zst@99", r"names book/a\.jsonl\.zst@99, and the run has no such document"),
        ("keep book/a.jsonl.zst@1\ndrop book/a.jsonl.zst@1", "line 2: expected each key once"),
    ):
        listed.write_text(f"{line}\n")
        with pytest.raises(GristmillError, match=fault):
            run(config)
