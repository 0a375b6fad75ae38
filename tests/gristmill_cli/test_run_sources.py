"""`gristmill run` with [sources]: one that is added, removed, renamed or weighed anew redoes only itself."""

from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill.io.corpus import Source
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import plan_table
from gristmill_cli.stages.pipeline import plan_stages
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


def test_a_dry_run_says_which_library_has_another_version(config: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    from gristmill.engine.task import library_version

    def upgraded(name: str) -> str:
        return "99.1" if name == "pyarrow" else library_version(name)

    monkeypatch.setattr("gristmill_cli.run_records.library_version", upgraded)
    state = planned(config)["normalize_text"]
    assert state.startswith("to run again: pyarrow ") and state.endswith(" → 99.1")
