"""`gristmill make-tasks`: each item is of the held-out text, its right answer is what follows there."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill_cli.benchmarks.make_tasks import TASKS, make_tasks
from preprocessing.tokenize_corpus import tokenize_corpus
from tests.training.hugging_face.test_tokenizer_json import train

WORDS = [first + second + third for first in "bdg" for second in ("ala", "ime", "oru") for third in ("k", "n", "st")]


def make_holdout(folder: Path, seed: int = 1, is_reversed: bool = False) -> Path:
    chosen = random.Random(seed)
    texts = [" ".join(chosen.choices(WORDS, k=150)) for _ in range(20)]
    folder.mkdir()
    for source, part in (("web", texts[:10]), ("book", texts[10:])):
        (folder / source).mkdir()
        ordered = part[::-1] if is_reversed else part
        lines = "".join(json.dumps({"text": text}) + "\n" for text in ordered)
        (folder / source / "a.jsonl").write_text(lines)
    return folder


def items_of(folder: Path) -> dict[str, list[dict]]:
    return {name: [json.loads(line) for line in (folder / f"{name}.jsonl").read_text().splitlines()] for name in TASKS}


def test_right_answers_are_what_follows_and_wrong_ones_are_not(tmp_path: Path) -> None:
    holdout = make_holdout(tmp_path / "holdout")
    lines = [line for path in holdout.rglob("*.jsonl") for line in path.read_text().splitlines()]
    texts = "\n".join(json.loads(line)["text"] for line in lines)
    make_tasks(holdout, tmp_path / "tasks", items=30)
    tasks = items_of(tmp_path / "tasks")
    for name, items in tasks.items():
        assert len(items) == 30 and len({item["context"] for item in items}) > 25
        for item in items:
            assert len(set(item["choices"])) == 4
            right = item["choices"][item["answer"]]
            assert f"{item['context']} {right}" in texts
            assert item["document"].startswith(f"{item['source']}/a.jsonl@")
            wrong = [f"{item['context']} {choice}" in texts for choice in item["choices"]]
            assert wrong.count(True) == 1
        answers = Counter(item["answer"] for item in items)
        assert len(answers) == 4 and max(answers.values()) < 20, name
    for item in tasks["holdout_repeat"]:
        assert all(choice in item["context"].split() for choice in item["choices"])
    for item in tasks["holdout_order"]:
        assert len({" ".join(sorted(choice.split())) for choice in item["choices"]}) == 1


def test_who_knows_only_how_frequent_or_long_words_are_is_at_chance(tmp_path: Path) -> None:
    """In text as it is: a few short words are frequent, and so are most that are repeated within a passage."""
    chosen = random.Random(1)
    words = ["b" + "ao"[number % 2] * (2 + number // 8) + "dgkmnprt"[number % 8] for number in range(160)]
    shares = [1 / (rank + 3) for rank in range(len(words))]
    texts = [" ".join(chosen.choices(words, shares, k=480)) for _ in range(150)]
    (tmp_path / "holdout/web").mkdir(parents=True)
    (tmp_path / "holdout/web/a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    make_tasks(tmp_path / "holdout", tmp_path / "tasks", items=300)
    counts = Counter(" ".join(texts).split())
    guesses: list[Callable[[str], int]] = [counts.__getitem__, lambda word: -len(word), len]
    for name in ("holdout_word", "holdout_repeat"):
        items = items_of(tmp_path / "tasks")[name]
        assert len(items) == 300
        for guess in guesses:
            chosen_right = [
                guess(item["choices"][item["answer"]]) == max(map(guess, item["choices"])) for item in items
            ]
            shared = [
                sum(guess(word) == max(map(guess, item["choices"])) for word in item["choices"]) for item in items
            ]
            accuracy = sum(right / among for right, among in zip(chosen_right, shared, strict=True)) / len(items)
            assert 0.17 < accuracy < 0.33, (name, accuracy)


def test_the_same_text_gives_the_same_tasks(tmp_path: Path) -> None:
    """In another order of the documents, and from tokens."""
    holdout = make_holdout(tmp_path / "holdout")
    make_tasks(holdout, tmp_path / "one", items=20)
    make_tasks(make_holdout(tmp_path / "again", is_reversed=True), tmp_path / "two", items=20)
    (tmp_path / "t.model").write_bytes(train().serialized_model_proto())
    tokenize_corpus(holdout, tmp_path / "t.model", tmp_path / "tokens")
    make_tasks(tmp_path / "tokens", tmp_path / "three", items=20)
    make_tasks(holdout, tmp_path / "other", items=20, seed=2)
    content = {}
    for name in ("one", "two", "three", "other"):
        tasks = items_of(tmp_path / name)
        for item in (item for items in tasks.values() for item in items):
            del item["document"]
        content[name] = tasks
    assert content["one"] == content["two"] == content["three"] != content["other"]


def test_a_holdout_without_passages_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "holdout" / "web"
    folder.mkdir(parents=True)
    (folder / "a.jsonl").write_text(json.dumps({"text": "too short"}) + "\n")
    with pytest.raises(UsageError, match="too few passages for holdout_word: 0 of 48 words"):
        make_tasks(tmp_path / "holdout", tmp_path / "tasks")
    with pytest.raises(UsageError, match="--items 0"):
        make_tasks(tmp_path / "holdout", tmp_path / "tasks", items=0)
