"""The wheel, installed into an empty folder and run from outside the checkout."""

import contextlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gristmill_cli.quickstart import main as quickstart
from tests.gristmill_cli.corpus import ROOT, make_corpus
from tests.gristmill_cli.documentation import commands, shell

PACKAGES = ("gristmill", "gristmill_cli", "gristmill_parity", "gristmill_planner", "preprocessing", "dedup", "training")
LAUNCHER = "from gristmill_cli.__main__ import main\nif __name__ == '__main__':\n    main()\n"  # as pip writes it
SMALL = "--optim.steps 4 --eval.every 4 --model.width 32 --model.layers 2 --data.seq_len 32 --data.batch_size 4"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel's files. It is built from a copy, because setuptools writes into the source."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in PACKAGES:
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / "source" / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / "source")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    subprocess.run([*command, "--wheel-dir", str(folder), str(folder / "source")], check=True)
    (wheel,) = folder.glob("gristmill-*.whl")
    subprocess.run([sys.executable, "-m", "twine", "check", "--strict", wheel], check=True)
    zipfile.ZipFile(wheel).extractall(folder / "site")
    shutil.rmtree(folder / "source")
    (folder / "site" / "bin").mkdir()
    (folder / "site" / "bin" / "gristmill").write_text(LAUNCHER)
    copy_kernels(folder / "site")
    return folder / "site"


def copy_kernels(site: Path) -> None:
    """Copy the checkout's compiled kernels, because compiling them takes half a minute."""
    with contextlib.suppress(FileNotFoundError):
        shutil.copytree(ROOT / "gristmill/__pycache__/kernels", site / "gristmill/__pycache__/kernels")


def run_installed(site: Path, cwd: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(site)}
    return subprocess.run(
        [sys.executable, *command], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_has_every_package_and_the_licence(site: Path) -> None:
    sources = {str(path.relative_to(ROOT)) for name in PACKAGES for path in (ROOT / name).rglob("*.py")}
    installed = {str(path.relative_to(site)) for path in site.rglob("*.py")}
    assert installed == sources
    assert len(list((site / "gristmill_cli").glob("*.toml"))) == 2
    templates = {path.relative_to(ROOT) for path in (ROOT / "gristmill_cli/templates").rglob("*.*")}
    assert len(templates) > 10 and all((site / path).is_file() for path in templates)
    assert list(site.glob("gristmill-*.dist-info/licenses/LICENSE"))


def test_the_command_lists_its_commands(site: Path, tmp_path: Path) -> None:
    done = run_installed(site, tmp_path, "-m", "gristmill_cli", "--help")
    assert done.returncode == 0, done.stderr
    assert "quickstart" in done.stdout and "normalize_text" in done.stdout


def test_the_library_deduplicates(site: Path, tmp_path: Path) -> None:
    texts = ["The mill grinds the grain.", "Bread is baked from flour.", "the mill grinds the grain"]
    code = f"import dedup; print(dedup.__file__, dedup.deduplicate({texts}).kept)"
    done = run_installed(site, tmp_path, "-c", code)
    assert done.stdout.split(" ", 1) == [str(site / "dedup" / "__init__.py"), "[0 1]\n"], done.stderr


def test_the_quick_start_of_the_readme_trains_beside_packages_of_the_same_names(site: Path, tmp_path: Path) -> None:
    """The script in a folder whose packages are not ours: with the wheel's, it does all that a reader is promised."""
    corpus = make_corpus(tmp_path / "corpus")
    (corpus / "table").mkdir()
    rows = "".join(f"row {i} of a table that is read beside\n" for i in range(20))
    (corpus / "table/a.csv").write_text(f"text\n{rows}")
    checkout = copy_scripts(tmp_path / "checkout")
    for name in ("training", "preprocessing", "pipeline"):
        (checkout / name).mkdir()
        (checkout / name / "__init__.py").write_text("raise SystemExit('not ours')")
    (command,) = commands("README.md")[0].splitlines()
    options = f"{SMALL} --normalize.read_also csv --parallel.micro_batches 2"
    which = "python -c 'import gristmill_cli; print(gristmill_cli.__file__)'"
    done = shell(
        f"cd {checkout}; {which}; {command} {corpus} {options}",
        PYTHONPATH=str(site),
        QUICKSTART_OUT=str(tmp_path / "out"),
    )
    assert done.returncode == 0, done.stderr
    headings = [line.partition(". ")[0] for line in done.stdout.splitlines() if line.startswith("== ")]
    assert headings == ["== 1", "== 2", "== 3", "== 4", "== 5", "== 6", "== 7"]
    assert done.stdout.startswith(f"{site}/gristmill_cli/") and "holdout after step 4" in done.stdout
    assert "1 prompt: " in done.stderr and re.search("^The", done.stdout, re.MULTILINE)
    assert "= train" in done.stdout and "· train" in done.stdout
    assert (tmp_path / "out/model/summary.json").is_file() and (tmp_path / "out/model/loss.svg").is_file()
    assert "table" in (tmp_path / "out/data/funnel.json").read_text(encoding="utf-8")  # its option is the pipeline's
    assert str(site) not in done.stderr  # no warning or traceback


def copy_scripts(checkout: Path) -> Path:
    """A checkout of the scripts alone, with the environment of this one."""
    shutil.copytree(ROOT / "scripts", checkout / "scripts")
    for name in ("pyproject.toml", "constraints.txt", ".venv"):
        (checkout / name).symlink_to(ROOT / name)
    return checkout


def test_the_quick_start_refuses_a_wrong_option_before_it_begins(site: Path, tmp_path: Path) -> None:
    done = run_installed(site, tmp_path, "-m", "gristmill_cli", "quickstart", "--optim.stepz", "3")
    assert done.returncode == 2 and done.stderr.startswith("error: ") and done.stdout == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("wrong", ["--optim.steps 3 corpus", "--data.seq_len x"])
def test_wrong_values_are_refused_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], wrong: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        quickstart(wrong.split())
    said = capfd.readouterr()
    assert end.value.code == 2 and said.err.startswith("error: ") and said.out == ""
    assert list(tmp_path.iterdir()) == []


def test_the_quick_start_needs_torch(site: Path, tmp_path: Path) -> None:
    hide = "import sys; sys.modules['torch'] = None; import importlib.util as util; find = util.find_spec; "
    hide += "util.find_spec = lambda name, *more: None if name == 'torch' else find(name, *more); "
    done = run_installed(site, tmp_path, "-c", hide + "from gristmill_cli.quickstart import main; main([])")
    assert done.returncode == 2
    assert "pip install 'gristmill[train]'" in done.stderr
    assert list(tmp_path.iterdir()) == []
