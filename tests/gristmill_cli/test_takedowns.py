"""Documents that were taken down stay down, or the run says that they are back."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import InputError, UsageError
from gristmill_cli.documents.trace import trace
from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.documents.way import Fate
from gristmill_cli.run import run
from gristmill_cli.run_config import Dedup, Filter, Lines, Mix, RunConfig
from preprocessing.steps.model_score import ScoreOptions
from tests.gristmill_cli.corpus import write_records


def corpus_of(folder: Path, texts: list[str], name: str = "a.jsonl") -> Path:
    """Write a corpus with a document `web-ROW` for each text, in a file of this name."""
    (folder / "corpus" / "web").mkdir(parents=True)
    records = [{"text": text, "id": f"web-{row}"} for row, text in enumerate(texts)]
    write_records(folder / "corpus" / "web" / name, records)
    return folder / "corpus"


def texts_of(count: int) -> list[str]:
    """Return texts that resemble one another in nothing."""
    return [" ".join(f"word{number}of{row}" for number in range(60)) for row in range(count)]


def small_run(folder: Path, texts: list[str], name: str = "a.jsonl") -> RunConfig:
    """Return a run to the mix of all documents with these texts."""
    return RunConfig(
        corpus_of(folder, texts, name), folder / "out", workers=1, filter=Filter(0), mix=Mix(holdout=0), until="mix"
    )


def take_down(config: RunConfig, *names: str) -> str:
    """Return the lines that take down documents, by their ids."""
    lines = list[str]()
    for name in names:
        for _, fates in Tracer(config).find(name):
            lines += [line for fate in fates for line in fate.lines]
    return "".join(f"{line}\n" for line in lines)


def test_one_line_takes_down_a_document_and_its_exact_copy(tmp_path: Path) -> None:
    texts = texts_of(3)
    near = texts[1].replace("word59of1", "another")
    config = small_run(tmp_path, [*texts, texts[0], near])
    run(replace(config, dedup=Dedup(exact=True)))
    (line,) = take_down(config, "web-3").splitlines()
    assert line == take_down(config, "web-0").rstrip().replace("web-0", "web-3")
    assert len(take_down(config, "web-4").splitlines()) == 2  # its own, and that of the one that it resembles


def test_lines_that_are_gone_from_a_list_are_warned_of(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Also once the run was killed before its mix; a line renewed by its note is none; each line can be had again."""
    config = small_run(tmp_path, texts_of(12))
    run(config)
    lines = take_down(config, "web-2", "web-3", "web-4")
    listed = tmp_path / "take-down.txt"
    config = replace(config, keep_list=listed)

    def said_of(content: str, until: str = "mix") -> str:
        listed.write_text(content)
        capsys.readouterr()
        run(replace(config, until=until))
        said = capsys.readouterr().err
        return said.partition("warning: ")[2].partition("\n")[0]

    first, second, third = lines.splitlines()
    assert not said_of(f"{lines}drop web/a.jsonl.zst@5\n")
    assert not said_of(f"# the same\n{lines.replace('drop', 'gone')}drop web/a.jsonl.zst@5\n")
    for until in ("filter", "mix"):
        said = said_of("", until)
        assert f"{listed} lacks 4 lines of the list that the last run here had: `gone{first[4:]}`" in said, until
        assert "are in the mix again" in said
    kept = config.out / ".gristmill" / "keep_list.withdrawn.txt"
    assert kept.read_text() == f"{lines.replace('drop', 'gone')}drop web/a.jsonl.zst@5\n"
    assert not said_of("")
    assert not said_of(lines)
    assert f"{listed} lacks 1 line of the list that the last run here had: `{second}`;" in said_of(
        f"{first}\n{third}\n"
    )
    assert not said_of(f"{first}\ngone sha256:{'0' * 32}{third.partition('sha256:')[2][32:]}\n")
    run(replace(config, keep_list=None))
    said = capsys.readouterr().err
    assert f"had --keep_list {listed}, and this one has none" in said and f"({kept} keeps its lines)" in said


