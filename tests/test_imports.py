"""Importing dedup beside packages of a user's own that have the names of ours."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
OTHERS = ("pipeline", "preprocessing", "training", "gristmill_cli")
SCRIPT = """
import json
from pathlib import Path

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
