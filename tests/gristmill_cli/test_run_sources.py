"""`gristmill run` with [sources]: one that is added, removed, renamed or weighed anew redoes only itself."""

import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.engine import task
from gristmill.engine.staleness import reruns
from gristmill.errors import UsageError
from gristmill.io.corpus import Source
from gristmill_cli.cards.data_card import card
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_check import check_config
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import plan_table
from gristmill_cli.stages.pipeline import STAGES, plan_stages
from preprocessing.steps.text_digest import TextDigest
from tests.gristmill_cli.corpus import documents, tree, write_records


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A finished run of the sources m and z; new/ is a folder of another."""
    for name in ("c/m", "c/z", "new"):
        (tmp_path / name).mkdir(parents=True)
        write_records(tmp_path / name / "a.jsonl", list(documents(name, 40)))
    config = RunConfig(
        tmp_path / "c", tmp_path / "out", workers=1, filter=Filter(10), mix=Mix(holdout=0.1),
        tokenizer=Tokenizer(vocab_size=400, exact=False), sources={"m": Source(), "z": Source()},
    )  # fmt: skip
    run(config)
    return config


@pytest.fixture
def tokenizer_file(config: RunConfig, tmp_path: Path) -> Path:
    """The tokenizer that the run trained, as a file of one's own."""
    return shutil.copy(config.out / "tokenizer" / "tokenizer.model", tmp_path / "own.model")


def first_line(err: str) -> str:
    return next(line for line in err.splitlines() if line.startswith("normalize_text:"))


