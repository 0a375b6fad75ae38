"""The recipe fineweb2: each document is judged by the limits, stop words and words of its own language."""

import json
import re
from functools import partial
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from gristmill.io.readers import read_corpus
from gristmill_cli.preview import preview
from gristmill_cli.run import run
from gristmill_cli.run_config import Mix, RunConfig, Tokenizer
from preprocessing.filter_quality import filter_quality, removed_path
from preprocessing.quality.bounds import Bounds, LanguageBounds
from preprocessing.quality.languages import LanguageSplitter, read_table, rules_of, split_any, split_korean
from preprocessing.quality.recipe import load_recipe, read_recipe
from preprocessing.quality.words import WordSplitter
from tests.preprocessing.test_decontaminate import write

OPTIONS = RunOptions(workers=1, quiet=True)
TABLE = Path(__file__).parents[2] / "preprocessing/quality/recipes/fineweb2.jsonl"
GERMAN = (
    "Die Mühle am Fluss mahlt seit dem Jahr {n} das Korn der Bauern aus den Dörfern. Im Herbst kommen die"
    " Wagen schon vor dem Morgen, und der Müller steht mit seiner Laterne in der Tür. Er wiegt die Säcke,"
    " schreibt das Gewicht in ein Buch und öffnet dann das Wehr. Das Wasser fällt auf das Rad, das Rad "
    "dreht die Welle, und von oben rieselt das Korn zwischen die Steine. Am Abend ist die Luft weiß von "
    "Mehl, und die Kinder des Müllers tragen kleine Brote nach Hause."
)
WITHOUT_STOP_WORDS = (
    "Mühlen mahlen Korn Bauern bringen Säcke. Müller öffnen Tore Wasser fällt schnell. Räder drehen "
    "langsam Steine reiben Körner. Mehl staubt überall Kinder tragen Brote. Frauen backen Kuchen Männer "
    "schleppen Holz. Hunde bellen laut Katzen jagen Mäuse. Bäche fließen talwärts Winde wehen kräftig. "
    "Wolken ziehen westwärts Pferde ziehen Wagen. Lehrlinge fegen Böden Glocken läuten abends. Laternen "
    "leuchten hell Nachbarn erzählen Geschichten."
)
CHINESE = (
    "这座磨坊在河边已经有{n}年的历史了。每年秋天，农民们把粮食从村子里运来，磨坊主在门口等着他们。他先称一称袋子，"
    "然后把重量写在本子上，最后打开水闸。水落在轮子上，轮子带动了轴，粮食就从上面慢慢地流到石磨中间。到了晚上，"
    "空气里都是白色的面粉，孩子们拿着小面包回家。他们的母亲也在等着他们，因为家里的人都喜欢刚刚做好的面包。"
)
THAI = (
    "โรงสีริมแม่น้ำแห่งนี้มีอายุ {n} ปีแล้ว และทุกปีในฤดูใบไม้ร่วงชาวนาจะนำข้าวมาจากหมู่บ้าน "
    "เจ้าของโรงสีจะรออยู่ที่ประตูและชั่งน้ำหนักของกระสอบ "
    "จากนั้นเขาจะเขียนน้ำหนักในสมุดและเปิดประตูน้ำ น้ำจะตกลงบนกังหันและกังหันจะหมุนเพลา "
    "ข้าวจะไหลลงมาระหว่างหินโม่ ในตอนเย็นอากาศเต็มไปด้วยแป้งสีขาว และเด็ก ๆ "
    "จะถือขนมปังก้อนเล็กกลับบ้านไปหาแม่ของพวกเขา เพราะทุกคนในบ้านชอบขนมปังที่ได้ทำเสร็จใหม่"
)
KOREAN = (
    "강가에 있는 물레방앗간 {n}호는 오래전에 지어졌다. 해마다 가을이 되면 농부들이 마을에서 곡식을 싣고 온다. "
    "방앗간 주인은 문 앞에서 그들을 기다린다. 그는 먼저 자루의 무게를 재고 공책에 적은 다음 물길을 연다. "
    "물이 바퀴 위로 떨어지면 바퀴가 굴대를 돌리고, 곡식은 위에서 맷돌 사이로 천천히 흘러내린다. "
    "저녁이 되면 공기는 하얀 밀가루로 가득하고, 아이들은 작은 빵을 들고 집으로 돌아간다. "
    "어머니는 갓 구운 빵을 좋아하는 식구들을 위해 상을 차린다. 겨울에는 강이 얼어서 바퀴가 멈추고, 모두 봄을 기다린다."
)
ENGLISH = (
    "The mill on the river has ground the grain of the farmers for {n} years. In autumn the carts come "
    "before the day, and the miller stands with his lamp in the door. He weighs the sacks, writes the "
    "weight in a book and opens the gate. The water falls on the wheel, the wheel turns the shaft, and "
    "the grain runs between the stones. That is how it will be."
)


