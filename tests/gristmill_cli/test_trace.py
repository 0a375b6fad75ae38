"""`gristmill trace`: each record's way agrees with the funnel, and leads to its own tokens and back."""

import gzip
import hashlib
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from warcio.statusandheaders import StatusAndHeaders
from warcio.warcwriter import WARCWriter

from gristmill.errors import InputError, UsageError
from gristmill.io.documents import DocKey, Document, Slice
from gristmill.io.readers import read_corpus
from gristmill.io.token_shards import Manifest, open_shards
from gristmill_cli.documents import id_search
from gristmill_cli.documents.trace import trace
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.documents.way import Fate
from gristmill_cli.run import run
from gristmill_cli.run_config import Apply, Dedup, Filter, Lines, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import remove_record
from gristmill_cli.stages.pipeline import plan_stages
from tests.gristmill_cli.corpus import make_corpus, write_records
from tests.gristmill_cli.documentation import commands, shell
from tests.gristmill_cli.in_process import gristmill

NOTICE = "All rights are reserved by the miller and his heirs, now and for ever."


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """A finished run with rules, repeated lines, copies and 2.5 epochs; malformed records shift the rows."""
    root = tmp_path_factory.mktemp("trace")
    corpus = make_corpus(root / "corpus")
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(f"{word}{row % 25}" for word in words) for row in range(40)]
    texts[7] = NOTICE
    texts[3] += f"\n{NOTICE}"
    texts[9] += f"\n{NOTICE}"
    texts[11] = "too few words"
    (corpus / "own").mkdir()
    write_records(corpus / "own" / "a.jsonl", [{"text": text, "id": f"own-{row}"} for row, text in enumerate(texts)])
    with (corpus / "own" / "a.jsonl").open() as file:
        lines = file.readlines()
    lines.insert(2, "no JSON\n")
    (corpus / "own" / "a.jsonl").write_text("".join(lines))
    (root / "own.toml").write_text("words = { min = 6 }\n")
    config = RunConfig(
        corpus, root / "out", workers=1, recipe=str(root / "own.toml"), max_malformed=0.1, filter=Filter(100),
        lines=Lines(unit="line", min_count=3), dedup=Dedup(exact=True), mix=Mix({"book": 2.5, "c4": 0.5}, holdout=0.1),
        tokenizer=Tokenizer(vocab_size=420),
    )  # fmt: skip
    run(config)
    return config


def outcome_of(fates: list[Fate]) -> str:
    """Return the reason under which the funnel counts a document, copies aside."""
    decided = [fate for fate in fates if fate.stage != "--keep_list"]  # the line for a list is no reason
    last = decided[-1].outcome
    if last.startswith("removed: lost"):
        return "emptied"
    if last.startswith("removed: "):
        return last.removeprefix("removed: ").partition(" (")[0]
    if fates[-1].stage == "mix":
        return last.removeprefix("left out: ")
    return "holdout" if "tokens/holdout" in last else "train"


def test_the_ways_of_all_records_are_those_of_the_funnel(config: RunConfig) -> None:
    tracer = Tracer(config)
    found = Counter[tuple[str, str]]()
    files = [file for source in ("own", "book", "c4") for file in sorted((config.corpus / source).rglob("*.jsonl*"))]
    for file in files:
        name = file.relative_to(config.corpus).as_posix()
        content = gzip.decompress(file.read_bytes()) if file.suffix == ".gz" else file.read_bytes()
        for row in range(content.count(b"\n")):
            ways = [fates for title, fates in tracer.find(f"{name}@{row}") if title == f"{name}@{row}"]
            assert len(ways) == 1, (name, row)
            found[name.partition("/")[0], outcome_of(ways[0])] += 1
    went = json.loads((config.out / "funnel.json").read_text())["went"]
    for source in ("own", "book", "c4"):
        others = {reason: tally["documents"] for reason, tally in went[source].items() if "documents" in tally}
        for reason in ("malformed: broken JSON", "words", "short", "duplicate", "left out by weight", "holdout"):
            assert found[source, reason] == others.get(reason, 0), (source, reason)
    assert found["own", "words"] == 1 and found["own", "duplicate"] > 10 and found["c4", "left out by weight"] > 20
    assert found["own", "emptied"] == 1


