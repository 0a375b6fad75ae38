"""decontaminate --near: paraphrased items are found at their places, and nothing else, as a plain program finds."""

import random
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.io.readers import read_corpus
from preprocessing.contamination import near
from preprocessing.contamination.benchmarks import LENGTH, MAX_ITEMS
from preprocessing.contamination.report import read_report, report_paths
from preprocessing.decontaminate import decontaminate, describe
from tests.preprocessing.test_decontaminate import OPTIONS, plain_search, plain_words, table_of, write

N = 5


def natural_text(chosen: random.Random, words: int) -> list[str]:
    """Words of which some are far more frequent than others, as in a language, so that short n-grams are shared."""
    return [f"w{int(chosen.paretovariate(0.35)) % 4000}" for _ in range(words)]


def paraphrase(words: list[str], first: int) -> list[str]:
    """Every eighth word is another one."""
    return [f"other{at}" if at % 8 == first else word for at, word in enumerate(words)]


def plain_near(texts: list[str], items: list[str], share: float = 0.6) -> set[tuple[int, int]]:
    """(text, item) where some window of a text has enough words of an item, by sets of n-grams of every window."""
    found = set()
    grams_of = []  # of each item, the n-grams and where each is first
    for words in map(plain_words, items):
        grams = [tuple(words[at : at + N]) for at in range(len(words) - N + 1)] if len(words) >= LENGTH else []
        grams_of.append((len(words), {gram: grams.index(gram) for gram in grams}))
    number_of = {gram: sum(gram in its for _, its in grams_of) for _, its in grams_of for gram in its}
    for item, (length, grams) in enumerate(grams_of):
        own = {gram: at for gram, at in grams.items() if number_of[gram] <= MAX_ITEMS}
        total = len({at + k for at in own.values() for k in range(N)})
        for number, text in enumerate(map(plain_words, texts)):
            width = int(length / share + 1e-9)
            for start in range(-width, len(text)):
                window = text[max(0, start) : start + width]
                there = {tuple(window[at : at + N]) for at in range(len(window) - N + 1)} & own.keys()
                covered = {own[gram] + k for gram in there for k in range(N)}
                if len(covered) >= max(LENGTH, share * total - 1e-9):
                    found.add((number, item))
                    break
    return found


@pytest.mark.parametrize("policy", ["report", "cut"])
def test_every_paraphrase_is_found_at_its_place_and_no_other_text(tmp_path: Path, policy: str) -> None:
    chosen = random.Random(5)
    items = [natural_text(chosen, chosen.randint(30, 90)) for _ in range(60)]
    texts = [natural_text(chosen, chosen.randint(100, 400)) for _ in range(120)]
    places = {}
    for number, item in enumerate(items[:40]):
        at = chosen.randrange(len(texts[2 * number]))
        before, same = " ".join(texts[2 * number][:at]), " ".join(paraphrase(item, number % 8))
        places[2 * number] = (len(before), len(before) + 1 + len(same))
        texts[2 * number][at:at] = same.split()
    lines = [" ".join(words) for words in texts]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": line, "id": n} for n, line in enumerate(lines)])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": " ".join(item)} for item in items])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy=policy, margin=0)
    planted = {(2 * number, number) for number in range(40)}
    assert table_of(tmp_path / "out", "near") == planted and not table_of(tmp_path / "out")
    assert not plain_search(lines, [" ".join(item) for item in items])  # nothing to be found without
    at_its_place = 0
    for row in pq.read_table(report_paths(tmp_path / "out")[0]).to_pylist():
        first, last = places[row["row"]]
        room = 7 * (last - first) // 10  # a window may have an n-gram before or after that is there by chance
        assert first - room <= row["start"] <= first + 60 and last - 60 <= row["end"] <= last + room
        at_its_place += first <= row["start"] and row["end"] <= last
        assert 0.6 <= row["share"] < 1 and row["ngrams"] >= 3
    assert at_its_place > 30
    report = read_report(report_paths(tmp_path / "out")[1])
    found = report.benchmarks["quiz"]
    assert (found.found, found.near, found.near_documents, report.documents) == (0, 40, {"web": 40}, 40)
    assert describe(report) == ["quiz: 0 of 60 items found (0.0%) in 0 documents; near-duplicates of 40 more in 40"]
    kept = {document.value("id"): document.text for document in read_corpus(tmp_path / "out")}
    changed = [number for number, line in enumerate(lines) if kept[number] != line]
    assert changed == (sorted(places) if policy == "cut" else [])
    if policy == "cut":
        assert not any(plain_near([kept[2 * number]], [" ".join(items[number])]) for number in range(40))