def test_the_table_has_the_published_numbers() -> None:
    table = read_table(TABLE)
    assert len(table.languages) == 1930  # of FineWeb2's configurations, and English
    german, thai, chinese = (table.find(name, "") for name in ("deu_Latn", "tha_Thai", "cmn_Hani"))
    assert german and thai and chinese
    names = ("language_score", "dup_line_frac", "top_2_gram", "dup_10_grams", "line_punct_thr", "new_line_ratio")
    names += ("min_avg_word_length", "max_avg_word_length", "max_non_alpha_words_ratio")
    assert [german.number(name) for name in names] == [0.821, 0.263, 0.169, 0.098, 0.0, 0.152, 0, 15, 0.774]
    assert [thai.number(name) for name in names] == [0.9, 0.349, 0.221, 0.111, 0.0, 0.153, 2, 10, 0.9]
    assert [chinese.number(name) for name in names[4:]] == [0.106, 0.178, 1, 5, 0.735]
    assert list(thai.values["stop_words"]) == ["ใน", "ที่", "และ", "ของ", "เป็น", "มี", "การ", "ได้"]
    english = table.find("en", "")
    assert english is not None
    of_fineweb = {step.name: step for step in load_recipe("fineweb").steps if isinstance(step, Bounds)}
    for step in load_recipe("fineweb2").steps:  # of English FineWeb's own limits
        if isinstance(step, LanguageBounds):
            own = step.of(english)
            assert (own.min, own.max) == (of_fineweb[step.name].min, of_fineweb[step.name].max)


@pytest.mark.parametrize(
    ("label", "text", "name"),
    [
        ("de", "Mühle", "deu_Latn"), ("deu", "Mühle", "deu_Latn"), ("de-AT", "Mühle", "deu_Latn"),
        ("sr", "млин", "srp_Cyrl"),
        ("sr", "mlin", "srp_Latn"), ("hi", "चक्की", "hin_Deva"), ("hi", "chakki", "hin_Latn"),
        ("bn", "কল", "ben_Beng"), ("zh-Hans", "磨坊", "cmn_Hani"),
        ("no", "mølle", "nob_Latn"), ("als", "mulli", "als_Latn"), ("qqq", "Qapla", ""),
        ("", "Mühle", ""),
    ],
)  # fmt: skip
def test_labels_of_a_language(label: str, text: str, name: str) -> None:
    found = read_table(TABLE).find(label, text)
    assert (found.name if found else "") == name


def test_the_models_own_codes_come_first() -> None:
    found = read_table(TABLE).find("als", "Müli", is_of_model=True)
    assert found is not None and found.name == "gsw_Latn"


