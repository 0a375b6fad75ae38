"""The templates of the report and the browser: every text of a user is shown as it is, and is never HTML."""

import json
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from jinja2 import UndefinedError
from rich.text import Text

from gristmill.io.documents import DocKey
from gristmill_cli.browse.marks import KeepMarks
from gristmill_cli.browse.pages import Pages
from gristmill_cli.browse.tables import RunTables
from gristmill_cli.report import page as parts
from gristmill_cli.report.page import NOTHING, Number
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.pages import Elements
from tests.gristmill_cli.test_report_training import write_run

HOSTILE = [
    "<script>document.title = 1</script>",
    '"><img src=x onerror="alert(1)">',
    "' autofocus onfocus='alert(1)",
    "javascript:alert(1)",
    "{{ 7 * 7 }}{% raw %}",
    "&lt;b&gt; &amp; </style></title>",
]
NAMES = [text.replace("/", "") for text in HOSTILE]  # of files and sources
TAGS = {"a", "b", "blockquote", "body", "button", "details", "div", "figure", "form", "h1", "h2", "h3", "head", "html"}
TAGS |= {"input", "main", "mark", "nav", "meta", "p", "section", "style", "summary", "table", "td", "th", "title", "tr"}
SVG_TAGS = {"svg", "defs", "clippath", "g", "path", "rect", "text", "tspan", "use", "style"}
ATTRIBUTES = {"action", "class", "content", "charset", "data-record", "data-value", "disabled", "href", "http-equiv"}
ATTRIBUTES |= {"id", "lang", "method", "name", "placeholder", "size", "style", "type", "value"}


def check(content: str, texts: list[str]) -> Elements:
    """The elements of a page: only those of templates, with links to this server alone; and each text is shown."""
    elements = Elements(content)
    outside = [(tag, attributes) for tag, attributes in elements.tags if tag not in SVG_TAGS]
    assert {tag for tag, _ in outside} <= TAGS
    assert {name for _, attributes in outside for name in attributes} <= ATTRIBUTES
    assert {name for _, attributes in elements.tags for name in attributes if name.startswith("on")} == set()
    for _, attributes in outside:
        assert (attributes.get("href") or "/").startswith(("/", "#")) and (attributes.get("action") or "/").startswith(
            "/"
        )
    for text in texts:
        assert text in elements.text, text
    return elements


@pytest.mark.parametrize("text", HOSTILE)
def test_each_part_shows_a_text_as_it_is(text: str) -> None:
    number = Number(1, text, record=text)
    marked = Elements(str(parts.marked(Text.assemble("before ", (text, "bold"), text))))
    assert marked.text == f"before {text}{text}" and [tag for tag, _ in marked.tags] == ["mark"]
    made = {
        "heading": parts.heading(text),
        "paragraph": parts.paragraph(text, text),
        "warnings": parts.warnings([(text, text)]),
        "table": parts.table([text], [[text, number]], text),
        "section": parts.section(text, parts.paragraph(text)),
        "figure": parts.figure(text, NOTHING, parts.table([text], [])),
        "tiles": parts.tiles({text: number}),
        "side_by_side": parts.side_by_side(text, text),
        "fold": parts.fold(text, parts.paragraph(text)),
        "quotation": parts.quotation(text, text, text),
        "comparison": parts.comparison(text, text, text),
        "page": parts.page(text, [parts.paragraph(text)]).decode(),
    }
    for name, content in made.items():
        elements = check(str(content), [text])
        assert name != "table" or {"data-value": "1", "data-record": text} in [them for _, them in elements.tags]


def test_a_text_that_is_no_part_is_escaped_even_where_a_part_is_expected() -> None:
    content = parts.page("title", ["<b>no part</b>"]).decode()  # type: ignore[list-item]
    assert "<b>no part</b>" in check(content, []).text


def test_a_template_without_one_of_its_values_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'message' is undefined"):
        parts.render("browse/message.html", title="gristmill", has_link=False)


def test_a_lone_surrogate_is_replaced() -> None:
    assert b"a ? b" in parts.page("title", [parts.paragraph("a \ud800 b")])


