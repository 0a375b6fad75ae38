"""The scripts' virtual environment is installed into once, and again when the requirements change."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts/environment.sh"


@pytest.mark.parametrize(
    ("extras", "installs"), [("train", False), ("ftfy,train,test", False), ("tes", True), ("train,bench", True)]
)
def test_extras_that_are_installed_with_others_are_not_installed_again(
    tmp_path: Path, extras: str, installs: bool
) -> None:
    (tmp_path / ".venv/bin").mkdir(parents=True)
    python = tmp_path / ".venv/bin/python"
    python.write_text("#!/bin/sh\nexit 9\n")  # in place of pip
    python.chmod(0o755)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
    stamps = {"ftfy,train,test": "cat pyproject.toml constraints.txt | cksum", "train,bench": "echo earlier"}
    script = "".join(f"{command} > .venv/.installed-{name}\n" for name, command in stamps.items())
    script += f". {SCRIPT} {extras}\n"
    done = subprocess.run(["bash", "-euo", "pipefail", "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, "installing into .venv" in done.stdout) == ((9, True) if installs else (0, False)), done
