"""Command lines: standard output that cannot be written, and empty arguments."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Literal

import pytest
from tyro.conf import Positional

from gristmill.arguments import check_words, parse
from gristmill.command import command
from gristmill.engine.options import RunOptions
from gristmill.errors import UsageError
from tests.gristmill_cli.corpus import write_records
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
SAY = "from gristmill.command import run_with_exit_code as run; import sys; sys.exit(run(lambda: 'b\\xfcch'))"

LIMITED = """
import resource
from pathlib import Path
from gristmill.command import run_with_exit_code
from gristmill.io.arrow_tables import row_group_cuts
from gristmill.io.readers import read_corpus

documents, table = read_corpus(Path("corpus")), Path("corpus/a.parquet")
print(next(documents).text, row_group_cuts(table, 1, 1))  # imports what is needed
resource.setrlimit(resource.RLIMIT_NOFILE, (0, 9999))
for action in (lambda: next(documents), lambda: row_group_cuts(table, 1, 1), lambda: open("here", "w")):
    run_with_exit_code(action)
"""


def say(stdout: int, encoding: str = "utf-8", words: tuple[str, ...] = (sys.executable, "-c", SAY)) -> tuple[int, str]:
    """Exit code and standard error of a process that prints a result to `stdout`."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        words, stdout=stdout, stderr=subprocess.PIPE, text=True, env=environment, timeout=patience(60)
    )
    return done.returncode, done.stderr


def test_a_full_disk_is_one_line() -> None:
    with Path("/dev/full").open("w") as full:
        code, said = say(full.fileno())
    assert code == 1 and said.startswith("error: cannot write standard output: the disk is full")
    assert said.count("\n") == 1


def test_a_reader_that_has_ended_is_no_error() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    try:
        assert say(writer) == (0, "")
    finally:
        os.close(writer)


def test_ctrl_c_while_modules_are_imported_is_said_without_a_traceback(tmp_path: Path) -> None:
    (tmp_path / "msgspec.py").write_text(
        "import os, signal, time\nos.kill(os.getpid(), signal.SIGINT)\ntime.sleep(60)\n"
    )
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); sys.argv[1] = 'run'; import gristmill_cli.__main__ as m; m.main()"
    )
    words = (sys.executable, "-c", code, str(tmp_path))
    assert say(subprocess.DEVNULL, words=words) == (-signal.SIGINT, "interrupted\n")


def test_a_closed_output_is_no_error() -> None:
    words = "sh", "-c", 'exec "$0" -c "$1" >&-', sys.executable, SAY
    assert say(subprocess.DEVNULL, words=words) == (0, "")


def test_a_character_that_the_encoding_lacks(tmp_path: Path) -> None:
    with (tmp_path / "said").open("w") as file:
        assert say(file.fileno(), encoding="ascii") == (0, "")
    assert (tmp_path / "said").read_text() == "b\\xfcch\n"


def mill(grain: Positional[Path], out: Path = Path("out"), more: Path | None = None, text: str = "a") -> str:
    """Mill grain."""
    return f"{grain} {out} {more} {text!r}"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["rye", "--out", ""], "--out"),
        (["rye", "--more="], "--more"),
        ([""], "argument 1"),
        (["--out", "x", ""], "argu"),
    ],
)
def test_an_empty_path_is_not_the_current_folder(capsys: pytest.CaptureFixture[str], words: list, named: str) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(mill, arguments=words)
    said = capsys.readouterr().err
    assert said.startswith(f"error: {named}") and "is empty: is a variable of your shell not set?" in said


def test_a_word_of_no_option_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(mill, arguments=["rye", "oats", "barley"], prog="mill")
    expected = "error: expected options, each with its name, got 'oats, barley'; try mill --help\n"
    assert capsys.readouterr().err == expected


def test_an_empty_text_among_many_is_one() -> None:
    kinds = {"--stop": tuple[str, ...], "--out": Path, "--files": tuple[Path, ...]}
    positional = (Path, tuple[str, ...])
    for given in (["a", ""], ["a", "b", ""], ["--out", "o", "a", ""], ["a", "--out=o", ""], ["a", "--stop", "b", ""]):
        check_words(given, kinds, positional)
    for given, named in ((["", "b"], "argument 1"), (["a", "--out", ""], "--out"), (["--files", "f", ""], "--files")):
        with pytest.raises(UsageError, match=f"^{named} is empty"):
            check_words(given, kinds, positional)
    with pytest.raises(UsageError, match=r"^argument 2 is empty"):
        check_words(["a", ""], kinds, (Path, str))