def test_a_document_that_a_rule_removes_can_be_taken_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its line holds when the rule lets it in, with what the recipe rewrites in it and another normal form."""
    texts = texts_of(8)
    texts[2] += " Cafe\u0301 miller@mills.org"
    texts[5] = f"{texts[5]}\nbread\nbread\nbread"
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { max = 60 }\npersonal = { mail = true }\n")
    config = replace(small_run(tmp_path, texts), recipe=str(rules))
    run(config)
    ((_, fates),) = Tracer(config).find("web-2")
    assert fates[0].outcome == "removed: words (62)"
    lines = take_down(config, "web-2", "web-5", "web-6")
    assert [line.split()[0] for line in lines.splitlines()] == ["gone", "gone", "drop"]
    capsys.readouterr()
    trace(config.out, ("web-2", "web-5", "web-6"), lines=True)
    assert capsys.readouterr().out == lines
    listed = tmp_path / "take-down.txt"
    listed.write_text(lines)
    config = replace(config, keep_list=listed)
    run(config)
    ((_, fates),) = Tracer(config).find("web-2")
    assert fates[-1] == Fate("--keep_list", "its text is in your list, which keeps it out should it come back")
    rules.write_text("words = { max = 70 }\npersonal = { mail = true }\n")
    run(config)
    for name in ("web-2", "web-5", "web-6"):
        ((_, fates),) = Tracer(config).find(name)
        assert fates[-1].outcome == "left out: in your list", name


def test_a_document_that_a_later_stage_removes_can_be_taken_down(tmp_path: Path) -> None:
    """Of a stage that compares lines, and whose input is the text as the stage before wrote it."""
    notice = "All rights are reserved by the miller and his heirs, now and for ever."
    texts = texts_of(8)
    texts[1] = texts[3] = texts[4] = notice
    config = small_run(tmp_path, texts)
    config = replace(config, lines=Lines(unit="line", min_count=2))
    run(config)
    ((_, fates),) = Tracer(config).find("web-3")
    assert fates[-2].stage == "remove_lines" and fates[-2].outcome.startswith("removed: ")
    listed = tmp_path / "take-down.txt"
    listed.write_text(take_down(config, "web-3"))
    assert listed.read_text().startswith("gone sha256:")
    config = replace(config, keep_list=listed, lines=Lines(unit="line", min_count=1000))
    run(config)
    ((_, fates),) = Tracer(config).find("web-3")
    assert fates[-1].outcome == "left out: in your list"


def test_a_line_holds_when_a_later_stage_cuts_the_text_that_a_looser_rule_lets_in(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It names the text before lines are cut; a document before it that is gone shifts rows. Renewing leaves it."""
    notice = "All rights are reserved by the miller and his heirs, now and for ever."
    texts = texts_of(9)
    texts[2] = notice  # nothing is left of it
    for row in (0, 3, 5, 6):  # the first keeps it
        texts[row] += f"\n{notice}"
    texts[3] += "\nand more words"
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { max = 74 }\n")
    config = replace(small_run(tmp_path, texts), recipe=str(rules), lines=Lines(unit="line", min_count=3))
    run(config)
    listed = tmp_path / "take-down.txt"
    listed.write_text(take_down(config, "web-2", "web-3"))
    assert [line.split()[0] for line in listed.read_text().splitlines()] == ["gone", "gone"]
    config = replace(config, keep_list=listed)
    rules.write_text("words = { max = 90 }\n")
    run(config)
    ways = {name: way.fates for name, (way,) in Tracer(config).find_all([f"web-{row}" for row in range(9)]).items()}
    left_out = [name for name, fates in ways.items() if fates[-1].outcome == "left out: in your list"]
    assert left_out == ["web-3"]
    assert ways["web-3"][1].outcome.startswith("lost 1 of 3 lines")
    assert ways["web-3"][-2] == Fate("--keep_list", "its text is in your list")
    assert ways["web-2"][-1] == Fate("--keep_list", "its text is in your list, which keeps it out should it come back")
    capsys.readouterr()
    listed.write_text(listed.read_text().replace("gone", "drop"))
    trace(config.out, file=listed, lines=True)
    assert capsys.readouterr().out == listed.read_text()
    run(replace(config, lines=Lines(unit="line", min_count=3, min_characters=1000)))
    for name in ("web-2", "web-3"):
        ((_, fates),) = Tracer(config).find(name)
        assert fates[-1].outcome == "left out: in your list", name


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (f"drop sha256:{'0' * 32} web-2", r"line 1: no document has the text of"),
        ("keep web/a.jsonl.zst@12", r"names web/a.jsonl.zst@12, and the run has no such document"),
        ("drop press/a.jsonl.zst@0", r"names press/a.jsonl.zst@0, and the run has no such document"),
        (
            "keep web/a.jsonl@3",
            r"names web/a.jsonl@3, by the name of a file of yours: expected web/a.jsonl.zst@ROW, .*"
            r" `gristmill trace OUT web/a.jsonl@3` shows",
        ),
    ],
)
def test_a_line_that_fits_no_document_is_said_before_documents_are_compared(
    tmp_path: Path, line: str, said: str
) -> None:
    listed = tmp_path / "take-down.txt"
    listed.write_text(f"{line}\n")
    config = replace(small_run(tmp_path, texts_of(12)), keep_list=listed)
    with pytest.raises(InputError, match=said):
        run(config)
    assert not (config.out / "dup").exists()
    listed.write_text("keep web/a.jsonl.zst@11\n")
    run(config)


