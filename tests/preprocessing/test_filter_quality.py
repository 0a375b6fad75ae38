"""filter_quality: each rule just inside and just outside its number, recipes of files, every document counted."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from preprocessing.filter_quality import filter_quality
from preprocessing.quality.bounds import Bounds
from preprocessing.quality.measures import MEASURES, TextMeasures
from preprocessing.quality.recipe import load_recipe, parse_recipe, shipped_recipes
from preprocessing.quality.words import WordSplitter
from tests.gristmill.engine.sandbox import sandboxed
from tests.gristmill_cli.corpus import ROOT
from tests.patience import patience

PLAIN = " ".join(f"word{chr(97 + n // 26)}{chr(97 + n % 26)}" for n in range(100))  # 100 words, none twice
LINES = [f"line number {chr(97 + n)} ends." for n in range(10)]


def measured(rule: str, text: str) -> float:
    return MEASURES[rule](TextMeasures(text, WordSplitter()))


def removed(recipe: str, text: str) -> str:
    return parse_recipe(recipe, "test").judge(text, WordSplitter()).rule


def repeat(n: int, times: int, others: int) -> str:
    """An n-gram of 4-letter words some times, between words that are there once."""
    gram = " ".join(f"abc{chr(97 + k)}" for k in range(n))
    once = [f"x{chr(97 + k // 26)}{chr(97 + k % 26)}y" for k in range(others)]
    return " ".join(f"{gram} {once[k]}" for k in range(times)) + " " + " ".join(once[times:])


# rule, bound, a text that is just inside, and one just outside
CASES = [
    ("repeated_paragraphs", "max = 0.3", "\n\n".join("abcdefgggg"), "\n\n".join("abcdefffff")),
    ("repeated_lines", "max = 0.3", "\n".join("abcdefgggg"), "\n".join("abcdefffff")),
    ("repeated_paragraph_characters", "max = 0.2", "a" * 2 + "\n\n" + "a" * 2 + "\n\n" + "b" * 2, "aaaa\n\naaaa\n\nbb"),
    ("repeated_line_characters", "max = 0.2", "aa\naa\nbbbb", "aaa\naaa\nbbb"),
    *((f"top_{n}_gram", "max = 0.2", repeat(n, 2, 60), repeat(n, 8, 9)) for n in (2, 3, 4)),
    *((f"repeated_{n}_grams", "max = 0.1", repeat(n, 2, 120), repeat(n, 6, 9)) for n in range(5, 11)),
    ("words", "min = 5", "a b c d e -- !", "a b c d -- !"),
    ("words", "max = 5", "a b c d e -- !", "a b c d e f"),
    ("mean_word_length", "min = 3", "abc abc . .", "abc ab . ."),
    ("mean_word_length", "max = 4", "abcd abcd", "abcd abcde"),
    ("hashes_per_word", "max = 0.1", PLAIN + " c#", PLAIN + " #" * 12),
    ("ellipses_per_word", "max = 0.02", PLAIN + " ... …", PLAIN + " ... … …"),
    ("bullet_lines", "max = 0.5", "- a\n • b\nc\nd", "- a\n • b\n-c\nd"),
    ("ellipsis_lines", "max = 0.5", "a...\nb… \nc\nd", "a...\nb… \nc...\nd"),
    ("alphabetic_words", "min = 0.8", "a b c d 5", "a b c 4 5"),
    ("stop_words", "min = 2", "The the cat that the", "The the cat the"),
    ("lorem_ipsum", "max = 0", "lorem, ipsum", "A Lorem Ipsum text"),
    ("curly_brackets", "max = 0", "f(x) }", "f(x) {"),
    ("latin_letters", "min = 0.5", "ab вг 12", "a вг!"),
    ("cyrillic_letters", "max = 0.5", "ab вг", "a вг"),
    ("greek_letters", "min = 1", "αβγ 3", "αβγ a"),
    ("arabic_letters", "max = 0", "a", "سلام"),
    ("hebrew_letters", "max = 0", "a", "שלום"),
    ("devanagari_letters", "min = 1", "अनाज", "अनाज a"),
    ("thai_letters", "min = 1", "ข้าว", "ข้าว a"),
    ("hangul_letters", "min = 1", "곡식", "곡식 a"),
    ("kana_letters", "max = 0.5", "粉こ", "粉こな"),
    ("han_letters", "max = 0.5", "粉 a", "粉麦 a"),
    ("sentences", "min = 3", "One two. Three!\nFour Mr. Five", "One two... three Mr. X.\nFour"),
    ("ended_lines", "min = 0.5", "a.\nb\n\nc!\nd", "a.\nb\nc,\nd"),
    ("short_lines", "max = 0.5", "a" * 31 + "\n" + "a" * 30, "a" * 30 + "\n" + "b" * 30),
    ("repeated_nonblank_characters", "max = 0.2", "aa\n\naa\nbbbbbb", "aaa\naaa\nbbbbbb"),
    ("newlines_per_word", "max = 0.5", "a\nb c d\n", "a\nb\nc\nd"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("rule", "bound", "inside", "outside"), CASES, ids=[f"{rule} {bound}" for rule, bound, *_ in CASES]
)
def test_each_rule_keeps_just_inside_and_removes_just_outside(rule: str, bound: str, inside: str, outside: str) -> None:
    assert removed(f"{rule}.{bound}", inside) == "", measured(rule, inside)
    assert removed(f"{rule}.{bound}", outside) == rule, measured(rule, outside)


def test_every_rule_has_a_case() -> None:
    assert {rule for rule, *_ in CASES} == set(MEASURES)


@pytest.mark.parametrize(
    ("rules", "text", "kept"),
    [
        ("end_punctuation = true", "One.\n two \nThree...\n'Four'", "One.\n'Four'"),
        ("min_words = 3", "one two\none two three", "one two three"),
        ("max_word_length = 4", "abcd ab\nabcde ab", "abcd ab"),
        ("javascript = false", "Enable JavaScript now.\nText.", "Text."),
        ("policy = false", "Read our Privacy Policy.\nText.", "Text."),
        ("citations = false", "True[12].[citation needed]\nb[edit] [x]", "True.\nb [x]"),
    ],
)
def test_lines_are_left_out(rules: str, text: str, kept: str) -> None:
    assert parse_recipe(f"lines = {{ {rules} }}", "test").judge(text, WordSplitter()).text == kept
    assert parse_recipe("lines = {}", "test").judge(text, WordSplitter()).text != kept


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        *((f"a {sign}me@e.com{sign} b", f"a {sign}email@example.com{sign} b") for sign in "*_`'\"|/!~#?=^&$"),
        ("**me@e.com**", "**email@example.com**"),
        ("<me@e.com>, {me@e.com}, [me@e.com]", "<email@example.com>, {email@example.com}, [email@example.com]"),
        ("- me@e.com-", "- email@example.com-"),
        ("mailto:o'hara+tag@mail.e.co.uk?x", "mailto:email@example.com?x"),
        ("邮箱me@e.com。", "邮箱email@example.com。"),
        ("ssh://git@host.com/x https://u:p@host.com/", None),
        ("git@host.com:a/b.git lodash@4.17.21 me@localhost @me x@", None),
    ],
)
def test_signs_around_an_address_stay(text: str, expected: str | None) -> None:
    rules = parse_recipe("personal = { mail = true }", "test")
    judged = rules.judge(text, WordSplitter())
    assert judged.text == (expected or text)
    assert judged.replaced.get("mail", 0) == judged.text.count("email@example.com")


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ("We set cookies {now}, read our cookie policy.", "curly_brackets"),
        ("This lorem ipsum needs javascript to be on.", "lorem_ipsum"),
        ("This lorem ipsum uses cookies a lot.", "lorem_ipsum"),
        ("This needs javascript {here} to be on.", ""),
        ("Our cookie policy is short.", ""),
        ("lorem ipsum { without an end", ""),
    ],
)
def test_c4_looks_at_lines_in_the_order_of_datatrove(line: str, rule: str) -> None:
    prose = "\n".join(f"The mill has ground sack {n} of grain." for n in range(6))
    judged = load_recipe("c4").judge(f"{prose}\n{line}", WordSplitter())
    assert judged.rule == rule and (rule or judged.text == prose)


def test_personal_data_is_replaced() -> None:
    text = "Write to jo.do+x@mail.example.org, or 8.8.8.8, not 10.0.0.1 nor 1.2.3.4.5 nor 999.1.1.1."
    judged = parse_recipe("personal = { mail = true, ip = true }", "test").judge(text, WordSplitter())
    assert judged.text == "Write to email@example.com, or 192.0.2.1, not 10.0.0.1 nor 1.2.3.4.5 nor 999.1.1.1."
    assert judged.replaced == {"mail": 1, "ip": 1}
    assert parse_recipe("personal = {}", "test").judge(text, WordSplitter()).text == text


def test_rules_after_lines_see_the_lines_that_are_left() -> None:
    recipe = "curly_brackets.max = 0\nlines = { min_words = 2 }\nwords.min = 3"
    assert removed(recipe, "one two\nthree") == "words"
    assert (
        removed(recipe.replace("curly_brackets.max = 0\n", "") + "\ncurly_brackets.max = 0", "{\none two three") == ""
    )


def test_shipped_recipes_have_the_published_numbers() -> None:
    assert shipped_recipes() == ["c4", "fineweb", "fineweb-en", "fineweb2", "gopher"]
    names = {
        name: [getattr(step, "name", type(step).__name__) for step in load_recipe(name).steps]
        for name in shipped_recipes()
    }
    assert len(names["gopher"]) == 21 and names["fineweb"][:21] == names["gopher"]
    assert names["c4"] == ["LineRules", "lorem_ipsum", "LineRules", "curly_brackets", "LineRules", "sentences"]
    gopher = [name for name in names["gopher"] if name.startswith(("top", "repeated")) and "paragraph" not in name]
    own = [
        "ended_lines",
        "repeated_nonblank_characters",
        "newlines_per_word",
    ]  # FineWeb2's order: FineWeb's own are second
    rest = [name for name in names["gopher"] if name not in gopher and "paragraph" not in name]
    gopher.remove("repeated_line_characters")
    assert names["fineweb2"] == [*gopher, *own, *rest, "PersonalRules"]
    assert names["fineweb-en"] == ["language", *names["fineweb"]]
    assert names["fineweb"][21:] == [*names["c4"], "ended_lines", "short_lines", "repeated_nonblank_characters",
                                     "newlines_per_word", "PersonalRules"]  # fmt: skip


def test_fineweb_en_takes_english_first_and_needs_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    german = "Dies ist ein deutscher Satz über das Mahlen von Getreide in einer Mühle am Fluss."
    verdict = load_recipe("fineweb-en").judge(german, WordSplitter())
    assert (verdict.rule, verdict.value, verdict.detail) == ("language", 0.0, "de")
    monkeypatch.setattr("preprocessing.quality.language_identifier.find_spec", lambda _: None)
    with pytest.raises(UsageError, match=r"pip install 'gristmill\[language\]'"):
        load_recipe("fineweb-en")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "expected rules such as words.min = 50, got none"),
        ("words.min = ", "invalid TOML"),
        ("wordz.min = 3", "unknown rule 'wordz'; did you mean words?"),
        ("words = 3", "words: expected a table such as words.max = 1, got 3"),
        ("personal = true", "personal: expected a table such as personal = { mail = true, ip = true }, got True"),
        ("language = 'en'", "expected a table such as language = { allow = ['en'], min_score = 0.65 }"),
        ("words.most = 3", "words.most: expected words.min or words.max"),
        ("words.min = -1", "words.min: expected a number of 0 or more, got -1"),
        ("words.min = nan", "words.min: expected a number of 0 or more, got nan"),
        ("bullet_lines.max = 1.1", "bullet_lines.max: expected a share from 0 to 1, got 1.1"),
        ("words = { min = 3, max = 2 }", "min up to max"),
        ("lines.min_word = 3", "lines: unknown rule 'min_word'; did you mean min_words?"),
        ("language.min_score = 0.5", "language.allow: expected codes of languages such as ['en'], got None"),
        ("language = { allow = ['en'], least = 1 }", "language.least: expected language.allow or language.min_score"),
        ("language = { allow = ['en'], min_score = 2 }", "min_score: expected a probability from 0 to 1, got 2"),
        ("language = { allow = ['eng'] }", "language.allow: unknown code 'eng'; "),
        ("listed_words = { file = 'own.toml' }", "listed_words.file: expected one word an entry in "),
        ("listed_words.max = 0", "listed_words.file: expected the name of a file with one entry per line, got None"),
        ("listed_words = { file = 'none.txt' }", "none.txt: expected a list, a UTF-8 file with one entry per line"),
        ("listed_urls = { file = 'own.toml', max = 0 }", "listed_urls.max: expected listed_urls.file or"),
        ("listed_urls = { file = 'own.toml', field = '' }", "listed_urls.field: expected the name of a field, got ''"),
        ("lines.min_words = true", "lines.min_words: expected a whole number of 0 or more, got True"),
    ],
)
def test_a_wrong_recipe_is_refused_in_a_sentence(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "own.toml"
    path.write_text(content)
    with pytest.raises(UsageError) as error:
        load_recipe(str(path))
    assert message in str(error.value) and str(path) in str(error.value) and "\n" not in str(error.value)


def test_languages_are_told_apart_and_the_table_has_them(
    tmp_path: Path, quiet: RunOptions, write: Callable[..., Path]
) -> None:
    texts = {
        "en": "The miller grinds the grain in the early morning, and the baker buys the flour.",
        "de": "Der Müller mahlt das Korn am frühen Morgen, und der Bäcker kauft das Mehl.",
        "fr": "Le meunier moud le grain de bon matin,\net le boulanger achète la farine.",
        "zh": "中国的农民在秋天收获小麦，然后把它们送到磨坊，这里的工人会把小麦磨成面粉。",
    }
    write(
        tmp_path / "corpus/web/a.jsonl",
        [{"text": text, "id": name} for name, text in {**texts, "": "xqz 1 2 3"}.items()],
    )
    own = tmp_path / "own.toml"
    own.write_text('language = { allow = ["en", "fr"], min_score = 0.65 }')
    with sandboxed():
        filter_quality(tmp_path / "corpus", tmp_path / "out", str(own), quiet)
    assert [document.text for document in read_corpus(tmp_path / "out")] == [texts["en"], texts["fr"]]
    rows = pq.read_table(tmp_path / "out.removed.parquet").to_pylist()
    assert [(row["rule"], row["detail"]) for row in rows[:2]] == [("language", "de"), ("language", "zh")]
    assert rows[0]["value"] == 0 and rows[2]["value"] < 0.65
    assert [row["id"] for row in rows] == ["de", "zh", ""]  # the user's own


def test_lists_of_words_and_domains_are_inputs(tmp_path: Path, quiet: RunOptions, write: Callable[..., Path]) -> None:
    rows: list[dict[str, object]] = [
        {"text": "good grain", "url": "https://www.mill.example/a"},
        {"text": "good Chaff, good", "url": "http://mill.example:80/b"},
        {"text": "chaff and tares", "url": "mill.example"},
        {"text": "good bread", "url": "https://shop.spam.example/?q=1"},
        {"text": "good flour", "url": "https://notspam.example/"},
        {"text": "good oven", "url": None},
        {"text": "good oven", "url": "http://[broken"},
    ]
    write(tmp_path / "corpus/web/a.jsonl", rows)
    (tmp_path / "bad.txt").write_text("\ufeffChaff\n# words\nTares  # and more\n\n")
    (tmp_path / "domains.txt").write_text("spam.example\n")
    own = tmp_path / "own.toml"
    own.write_text('listed_urls = { file = "domains.txt" }\nlisted_words = { file = "bad.txt", max = 0.4 }\n')

    def judge() -> None:
        filter_quality(tmp_path / "corpus", tmp_path / "out", str(own), quiet)

    def kept() -> list[int]:
        return [row for row in range(len(rows)) if row not in removed_rows()]

    def removed_rows() -> dict[int, str]:
        table = pq.read_table(tmp_path / "out.removed.parquet").to_pylist()
        return {row["row"]: row["detail"] for row in table}

    with sandboxed():
        judge()
    assert kept() == [0, 1, 4, 5, 6] and removed_rows() == {2: "", 3: "spam.example"}
    (tmp_path / "domains.txt").write_text("example\n")
    judge()
    assert kept() == [5, 6]


def test_an_unknown_recipe_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"recipe 'gofer': expected .* did you mean gopher\?"):
        load_recipe("gofer")
    with pytest.raises(UsageError, match=r"none\.toml"):
        load_recipe(str(tmp_path / "none.toml"))


def _corpus(folder: Path, write: Callable[..., Path]) -> Path:
    texts = [PLAIN, "too short", "\n".join(LINES * 3), "mail me@example.net " + PLAIN, ""]
    for name in ("a", "b"):
        write(folder / "web" / f"{name}.jsonl", [{"text": text, "n": n} for n, text in enumerate(texts)])
    return folder


def test_every_document_is_written_or_in_the_table_with_its_rule_and_value(
    tmp_path: Path, quiet: RunOptions, write: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, own = _corpus(tmp_path / "corpus", write), tmp_path / "own.toml"
    own.write_text("words.min = 50\nrepeated_lines.max = 0.3\npersonal = { mail = true }")
    with sandboxed():
        counts = filter_quality(corpus, tmp_path / "out", str(own), quiet)
    assert {reason: counts.total(reason).documents for reason in counts.reasons} == {
        "read": 10, "written": 4, "words": 4, "repeated_lines": 2,
    }  # fmt: skip
    table = pq.read_table(tmp_path / "out.removed.parquet").to_pylist()
    assert [(row["row"], row["rule"], round(row["value"], 3)) for row in table if row["file"] == "web/a.jsonl"] == [
        (1, "words", 2), (2, "repeated_lines", 0.667), (4, "words", 0),
    ]  # fmt: skip
    kept = [document.text for document in read_corpus(tmp_path / "out")]
    assert kept == [PLAIN, "mail email@example.com " + PLAIN] * 2
    again = filter_quality(corpus, tmp_path / "out", str(own), quiet)
    assert json.dumps(str(again)) == json.dumps(str(counts))
    filter_quality(corpus, tmp_path / "out", str(own), replace(quiet, quiet=False))
    assert "personal data replaced in the documents written: 2 mail" in capsys.readouterr().err


def measure_hostile_texts(size: int) -> None:
    """Apply each step of a recipe to texts of `size` characters on which a careless pattern takes quadratic time."""
    for unit in ("(", "a.", "a ", ".", "a@", "'s", "a-", "1.2."):
        text = unit * (size // len(unit))
        for step in load_recipe("fineweb").steps:
            if isinstance(step, Bounds):
                MEASURES[step.name](TextMeasures(text, WordSplitter()))
            else:
                step.rewrite(text)


@pytest.mark.thorough
def test_no_pattern_hangs_in_hostile_texts() -> None:
    """Of a million characters a pattern of quadratic time would take hours; linear ones take half a minute."""
    code = f"from {__name__} import measure_hostile_texts; measure_hostile_texts(1_000_000)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, timeout=patience(600))
