"""Entry points of a stage: by path, as a module, by the command `gristmill`, and imported."""

import ast
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gristmill_cli.__main__ import COMMANDS
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
PATH_FIX = "if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])  # fmt: skip\n"
GUARD = 'if __name__ == "__main__":'
PACKAGES = ("preprocessing", "dedup", "training")
FILES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
RUNNABLE = [path for path in FILES if GUARD in path.read_text(encoding="utf-8")]
DOORS = RUNNABLE + sorted(path for path in (ROOT / "gristmill_cli").rglob("*.py") if GUARD in path.read_text())
STAGES = ["normalize_text", "filter", "shuffle_holdout", "train_tokenizer", "tokenize_corpus"]

HELPS = """
import contextlib, io, json, runpy, sys, warnings
said = {}
for door in sys.argv[1:]:
    sys.argv, outputs = [door, "--help"], io.TextIOWrapper(io.BytesIO(), "utf-8")
    with contextlib.redirect_stdout(outputs), warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            if door.endswith(".py"):
                runpy.run_path(door, run_name="__main__")
            elif door.startswith("gristmill "):
                sys.argv = door.split() + ["--help"]
                from gristmill_cli.__main__ import main
                main()
            else:
                for other in [name for name in sys.modules if name.partition(".")[0] in ROOMS]:
                    del sys.modules[other]  # a door before has imported it
                runpy.run_module(door, run_name="__main__", alter_sys=True)
        except SystemExit as end:
            if end.code:
                print(door, "ends with", end.code, file=sys.stderr)
        except BaseException as error:
            print(door, repr(error), file=sys.stderr)
    outputs.flush()
    said[door] = outputs.buffer.getvalue().decode()
open(OUT, "w").write(json.dumps(said))
"""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_every_stage_is_runnable() -> None:
    at_the_top = [command.module for command in COMMANDS.values() if command.module.partition(".")[0] in PACKAGES]
    stages = {f"{module.replace('.', '/')}.py" for module in at_the_top if module.count(".") == 1}
    stages.add("training/train.py")  # gristmill_cli.train runs it
    assert stages == {name_of(path) for path in RUNNABLE}


@pytest.mark.parametrize("path", RUNNABLE, ids=name_of)
def test_path_fix_is_identical_and_precedes_other_imports(path: Path) -> None:
    source = path.read_text(encoding="utf-8")
    assert source.splitlines(keepends=True).count(PATH_FIX) == 1
    before = ast.parse(source[: source.index(PATH_FIX)])
    imported = [node for node in ast.walk(before) if isinstance(node, (ast.Import, ast.ImportFrom))]
    names = {node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imported}
    assert {name.split(".")[0] for name in names} <= sys.stdlib_module_names  # the rest would be looked for here


@pytest.mark.parametrize("path", [path for path in FILES if path not in RUNNABLE], ids=name_of)
def test_path_fix_is_only_in_runnable_files(path: Path) -> None:
    assert "__package__" not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_shadows_the_standard_library(path: Path) -> None:
    assert path.stem == "__init__" or path.stem not in sys.stdlib_module_names


@pytest.mark.parametrize("name", ["normalize_text", "filter", "train_tokenizer", "tokenize_corpus", "pass1", "pass2"])
def test_package_exports_the_stage_function(name: str) -> None:
    package = importlib.import_module("preprocessing")
    file = "shuffle_holdout" if name.startswith("pass") else name
    function = getattr(package, name)
    assert callable(function) and function.__module__ == f"preprocessing.{file}"
    assert name in COMMANDS[file].functions and COMMANDS[file].module == f"preprocessing.{file}"