def run_again(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> str:
    """Run, compare with a run in a new folder, and return what the first stage said."""
    capsys.readouterr()
    run(config)
    said = first_line(capsys.readouterr().err)
    fresh = replace(config, out=config.out.with_name("fresh"))
    run(fresh)
    assert {name: data for name, data in tree(config.out).items() if name != "run.json"} == {
        name: data for name, data in tree(fresh.out).items() if name != "run.json"
    }
    return said


def test_a_source_that_sorts_first_is_added(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    added = replace(config, sources={"aa": Source(path="../new"), **config.sources})
    assert run_again(added, capsys).endswith("2 of 4 tasks done before")


def test_a_source_is_removed(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_again(replace(config, sources={"z": Source()}), capsys).endswith("1 of 2 tasks done before")


def test_a_source_is_renamed(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    renamed = {"n": Source(path="m"), "z": Source()}
    assert run_again(replace(config, sources=renamed), capsys).endswith("1 of 3 tasks done before")


def test_an_output_of_none_of_the_sources_is_not_overwritten(config: RunConfig, tmp_path: Path) -> None:
    others = {"other": Source(path=str(tmp_path / "new"))}
    with pytest.raises(UsageError, match="would lose it"):
        run(replace(config, sources=others))


def planned(config: RunConfig) -> dict[str, str]:
    table = plan_table(config, plan_stages(config))
    names, states = table.columns[0].cells, table.columns[1].cells
    return {str(name): str(state).partition("\n")[0] for name, state in zip(names, states, strict=True)}


def test_a_weight_does_not_redo_the_first_stage(config: RunConfig) -> None:
    states = planned(replace(config, sources={"m": Source(), "z": Source(weight=2.0)}))
    assert states["normalize_text"].startswith("done") and states["mix"].startswith("to run again: weights")


def upgrade(monkeypatch: pytest.MonkeyPatch) -> str:
    """Make pyarrow seem to be another version; return that of before."""
    version_of = task.library_version
    before = version_of("pyarrow")

    def upgraded(name: str) -> str:
        return "99.1" if name == "pyarrow" else version_of(name)

    monkeypatch.setattr(task, "library_version", upgraded)
    monkeypatch.setattr(reruns, "library_version", upgraded)
    return before


def test_another_version_is_said_first_with_its_cost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = upgrade(monkeypatch)
    state = planned(config)["normalize_text"]
    assert state.startswith(f"to run again: pyarrow {before} → 99.1; it took ")
    assert state.endswith(" of core time, --accept_versions keeps what is there")
    capsys.readouterr()
    run(config)
    first = capsys.readouterr().err.splitlines()[0]
    assert first.startswith(f"note: pyarrow {before} → 99.1: normalize_text, filter, ")
    assert " run again, " in first and " of core time, about " in first
    assert first.endswith(" with 1 worker; --accept_versions keeps what is there")
    assert planned(config)["normalize_text"] == "done; its files will be checked"
    run(config)
    assert "note: pyarrow" not in capsys.readouterr().err


def test_an_upgrade_of_gristmill_is_said_first_with_its_cost(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of the stage's own version and of a step's; nothing else runs again, and --accept_versions keeps it."""
    first = STAGES[0]
    written = tree(config.out)
    monkeypatch.setattr(type(first), "engine", replace(first.engine, version=first.engine.version + 1))
    monkeypatch.setattr(TextDigest, "version", 9)
    versions = f"version of the stage {first.engine.version - 1} → {first.engine.version}, "
    versions += "version of the step 'digest of the text' 1 → 9"
    planned_states = planned(config)
    assert planned_states["normalize_text"].startswith(f"to run again: {versions}; it took ")
    assert planned_states["normalize_text"].endswith(" of core time, --accept_versions keeps what is there")
    assert planned_states["mix"] == "to run again where its input changes"
    capsys.readouterr()
    run(replace(config, accept_versions=True))
    said = capsys.readouterr().err.splitlines()
    named = versions.replace("the stage", "normalize_text")
    assert said[0] == f"note: {named}: --accept_versions keeps what normalize_text wrote"
    assert all(line.endswith("done already, nothing to do") for line in said[1:])
    assert tree(config.out / "tokens") == {
        name.removeprefix("tokens/"): data for name, data in written.items() if name.startswith("tokens/")
    }
    report((config.out,))
    kept = f"was made with version {first.engine.version - 1} of the stage, and kept by --accept_versions at "
    assert f"Some of what normalize_text wrote {kept}" in (config.out / "report.html").read_text()
    run(config)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"note: {named}: normalize_text runs again, ")
    assert planned(config)["normalize_text"] == "done; its files will be checked"


def test_a_step_that_is_new_is_said_first_whatever_versions_are_accepted(
    config: RunConfig, tokenizer_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the one that counts tokens, which amounts of tokens need: the first stage runs again for it."""
    amounts = replace(
        config, accept_versions=True, mix=Mix(holdout=0.1, tokens={"m": 300}), tokenizer=Tokenizer(file=tokenizer_file),
        until="mix",
    )  # fmt: skip
    assert re.fullmatch(
        r"to run again: the step 'token count' is new; it took .* of core time", planned(amounts)["normalize_text"]
    )
    capsys.readouterr()
    run(amounts)
    said = capsys.readouterr().err.splitlines()
    assert re.match(r"note: normalize_text runs again, as the step 'token count' is new: 2 tasks that took ", said[0])
    assert planned(amounts)["normalize_text"] == "done; its files will be checked"


def test_versions_that_are_accepted_are_recorded(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is there stays, as the plan, the report and the card say; a new source is read by today's version."""
    written = tree(config.out)
    before = upgrade(monkeypatch)
    accepting = replace(config, accept_versions=True)
    assert planned(accepting)["normalize_text"] == (
        f"done; its files will be checked (made with other versions: pyarrow {before} → 99.1)"
    )
    capsys.readouterr()
    run(accepting)
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith(f"note: pyarrow {before} → 99.1: --accept_versions keeps what normalize_text, filter, ")
    assert all(line.endswith("done already, nothing to do") for line in said[1:])
    assert {name: data for name, data in tree(config.out).items() if name != "run.json"} == {
        name: data for name, data in written.items() if name != "run.json"
    }
    sentence = (
        f"Some of what normalize_text wrote was made with pyarrow {before}, and kept by --accept_versions at 99.1."
    )
    card(config.out)
    assert f"- {sentence}\n" in (config.out / "tokens" / "README.md").read_text()
    report((config.out,))
    assert sentence in (config.out / "report.html").read_text()
    run(replace(accepting, sources={**config.sources, "new": Source(path="../new")}))
    assert first_line(capsys.readouterr().err).endswith("2 of 4 tasks done before")


def test_an_explanation_speaks_of_sources(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    (config.corpus / "m" / "a.jsonl").rename(config.corpus / "m" / "b.jsonl")
    explaining = replace(config, explain=True, until="normalize_text")
    capsys.readouterr()
    run(explaining)
    said = capsys.readouterr().err
    assert "normalize_text: prepare: 1 of 2 tasks runs: 1 file new (m/b.jsonl), 1 file gone (m/a.jsonl)\n" in said
    run(replace(explaining, sources={"m": Source(format="jsonl"), "new": Source(path="../new")}))
    said = capsys.readouterr().err
    assert "changed: normalize_text source m: format none → jsonl, source z gone, source new new\n" in said


def test_files_beside_the_sources_are_said(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    write_records(config.corpus / "top.jsonl", list(documents("top", 3)))
    run(replace(config, sources={}, out=config.out.with_name("top"), until="normalize_text"))
    said = "such as top.jsonl: expected CORPUS/<source>/…; read as the source 'corpus'"
    assert f"note: 1 file directly in {config.corpus}, {said}" in capsys.readouterr().err


def test_folders_of_sources_are_named(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    """Without [sources] a source is a folder."""
    folders = replace(config, sources={}, out=config.out.with_name("folders"), until="normalize_text", explain=True)
    run(folders)
    (config.corpus.parent / "new").rename(config.corpus / "new")
    shutil.rmtree(config.corpus / "z")
    capsys.readouterr()
    run(folders)
    said = capsys.readouterr().err
    assert "normalize_text: prepare: 1 of 2 tasks runs: source new new (1 file), source z gone (1 file)\n" in said


def test_folders_that_no_table_of_sources_reads_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "forgotten", "d/deep"):
        (tmp_path / "corpus" / name).mkdir(parents=True)
        write_records(tmp_path / "corpus" / name / "a.jsonl", [{"text": "a text of some words"}] * 3)
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", sources={"a": Source(), "other": Source(path="d/deep")})
    check_config(config)
    said = capsys.readouterr().err
    assert f"note: 1 folder of {config.corpus} not read, such as forgotten: no table [sources.NAME]" in said
    check_config(replace(config, sources={}))
    assert "no table [sources.NAME]" not in capsys.readouterr().err