@pytest.fixture
def browsed(tmp_path: Path) -> Path:
    """A run whose tables have hostile names everywhere; the texts of its documents are no longer there."""
    (tmp_path / "dup").mkdir()
    (tmp_path / "run.json").write_text(
        json.dumps({"corpus": "corpus", "dedup": {}, "decontaminate": {"against": ["items"]}})
    )
    files = [f"{name}/a.jsonl" for name in NAMES]
    rows = list(range(len(files)))
    kept = {"kept_file": files[::-1], "kept_row": rows, "similarity": [0.5] * len(files)}
    tables = {
        "dup/duplicates.parquet": {"file": files, "row": rows, **kept},
        "dup/connected_components.parquet": {"cluster": rows, "file": files, "row": rows},
        "normalized.removed.parquet": {"file": files, "row": rows, "rule": HOSTILE, "value": [0.5] * len(files)},
        "decontaminated.contamination.parquet": {
            "file": files, "row": rows, "benchmark": HOSTILE, "item": HOSTILE, "match": HOSTILE,
            "share": [0.5] * len(files), "text": HOSTILE, "item_text": HOSTILE,
        },
    }  # fmt: skip
    for name, columns in tables.items():
        pq.write_table(pa.table(columns), tmp_path / name)
    return tmp_path


def test_the_browser_shows_hostile_names_and_texts_as_they_are(browsed: Path) -> None:
    marks = KeepMarks(None)
    for row, name in enumerate(NAMES):
        marks.set(DocKey(f"{name}/a.jsonl", row), "keep")
    with RunTables(browsed) as tables:
        pages = Pages(tables, marks)
        for name in ("clusters", "duplicates", "rules", "spans"):
            content = pages.show(name, {})
            assert content is not None
            elements = check(content.decode(), NAMES if name in ("clusters", "duplicates") else HOSTILE)
            keys = {
                key
                for _, them in elements.tags
                for key in parse_qs(urlsplit(them.get("href") or "").query).get("key", [])
            }
            assert name == "clusters" or keys == {f"{file}/a.jsonl@{row}" for row, file in enumerate(NAMES)} | (
                {f"{file}/a.jsonl@{row}" for row, file in enumerate(NAMES[::-1])} if name == "duplicates" else set()
            )
        for number, text in enumerate(HOSTILE):
            for name, query in {
                "": {}, "cluster": {"place": str(number), "first": "0"}, "rules": {"rule": text, "q": text},
                "spans": {"benchmark": text, "q": text}, "duplicates": {"q": text, text: text},
                "document": {"key": f"{NAMES[number]}/a.jsonl@{number}", "of": "duplicates", text: text},
            }.items():  # fmt: skip
                content = pages.show(name, query)
                assert content is not None
                elements = check(
                    content.decode(), [f"{NAMES[number]}/a.jsonl"] if name in ("cluster", "document") else []
                )
                values = [attributes.get("value") for tag, attributes in elements.tags if tag == "input"]
                assert "q" not in query or text in values


def test_the_reports_show_hostile_names_and_texts_as_they_are(tmp_path: Path) -> None:
    for name in NAMES:
        folder = tmp_path / "corpus" / name
        folder.mkdir(parents=True)
        texts = [f"{text} " + " ".join(f"{row}{name[:3]}w{at}" for at in range(40)) for row, text in enumerate(HOSTILE)]
        texts += [f"{text} more" for text in texts]
        (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    out = tmp_path / '"><script>'
    config = RunConfig(
        tmp_path / "corpus", out, workers=1, dedup=Dedup(verify="none", exact=False), mix=Mix(holdout=0.1),
        filter=Filter(threshold=10), tokenizer=Tokenizer(vocab_size=400, exact=False),
    )  # fmt: skip
    run(config)
    report((out,))
    check((out / "report.html").read_text(), [*NAMES, out.name])
    trained = [write_run(tmp_path / "trained" / name, 100, 0.25) for name in NAMES]
    for folder, text in zip(trained, HOSTILE, strict=True):
        records = [{"kind": "eval", "step": 100, "loss": 3.0, "sources": {text: {"loss": 3.0}}, "text": text}]
        with (folder / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(record) + "\n" for record in records)
    report(trained, tmp_path / "trained.html")
    check((tmp_path / "trained.html").read_text(), [*NAMES, *HOSTILE])