@pytest.fixture(scope="module")
def helps(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The help of every module that `python -m` runs, and of stages by the other entry points; from one process."""
    modules = [name_of(path)[: -len(".py")].replace("/", ".") for path in DOORS]
    doors = modules + [f"preprocessing/{stage}.py" for stage in STAGES] + [f"gristmill {stage}" for stage in STAGES]
    out = tmp_path_factory.mktemp("helps") / "helps.json"
    words = [sys.executable, "-c", f"ROOMS, OUT = {(*PACKAGES, 'gristmill_cli')!r}, {str(out)!r}\n{HELPS}", *doors]
    done = subprocess.run(words, capture_output=True, text=True, cwd=ROOT, timeout=patience(120), check=False)
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    found: dict[str, str] = json.loads(out.read_text())
    return found


def test_every_module_that_is_run_answers_and_says_nothing_beside(helps: dict[str, str]) -> None:
    assert {"dedup.to_hash", "gristmill_cli.status.command", "training.train"} < set(helps)
    assert all("usage: " in said for said in helps.values())


@pytest.mark.parametrize("stage", STAGES)
def test_every_entry_point_gives_the_same_help(helps: dict[str, str], stage: str) -> None:
    calls = [f"preprocessing/{stage}.py", f"preprocessing.{stage}", f"gristmill {stage}"]
    options = [helps[call].partition("\n\n")[2] for call in calls]  # after the line of usage
    assert options[0] and options[0] == options[1] == options[2]


@pytest.mark.parametrize("entry_point", ["path", "module", "gristmill"])
def test_datasets_is_hugging_faces_for_every_entry_point(run, tmp_path: Path, entry_point: str) -> None:
    """In a copy of the project, a stage imports `datasets` in its workers and reports the file it got."""
    project = tmp_path / "project"
    for package in ("gristmill", "gristmill_cli", "preprocessing", "dedup", "training"):
        shutil.copytree(ROOT / package, project / package, ignore=shutil.ignore_patterns("__pycache__"))
    stage = project / "preprocessing" / "normalize_text.py"
    source = stage.read_text(encoding="utf-8")
    start_of_task = "    for part, output in zip(group, outputs, strict=True):"
    assert source.count(start_of_task) == 1
    told = '    import datasets, os\n    os.write(1, f"{__file__} {datasets.__file__}\\n".encode())\n'
    stage.write_text(source.replace(start_of_task, told + start_of_task))
    for name in "ab":
        (tmp_path / "in" / name).mkdir(parents=True)  # files of one source would share a task
        (tmp_path / "in" / name / "x.jsonl").write_text('{"text": "a"}\n')
    start = {
        "path": [str(stage)],
        "module": ["-c", f"import sys, runpy; sys.path.insert(0, {str(project)!r}); "
                   "runpy.run_module('preprocessing.normalize_text', run_name='__main__', alter_sys=True)"],
        "gristmill": ["-c", f"import sys; sys.path.insert(0, {str(project)!r}); sys.argv[0] = 'gristmill'; "
                      "sys.argv.insert(1, 'normalize_text'); from gristmill_cli.__main__ import main\n"
                      "if __name__ == '__main__': main()"],
    }[entry_point]  # fmt: skip
    done = run(*start, "-d", tmp_path / "in", "-t", tmp_path / "out", "--workers", 2)
    assert done.returncode == 0, done.stderr
    told = [line.split(" ") for line in done.stdout.splitlines() if line.endswith("__init__.py")]
    assert len(told) == 2, done.stdout
    for own, file in told:
        assert own == str(stage)  # a worker must not run another copy, the one that is installed
        assert Path(file).parts[-2:] == ("datasets", "__init__.py") and str(project) not in file


def test_slimpajamas_command_lines_run_unchanged(tmp_path: Path, run, corpus) -> None:
    corpus("in", book=12)
    out = tmp_path / "out"
    lines = [
        "preprocessing/normalize_text.py --data_dir in/book/ --target_dir norm/book/ --zst --idx 0",
        "preprocessing/filter.py norm/book/ short.pickle 12 book 10",
        "preprocessing/shuffle_holdout.py pass1 --input_dir norm/ --short_docs short.pickle --out_dir out/pass1",
        "preprocessing/shuffle_holdout.py pass2 0 20 1 --input_dir out/pass1 --train_dir out/train "
        "--holdout_dir out/holdout",
    ]
    for line in lines:
        done = run(*line.split())
        assert done.returncode == 0, done.stderr
    assert len(list((out / "train" / "chunk1").glob("example_train_*.jsonl.zst"))) == 20
    assert len(list((out / "holdout" / "chunk1").glob("example_holdout_*.jsonl.zst"))) == 20
