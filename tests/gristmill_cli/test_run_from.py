"""`gristmill run --from` and `--dry_run`: what was edited, removed or cut off since a stage ended is noticed."""

import re
import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import GristmillError, UsageError
from gristmill_cli.run import main, run
from gristmill_cli.run_config import Apply, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import choose_stages, plan_table
from gristmill_cli.stages.pipeline import plan_stages
from tests.gristmill_cli.corpus import documents, write_records

FUNCTION = "def keep(documents):\n    yield from (d for d in documents if len(d.text) > {})\n"


def planned(config: RunConfig) -> dict[str, str]:
    """What a dry run says of each stage."""
    table = plan_table(config, plan_stages(config))
    names, states = table.columns[0].cells, table.columns[1].cells
    return {str(name): str(state).partition("\n")[0] for name, state in zip(names, states, strict=True)}


def write_function(folder: Path, length: int) -> None:
    (folder / "edited_filter.py").write_text(FUNCTION.format(length))


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """A run with a function of the user's that has ended with the filter."""
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("edited_filter", None)  # of another test's folder
    write_function(tmp_path, 10)
    (tmp_path / "corpus").mkdir()
    write_records(tmp_path / "corpus/a.jsonl", list(documents("a", 20)))
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, apply=Apply("edited_filter:keep"))
    run(replace(config, until="filter"))
    return config


def test_an_edited_function_is_noticed(config: RunConfig, tmp_path: Path) -> None:
    assert planned(config)["apply"].startswith("done")
    write_function(tmp_path, 400)
    with pytest.raises(UsageError, match=r"--from filter: apply ran .* \(code \w+ → \w+\): give --from apply"):
        run(replace(config, from_="filter", until="filter"))
    states = planned(config)
    assert states["apply"].startswith("to run again: code ") and "input changes" in states["filter"]
    run(replace(config, from_="apply", until="filter"))
    run(replace(config, from_="filter", until="filter"))
    (tmp_path / "edited_filter.py").write_text(FUNCTION.format(400) + "\n\nkeep.version = 2\n")
    assert planned(config)["apply"].endswith("→ version 2")


def test_a_function_that_is_edited_before_its_stage_begins_is_recorded_as_it_ran(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["gristmill_cli.stages.normalize_text"]
    real = module.prepare

    def edited(*arguments, **options):
        write_function(tmp_path, 400)
        return real(*arguments, **options)

    monkeypatch.setattr(module, "prepare", edited)
    run(replace(config, until="filter"))
    assert planned(config)["apply"].startswith("done")
    write_function(tmp_path, 10)
    assert planned(config)["apply"].startswith("to run again: code ")


@pytest.fixture(scope="module")
def ended(finished: tuple[Path, Path, str], tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    """The configuration of a copy of a finished run."""
    out = tmp_path_factory.mktemp("ended") / "out"
    shutil.copytree(finished[1], out)
    config = RunConfig(finished[0], out, workers=1, filter=Filter(100), mix=Mix(holdout=0.05))
    return replace(config, tokenizer=Tokenizer(vocab_size=420), keep=("train_text",))


@contextmanager
def moved_away(pattern: str, out: Path, folder: Path) -> Iterator[Path]:
    """Context: one file or folder of a run is elsewhere."""
    found = min(out.glob(pattern))
    found.rename(folder / "away")
    yield found
    shutil.rmtree(found, ignore_errors=True)
    (folder / "away").rename(found)


@pytest.mark.parametrize(
    ("removed", "first"),
    [
        ("normalized/book/b.jsonl.zst", "encode"),
        ("mix/book/b.jsonl+0.decisions.parquet", "encode"),
        ("tokenizer/tokenizer.model", "encode"),
        ("dup/duplicates.parquet", "mix"),
        ("filtered.pickle", "mix"),
        ("pass1", "pass2"),
    ],
)
def test_an_output_that_was_removed_is_named_by_the_stage_that_reads_it(
    ended: RunConfig, tmp_path: Path, removed: str, first: str
) -> None:
    shutil.copytree(ended.out, tmp_path / "out")
    config = replace(ended, out=tmp_path / "out", from_=first)
    said = "(is missing|none of that name|no such file|Run pass1)"
    with (
        moved_away(removed, config.out, tmp_path) as found,
        pytest.raises(GristmillError, match=f"{re.escape(str(found))}.*{said}"),
    ):
        run(config)


def test_a_corpus_may_be_removed_once_it_was_read(ended: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(ended.out, tmp_path / "out")
    with moved_away(ended.corpus.name, ended.corpus.parent, tmp_path):
        run(replace(ended, from_="filter", until="pass2", out=tmp_path / "out"))
        with pytest.raises(UsageError, match=r"--mix.weights.*nowhere"):
            run(replace(ended, from_="filter", mix=Mix(weights={"nowhere": 1.0})))
        for first in (None, "normalize_text"):
            with pytest.raises(UsageError, match="expected a folder, but there is none of that name"):
                run(replace(ended, from_=first))


def test_a_dry_run_is_refused_where_a_run_is(
    ended: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(ended.corpus, tmp_path / "other")
    (tmp_path / "passes.py").write_text(FUNCTION.format(0))
    for option, fault in (
        (("--corpus", tmp_path / "other"), f"holds a run of the corpus {ended.corpus}, not of {tmp_path}/other"),
        (("--corpus", ended.corpus, "--apply.function", "passes:keep"), "holds a run without --apply.function"),
    ):
        for dry in ((), ("--dry_run",)):
            with chdir(tmp_path), pytest.raises(SystemExit) as ended_with:
                main(["--out", str(ended.out), *map(str, option), *dry])
            assert ended_with.value.code == 1 and fault in capsys.readouterr().err


@pytest.mark.parametrize("removed", ["facts", "filtered.pickle", "minhash", "dup", "pass1", "train", "holdout"])
def test_an_output_that_nothing_reads_any_more_may_be_removed_as_a_whole(
    ended: RunConfig, tmp_path: Path, removed: str
) -> None:
    config = replace(ended, from_="train_tokenizer", until="encode")
    with moved_away(removed, config.out, tmp_path):
        assert choose_stages(config, plan_stages(config)) == (10, 12)
