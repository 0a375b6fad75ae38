"""decontaminate: planted items are found in every disguise, and nothing else, as a plain program of this test finds."""

import html
import json
import random
import re
import subprocess
import sys
import unicodedata
from dataclasses import replace
from html.entities import codepoint2name
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill.io.readers import read_corpus
from gristmill_cli.run import run
from gristmill_cli.run_config import Decontaminate, Mix, RunConfig, Tokenizer
from gristmill_cli.stages.pipeline import clean_corpus
from preprocessing.contamination import benchmarks
from preprocessing.contamination.benchmarks import LENGTH, MAX_ITEMS, SHORTEST
from preprocessing.contamination.ngrams import find_words, hash_ngrams
from preprocessing.contamination.report import read_report, report_paths
from preprocessing.decontaminate import decontaminate, describe
from tests.gristmill.engine.sandbox import sandboxed
from tests.gristmill_cli.corpus import make_corpus, tree

ITEM = 'What is the "capital" of the country where the river Seine flows, and who designed its most famous iron tower?'
DISGUISES = {
    "verbatim": ITEM,
    "other signs": ITEM.replace('"', "").replace(",", " –").replace("?", "!!"),
    "other case": ITEM.upper(),
    "two paragraphs": ITEM.replace(", and", ",\n\n  and"),
    "JSON": json.dumps({"id": 3, "question": "Read:\n" + ITEM, "answer": "Paris"}),
    "other quotes": ITEM.replace('"capital"', "« capital »"),
    "the end of it": "…" + ITEM[30:],
    "JSON in JSON": json.dumps(json.dumps({"question": "Read:\n" + ITEM})),
    "escaped letters": "".join(f"\\u{ord(letter):04X}" for letter in ITEM),
    "escaped twice": "".join(f"\\\\\\\\u{ord(letter):04x}" for letter in ITEM),
    "HTML": html.escape(ITEM),
    "HTML in HTML": html.escape(html.escape(ITEM).replace("i", "&#105;")),
    "JSON in HTML": json.dumps(ITEM).replace("&", "\\u0026").replace('\\"', "&#x22;").replace("e", "\\u0026#101;"),
    "hexadecimal": "".join(f"&#x{ord(letter):X};" for letter in ITEM),
    "soft hyphens": ITEM.replace("i", "\u00adi"),
    "escaped soft hyphens": ITEM.replace("i", "&shy;i").replace("a", "\\u00ada"),
    "without width": ITEM.replace("i", "i\u200b").replace("a", "\u2060a").replace("o", "o\ufeff\u200d"),
    "full width": "".join(chr(ord(letter) + 0xFEE0) if "!" <= letter <= "~" else letter for letter in ITEM),
    "mathematical": re.sub("[a-z]", lambda letter: chr(0x1D41A - 97 + ord(letter[0])), ITEM),
    "ligatures": ITEM.replace("fl", "ﬂ").replace("st", "ﬆ"),
    "variation": ITEM.replace("e", "e\ufe0f"),
}  # fmt: skip
PLAIN = re.compile(r"\w+")
OPTIONS = RunOptions(workers=1, quiet=True)


