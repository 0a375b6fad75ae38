"""--recipe: the page's commands, a run whose funnel has each rule, and shards that write the same bytes."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from rich.console import Console

from gristmill.errors import UsageError
from gristmill_cli.preview import preview
from gristmill_cli.run import run
from gristmill_cli.run_config import Filter, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import ROOT, make_corpus, tree
from tests.gristmill_cli.documentation import commands, shell
from tests.gristmill_cli.in_process import gristmill
from tests.patience import patience

RECIPE = "words = { min = 20, max = 150 }\n"


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> RunConfig:
    folder = tmp_path_factory.mktemp("recipes")
    (folder / "own.toml").write_text(RECIPE)
    corpus = make_corpus(folder / "corpus")
    return RunConfig(
        corpus, folder / "out", workers=1, recipe=str(folder / "own.toml"), filter=Filter(0), mix=Mix(holdout=0.05),
        tokenizer=Tokenizer(vocab_size=420),
    )  # fmt: skip


def test_the_funnel_has_each_rule_and_the_table_each_document(config: RunConfig) -> None:
    funnel = run(config)
    assert funnel is not None
    removed = pq.read_table(config.out / "normalized.removed.parquet").to_pylist()
    counted = sum(
        tally.documents for reasons in funnel.tallies.values() for name, tally in reasons.items() if name == "words"
    )
    assert counted == len(removed) > 0
    assert all(row["rule"] == "words" and not 20 <= row["value"] <= 150 for row in removed)
    assert json.loads((config.out / "funnel.json").read_text())["went"]


@pytest.mark.thorough
def test_three_shards_write_the_bytes_of_one_process(config: RunConfig, tmp_path: Path) -> None:
    alone = replace(config, out=tmp_path / "one", until="normalize_text")
    run(alone)
    words = [sys.executable, "-m", "gristmill_cli", "run", "--corpus", str(config.corpus), "--recipe", config.recipe]
    words += ["--out", str(tmp_path / "shards"), "--until", "normalize_text", "--workers", "1"]
    started = [subprocess.Popen([*words, "--shard", f"{number}/3"], cwd=ROOT) for number in range(3)]
    assert [process.wait(patience(120)) for process in started] == [0, 0, 0]
    assert tree(tmp_path / "shards" / "normalized") == tree(alone.out / "normalized")
    table = "normalized.removed.parquet"
    assert (tmp_path / "shards" / table).read_bytes() == (alone.out / table).read_bytes()


def test_another_number_runs_the_recipe_again_and_another_name_does_not(
    config: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "own.toml"
    own.write_text("words.min = 20\n")
    changing = replace(config, out=tmp_path / "out", recipe=str(own), until="normalize_text", explain=True)
    run(changing)
    before = tree(tmp_path / "out" / "normalized")
    own.write_text("words.max = 80\n")
    run(changing)
    assert tree(tmp_path / "out" / "normalized") != before
    assert "changed: normalize_text rules" in capsys.readouterr().err
    run(replace(changing, recipe=str(own.rename(tmp_path / "other.toml"))))
    assert "no option changed" in capsys.readouterr().err


def test_a_run_refuses_a_recipe_that_is_none(config: RunConfig, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"did you mean fineweb\?"):
        run(replace(config, out=tmp_path / "out", recipe="finewebb"))


def test_preview_fits_80_columns_and_shows_examples(config: RunConfig) -> None:
    console = Console(width=80, record=True, file=StringIO())
    console.print(preview("fineweb", config.corpus, documents=60, examples=1))
    lines = console.export_text().splitlines()
    assert max(map(len, lines)) <= 80
    assert any("repeated_nonblank_characters" in line for line in lines) and any(".jsonl" in line for line in lines)
    with pytest.raises(UsageError, match="--documents 0"):
        preview("fineweb", config.corpus, documents=0)


def test_preview_reads_the_sources_of_a_run(tmp_path: Path) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"content": "one two"}\n{"content": "three"}\n')
    (tmp_path / "raw/b.jsonl").write_text('{"text": "of no source"}\n')
    file = tmp_path / "run.toml"
    file.write_text(f"corpus = '{tmp_path}'\nout = 'out'\n[sources.own]\npath = 'raw/a.jsonl'\ncolumn = 'content'\n")
    console = Console(width=100, record=True, file=StringIO())
    console.print(preview("gopher", file))
    said = console.export_text()
    assert said.startswith("2 of 2 documents: 2 removed") and "own/a.jsonl@0" in said


def test_preview_of_the_file_of_a_run_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the recipe, or the sentence says what to type."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw/a.jsonl").write_text('{"text": "one two"}\n{"text": "three"}\n')
    pq.write_table(pa.table({"body": ["one"]}), tmp_path / "raw/b.parquet")
    file = tmp_path / "run.toml"
    file.write_text("corpus = 'raw'\nout = 'out'\n[sources.own]\npath = 'a.jsonl'\n")
    said = gristmill("preview", "run.toml")
    assert said.returncode == 2
    assert "run.toml names no recipe: gristmill preview gopher run.toml shows" in said.stderr
    file.write_text(f"recipe = 'gopher'\n{file.read_text()}")
    done = gristmill("preview", "run.toml")
    assert done.returncode == 0 and "2 of 2 documents: 2 removed" in done.stdout, done.stderr
    rules = tmp_path / "rules.toml"
    rules.write_text("words = { min = 2 }\n")
    for words, expected in (
        (
            ["rules.toml"],
            "expected RECIPE CORPUS, such as gristmill preview gopher corpus; rules.toml alone is no TOML",
        ),
        (["gopher"], "expected RECIPE CORPUS, such as gristmill preview gopher corpus; gopher alone is no TOML file"),
        (["rules.toml", "raw"], "has no column 'text', only body: .* give the TOML file of the run in place of raw"),
    ):
        said = gristmill("preview", *words)
        assert said.returncode == 2 and re.search(expected, said.stderr), said.stderr


def test_the_commands_of_the_page(config: RunConfig, tmp_path: Path) -> None:
    block, any_language = commands("guides/recipes.md")
    block = block.replace("--recipe gopher", "--recipe gopher --until normalize_text")
    done = shell(block, on_one_core=True, CORPUS=str(config.corpus), OUT=str(tmp_path / "out"))
    assert done.returncode == 0, done.stderr
    assert "alone" in done.stdout and (tmp_path / "out/normalized.removed.parquet").is_file()
    done = shell(any_language, on_one_core=True, CORPUS=str(config.corpus))
    assert done.returncode == 0 and "eng_Latn" in done.stdout, done.stderr