@pytest.mark.parametrize(("seed", "state_bytes"), [(0, near._STATE_BYTES), (1, 1)])
def test_what_is_nearly_there_equals_a_plain_program(
    tmp_path: Path, seed: int, state_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Few different words: items repeat n-grams, share them, and are there in pieces, also in another order."""
    monkeypatch.setattr(near, "_STATE_BYTES", state_bytes)
    chosen = random.Random(seed)
    words = [f"w{n}" for n in range(14)]
    items = [chosen.choices(words, k=chosen.randint(8, 40)) for _ in range(25)] + [["w1"] * 30, ["w2", "w3"] * 20]
    items += [chosen.choices(words[:4], k=40) for _ in range(10)]
    rule = [f"r{n}" for n in range(9)]
    items += [rule + [f"i{n}x{k}" for k in range(12 + n % 3)] for n in range(MAX_ITEMS + 2)]
    texts = [chosen.choices(words[: chosen.choice((4, 14))], k=chosen.randint(0, 200)) for _ in range(20)]
    for item in [*items[:25], *items[-4:]]:
        half = len(item) // 2
        gap = chosen.choices(words, k=chosen.randint(0, 30))
        texts += [[*gap, *item[half:], *gap, *item[:half]], paraphrase(item, chosen.randrange(8))]
    lines, wanted = [" ".join(text) for text in texts], [" ".join(item) for item in items]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": line} for line in lines])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": item} for item in wanted])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report", common=0)
    expected, exact = plain_near(lines, wanted), plain_search(lines, wanted)
    found = table_of(tmp_path / "out", "near")
    assert table_of(tmp_path / "out") == exact
    assert found | exact == expected | exact and found <= expected and len(expected - exact) > 10
    report = read_report(report_paths(tmp_path / "out")[1])
    assert report.benchmarks["quiz"].shared_near_ngrams == (len(rule) - N + 1) * (MAX_ITEMS + 2)
    decontaminate(tmp_path / "corpus", tmp_path / "none", (quiz,), OPTIONS, policy="report", common=0, near=0)
    assert not table_of(tmp_path / "none", "near") and table_of(tmp_path / "none") == exact


def test_items_that_many_documents_nearly_have_are_boilerplate(tmp_path: Path) -> None:
    licence, question = ([f"{name}{n}" for n in range(40)] for name in ("a", "b"))
    texts = [paraphrase(licence, n % 8) for n in range(9)] + [paraphrase(question, n) for n in range(8)]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": " ".join(text)} for text in texts])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": " ".join(licence)}, {"q": " ".join(question)}])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report", common=9)
    assert table_of(tmp_path / "out", "near") == {(9 + n, 1) for n in range(8)}
    assert read_report(report_paths(tmp_path / "out")[1]).common_items == 1


def test_a_verbatim_item_is_one_exact_place(tmp_path: Path) -> None:
    item = [f"w{n}" for n in range(50)]
    half = [*item[:25], *paraphrase(item, 4)[25:]]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": " ".join(["so", *text, "ends"])} for text in (item, half)])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": " ".join(item)}])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report")
    rows = pq.read_table(report_paths(tmp_path / "out")[0]).to_pylist()
    # the end of the second one is no exact place, and would stay if only that were cut
    assert [(row["row"], row["match"], row["share"]) for row in rows] == [
        (0, "exact", 1.0), (1, "exact", 0.56), (1, "near", 0.94)
    ]  # fmt: skip
    report = read_report(report_paths(tmp_path / "out")[1])
    assert (report.documents, report.benchmarks["quiz"].near) == (2, 0)


def test_texts_that_repeat_what_many_items_share_have_one_place_of_each(tmp_path: Path) -> None:
    """Each n-gram of the text is in 50 items, which is the most; a place that repeats is one."""
    phrase = [f"w{n}" for n in range(40)]
    items = [[*paraphrase(phrase, 3), f"i{n}"] for n in range(MAX_ITEMS)]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": " ".join(phrase * 500)}])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": " ".join(item)} for item in items])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report")
    rows = pq.read_table(report_paths(tmp_path / "out")[0]).to_pylist()
    assert len(rows) == MAX_ITEMS and {row["match"] for row in rows} == {"near"}