def test_places_are_those_of_the_tokens_and_lead_back(config: RunConfig) -> None:
    tracer = Tracer(config)
    order = tracer._token_order
    model = sentencepiece.SentencePieceProcessor(model_file=str(config.out / "tokenizer/tokenizer.model"))
    text_of = {document.key: document.text for document in read_corpus(config.out / "lines")}
    places = {key: order.places_of(key) for key in text_of}
    seen = set[tuple[str, int]]()
    for set_name in ("train", "holdout"):
        shards = [ids for shard in open_shards(config.out / "tokens" / set_name)[1] for ids in shard]
        for key, of_key in places.items():
            for place in of_key:
                if place.set_name == set_name:
                    assert shards[place.number].tolist()[:-1] == model.encode(text_of[key]), (key, place)
                    assert order.key_at(place) == key
                    seen.add((set_name, place.number))
        assert {number for name, number in seen if name == set_name} == set(range(len(shards)))
    assert max(len(of_key) for of_key in places.values()) == 3


@pytest.mark.thorough
def test_each_record_leads_to_its_places_and_each_place_to_its_record(config: RunConfig) -> None:
    """All records of all sources and formats, after rules, lines and copies, some mixed 2.5 times."""
    tracer = Tracer(config)
    places = dict[str, DocKey]()
    for document in read_corpus(config.corpus, on_malformed="skip"):
        ways = [fates for title, fates in tracer.find(str(document.key)) if title == str(document.key)]
        assert len(ways) == 1, document.key
        last = ways[0][-1]
        for place in last.outcome.split("; ") if last.stage == "encode" else ():
            assert place not in places
            places[place] = document.key
    for set_name in ("train", "holdout"):
        shards = Manifest.load(config.out / "tokens" / set_name).shards
        shard_places = [f"tokens/{set_name}/{shard.name}@{row}" for shard in shards for row in range(shard.documents)]
        keys = tracer.keys_in_tokens(set_name, range(len(shard_places)))
        raw = tracer.raw_keys(keys.values())
        assert {place: raw[keys[number]] for number, place in enumerate(shard_places)} == {
            place: key for place, key in places.items() if place.startswith(f"tokens/{set_name}/")
        }
    repeated = Counter(places.values())
    assert set(repeated.values()) == {1, 2, 3}
    for place, key in [*places.items()][::40]:  # one by one, as the command does
        ((title, fates),) = tracer.find(place)
        assert title == str(key) and place in fates[-1].outcome


def test_an_id_a_place_and_a_key_of_a_report_lead_to_the_raw_record(config: RunConfig) -> None:
    tracer = Tracer(config)
    ((title, fates),) = tracer.find("own-8")
    assert title == "own/a.jsonl@9"
    assert [fate.stage for fate in fates][:2] == ["normalize_text", "remove_lines"]
    ((_, by_id),) = tracer.find("own-9")
    place = next(fate.outcome for fate in by_id if fate.stage == "encode").partition(";")[0]
    ((title, by_place),) = tracer.find(place)
    assert title == "own/a.jsonl@10" and [fate.outcome for fate in by_place] == [fate.outcome for fate in by_id]
    clean = next(document for document in read_corpus(config.out / "lines") if document.own_id == "own-20")
    assert clean.key == DocKey("own/a.jsonl.zst", 18)
    assert [title for title, _ in tracer.find(str(clean.key))] == ["own/a.jsonl@21"]
    assert [title for title, _ in tracer.find("own/a.jsonl@18")] == ["own/a.jsonl@18"]  # a raw key of another one


def test_the_line_for_a_list_takes_the_document_down(config: RunConfig, tmp_path: Path, capsys) -> None:
    """Not the one that has this key in the raw corpus; and a run without the list says that it is back."""
    out = tmp_path / "out"
    shutil.copytree(config.out, out)
    ((title, fates),) = Tracer(config).find("own-8")
    (line,) = line_for(fates)
    assert title == "own/a.jsonl@9" and re.fullmatch(r"drop sha256:[0-9a-f]{32} own-8", line)
    listed = tmp_path / "take-down.txt"
    listed.write_text(f"{line}\n")
    run(replace(config, out=out, keep_list=listed))
    ((_, fates),) = Tracer(replace(config, out=out, keep_list=listed)).find("own-8")
    assert fates[-2:] == [Fate("--keep_list", "its text is in your list"), Fate("mix", "left out: in your list")]
    said = capsys.readouterr().err
    assert "had --keep_list" not in said and "FILE@ROW" not in said
    run(replace(config, out=out))
    assert "warning: the last run here had --keep_list" in capsys.readouterr().err
    ((_, fates),) = Tracer(replace(config, out=out)).find("own-8")
    assert fates[-1].stage == "encode"