def write(path: Path, rows: list[dict[str, object]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def plain_words(text: str) -> list[str]:
    """Words by Python's own tables, one at a time, of a text without escapes."""
    for _ in range(4):
        text = re.sub(r"\\+u([dD][89abAB]..)\\+u(....)", lambda pair: surrogates(*pair.groups()), text)
        text = re.sub(r"\\+u([0-9a-fA-F]{4})", lambda code: chr(int(code[1], 16)), text)
        text = re.sub(r"&#?\w+;", lambda entity: html.unescape(entity[0]), text)
    text = re.sub(r"\\+[nrtbf]", "  ", text)
    text = re.sub("[\ufe00-\ufe0f]", "", text)
    text = "".join(letter for letter in text if unicodedata.category(letter) != "Cf")
    text = "".join(" " if unicodedata.category(letter) == "Sk" else letter for letter in text)
    text = unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())
    words, word = [], ""
    for letter in text + " ":
        is_part = unicodedata.category(letter)[0] in "LMN"
        is_alone = is_part and ("\u3040" <= letter <= "\u9fff" or "\u0e00" <= letter <= "\u0eff")
        if letter in "\u3099\u309a" and not word and words:
            words[-1] += letter
            continue
        if word and (not is_part or is_alone):
            words.append(word)
            word = ""
        if is_alone:
            words.append(letter)
        elif is_part:
            word += letter
    return words


def surrogates(high: str, low: str) -> str:
    return bytes.fromhex(high + low).decode("utf-16-be")


def plain_search(texts: list[str], items: list[str]) -> set[tuple[int, int]]:
    """(text, item) of each item that is in a text, by sets of n-grams."""
    found = set()
    of_items = [plain_words(item) for item in items]
    for number, words in enumerate(map(plain_words, texts)):
        grams = {n: {tuple(words[i : i + n]) for i in range(len(words) - n + 1)} for n in range(SHORTEST, LENGTH + 1)}
        for item, wanted in enumerate(of_items):
            n = min(LENGTH, len(wanted))
            if n >= SHORTEST and any(tuple(wanted[i : i + n]) in grams[n] for i in range(len(wanted) - n + 1)):
                found.add((number, item))
    return found


def table_of(target: Path, match: str = "exact") -> set[tuple[int, int]]:
    rows = pq.read_table(report_paths(target)[0]).to_pylist()
    return {(row["row"], int(row["item"].rpartition("@")[2])) for row in rows if row["match"] == match}


@pytest.mark.parametrize("disguise", DISGUISES)
def test_an_item_is_found_in_each_disguise_and_its_place_is_in_the_table(tmp_path: Path, disguise: str) -> None:
    clean = "A text of its own about mills, which grind the grain that bakers need, day after day."
    texts = [clean, f"{clean} {DISGUISES[disguise]} {clean}", clean + " What is the capital of the country?"]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in texts])
    quiz = write(tmp_path / "quiz.jsonl", [{"question": ITEM, "answer": "Paris"}])
    counts = decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, template="{question}")
    assert [d.text for d in read_corpus(tmp_path / "out")] == [texts[0], texts[2]]
    assert counts.total("in a benchmark").documents == 1
    (row,) = pq.read_table(report_paths(tmp_path / "out")[0]).to_pylist()
    assert (row["file"], row["row"], row["item"], row["item_text"]) == ("web/a.jsonl", 1, "quiz.jsonl@0", ITEM)
    place = texts[1][row["start"] : row["end"]]
    assert place.startswith(row["text"]) and plain_words(place)[-1] == "tower"


@pytest.mark.parametrize("seed", range(4))
def test_what_is_found_equals_a_plain_program(tmp_path: Path, seed: int) -> None:
    """Few different words, so that parts of items are there by chance, and characters of scripts without spaces."""
    chosen = random.Random(seed)
    known = [*"abcDEF", "İx", "naïve", "漢字", "かな", "がぱ", "ไทย", "x1", "a\\n", "it's", "…", "--",
             "\\nu", "\\\\theta", "cafe\u0301", "caf\\u00e9", "&eacute;", "&mdash;", "ﬁ", "Ａ", "a\u00adb", "ｶﾞ", "가",
             "\\ud83c\\udf00", "\\ud842\\udfb7", "Straße", "´", "ồ", "o\u0302\u0300"]  # fmt: skip

    def make(least: int, most: int) -> str:
        return " ".join(chosen.choices(known, [60, 9, *[1] * (len(known) - 2)], k=chosen.randint(least, most)))

    items, texts = [make(1, 30) for _ in range(60)], [make(0, 120) for _ in range(80)]
    texts += [f"{make(0, 9)} {item} {make(0, 9)}" for item in items[::3]] + ["a " * 99, "漢" * 99]
    items += ["a " * 40, "漢" * 20]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in texts])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": item} for item in items])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report", common=0)
    expected = plain_search(texts, items)
    assert table_of(tmp_path / "out") == expected and len(expected) > 12
    report = read_report(report_paths(tmp_path / "out")[1]).benchmarks["quiz"]
    assert report.found == len({item for _, item in expected})
    assert report.documents == {"web": len({text for text, _ in expected})}
    assert report.too_short == sum(len(plain_words(item)) < SHORTEST for item in items)


