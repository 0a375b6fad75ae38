"""The command `gristmill` itself: its names, its help, and training from any folder."""

import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_cli.__main__ import COMMANDS, GROUPS, main, overview
from tests.gristmill_cli.corpus import ROOT


def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> tuple[object, str, str]:
    monkeypatch.setattr(sys, "argv", ["gristmill", *words])
    with pytest.raises(SystemExit) as end:
        main()
    return (end.value.code, *capsys.readouterr())


def test_every_name_that_was_ever_documented_is_a_command() -> None:
    names = [
        "quickstart",
        "harvest_corpus",
        "run",
        "estimate",
        "status",
        "normalize_text",
        "apply",
        "filter",
        "sign",
        "cluster",
        "remove",
        "generate_exact_pairs",
        "bands",
        "to_hash",
        "generate_duplicate_pairs",
        "generate_connected_components",
        "generate_duplicates_dict",
        "cluster_graph",
        "shuffle_holdout",
        "dedup_train",
        "train_tokenizer",
        "tokenize_corpus",
        "compile",
        "funnel",
        "train",
        "train_async",
        "evaluate",
        "generate",
        "plan",
        "plot",
        "parity",
        "export_hf",
        "import_hf",
    ]
    assert [name for name in names if name not in COMMANDS] == []


@pytest.mark.parametrize(("given", "nearest"), [("clster", "cluster"), ("train-tokeniser", "train-tokenizer"),
                                                ("normalise_text", "normalize"), ("tokeni", "tokenize")])  # fmt: skip
def test_a_mistyped_command_is_answered_with_the_nearest(capsys, monkeypatch, given: str, nearest: str) -> None:
    said = f"error: expected a command, got '{given}'; try gristmill {nearest} or gristmill --help\n"
    assert call(capsys, monkeypatch, given) == (2, "", said)


def test_the_version_and_the_help_need_no_library(capsys, monkeypatch) -> None:
    assert call(capsys, monkeypatch, "--version")[:2] == (0, "gristmill 0.1.0\n")
    code = (
        "import sys; from gristmill_cli.__main__ import overview; overview(); "
        "print([name for name in ('numpy', 'numba', 'pyarrow', 'tyro', 'rich', 'torch') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "[]\n"


def test_commands_that_train_nothing_are_imported_without_torch() -> None:
    """It takes a second: whoever asks for their help waits for it."""
    late = {"export-hf", "import-hf"}
    modules = {command.module for group in GROUPS.values() for name, command in group.items() if name not in late}
    code = (
        f"import sys, {', '.join(sorted(modules))}; print([name for name in ('torch', 'sympy') if name in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", code], text=True, cwd=ROOT) == "[]\n"


@pytest.mark.parametrize(
    ("words", "advice"),
    [
        ("plan --model llama-2-7b", "--model; try gristmill plan llama-2-7b"),
        ("plan --config=llama-2-7b", "--config; try gristmill plan llama-2-7b"),
        ("plan --gpuss 8 llama-2-7b", "--gpuss; did you mean --gpus?"),
        ("plan llama-2-7b --model x", "--model; there are --gpus, --gpu, "),
        (
            "filter --input_dir x",
            "--input_dir; try gristmill filter INPUT_DIR OUTPUT_FILE N_DOCS DATASET_NAME THRESHOLD",
        ),
    ],
)
def test_an_argument_that_was_given_as_an_option_is_told(capsys, monkeypatch, words: str, advice: str) -> None:
    code, printed, error = call(capsys, monkeypatch, *words.split())
    assert (code, printed) == (2, "")
    assert error.startswith(f"error: unknown option {advice}") and error.count("\n") == 1


@pytest.mark.parametrize("columns", ["60", "80", "100"])
def test_the_overview_is_wrapped_once_and_names_every_command(monkeypatch, columns: str) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    text = overview()
    assert max(map(len, text.splitlines())) <= int(columns)
    assert [name for group in GROUPS.values() for name in group if f"\n  {name} " not in text] == []


def test_training_starts_beside_a_folder_of_the_user_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "training").mkdir()
    (tmp_path / "training/__init__.py").write_text("raise SystemExit('not ours')")
    words = [sys.executable, "-m", "gristmill_cli.train", "--optim.stepz", "3"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and "unknown option --optim.stepz; did you mean --optim.steps?" in done.stderr