def line_for(fates: list[Fate]) -> tuple[str, ...]:
    """Return the lines of a list that trace shows to take a document down."""
    (lines,) = [fate.lines for fate in fates if fate.stage == "--keep_list"]
    return lines


def test_a_document_stays_down_when_its_row_or_file_is_another(tmp_path: Path, capsys) -> None:
    """After another limit of a rule, a raw file without its first line, a renamed source; its copies, too."""
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(f"{word}of{row}" for word in words[row < 10 :]) for row in range(30)]
    texts[25] = texts[19]
    texts[20] += f"\n{NOTICE}"
    records = [{"text": text, "id": f"web-{row}"} for row, text in enumerate(texts)]
    file = tmp_path / "corpus" / "web" / "a.jsonl"
    file.parent.mkdir(parents=True)
    write_records(file, records)
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { min = 30 }\n")
    listed = tmp_path / "take-down.txt"
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(rules), filter=Filter(0), max_malformed=0.1,
        mix=Mix(holdout=0), until="mix", lines=Lines(unit="line", min_count=1000),
    )  # fmt: skip
    run(config)
    ((_, fates),) = Tracer(config).find("web-19")
    listed.write_text("".join(f"{line}\n" for line in line_for(fates)) + "# by request\n")
    ((_, fates),) = Tracer(config).find("web-20")
    (line_of_changed,) = line_for(fates)
    config = replace(config, keep_list=listed)

    def left_out() -> list[str]:
        run(config)
        tracer = Tracer(config)
        found = list[str]()
        for record in records:
            ((_, fates),) = tracer.find(record["id"])
            if fates[-1] == Fate("mix", "left out: in your list"):
                found.append(record["id"])
        return found

    assert left_out() == ["web-19", "web-25"]
    rules.write_text("words = { min = 60 }\n")  # the first ten go, and rows shift
    assert left_out() == ["web-19", "web-25"]
    rules.write_text("words = { min = 59 }\n")
    records = records[1:]
    write_records(file, records)
    assert left_out() == ["web-19", "web-25"]
    file.parent.rename(tmp_path / "corpus" / "press")
    assert left_out() == ["web-19", "web-25"]
    listed.write_text(f"{listed.read_text()}{line_of_changed}\n")
    assert left_out() == ["web-19", "web-20", "web-25"]
    file = tmp_path / "corpus" / "press" / "a.jsonl"
    records[19]["text"] += " and more"
    write_records(file, records)
    with pytest.raises(InputError, match=r"line 3: no document has the text .*`gristmill trace OUT --file .* anew"):
        run(config)
    ((_, fates),) = Tracer(config).find("web-20")
    (line_of_today,) = line_for(fates)
    assert line_of_today not in listed.read_text() and line_of_today.endswith(" web-20")
    before = listed.read_text()
    assert renewed(config.out, listed, capsys) == before.replace(line_of_changed, line_of_today)
    records[19]["id"] = "another"
    write_records(file, records)
    anew = renewed(config.out, listed, capsys)
    assert anew == before.replace(line_of_changed, f"gone{line_of_changed[4:]}")
    records[19]["id"] = "web-20"
    write_records(file, records)
    listed.write_text(anew)
    assert left_out() == ["web-19", "web-25"]
    records[19]["text"] = texts[20]
    write_records(file, records)
    assert left_out() == ["web-19", "web-20", "web-25"]
    capsys.readouterr()
    listed.write_text("drop press/a.jsonl.zst@3\n")
    assert left_out() == [records[3]["id"]]
    assert "1 document to drop by FILE@ROW: if files or rules change" in capsys.readouterr().err