def test_stop_words_are_words() -> None:
    """No language has stop words that its splitter never finds: its documents would all go."""
    lost = dict[str, list[str]]()
    for language in read_table(TABLE).languages:
        stop_words: list[str] = language.values["stop_words"]
        rules = rules_of(language.name)
        split = split_korean if language.name == "kor_Hang" else partial(split_any, rules=rules)
        never = [word for word in stop_words if word not in split(word)]
        if len(never) > 2 / 3 * len(stop_words):
            lost[language.name] = never
    assert not lost


def test_words_of_any_language() -> None:
    assert split_any("โรงสีริมแม่น้ำ") == ["โรง", "สี", "ริม", "แม่น้ำ"]
    assert split_any("磨坊在河边。") == ["磨坊", "在", "河", "边", "。"]
    assert split_any("水車が回る") == ["水車", "が", "回る"]
    assert split_any("བོད་སྐད་དང་ཡིག།") == ["བོད་", "སྐད་", "དང་", "ཡིག", "།"]
    assert split_korean("강가에서") == ["강가", "에서"] and split_any("강가에서") == ["강가에서"]
    splitter = LanguageSplitter()
    assert splitter.of("kor_Hang").split("밀가루를, 磨坊 Linux").length.tolist() == [3, 1, 1, 2, 5]
    assert splitter.of("deu_Latn").split("im Haus").length.tolist() == [2, 4]  # in English im is i'm
    assert splitter.of("eng_Latn").split("im there").length.tolist() == WordSplitter().split("im there").length.tolist()
    assert WordSplitter().split("im Haus").length.tolist() == [1, 1, 4]


WORDS_OF_DATATROVE = [  # 0.10.1, as its filters of these languages see them
    (
        "deu",
        "Der Müller (und Helfer/innen) mahlt „feines“ Mehl; die E-Mail steht in Datei(en) --help.",
        "Der|Müller|(|und|Helfer|/|innen|)|mahlt|„|feines|“|Mehl|;|die|E-Mail|steht|in|Datei|(|en|)|--help|.",
    ),
    (
        "spa",
        "¿Dónde está el molino-museo? ¡Aquí! Cuesta 3,50 € y abre de 9:00 a 14:00 (lunes-viernes).",
        "¿|Dónde|está|el|molino-museo|?|¡|Aquí|!|Cuesta|3,50|€|y|abre|de|9:00|a|14:00|(|lunes-viernes|)|.",
    ),
    (
        "nld",
        "De molen/het huis in Noord-Holland draait 's ochtends; zie foto(s) en 'bijlage'.",
        "De|molen/het|huis|in|Noord-Holland|draait|'s|ochtends|;|zie|foto|(|s|)|en|'|bijlage|'|.",
    ),
    (
        "por",
        "O moinho-de-vento fica perto; vê-lo é fácil: custa R$ 5,00/pessoa.",
        "O|moinho-de-vento|fica|perto|;|vê-lo|é|fácil|:|custa|R$|5,00|/|pessoa|.",
    ),
    (
        "rus",
        "Мельница «Старая» работает с 8:00 до 17:00, кое-что мелют и/или продают (недорого).",
        "Мельница|«|Старая|»|работает|с|8:00|до|17:00|,|кое|-|что|мелют|и|/|или|продают|(|недорого|)|.",
    ),
    (
        "ces",
        "Mlýn mele obilí česko-polské; viz http://mlyn.example/cesta a e-mail!",
        "Mlýn|mele|obilí|česko|-|polské|;|viz|http://mlyn.example/cesta|a|e|-|mail|!",
    ),
    (
        "ukr",
        "Млин п'ять днів меле зерно, а хтось-таки купує (дешево).",
        "Млин|п'ять|днів|меле|зерно|,|а|хтось|-|таки|купує|(|дешево|)|.",
    ),
    (
        "tur",
        "Değirmen Ali'nin köyünde; un/kepek 5,5 kg-lık torbalarda satılır.",
        "Değirmen|Ali'nin|köyünde|;|un|/|kepek|5,5|kg|-|lık|torbalarda|satılır|.",
    ),
    ("hun", "A malom-tó partján/mellett áll; a liszt 5 kg-os.", "A|malom-tó|partján/mellett|áll|;|a|liszt|5|kg-os|."),
    (
        "fin",
        "Mylly jauhaa viljaa/jauhoja; linja-auto tulee klo 9:30.",
        "Mylly|jauhaa|viljaa|/|jauhoja|;|linja-auto|tulee|klo|9:30|.",
    ),
    ("ell", "Ο μύλος αλέθει σιτάρι-καλαμπόκι· «καλό» αλεύρι;", "Ο|μύλος|αλέθει|σιτάρι-καλαμπόκι|·|«|καλό|»|αλεύρι|;"),
    (
        "fra",
        "L'eau qu'il faut n'est pas « loin » : l'équipe part à 10h30.",
        "L'|eau|qu'|il|faut|n'|est|pas|«|loin|»|:|l'|équipe|part|à|10h30|.",
    ),
]


