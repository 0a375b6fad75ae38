"""Documents that were taken down stay down, or the run says that they are back."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill_cli.documents.tracer import Tracer
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig
from tests.gristmill_cli.corpus import write_records


def corpus_of(folder: Path, texts: list[str]) -> Path:
    """Write a corpus with a document `web-ROW` for each text."""
    (folder / "corpus" / "web").mkdir(parents=True)
    records = [{"text": text, "id": f"web-{row}"} for row, text in enumerate(texts)]
    write_records(folder / "corpus" / "web" / "a.jsonl", records)
    return folder / "corpus"


def texts_of(count: int) -> list[str]:
    """Return texts that resemble one another in nothing."""
    return [" ".join(f"word{number}of{row}" for number in range(60)) for row in range(count)]


def small_run(folder: Path, texts: list[str]) -> RunConfig:
    """Return a run to the mix of all documents with these texts."""
    return RunConfig(
        corpus_of(folder, texts), folder / "out", workers=1, filter=Filter(0), mix=Mix(holdout=0), until="mix"
    )


def take_down(config: RunConfig, *names: str) -> str:
    """Return the lines that take down documents, by their ids."""
    lines = list[str]()
    for name in names:
        for _, fates in Tracer(config).find(name):
            lines += [line for fate in fates for line in fate.lines]
    return "".join(f"{line}\n" for line in lines)


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
    assert not said_of(f"{lines}drop web/a.jsonl@5\n")
    assert not said_of(f"# the same\n{lines.replace('drop', 'gone')}drop web/a.jsonl@5\n")
    for until in ("filter", "mix"):
        said = said_of("", until)
        assert f"{listed} lacks 4 lines of the list that the last run here had: `gone{first[4:]}`" in said, until
        assert "are in the mix again" in said
    kept = config.out / ".gristmill" / "keep_list.withdrawn.txt"
    assert kept.read_text() == f"{lines.replace('drop', 'gone')}drop web/a.jsonl@5\n"
    assert not said_of("")
    assert not said_of(lines)
    assert f"{listed} lacks 1 line of the list that the last run here had: `{second}`;" in said_of(
        f"{first}\n{third}\n"
    )
    assert not said_of(f"{first}\ngone sha256:{'0' * 32}{third.partition('sha256:')[2][32:]}\n")
    run(replace(config, keep_list=None))
    said = capsys.readouterr().err
    assert f"had --keep_list {listed}, and this one has none" in said and f"({kept} keeps its lines)" in said