def test_cut_takes_the_places_and_a_margin_and_drops_what_is_empty(tmp_path: Path) -> None:
    texts = ["before " * 20 + ITEM + " after" * 20, ITEM, "x " * 9 + ITEM + " y" * 300 + ITEM + " z" * 300]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text, "id": n} for n, text in enumerate(texts)])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": ITEM}])
    counts = decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="cut", margin=40)
    kept = {document.value("id"): document.text for document in read_corpus(tmp_path / "out")}
    assert kept.keys() == {0, 2} and counts.total("in a benchmark").documents == 1
    assert set(plain_words(kept[0])[1:-1]) <= {"before", "be", "after", "ter"}
    assert len(kept[0]) == pytest.approx(len(texts[0]) - len(ITEM) - 80, abs=8)
    assert kept[2].count("\n\n") == 1 and not set("xq") & set(kept[2])


CASES = {  # other scripts, and signs inside words
    "Chinese": "磨坊主在清晨打开水闸让河水推动木轮然后把新收的小麦倒进石磨之间慢慢磨成细白的面粉",
    "Russian": "Мельник открывает шлюз рано утром чтобы река вращала колесо и сыплет ещё зерно между тяжёлыми камнями",
    "formulas": r"Find $\nu$ and $\theta$ so $\tan\theta = \nu$, $\beta = \tau$ = \frac{\nu}{\rho} \times \nabla r$",
    "quotes": "The miller’s wheel doesn’t turn – it’s “dry” – and the baker’s wife’s flour isn’t ground",
    "French": "Où le meunier a-t-il rangé la clé de l’écluse après avoir fermé le café près de la forêt d’Écouves ?",
    "Vietnamese": "Người thợ xay mở cửa cống vào buổi sáng sớm để dòng sông làm quay bánh xe gỗ cũ kỹ của cối xay",
    "Japanese": "がらすのばけつがごとごとなるとぱんやがでてくるグリンピースとパンダ",
    "Korean": "방앗간 주인은 이른 아침에 수문을 열어 강물이 나무 바퀴를 돌리게 하고 밀을 돌 사이에 천천히 부어 넣는다",
    "Hindi": "चक्की वाला सुबह जल्दी पानी का द्वार खोलता है ताकि नदी लकड़ी के पहिये को घुमा सके और आटा पिसे",
}  # fmt: skip
WRITTEN = {
    "JSON": json.dumps,
    "JSON in JSON": lambda text: json.dumps(json.dumps({"question": text})),
    "HTML": lambda text: text.encode("ascii", "xmlcharrefreplace").decode(),
    "named": lambda text: "".join(f"&{codepoint2name[ord(x)]};" if ord(x) in codepoint2name else x for x in text),
    "doubled": lambda text: text.replace("\\", "\\\\"),
    "NFD": lambda text: unicodedata.normalize("NFD", text),
    "NFKC": lambda text: unicodedata.normalize("NFKC", text),
    "hyphens": lambda text: "".join(f"{x}\u00ad\u200b" if x.isalpha() else x for x in text),
}


@pytest.mark.parametrize("policy", ["drop", "cut"])
@pytest.mark.parametrize("case", CASES)
def test_an_item_is_found_however_it_is_written(tmp_path: Path, case: str, policy: str) -> None:
    """An item as each of these, in a corpus of all of the others, and of texts that say something else."""
    forms = {name: unicodedata.normalize("NFC", CASES[case]) for name in ("plain",)}
    forms |= {name: write(forms["plain"]) for name, write in WRITTEN.items()}
    before, after = "Not of the item. ", " Nor is this &amp; that."
    texts = [f"{before}{form}{after}" for form in forms.values()] + [CASES[other] for other in CASES if other != case]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in texts])
    for name, form in forms.items():
        quiz = write(tmp_path / f"{name}.jsonl", [{"q": form}])
        target = tmp_path / name
        decontaminate(tmp_path / "corpus", target, (quiz,), OPTIONS, policy=policy, margin=0, near=0)  # type: ignore[arg-type]
        assert table_of(target) == {(row, 0) for row in range(len(forms))}
        kept = [document.text for document in read_corpus(target)]
        assert kept[-len(CASES) + 1 :] == texts[len(forms) :]
        if policy == "cut":
            assert all(
                text.startswith(before.rstrip()) and text.endswith(after.lstrip()) for text in kept[: len(forms)]
            )
            assert max(map(len, kept[: len(forms)])) < len(before + after) + 40