@pytest.mark.parametrize(("language", "text", "words"), WORDS_OF_DATATROVE)
def test_words_are_datatroves_in_languages_with_spaces(language: str, text: str, words: str) -> None:
    rules = rules_of(f"{language}_Latn")
    assert "|".join(word for piece in text.split() for word in split_any(piece, rules)) == words
    splitter = LanguageSplitter().of(f"{language}_Latn")
    assert splitter.split(text).length.tolist() == [len(word) for word in words.split("|")]


def test_each_document_is_judged_by_its_own_language(tmp_path: Path) -> None:
    texts = {"de": GERMAN, "zh": CHINESE, "th": THAI, "ko": KOREAN, "en": ENGLISH}
    foreign = {"short": "Die Mühle mahlt das Korn.", "no stop words": WITHOUT_STOP_WORDS}
    records = [{"text": text.format(n=120 + n), "of": code} for n in range(3) for code, text in texts.items()]
    records += [{"text": text, "of": "de"} for text in foreign.values()]
    write(tmp_path / "corpus/web/a.jsonl", records)
    counts = filter_quality(tmp_path / "corpus", tmp_path / "out", "fineweb2", OPTIONS)
    assert [document.value("of") for document in read_corpus(tmp_path / "out")] == ["de", "zh", "th", "ko", "en"] * 3
    removed = pq.read_table(removed_path(tmp_path / "out")).to_pylist()
    assert [(row["rule"], row["detail"]) for row in removed] == [("top_2_gram", "deu_Latn"), ("stop_words", "deu_Latn")]
    assert counts.total("stop_words").documents == 1
    by_english = load_recipe("fineweb")
    assert by_english.judge(GERMAN, WordSplitter()).rule and by_english.judge(CHINESE, WordSplitter()).rule


