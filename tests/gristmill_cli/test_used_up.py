"""--remove_used: what no later stage reads is removed; the run resumes, is repeated and changed with the same bytes."""

import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill_cli.cards.data_card import card
from gristmill_cli.report.write import report
from gristmill_cli.run import run
from gristmill_cli.run_config import Apply, Filter, Lines, Mix, RunConfig, Tokenizer
from tests.gristmill_cli.corpus import ROOT, documents, tree, write_records

GONE = ("normalized/", "applied/", "lines/", "pass1/")
FUNCTION = "def all_of(documents):\n    yield from documents\n"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunConfig:
    """The configuration of a run that writes its documents three times, and once in buckets; nothing was run."""
    for name in ("m", "z"):
        (tmp_path / "corpus" / name).mkdir(parents=True)
        for number in range(3):
            write_records(tmp_path / "corpus" / name / f"{number}.jsonl", list(documents(f"{name}{number}", 30)))
    (tmp_path / "used_functions.py").write_text(FUNCTION)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{tmp_path}")
    return RunConfig(
        tmp_path / "corpus", tmp_path / "out", workers=1, filter=Filter(10), mix=Mix(holdout=0.1),
        tokenizer=Tokenizer(vocab_size=400, exact=False), apply=Apply("used_functions:all_of"), lines=Lines("line"),
        keep=("train_text",), remove_used=True,
    )  # fmt: skip


def kept(out: Path) -> dict[str, bytes]:
    """What is in the folder of a run, but for its options and for what is removed as it is used up."""
    return {name: data for name, data in tree(out).items() if not name.startswith(GONE) and name != "run.json"}


def reject_text(out: Path) -> None:
    assert [name for name in tree(out) if name.startswith(GONE)] == []


def reject_differences(config: RunConfig) -> None:
    """The run has the bytes of one that removed nothing."""
    fresh = replace(config, out=config.out.with_name("fresh"), remove_used=False)
    shutil.rmtree(fresh.out, ignore_errors=True)
    run(fresh)
    assert kept(config.out) == kept(fresh.out)
    assert any(name.startswith("normalized/") for name in tree(fresh.out))


def test_documents_are_removed_as_soon_as_no_stage_reads_them(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(replace(config, until="remove_lines"))
    written = {name.partition("/")[0] for name in tree(config.out) if name.startswith(GONE)}
    assert written == {"lines"}
    run(config)
    reject_text(config.out)
    reject_differences(config)
    capsys.readouterr()
    before = tree(config.out)
    run(config)
    said = capsys.readouterr().err
    assert "normalize_text: done already; what it wrote or read was used up, and removed\n" in said
    assert "encode: done already; what it wrote or read was used up, and removed\n" in said
    assert all("done already" in line for line in said.splitlines() if " read = " in line)
    assert tree(config.out) == before
    report((config.out,))
    card(config.out)


def test_what_is_needed_again_is_written_again(config: RunConfig, capsys: pytest.CaptureFixture[str]) -> None:
    run(config)
    capsys.readouterr()
    other = replace(config, seed=7)
    run(other)
    said = capsys.readouterr().err
    assert "note: mix is not as before, so normalize_text, apply, remove_lines, pass1 write again what was" in said
    reject_text(config.out)
    reject_differences(other)
    write_records(config.corpus / "m/1.jsonl", list(documents("edited", 30)))
    capsys.readouterr()
    run(other)
    assert "note: normalize_text is not as before, so " in capsys.readouterr().err
    reject_text(config.out)
    reject_differences(other)


def test_a_damaged_output_of_a_stage_whose_input_is_gone_is_written_again(config: RunConfig) -> None:
    run(config)
    (shard,) = (config.out / "tokens/train").glob("*.bin")
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-1])
    run(config)
    assert shard.read_bytes() == whole
    reject_text(config.out)


def test_from_a_stage_whose_input_is_gone(config: RunConfig) -> None:
    run(config)
    with pytest.raises(UsageError, match="what normalize_text, apply, remove_lines wrote was removed as"):
        run(replace(config, from_="encode", tokenizer=replace(config.tokenizer, shard_size="1MiB")))


@pytest.mark.every(2)
@pytest.mark.parametrize("stage", ["normalize_text", "apply", "remove_lines", "mix", "pass1", "encode"])
def test_a_run_that_is_killed_when_a_stage_has_ended_resumes(config: RunConfig, stage: str) -> None:
    """Just before documents are removed, and in the middle of that."""
    script = (
        "import os, sys\n"
        "from gristmill_cli import run, used_up\n"
        "how, stage = sys.argv[1:3]\n"
        "real, remove = run.remove_used, used_up.remove_files\n"
        "def dies(config, stages, done):\n"
        "    if done[-1].name == stage:\n"
        "        if how == 'before':\n"
        "            os._exit(9)\n"
        "        used_up.remove_files = lambda paths, root: (remove(paths[:1], root), os._exit(9))\n"
        "    real(config, stages, done)\n"
        "run.remove_used = dies\n"
        "run.main(sys.argv[3:])\n"
    )
    file = config.corpus.with_name("run.toml")
    file.write_text(
        f"corpus = '{config.corpus}'\nout = '{config.out}'\nworkers = 1\nkeep = ['train_text']\nremove_used = true\n"
        "[filter]\nthreshold = 10\n[mix]\nholdout = 0.1\n[tokenizer]\nvocab_size = 400\nexact = false\n"
        "[apply]\nfunction = 'used_functions:all_of'\n[lines]\nunit = 'line'\n"
    )
    for how in ("before", "within"):
        command = [sys.executable, "-c", script, how, stage, str(file)]
        died = subprocess.run(command, env=os.environ, capture_output=True, text=True, check=False)
        assert died.returncode == 9 or stage in ("normalize_text", "mix"), died.stderr
    run(config)
    reject_text(config.out)
    reject_differences(config)
