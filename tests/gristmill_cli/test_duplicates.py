"""`gristmill duplicates`: removed documents next to those that were kept, with their differences."""

import io
import json
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gristmill.errors import UsageError
from gristmill_cli.documents.duplicates import mark_differences, show_duplicates
from gristmill_cli.run import run
from gristmill_cli.run_config import Apply, Dedup, Filter, Lines, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.in_process import gristmill
from tests.object_store import BUCKET, object_store

ROOT = Path(__file__).resolve().parents[2]
WORDS = [f"word{number}" for number in range(60)]
NEAR = {"a": " ".join(WORDS), "b": " ".join([*WORDS[:30], "another", *WORDS[31:]])}


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run: web has two near-duplicates, book three copies, of which one is in web, and each has other documents."""
    root = tmp_path_factory.mktemp("duplicates")
    copy = " ".join(reversed(WORDS))
    others = [" ".join(f"{word}{number}" for word in WORDS) for number in range(30)]
    texts = {"web/a.jsonl": [*others[:15], NEAR["a"], NEAR["b"], copy], "book/b.jsonl": [*others[15:], copy, copy]}
    for name, found in texts.items():
        (root / "corpus" / name).parent.mkdir(parents=True)
        (root / "corpus" / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in found))
    run(
        RunConfig(
            root / "corpus", root / "out", workers=1, dedup=Dedup(threshold=0.7), mix=Mix(holdout=0.1),
            tokenizer=Tokenizer(vocab_size=300, exact=False), until="generate_duplicates_dict",
        )
    )  # fmt: skip
    return root / "out"


@pytest.fixture
def printed(out: Path) -> Callable[..., str]:
    def printed(**options: object) -> str:
        written = io.StringIO()
        Console(width=160, file=written).print(show_duplicates(out, **options))  # type: ignore[arg-type]
        return written.getvalue()

    return printed


def test_the_least_similar_come_first_with_their_differences(printed: Callable[..., str]) -> None:
    text = printed()
    assert text.startswith("documents removed as duplicates: 3; shown: 3, the least similar first")
    pair = "web/a.jsonl.zst@16 next to web/a.jsonl.zst@15, similarity 0."
    first, second = map(text.index, (pair, "the texts are equal"))
    assert first < second and "[another]" in text and "[word30]" in text and "[word29]" not in text
    assert "web/a.jsonl.zst@16 next to" in printed(show=1) and "equal" not in printed(show=1)


@pytest.mark.parametrize("key", ["web/a.jsonl.zst@15", "web/a.jsonl.zst@16", "web/a.jsonl@15", "web/a.jsonl@16"])
def test_the_pairs_of_a_document_that_was_kept_or_removed(printed: Callable[..., str], key: str) -> None:
    """By its key in the run, or by that in the raw corpus."""
    text = printed(of=key)
    assert text.startswith(f"documents with {key}: 1; shown: 1, the least similar first") and "[another]" in text


def test_the_pairs_of_a_source(printed: Callable[..., str]) -> None:
    assert printed(source="book").startswith("documents of book: 2; shown: 2, the least similar first")
    assert printed(source="web").startswith("documents of web: 2; ")  # one is a copy of a document of book


def test_the_largest_clusters(printed: Callable[..., str]) -> None:
    lines = [line.split() for line in printed(largest=2).splitlines()]
    assert lines[2][0] == "3" and lines[3][0] == "2"
    assert lines[2][1:] == ["book/b.jsonl.zst@15,", "book/b.jsonl.zst@16,", "web/a.jsonl.zst@17"]


def test_clusters_with_texts_are_as_many_as_shown_and_have_similarities(printed: Callable[..., str]) -> None:
    assert " next to " in printed(largest=2, show=1) and printed(largest=2, show=1).count(" next to ") == 1
    assert "book/b.jsonl.zst@16 next to book/b.jsonl.zst@15, similarity 1.00" in printed(largest=2)


def test_a_similarity_that_was_not_measured_is_that_of_the_shingles_of_the_run(
    out: Path, printed: Callable[..., str]
) -> None:
    """Of a cluster's first two documents, and of each pair of a run that did not verify."""
    known = plain_jaccard(NEAR["b"], NEAR["a"], 13)
    assert f"web/a.jsonl.zst@16 next to web/a.jsonl.zst@15, similarity {known:.2f}" in printed(largest=2)
    config = json.loads((out / "run.json").read_text())
    config["dedup"]["width"] = 5
    kept = (out / "run.json").read_bytes()
    (out / "run.json").write_text(json.dumps(config))
    try:
        known = plain_jaccard(NEAR["b"], NEAR["a"], 5)
        assert f"web/a.jsonl.zst@16 next to web/a.jsonl.zst@15, similarity {known:.2f}" in printed(largest=2)
    finally:
        (out / "run.json").write_bytes(kept)


def plain_jaccard(one: str, other: str, width: int) -> float:
    sets = [{text[i : i + width] for i in range(len(text) - width + 1)} for text in (one, other)]
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def test_texts_without_spaces_are_compared_by_characters() -> None:
    one = "".join(chr(0x4E00 + i) for i in range(300))
    marked = [str(text) for text in mark_differences(one, one[:100] + "水" + one[101:])]
    assert marked == [
        f"… {one[88:100]}[{one[100]}]{one[101:248]} …", f"… {one[88:100]}[水]{one[101:248]} …"
    ]  # fmt: skip