def renewed(out: Path, listed: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Return a list of take-downs, written anew."""
    capsys.readouterr()
    trace(out, file=listed, lines=True)
    return capsys.readouterr().out


def test_a_list_is_renewed_after_a_rule_rewrites_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The lines lead to the same documents as before: by an id, by a row of the raw corpus, and of one kept instead."""
    words = [f"word{number}" for number in range(60)]
    texts = [" ".join(f"{word}of{row}" for word in words) + f" ask miller{row}@mills.org" for row in range(12)]
    texts[0] = "too short"
    texts[9] = texts[8].replace("word3of8 ", "")
    file = tmp_path / "corpus" / "web" / "a.jsonl"
    file.parent.mkdir(parents=True)
    write_records(file, [{"text": text, "id": f"web-{row}"} for row, text in enumerate(texts)])
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { min = 10 }\n")
    listed = tmp_path / "take-down.txt"
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, recipe=str(rules), filter=Filter(0), mix=Mix(holdout=0),
        until="mix",
    )  # fmt: skip
    run(config)
    capsys.readouterr()
    trace(config.out, ("web-3", "web/a.jsonl@5", "web-9"), lines=True)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" ", 2)[2] for line in lines] == ["web-3", "web/a.jsonl@5", "web-9", "web/a.jsonl@8"]
    listed.write_text("# by request\n" + "".join(f"{line}\n" for line in lines) + "keep web/a.jsonl.zst@2\n")
    config = replace(config, keep_list=listed)
    run(config)
    rules.write_text("words = { min = 10 }\npersonal = { mail = true }\n")
    with pytest.raises(
        InputError, match=r"no document has the text of 4 lines: line 2 \(web-3\), .*, line 5 \(web/a.jsonl@8\), so"
    ):
        run(config)
    anew = renewed(config.out, listed, capsys)
    assert anew.splitlines()[0] == "# by request" and anew.splitlines()[-1] == "keep web/a.jsonl.zst@2"
    assert [line.split()[-1] for line in anew.splitlines()] == [
        line.split()[-1] for line in listed.read_text().splitlines()
    ]
    assert anew != listed.read_text()
    listed.write_text(anew)
    assert renewed(config.out, listed, capsys) == anew
    run(config)
    down = Tracer(config).find_all([f"web-{row}" for row in range(12)])
    outcomes = {name: way.fates[-1].outcome for name, (way,) in down.items()}
    assert {name for name, outcome in outcomes.items() if outcome == "left out: in your list"} == {
        "web-3", "web-5", "web-8", "web-9"
    }  # fmt: skip


def test_many_documents_are_read_at_once(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [*(f"own-{row}" for row in range(40)), "own/a.jsonl@2", "train@3", "own-9", "nobody"]
    (tmp_path / "names.txt").write_text("# of today\n\n" + "".join(f"{name}\n" for name in names))
    alone = [(title, fates) for name in names[:5] for title, fates in Tracer(config).find(name)]
    reads = list[str]()
    read = id_search.read_documents

    def noted(part: Slice, *words: Any) -> Iterator[Document]:
        reads.append(part.name)
        return read(part, *words)

    monkeypatch.setattr(id_search, "read_documents", noted)
    with pytest.raises(UsageError, match=r"1 of 43 documents not found: .*'nobody'"):
        trace(config.out, file=tmp_path / "names.txt", json=True)
    assert len(reads) == len(set(reads)) > 3
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert list(dict.fromkeys(record["document"] for record in records)) == list(dict.fromkeys(names))
    assert "error" in records[-1] and records[-2]["stages"][-1]["stage"] == "encode"
    for record, (title, fates) in zip(records, alone, strict=False):
        assert record["key"] == title
        assert [Fate(**stage) for stage in record["stages"]] == [replace(fate, lines=()) for fate in fates]


def test_the_command_prints_each_stage(config: RunConfig) -> None:
    done = gristmill("trace", config.out, "own-11")
    assert done.returncode == 0, done.stderr
    assert "own/a.jsonl@12" in done.stdout and "removed: words (3)" in done.stdout


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ("own/a.jsonl@4000", "knows no document own/a.jsonl@4000: expected a key"),
        ("nobody", "no document with the id or url 'nobody'"),
        ("None", "no document with the id or url 'None'"),  # most documents have no url
        ("train@100000", "document 100,000 of train: expected one from 0 to"),
        ("tokens/train/tokens_00000@100000", "tokens_00000@100000: expected a document from 0 to"),
        ("tokens/train/tokens_00009@0", "has no shard tokens_00009"),
    ],
)
def test_a_document_that_is_none_is_said_so(config: RunConfig, document: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        trace(config.out, (document,))


def test_a_run_that_was_killed_in_its_first_stage_says_so(config: RunConfig, tmp_path: Path) -> None:
    killed = tmp_path / "out"
    shutil.copytree(config.out, killed, ignore=shutil.ignore_patterns("facts", "*.facts", "mix"))
    for stage in plan_stages(config):
        remove_record(killed, stage)
    with pytest.raises(UsageError, match=r"normalize_text has not finished, which notes what became of own/a.jsonl@9"):
        trace(killed, ("own-8",))


def test_two_documents_of_one_id_are_named(config: RunConfig, tmp_path: Path) -> None:
    (tmp_path / "corpus" / "web").mkdir(parents=True)
    write_records(tmp_path / "corpus" / "web" / "a.jsonl", [{"text": "some text", "id": "same"}] * 2)
    small = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(0), until="filter")
    run(small)
    with pytest.raises(
        UsageError, match=r"2 documents have the id or url 'same': give the key of one, of web/a\.jsonl@0"
    ):
        trace(small.out, ("same",))