def test_escapes_of_megabytes_are_decoded_in_linear_work() -> None:
    text = "\\u00e9&eacute;&amp;amp;amp;amp;amp;&;&#;\\\\u12" * 3000
    words = find_words(text)
    assert len(words) == len(set(words.starts.tolist())) and words.ends[-1] <= len(text)


def test_what_cut_leaves_keeps_its_bytes(tmp_path: Path) -> None:
    before, after = "\n  def grind():\r\n    ", "\n\n\n    return flour  \n"
    write(tmp_path / "corpus/web/a.jsonl", [{"text": f"{before}{ITEM}{after}"}])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": ITEM}])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="cut", margin=0)
    (kept,) = (document.text for document in read_corpus(tmp_path / "out"))
    assert kept.startswith(f"{before}\n\n") and kept.endswith(after)
    assert len(kept) <= len(before) + len(after) + 3  # the gap, and a mark at the end of the item


def test_boilerplate_and_n_grams_of_many_items_are_not_looked_for(tmp_path: Path) -> None:
    rule = "please read the following text with care and then choose the one best answer from"
    items = [f"{rule} item {n} {' '.join(f'w{n}x{k}' for k in range(14))}" for n in range(MAX_ITEMS + 1)]
    licence = "permission is hereby granted free of charge to any person obtaining a copy of this software"
    texts = [f"text {n} says {licence}" for n in range(9)] + [f"one more {rule}", items[3], items[4].split("item")[1]]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in texts])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": item} for item in [*items, licence]])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report", common=9)
    assert table_of(tmp_path / "out") == {(10, 3), (11, 4)}
    report = read_report(report_paths(tmp_path / "out")[1])
    assert (report.common_ngrams, report.common_items) == (len(licence.split()) - LENGTH + 1, 1)
    assert describe(report)[-1].startswith("4 n-grams of benchmarks, and near-duplicates of 1 item, are in so many")
    assert report.benchmarks["quiz"].shared_ngrams == (len(rule.split()) + 1 - LENGTH + 1) * len(items)
    decontaminate(tmp_path / "corpus", tmp_path / "all", (quiz,), OPTIONS, policy="report", common=0)
    assert len({row for row, _ in table_of(tmp_path / "all")}) == 11
    decontaminate(tmp_path / "corpus", tmp_path / "four", (quiz,), OPTIONS, policy="report", common=9, min_ngrams=4)
    assert table_of(tmp_path / "four") == {(10, 3)}


def test_a_run_keeps_benchmarks_out_and_workers_change_no_byte(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path / "corpus")
    texts = [document.text for document in read_corpus(corpus)]
    long = [text for text in texts if len(plain_words(text)) > 60][:5]
    quiz = tmp_path / "benchmarks"
    write(quiz / "a.jsonl", [{"question": " ".join(plain_words(text)[20:50])} for text in long])
    write(quiz / "b.jsonl", [{"choices": ["none of", "these words"], "n": 1, "none": None}])
    config = RunConfig(
        corpus, tmp_path / "out", workers=1, decontaminate=Decontaminate((quiz,), policy="cut", margin=0),
        mix=Mix(holdout=0.05), tokenizer=Tokenizer(vocab_size=420),
    )  # fmt: skip
    assert run(config) is not None
    report = read_report(report_paths(clean_corpus(config))[1])
    assert report.benchmarks["benchmarks/a"].found == len(long) and not report.benchmarks["benchmarks/b"].found
    cleaned = [document.text for document in read_corpus(clean_corpus(config))]
    assert not plain_search(cleaned, [" ".join(plain_words(text)[20:50]) for text in long])
    other = replace(config, out=tmp_path / "four", workers=3, until="decontaminate")
    run(other)
    assert tree(clean_corpus(other)) == tree(clean_corpus(config))
    for path, same in zip(report_paths(clean_corpus(other)), report_paths(clean_corpus(config)), strict=True):
        assert path.read_bytes() == same.read_bytes()
    with pytest.raises(InputError, match="name the fields that there are"):  # before anything is written
        run(replace(config, out=tmp_path / "none", decontaminate=Decontaminate((quiz,), template="{prompt}")))
    assert not (tmp_path / "none").exists()
    write(quiz / "b.jsonl", [{"question": " ".join(plain_words(long[0])[51:80])}])
    run(replace(other, decontaminate=Decontaminate((quiz,))))
    assert read_report(report_paths(clean_corpus(other))[1]).benchmarks["benchmarks/b"].found == 1