def recipe_of(folder: Path, languages: str, rules: str = 'stop_words.min = "least"') -> str:
    """A recipe with a table of two languages, in which a document needs so many stop words."""
    lines = [
        {"language": "deu_Latn", "code": "de", "least": 2, "score": 0.5, "stop_words": ["der", "und", "im"]},
        {"language": "swe_Latn", "code": "sv", "least": 1, "score": 0.9, "stop_words": ["och"]},
    ]
    (folder / "table.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "own.toml").write_text(f"languages = {{ {languages} }}\n{rules}\n")
    return str(folder / "own.toml")


def test_a_field_names_the_language_and_its_probability(tmp_path: Path) -> None:
    languages = (
        'table = "table.jsonl", field = "lang", score_field = "p", min_score = "score", stop_words = "stop_words"'
    )
    recipe = recipe_of(tmp_path, languages)
    records = [
        ("im Haus und Hof", "deu_Latn", 0.6, ""), ("und und und", "de", 0.6, "stop_words"),
        ("hus och hem", "sv", 0.95, ""), ("hus och hem", "sv", 0.6, "language"),
        ("hus och hem", "sv", None, "language"),
        ("casa e campo", "pt", 1.0, "language"), ("im Haus und Hof", None, 1.0, "language"),
    ]  # fmt: skip
    write(tmp_path / "corpus/web/a.jsonl", [{"text": text, "lang": lang, "p": p} for text, lang, p, _ in records])
    filter_quality(tmp_path / "corpus", tmp_path / "out", recipe, OPTIONS)
    removed = {
        row["row"]: (row["rule"], row["detail"]) for row in pq.read_table(removed_path(tmp_path / "out")).to_pylist()
    }
    assert [removed.get(row, ("", ""))[0] for row in range(len(records))] == [rule for *_, rule in records]
    assert removed[5] == ("language", "pt") and removed[3] == ("language", "swe_Latn")


@pytest.mark.parametrize(
    ("languages", "rules", "message"),
    [
        (
            'tables = "a"',
            "words.min = 1",
            "languages: expected languages = { table = 'languages.jsonl' }, got {'tables'",
        ),
        ('table = "none.jsonl"', 'words.min = "least"', "none.jsonl: expected a table of languages, got No such file"),
        ('table = "table.jsonl", fild = "a"', "words.min = 1", "languages: unknown key 'fild'; did you mean field"),
        ('table = "table.jsonl", field = 3', "words.min = 1", "languages.field: expected languages = { table"),
        ('table = "table.jsonl"', 'words.min = "fewest"', "words.min: expected a value 'fewest' of each language"),
        (
            'table = "table.jsonl", stop_words = "least"',
            "words.min = 1",
            "languages.stop_words: expected a value 'least'",
        ),
        ('table = "own.toml"', "words.min = 1", "own.toml line 1: expected an object such as"),
    ],
)
def test_tables_that_are_none_are_refused(tmp_path: Path, languages: str, rules: str, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        load_recipe(recipe_of(tmp_path, languages, rules))


def test_a_limit_by_name_needs_a_table(tmp_path: Path) -> None:
    (tmp_path / "own.toml").write_text('words.min = "least"\n')
    with pytest.raises(UsageError, match=r"words.min: expected a number of 0 or more, got 'least'"):
        load_recipe(str(tmp_path / "own.toml"))


def test_a_preview_by_language(tmp_path: Path) -> None:
    records = [{"text": text.format(n=n)} for n in range(4) for text in (GERMAN, CHINESE, THAI)]
    records += [{"text": "Die Mühle mahlt das Korn."}]
    write(tmp_path / "corpus/web/a.jsonl", records)
    console = Console(width=120)
    with console.capture() as printed:
        console.print(preview("fineweb2", tmp_path / "corpus"))
    lines = [" ".join(line.split()) for line in printed.get().splitlines()]
    assert "language documents removed share most by" in lines
    assert "deu_Latn 5 1 20.0% top_2_gram 1" in lines and "tha_Thai 4 0 0.0%" in lines and "cmn_Hani 4 0 0.0%" in lines
    assert any(line.startswith("stop_words 2…") for line in lines)
    assert any(line.startswith("mean_word_length by language") for line in lines)


def test_one_run_judges_each_by_its_language(tmp_path: Path) -> None:
    records = [{"text": text.format(n=n)} for n in range(30) for text in (GERMAN, CHINESE, THAI, ENGLISH)]
    records += [{"text": "Die Mühle mahlt das Korn."}] * 3
    write(tmp_path / "corpus/web/a.jsonl", records)
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, recipe="fineweb2", mix=Mix(holdout=0.05),
        tokenizer=Tokenizer(vocab_size=900, exact=False), until="normalize_text",
    )  # fmt: skip
    run(config)
    rows = pq.read_table(tmp_path / "out/normalized.removed.parquet").to_pylist()
    assert [(row["rule"], row["detail"]) for row in rows] == [("top_2_gram", "deu_Latn")] * 3
    assert read_recipe("fineweb2").startswith("# Penedo et al. 2025")