def save(out: Path, options: RunOptions = RunOptions(), files: tuple[Path, ...] = ()) -> None:
    """A command with paths in several places."""


def test_an_option_of_many_values_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command(save, arguments=["--out", "a", "--files", "b", "c", "--files", "d"])
    assert capsys.readouterr().err.startswith("error: --files is given twice: give all its values after one")


@pytest.mark.parametrize("words", [["--out", "ftp://a/b"], ["--out", "a", "--scratch=ftp://a/b"],
                                   ["--out", "s3://a/b", "--files", "x", "ftp://a/b"]])  # fmt: skip
def test_a_url_of_an_unknown_scheme_is_refused_by_every_command(
    capsys: pytest.CaptureFixture[str], words: list
) -> None:
    with pytest.raises(SystemExit) as ended:
        command(save, arguments=words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(
        "error: ftp://a/b: the scheme ftp is not known: expected a folder, or s3://"
    )


def test_a_scratch_size_without_a_bucket_is_refused_by_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words, code in ((["--out", "a", "--shard", "1/2"], "2"), (["--out", "a", "--files", "s3://a/b"], "0")):
        with pytest.raises(SystemExit, match=code):
            command(save, arguments=[*words, "--scratch_size", "1GiB"])
        assert ("--scratch_size 1GiB has no effect" in capsys.readouterr().err) == (code == "2")


def test_an_empty_text_is_taken(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["rye", "--text", ""], ["--text=", "rye"]):
        with pytest.raises(SystemExit, match="0"):
            command(mill, arguments=words)
        assert capsys.readouterr().out == "rye out None ''\n"


def test_the_limit_of_open_files_is_not_blamed_on_the_input(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    for name in ("0.jsonl", "1.jsonl", "a.parquet"):
        write_records(tmp_path / "corpus" / name, [{"text": "one", "id": 1}])
    words, environment = [sys.executable, "-c", LIMITED], {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(words, cwd=tmp_path, stderr=subprocess.PIPE, text=True, timeout=patience(60), env=environment)
    limit = "the limit of open files is reached: raise it (ulimit -n 4096), or give fewer --workers"
    assert done.stderr.splitlines() == [
        f"error: {what}{limit}" for what in ("cannot read corpus/1.jsonl: ", "cannot read corpus/a.parquet: ", "")
    ]


def test_only_a_command_that_resumes_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    def looks() -> None:
        raise KeyboardInterrupt

    def works(options: RunOptions = RunOptions()) -> None:
        raise KeyboardInterrupt

    for function, said in ((looks, "interrupted"), (works, "interrupted: run the same command again to resume")):
        with pytest.raises(SystemExit) as end:
            command(function, arguments=[])
        assert (end.value.code, capsys.readouterr().err) == (130, f"{said}\n")


def test_missing_arguments_are_named_without_their_help() -> None:
    def mill(grain: Positional[Path], *, stones: int) -> None:
        """Mill.

        Args:
            grain: Folder of the grain.
            stones: How many.
        """

    with pytest.raises(UsageError, match=r"^expected PATH, --stones N; try mill --help$"):
        parse(mill, [], "mill")


def test_a_missing_argument_may_be_any_of_those_without_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    """`gristmill preview run.toml` lacks the recipe, though the parser takes the file for it and misses the corpus."""

    def preview(recipe: Positional[str], corpus: Positional[Path], *, seed: int) -> None:
        """Look.

        Args:
            recipe: Rules.
            corpus: Folder of documents.
            seed: Seed of the sample.
        """

    with pytest.raises(SystemExit):
        command(preview, arguments=["run.toml", "--seed", "1"], prog="preview")
    assert capsys.readouterr().err == "error: expected RECIPE CORPUS; try preview --help\n"
    with pytest.raises(SystemExit):
        command(preview, arguments=["gopher", "--help"], prog="preview")
    assert "usage: preview [-h] RECIPE CORPUS --seed N" in capsys.readouterr().out


def test_a_value_is_suggested_only_if_it_is_much_alike() -> None:
    def clean(*, policy: Literal["drop", "cut", "report"]) -> None:
        """Clean."""

    for given, hint in (("remove", ""), ("reports", "; did you mean report?")):
        with pytest.raises(UsageError, match=rf"got '{given}', expected one of drop, cut, report{re.escape(hint)}$"):
            parse(clean, ["--policy", given], "clean")
