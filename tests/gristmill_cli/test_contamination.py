"""`gristmill contamination`: planted items are found in tokens and in a corpus, with the scores without them."""

import json
import math
import random
import shutil
from pathlib import Path
from typing import Any

import pytest

from gristmill.io.token_shards import Manifest
from gristmill_cli.__main__ import main
from preprocessing.tokenize_corpus import tokenize_corpus
from tests.training.hugging_face.test_tokenizer_json import train

SYLLABLES = ["ka", "lo", "mi", "ne", "ru", "sa", "to", "vi"]
ITEMS = ("exact", "whole", "near", "none", "short", "wrong")


def words_of(chosen: random.Random, count: int) -> list[str]:
    return ["".join(chosen.choices(SYLLABLES, k=4)) for _ in range(count)]


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """A folder with a corpus and its tokens, and the items of which some are in it."""
    folder = tmp_path_factory.mktemp("contamination")
    chosen = random.Random(3)
    texts = {name: words_of(chosen, 40) for name in ITEMS}
    texts["whole"] = words_of(chosen, 9)
    texts["short"] = words_of(chosen, 5)
    documents = [words_of(chosen, 120) for _ in range(30)]
    documents[4][50:50] = texts["exact"][10:23]  # 13 words
    documents[5][20:20] = texts["exact"]
    documents[7][0:0] = texts["whole"]
    documents[11][60:60] = [word if number % 8 else "changed" for number, word in enumerate(texts["near"])]
    documents[13][60:60] = texts["short"]
    documents[17][9:9] = texts["none"][:12]  # one word too few, and too few for a near-duplicate
    for source, first in (("book", 0), ("web", 15)):
        (folder / "corpus" / source).mkdir(parents=True)
        records = [{"text": " ".join(words)} for words in documents[first : first + 15]]
        lines = "".join(json.dumps(record) + "\n" for record in records)
        (folder / "corpus" / source / "a.jsonl").write_text(lines)
    (folder / "tokenizer.model").write_bytes(train().serialized_model_proto())
    tokenize_corpus(folder / "corpus", folder / "tokenizer.model", folder / "tokens")
    items: list[dict[str, Any]] = []
    for number, name in enumerate(ITEMS):
        text = " ".join(texts[name])
        metrics = {"acc": float(number % 2), "bits_per_byte": [-2.0 * number - 1, len(text)]}
        aggregations = {"acc": "mean", "bits_per_byte": "bits_per_byte"}
        fields = {"task": "quiz", "item": number, "texts": [text, "yes"]}
        items.append({**fields, "metrics": metrics, "aggregations": aggregations})
    (folder / "items.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder, items


EXPECTED = {
    "exact": ("exact", {"exact": 2, "near": 0}),
    "whole": ("exact", {"exact": 1, "near": 0}),
    "near": ("near", {"exact": 0, "near": 1}),
    "none": ("none", {"exact": 0, "near": 0}),
    "short": ("not searched", {"exact": 0, "near": 0}),
    "wrong": ("none", {"exact": 0, "near": 0}),
}


def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: Any) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["gristmill", "contamination", *map(str, words)])
    code = 0
    try:
        main()
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.mark.parametrize(("trained_on", "workers"), [("tokens", 1), ("tokens", 2), ("corpus", 1)])
def test_each_item_is_found_where_it_was_planted(
    planted: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    trained_on: str,
    workers: int,
) -> None:
    folder, items = planted
    out = tmp_path / "out.jsonl"
    arguments = (folder / "items.jsonl", folder / trained_on, "--out", out, "--workers", workers)
    code, said, _ = run(capsys, monkeypatch, *arguments)
    assert code == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for name, item, written in zip(ITEMS, items, found, strict=True):
        assert (written["contamination"], written["documents"]) == EXPECTED[name], name
        assert written["metrics"]["acc"] == item["metrics"]["acc"]
    places = [{place["document"] for place in item["places"]} for item in found]
    names = [{"book/a.jsonl@4", "book/a.jsonl@5"}, {"book/a.jsonl@7"}, {"book/a.jsonl@11"}, set(), set(), set()]
    if trained_on == "corpus":
        assert places == names
    else:
        assert places == [{name.replace("book/a.jsonl", "tokens_00000") for name in each} for each in names]
    best = found[0]["places"][0]
    assert best["share"] == 1.0 and best["source"] == "book" and best["text"] in items[0]["texts"][0]
    clean = [item for item in items if EXPECTED[ITEMS[item["item"]]][0] not in ("exact", "near")]
    assert [item["item"] for item in clean] == [3, 4, 5]
    rows = [line.split() for line in said.splitlines()[1:3]]
    assert rows[0] == ["quiz", "6", "2", "1", "2", "1", "acc", "0.5000", f"{2 / 3:.4f}", f"{1 / 3:.4f}"]
    expected = []
    for part in (items, clean, items[:3]):
        nats = -sum(item["metrics"]["bits_per_byte"][0] for item in part)
        expected.append(f"{nats / sum(item['metrics']['bits_per_byte'][1] for item in part) / math.log(2):.4f}")
    assert rows[1] == ["bits_per_byte", *expected]
    assert "quiz 0: exact, in 2 documents" in said


def test_what_cannot_be_searched_is_refused_in_one_sentence(
    planted: tuple[Path, list[dict[str, Any]]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder, _ = planted
    items = folder / "items.jsonl"
    (tmp_path / "bad.jsonl").write_text(items.read_text() + '{"task": 3}\n')
    (tmp_path / "empty.jsonl").write_text("")
    tokens = tmp_path / "tokens"
    shutil.copytree(folder / "tokens", tokens)
    (tokens / Manifest.load(tokens).tokenizer.path).unlink()
    cases = (
        ((tmp_path / "none.jsonl", folder / "tokens"), 2, "there is no such file; make it with gristmill evaluate"),
        ((tmp_path / "bad.jsonl", folder / "tokens"), 1, "bad.jsonl:7: expected an item that gristmill evaluate"),
        ((tmp_path / "empty.jsonl", folder / "tokens"), 2, "empty.jsonl is empty"),
        ((items, tmp_path / "nothing"), 2, "expected a folder of token shards or of a corpus"),
        ((items, tokens), 2, "give it by --tokenizer FILE"),
        ((items, folder / "tokens", "--near", "0.2"), 2, "--near: expected 0, or a share of 0.5 to 1"),
    )
    for words, expected_code, message in cases:
        code, _, said = run(capsys, monkeypatch, *words)
        assert code == expected_code and message in said and said.count("\n") == 1, said
