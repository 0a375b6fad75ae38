"""`gristmill run --from` and `--dry_run`: what was edited, removed or cut off since a stage ended is noticed."""

import shutil
import sys
from collections.abc import Iterator
from contextlib import chdir, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gristmill.errors import UsageError
from gristmill_cli.run import main, run
from gristmill_cli.run_config import Apply, Dedup, Filter, Mix, RunConfig, Tokenizer
from gristmill_cli.run_records import choose_stages, plan_table
from gristmill_cli.run_stages import plan_stages
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
    module, real = sys.modules["gristmill_cli.run_stages"], sys.modules["gristmill_cli.run_stages"].normalize_text

    def edited(*arguments, **options):
        write_function(tmp_path, 400)
        return real(*arguments, **options)

    monkeypatch.setattr(module, "normalize_text", edited)
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
    return replace(config, tokenizer=Tokenizer(vocab_size=420))


@contextmanager
def moved_away(pattern: str, out: Path, folder: Path) -> Iterator[Path]:
    """Context: one file or folder of a run is elsewhere."""
    found = min(out.glob(pattern))
    found.rename(folder / "away")
    yield found
    shutil.rmtree(found, ignore_errors=True)
    (folder / "away").rename(found)


@pytest.mark.parametrize(
    ("removed", "first", "stage"),
    [
        ("tokens/train/*.bin", "tokenize_holdout", "tokenize_corpus"),
        ("tokens/train/manifest.json", "tokenize_holdout", "tokenize_corpus"),
        ("tokens/train", "tokenize_holdout", "tokenize_corpus"),
        ("holdout/**/*.jsonl*", "train_tokenizer", "pass2"),
        ("dup/duplicates.parquet", "pass1", "generate_duplicates_dict"),
        ("filtered.pickle", "pass1", "filter"),
        ("pass1", "pass2", "pass1"),
    ],
)
def test_an_output_that_was_removed_is_noticed(
    ended: RunConfig, tmp_path: Path, removed: str, first: str, stage: str
) -> None:
    config = replace(ended, from_=first)
    choose_stages(config, plan_stages(config))
    with moved_away(removed, config.out, tmp_path) as found:
        wanted = f"--from {first}: {stage} wrote {found}.*, and it is missing.*: give --from {stage}"
        with pytest.raises(UsageError, match=wanted):
            run(config)
        assert planned(ended)[stage].startswith("to run again: ") and "missing" in planned(ended)[stage]


def test_a_removed_file_beside_the_output_of_its_stage_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    write_records(tmp_path / "corpus/a.jsonl", list(documents("a", 20)))
    config = RunConfig(tmp_path / "corpus", tmp_path / "out", workers=1, dedup=Dedup(exact=True))
    run(replace(config, until="to_hash"))
    with (
        moved_away("dup/duplicate_pairs_exact.parquet", config.out, tmp_path),
        pytest.raises(UsageError, match=r"generate_exact_pairs wrote .*exact\.parquet, and it is missing"),
    ):
        run(replace(config, from_="to_hash", until="to_hash"))


def test_a_corpus_may_be_removed_once_it_was_read(ended: RunConfig, tmp_path: Path) -> None:
    shutil.copytree(ended.out, tmp_path / "out")
    with moved_away(ended.corpus.name, ended.corpus.parent, tmp_path):
        run(replace(ended, from_="filter", until="pass2", out=tmp_path / "out"))
        with pytest.raises(UsageError, match=r"--mix.weights.*nowhere"):
            run(replace(ended, from_="filter", mix=Mix(weights={"nowhere": 1.0})))
        for first in (None, "normalize_text"):
            with pytest.raises(UsageError, match="expected a folder, and there is none of that name"):
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


@pytest.mark.parametrize("name", ["filtered.pickle", "tokenizer/tokenizer.model", "tokens/train/mine.bin", "run.json"])
def test_a_file_of_the_user_that_a_later_stage_would_refuse_is_refused_at_the_start(
    ended: RunConfig, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out" / name
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    for dry in ((), ("--dry_run",)):
        with pytest.raises(SystemExit):
            main(["--corpus", str(ended.corpus), "--out", str(tmp_path / "out"), *dry])
        assert f"{file} exists, and " in capsys.readouterr().err
    assert [path for path in (tmp_path / "out").rglob("*") if path.is_file()] == [file]


FOREIGN = {
    "normalized/mine.jsonl": "normalize_text", "minhash/a/m.signatures.arrow": "to_hash", "pass1/mine.jsonl": "pass1",
    "train/chunk1/mine.jsonl.zst": "pass2", "holdout/mine.jsonl": "pass2", "train_deduped/m.parquet": "dedup_train",
}  # fmt: skip


@pytest.mark.parametrize("is_new", [True, False])
def test_documents_of_the_user_in_a_folder_of_a_later_stage_are_refused_at_the_start(
    ended: RunConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_new: bool
) -> None:
    out = tmp_path / "out" if is_new else ended.out
    options = ["--filter.threshold", "100", "--mix.holdout", "0.05", "--tokenizer.vocab_size", "420", "--workers", "1"]
    for name, stage in list(FOREIGN.items())[:: 3 if is_new else 1]:
        file = out / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("mine")
        with pytest.raises(SystemExit, match="1"):
            main(["--corpus", str(ended.corpus), "--out", str(out), *options, *["--dry_run"] * (not is_new)])
        assert f"holds 1 files that {stage} did not write, '{file.name}' the first" in capsys.readouterr().err
        file.unlink()
    with pytest.raises(SystemExit, match="0"):
        main(["--corpus", str(ended.corpus), "--out", str(out), *options, "--dry_run"])


def test_an_output_of_another_size_is_noticed(ended: RunConfig, tmp_path: Path) -> None:
    config = replace(ended, from_="tokenize_holdout")
    with moved_away("tokens/train/*.bin", config.out, tmp_path) as found:
        found.write_bytes((tmp_path / "away").read_bytes()[:-2])
        with pytest.raises(UsageError, match=r"tokenize_corpus wrote .*\.bin, and it has \d+ bytes instead of \d+"):
            run(config)


@pytest.mark.parametrize("removed", ["normalized", "filtered.pickle", "minhash", "dup", "pass1", "train", "holdout"])
def test_an_output_that_nothing_reads_any_more_may_be_removed_as_a_whole(
    ended: RunConfig, tmp_path: Path, removed: str
) -> None:
    config = replace(ended, from_="train_tokenizer", until="tokenize_corpus")
    with moved_away(removed, config.out, tmp_path):
        assert choose_stages(config, plan_stages(config)) == (9, 11)