def test_the_commands_of_the_page(config: RunConfig) -> None:
    (block,) = commands("guides/trace.md")
    block = block.replace("$OUT/run", "$OUT/out").replace("book/a.jsonl", "book/b.jsonl")
    done = shell(block, on_one_core=True, OUT=str(config.out.parent))
    assert done.returncode == 0, done.stderr
    for row in (4, 8, 10):
        assert f"own/a.jsonl@{row}\n" in done.stdout
    assert "book/b.jsonl@12" in done.stdout and "tokens/train/tokens_00000@0" in done.stdout
    assert re.search(r"^drop sha256:[0-9a-f]{32} book/b\.jsonl@\d+$", done.stdout, re.MULTILINE)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # warcio leaves temporary files open
def test_a_page_of_an_archive_is_found_beside_skipped_records_and_a_damaged_file(tmp_path: Path) -> None:
    """A skipped record has the key of the next page, and is no other fate of it; a damaged file was left out, too."""
    folder = tmp_path / "corpus" / "web"
    folder.mkdir(parents=True)
    with (folder / "a.warc.gz").open("wb") as file:  # not compressed, whatever it is called
        writer = WARCWriter(file, gzip=False)
        for status, url in (("301 Moved", "https://a.example/old"), ("200 OK", "https://a.example/new")):
            headers = StatusAndHeaders(status, [("Content-Type", "text/html")], protocol="HTTP/1.1")
            page = BytesIO(b"<p>The miller was grinding the grain in the village.</p>")
            writer.write_record(writer.create_warc_record(url, "response", payload=page, http_headers=headers))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b'{"text": "cut off", "id": "b"}\n' * 9)[:-12])
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, max_malformed=1.0, filter=Filter(0), until="filter"
    )
    run(config)
    ((title, fates),) = Tracer(config).find("https://a.example/new")
    assert title.startswith("web/a.warc.gz@") and fates[0].outcome.startswith("kept as ")
    ((title, fates),) = Tracer(config).find("https://a.example/old")
    assert title == "https://a.example/old in web/a.warc.gz"
    assert fates == [Fate("normalize_text", "removed: skipped: status other than 200")]
    ((title, fates),) = Tracer(config).find("web/b.jsonl.gz@3")
    assert title == "web/b.jsonl.gz@3"
    assert fates == [Fate("normalize_text", "left out with its file, which is damaged: truncated gz")]


def test_a_malformed_record_is_found_by_its_id(tmp_path: Path) -> None:
    folder = tmp_path / "corpus" / "web"
    folder.mkdir(parents=True)
    lines = ['{"text": "fine", "id": "a"}', '{"text": 5, "id": "b"}', '{"text": "cut", "url": "https://ä.example/", ']
    (folder / "a.jsonl").write_text("\n".join(lines))
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, max_malformed=1.0, filter=Filter(0), until="filter"
    )
    run(config)
    ((title, fates),) = Tracer(config).find("b")
    assert title == "web/a.jsonl@1" and fates[0].outcome.startswith("removed: malformed: ")
    ((title, fates),) = Tracer(config).find("https://ä.example/")
    assert title == "web/a.jsonl@2" and fates[0].outcome == "removed: malformed: broken JSON"


def test_a_document_on_which_a_function_fails_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "corpus" / "web").mkdir(parents=True)
    write_records(tmp_path / "corpus" / "web" / "a.jsonl", [{"text": "x" * size, "id": f"a{size}"} for size in (3, 4)])
    name = f"fails_{abs(hash(str(tmp_path)))}"
    function = "def f(documents):\n    for document in documents:\n        {} / (len(document.text) - 3)\n"
    (tmp_path / f"{name}.py").write_text(function.format(1) + "        yield document\n")
    monkeypatch.syspath_prepend(tmp_path)
    config = RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, apply=Apply(f"{name}:f"), max_failed=0.9, until="apply"
    )
    run(config)
    ((_, fates),) = Tracer(config).find("a3")
    assert fates[-2].outcome.startswith("removed: failed: f, ZeroDivisionError: ")
    digest = hashlib.sha256(b"xxx").hexdigest()[:32]
    assert fates[-1].stage == "--keep_list" and fates[-1].lines == (f"gone sha256:{digest} a3",)
    ((_, fates),) = Tracer(config).find("a4")
    assert fates[-1].outcome.startswith("a function of yours read it")
