"""Importing dedup beside packages of a user's own that have the names of ours."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("pipeline", "preprocessing", "training", "gristmill_cli")
SCRIPT = """
import json
from pathlib import Path

import pytest

import gristmill_cli, pipeline, preprocessing, training
from dedup import deduplicate, to_hash
from gristmill.engine.options import RunOptions

if __name__ == "__main__":
    texts = ["the miller grinds the corn " * 9, "a river turns the wheel " * 9, "the miller grinds the corn " * 9]
    result = deduplicate(texts)
    Path("corpus/a").mkdir(parents=True)
    for number in range(4):
        Path(f"corpus/a/{number}.jsonl").write_text("".join(json.dumps({"text": text}) + "\\n" for text in texts))
    counts = to_hash("all", Path("corpus"), Path("hashes"), 0, "0", 0, 4, options=RunOptions(workers=2, quiet=True))
    owners = {package.OWNER for package in (gristmill_cli, pipeline, preprocessing, training)}
    print(json.dumps([result.kept.tolist(), counts.total("signed").documents, sorted(owners)]))
"""


def test_dedup_works_where_other_packages_have_the_names_of_ours(tmp_path: Path) -> None:
    for name in OTHERS:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("OWNER = 'a user'\n")
    (tmp_path / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[[0, 1], 12, ["a user"]]'


ALONE = """
import importlib, json, sys
imported = {}
for name in sys.argv[1:]:
    importlib.import_module(name)
    ours = [module for module in sys.modules if module.partition(".")[0] in ("gristmill", "preprocessing", "dedup")]
    imported[name] = ours + [module for module in ("numpy", "pyarrow") if module in sys.modules]
    for module in ours:
        del sys.modules[module]
print(json.dumps(imported))
"""
TRAINING = "preprocessing.tokenizer.training"
STEPS = [
    "preprocessing.minimum_length",
    *(f"{folder}.{path.stem}" for folder in ("preprocessing.steps", "dedup.steps")
      for path in sorted((ROOT / folder.replace(".", "/")).glob("[a-z]*.py"))),
]  # fmt: skip
MAX_MODULES = 30


@pytest.fixture(scope="module")
def imported() -> dict[str, list[str]]:
    """The modules that are imported with each module, ours being gone before; those of others stay."""
    command = [sys.executable, "-c", ALONE, TRAINING, *STEPS]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.parametrize("name", STEPS)
def test_a_step_on_documents_stands_on_few_files_and_none_of_the_engine(
    imported: dict[str, list[str]], name: str
) -> None:
    """Their packages count, too: importing a module imports those first."""
    modules = [module for module in imported[name] if module not in ("numpy", "pyarrow")]
    assert not [module for module in modules if module.startswith("gristmill.engine")]
    assert len(modules) <= MAX_MODULES, modules


def test_the_process_that_trains_a_tokenizer_starts_with_little(imported: dict[str, list[str]]) -> None:
    """Each run starts one."""
    assert not [name for name in imported[TRAINING] if name.startswith(("numpy", "pyarrow", "gristmill.engine"))]


def test_a_stage_is_a_name_of_its_package() -> None:
    import preprocessing.filter
    import preprocessing.shuffle_holdout
    from preprocessing import filter, pass1

    assert preprocessing.filter is filter and callable(filter)
    assert preprocessing.shuffle_holdout.pass1 is pass1
    with pytest.raises(AttributeError, match="has no attribute 'unknown'"):
        _ = preprocessing.unknown  # type: ignore[attr-defined]