def test_a_mistake_is_refused_in_a_sentence(tmp_path: Path) -> None:
    write(tmp_path / "corpus/web/a.jsonl", [{"text": "a"}])
    quiz = write(tmp_path / "quiz.jsonl", [{"question": ITEM}])
    (tmp_path / "other").mkdir()
    (tmp_path / "bad.jsonl").write_text("{\n")
    write(tmp_path / "other/quiz.jsonl", [{"question": ITEM}])
    for changes, fault in (
        ({"against": ()}, "expected files or folders of benchmarks, got none"),
        ({"against": (tmp_path / "none",)}, "none: expected a file or a folder, but there is none"),
        ({"against": (quiz, tmp_path / "other/quiz.jsonl")}, r"got quiz.jsonl twice; rename one"),
        ({"template": "{text}"}, r"quiz.jsonl line 1: .*text.*; name the fields that there are, as in --template"),
        ({"template": "question"}, "--template 'question': expected names of fields in braces"),
        ({"against": (write(tmp_path / "few.jsonl", [{"q": "too short"}]),)}, r"got none in few \(1 records\); try"),
        (
            {"against": (write(tmp_path / "empty.jsonl", []),)},
            "empty.jsonl: expected items, a record each",
        ),
        ({"against": (tmp_path / "bad.jsonl",)}, r"bad.jsonl line 1: broken JSON.*; fix or remove the record"),
        ({"against": (tmp_path / "corpus/web",)}, "items of the benchmark would also be read as documents"),
        ({"against": (tmp_path,)}, "items of the benchmark would also be read as documents"),
        ({"margin": -1}, "--margin: expected 0 or more, got -1"),
        ({"min_ngrams": 0}, "--min_ngrams: expected 1 or more, got 0"),
        ({"near": 0.2}, "--near: expected 0, or a share of 0.5 to 1, got 0.2; try --near 0.6"),
    ):
        arguments = {"against": (quiz,), "options": OPTIONS, **changes}
        with pytest.raises(GristmillError, match=fault):
            decontaminate(tmp_path / "corpus", tmp_path / "out", **arguments)
    (tmp_path / "out.benchmarks.json").write_text("xx")
    with pytest.raises(InputError, match=r"out.benchmarks.json: expected what decontaminate found, got"):
        read_report(tmp_path / "out.benchmarks.json")
    with pytest.raises(UsageError, match="give a folder outside it"):
        decontaminate(tmp_path / "corpus", tmp_path / "corpus/out", (quiz,), OPTIONS)


def test_each_field_is_looked_for_in_the_corpus_own_form(tmp_path: Path) -> None:
    """A short question is not hidden by its number and answer, nor an item by accents that are marks of their own."""
    short, accents = "Who grinds the corn at the old mill?", "Où est le café près du moulin à blé, et qui y va ?"
    write(tmp_path / "corpus/web/a.jsonl", [{"text": f"One asked: {short} None knew."}, {"text": accents}])
    rows = [{"id": 7, "question": short, "answer": "B"}, {"question": unicodedata.normalize("NFD", accents)}]
    decontaminate(tmp_path / "corpus", tmp_path / "out", (write(tmp_path / "q.jsonl", rows),), OPTIONS, policy="report")
    assert table_of(tmp_path / "out") == {(0, 0), (1, 1)}