def test_a_line_of_a_text_that_a_rule_removes_now_keeps_it_out_in_both_forms(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = texts_of(6)
    texts[2] += " miller@mills.org"
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { max = 61 }\n")
    config = replace(small_run(tmp_path, texts), recipe=str(rules))
    run(config)
    listed = tmp_path / "take-down.txt"
    listed.write_text(take_down(config, "web-2"))
    rules.write_text("words = { max = 60 }\npersonal = { mail = true }\n")
    run(config)
    capsys.readouterr()
    trace(config.out, file=listed, lines=True)
    said = capsys.readouterr()
    assert "0 lines renewed, 1 line now `gone`" in said.err
    anew = said.out.splitlines()
    assert anew[0] == listed.read_text().strip().replace("drop", "gone")
    assert len(anew) == 2 and anew[1].startswith("gone sha256:") and anew[1] != anew[0]
    listed.write_text(said.out)
    config = replace(config, keep_list=listed)
    for content in ("words = { max = 61 }\n", "words = { max = 61 }\npersonal = { mail = true }\n"):
        rules.write_text(content)
        run(config)
        ((_, fates),) = Tracer(config).find("web-2")
        assert fates[-1].outcome == "left out: in your list", content


def test_a_key_of_two_documents_shows_the_line_of_neither(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It says how to get each; a key in a line is that of the raw corpus, whose files have the names of documents."""
    texts = texts_of(6)
    texts[1] = "too short"
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { min = 10 }\n")
    config = replace(small_run(tmp_path, texts, "a.jsonl.zst"), recipe=str(rules))
    run(config)
    capsys.readouterr()
    trace(config.out, ("web/a.jsonl.zst@3",))
    said = capsys.readouterr().out
    assert "drop sha256" not in said
    for key in ("web/a.jsonl.zst@3", "web/a.jsonl.zst@4"):
        assert f"\n{key}\n" in f"\n{said}"
        assert f"web/a.jsonl.zst@3 is the key of 2 documents: for the line, trace {key} with --lines true" in said
    trace(config.out, ("web/a.jsonl.zst@4",), lines=True)
    line = capsys.readouterr().out
    assert line == take_down(config, "web-4").replace("web-4", "web/a.jsonl.zst@4")


def test_a_row_that_is_none_is_said_so_in_a_run_with_scores(tmp_path: Path) -> None:
    config = replace(small_run(tmp_path, texts_of(4)), scores={"words": ScoreOptions(measure="words")})
    run(config)
    with pytest.raises(UsageError, match=r"knows no document web/a\.jsonl@99999: expected a key"):
        trace(config.out, ("web/a.jsonl@99999",))


def test_documents_are_found_by_a_piece_of_their_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """However it is broken into lines and composed; a row of it is none of what was mixed."""
    texts = texts_of(5)
    texts[0] = "too short"
    texts[2] += "\nthe miller's  Cafe\u0301\nin town"
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { min = 10 }\n")
    config = replace(small_run(tmp_path, texts), recipe=str(rules))
    run(config)
    capsys.readouterr()
    trace(config.out, text="miller's Caf\u00e9 in", lines=True)
    said = capsys.readouterr().out
    assert said.startswith("drop sha256:") and said.endswith(" web/a.jsonl@2\n")
    trace(config.out, text="miller's Caf\u00e9 in")
    shown = capsys.readouterr().out
    assert shown.startswith("web/a.jsonl@2\n") and said in shown
    with pytest.raises(UsageError, match="has no document with the text 'two millers'"):
        trace(config.out, text="two millers")