def test_differences_are_marked_without_colours_where_there_is_no_terminal(out: Path) -> None:
    done = gristmill("duplicates", out, "--show", 1)
    assert "[another]" in done.stdout and "\033" not in done.stdout


def test_a_run_in_a_bucket_is_shown_as_one_on_a_disk(out: Path) -> None:
    with object_store() as store:
        store.upload_tree(out, "out")
        there = gristmill("duplicates", f"s3://{BUCKET}/out", **store.environment)
    assert there.returncode == 0 and there.stdout == gristmill("duplicates", out).stdout, there.stderr


def test_a_row_of_the_users_file_is_that_of_its_document(tmp_path: Path) -> None:
    """Before it are a blank and a malformed line, and two of which nothing is left; and it may have another format."""
    (tmp_path / "corpus" / "web").mkdir(parents=True)
    lines = [json.dumps({"body": " ".join(f"{word}{number}" for word in WORDS)}) for number in range(9)]
    notice = json.dumps({"body": "All rights are reserved by the miller and his heirs, now and for ever."})
    lines = [*lines[:2], "not JSON", "", notice, notice, notice, *lines[2:], lines[0]]
    (tmp_path / "corpus/web/a.jsonl").write_text("\n".join(lines))
    table = pa.table({"body": [" ".join(WORDS), " ".join(reversed(WORDS)), " ".join(WORDS)]})
    pq.write_table(table, tmp_path / "corpus/web/b.parquet")
    out = tmp_path / "out"
    run(
        RunConfig(
            tmp_path / "corpus", out, text_column="body", workers=1, max_malformed=0.5, mix=Mix(holdout=0.1),
            lines=Lines(unit="line", min_count=3), tokenizer=Tokenizer(vocab_size=300, exact=False),
            until="generate_duplicates_dict",
        )
    )  # fmt: skip

    def shown(of: str) -> str:
        written = io.StringIO()
        Console(width=160, file=written).print(show_duplicates(out, of, text_column="body"))
        return written.getvalue()

    assert len(lines) == 15
    own = f"{tmp_path}/corpus/web/a.jsonl"
    by_key = shown("web/a.jsonl.zst@10")
    assert "\nweb/a.jsonl.zst@10 next to web/a.jsonl.zst@0, similarity 1.00" in by_key
    for raw in (f"{own}@14", "web/a.jsonl@14"):
        assert shown(raw) == by_key.replace("web/a.jsonl.zst@10:", f"{raw}:")
    assert "web/b.jsonl.zst@2 next to web/b.jsonl.zst@0" in shown("web/b.parquet@2")
    for row in (2, 3, 15):
        with pytest.raises(UsageError, match="has no document in that row, counted from 0"):
            shown(f"{own}@{row}")
    with pytest.raises(UsageError, match=r"web/a\.jsonl@5: remove_lines removed it before documents were compared"):
        shown("web/a.jsonl@5")


def test_what_cannot_be_shown_is_refused_in_a_sentence(out: Path, tmp_path: Path) -> None:
    for options, fault in (
        ({"of": "web/a.jsonl.zst@0"}, "was not removed as a duplicate, nor kept for one"),
        ({"of": "web"}, "has no pair with it, as an id or a key"),
        ({"source": "none"}, "no document of it was removed"),
        ({"of": "web/a.jsonl@0", "source": "web"}, "choose different things"),
        ({"show": 0}, "expected positive numbers"),
    ):
        with pytest.raises(UsageError, match=fault):
            show_duplicates(out, **options)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="expected the folder of a run, with dup/duplicates"):
        show_duplicates(tmp_path)
    (out / "normalized").rename(out / "gone")
    try:
        with pytest.raises(UsageError, match="the texts are no longer there"):
            show_duplicates(out)
    finally:
        (out / "gone").rename(out / "normalized")


SPLIT = """
def halves(documents):
    for document in documents:
        middle = len(document.text) // 2
        yield from (document.part(document.text[:middle]), document.part(document.text[middle:]))
"""


def test_a_run_whose_function_makes_parts_names_them_and_the_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The counts of all stages add up, and both names of a duplicate are printed."""
    (tmp_path / "halving.py").write_text(SPLIT)
    monkeypatch.syspath_prepend(tmp_path)
    others = [" ".join(f"{word}x{number}" for word in WORDS) for number in range(20)]
    (tmp_path / "corpus/web").mkdir(parents=True)
    with (tmp_path / "corpus/web/a.jsonl").open("w") as file:
        for number, text in enumerate([*others, " ".join(WORDS) + "!" * 400, " ".join(WORDS) + "?" * 400]):
            file.write(json.dumps({"text": text, "id": f"page-{number}"}) + "\n")
    funnel = run(
        RunConfig(
            tmp_path / "corpus", tmp_path / "out", workers=1, apply=Apply("halving:halves"), mix=Mix(holdout=0.1),
            filter=Filter(threshold=10), tokenizer=Tokenizer(vocab_size=300, exact=False),
        )
    )  # fmt: skip
    assert funnel is not None and funnel.tallies["web"]["further parts"].documents == 22
    removed, kept = (f"web/a.jsonl.zst@{2 * row} (id page-{row}, part web/a.jsonl.zst@{row}#0)" for row in (21, 20))
    for of in ("", "page-21", "page-20"):
        written = io.StringIO()
        Console(width=160, file=written).print(show_duplicates(tmp_path / "out", of=of))
        assert f"{removed} next to {kept}" in written.getvalue()