LIMITED = """
import resource, sys
from pathlib import Path
from gristmill.io.documents import CorpusFile
from preprocessing.contamination.benchmarks import ALL_FIELDS, IndexFiles, write_index
from tests.gristmill_cli.limited_run import data_bytes

folder = Path(sys.argv[1])
for name in ("few", "many"):
    path = folder / f"{name}.jsonl"
    index = IndexFiles(*(folder / f"{name}.{kind}" for kind in ("keys", "entries", "items", "sizes")))
    write_index([CorpusFile(path, path.name, path.stat().st_size, ALL_FIELDS)], index, near=True)
    if name == "few":  # has loaded all that is needed
        limit = data_bytes() + (96 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
"""


def test_the_index_of_many_items_is_made_in_bounded_memory(tmp_path: Path) -> None:
    chosen = random.Random(3)
    words = [f"w{number}" for number in range(5000)]
    for name, items in (("few", 10), ("many", 30_000)):
        write(tmp_path / f"{name}.jsonl", [{"q": " ".join(chosen.choices(words, k=100))} for _ in range(items)])
    subprocess.run([sys.executable, "-c", LIMITED, str(tmp_path)], check=True, cwd=Path(__file__).parents[2])
    keys = np.fromfile(tmp_path / "many.keys", np.uint64)
    assert len(keys) > 5_400_000 and bool(np.all(keys[1:] >= keys[:-1]))  # 600 MB if all are sorted at once


def test_an_index_that_is_sorted_on_disk_finds_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chosen = random.Random(4)
    items = [" ".join(chosen.choices("abcdefgh", k=40)) for _ in range(200)] + ["a " * 40] * (MAX_ITEMS + 1)
    write(tmp_path / "corpus/web/a.jsonl", [{"text": f"{item} {item[:60]}"} for item in items[::7]])
    quizzes = tuple(write(tmp_path / f"q{n}.jsonl", [{"q": it} for it in items[n::2]]) for n in range(2))
    found = []
    for name, memory in (("whole", 32 << 20), ("runs", 1)):
        monkeypatch.setattr(benchmarks, "_SORT_MEMORY", memory)
        decontaminate(tmp_path / "corpus", tmp_path / name, quizzes, OPTIONS, policy="report", common=0)
        found.append([path.read_bytes() for path in report_paths(tmp_path / name)])
    assert found[0] == found[1]
    assert sum(it.shared_ngrams for it in read_report(report_paths(tmp_path / "runs")[1]).benchmarks.values()) > 50


def test_hostile_texts_cost_what_their_length_says(tmp_path: Path) -> None:
    """Places found, not seconds: one for each item, whatever is repeated."""
    texts = ["a " * 50_000, "漢" * 50_000, "\\" * 50_000, "a" * 50_000]
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text} for text in texts])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": "a " * 5000}, {"q": "漢" * 5000}])
    decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS, policy="report")
    assert pq.read_table(report_paths(tmp_path / "out")[0]).num_rows == 2


def test_hashes_of_n_grams_depend_on_their_words_alone() -> None:
    words = find_words("one two three four five six one two three").hashes
    hashes = hash_ngrams(words, 3)
    assert hashes[0] == hashes[-1] and len(np.unique(hashes)) == len(hashes) - 1
    assert len(hash_ngrams(words, 10)) == 0


def test_outputs_depend_on_nothing_outside(tmp_path: Path) -> None:
    """As stages that run elsewhere: the task opens only what its arguments name."""
    write(tmp_path / "corpus/web/a.jsonl", [{"text": ITEM}, {"text": "b"}])
    quiz = write(tmp_path / "quiz.jsonl", [{"q": ITEM}])
    with sandboxed(tmp_path):
        decontaminate(tmp_path / "corpus", tmp_path / "out", (quiz,), OPTIONS)
    assert [document.text for document in read_corpus(tmp_path / "out")] == ["b"]
