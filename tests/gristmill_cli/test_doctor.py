"""gristmill doctor: what it says of this installation is so, and of one without extras."""

import subprocess
import sys
from importlib.metadata import metadata, version
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from gristmill.errors import UsageError
from gristmill_cli import doctor
from gristmill_cli.doctor import DEVELOPMENT, EXTRAS, missing, requirements_of
from gristmill_cli.needed_extras import needed_extras


def test_every_extra_is_told() -> None:
    assert {*EXTRAS} == {*metadata("gristmill").get_all("Provides-Extra", [])} - DEVELOPMENT
    assert all(requirements_of(extra) for extra in EXTRAS)
    assert "numpy" in requirements_of("") and not missing("") and not missing("train")


def test_the_command_tells_versions_and_what_lacks(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "gristmill_cli", "doctor"], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert version("torch") in done.stdout and sys.executable in done.stdout
    assert not list(tmp_path.iterdir())
    lacking = [extra for extra in EXTRAS if missing(extra)]
    assert (f"gristmill[{','.join(lacking)}]" in done.stdout) == bool(lacking)


def test_all_extras_that_a_run_needs_are_named_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "corpus/web").mkdir(parents=True)
    (tmp_path / "corpus/web/a.warc.gz").write_bytes(b"")
    file = tmp_path / "run.toml"
    file.write_text(
        f"corpus = '{tmp_path}/corpus'\nout = 'out'\nrecipe = 'gopher'\n[normalize]\nftfy = true\n"
        "[tokenizer]\nmodel_type = 'byte-bpe'\n[scores.edu]\nfasttext = 'edu.bin'\n"
    )
    assert needed_extras(file) == {
        "web": "web/a.warc.gz",
        "fasttext": "[scores.edu]",
        "tokenizers": "tokenizer.model_type",
        "ftfy": "normalize.ftfy",
    }
    known = doctor._version_of
    monkeypatch.setattr(doctor, "_version_of", lambda name: "" if name in ("ftfy", "resiliparse") else known(name))
    console = Console(file=StringIO(), width=100)
    console.print(doctor.doctor(file))
    assert "try pip install 'gristmill[web,ftfy]'" in console.file.getvalue()
    file.write_text("corpus = 'hf://datasets/a/b'\nout = 'out'\nexecutor = 'ray'\n[tokenizer]\nfile = 'm.model'\n")
    assert [*needed_extras(file)] == ["ray", "hub"]


def test_extras_of_a_recipe_are_named_though_they_are_not_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in ("language_identifier", "languages", "personal"):
        monkeypatch.setattr(f"preprocessing.quality.{module}.find_spec", lambda _: None)
    rules = tmp_path / "rules.toml"
    rules.write_text("language = { allow = ['en'] }\nwords.min = 3\npersonal = { mail = true, iban = true }\n")
    file = tmp_path / "run.toml"
    file.write_text(f"corpus = 'corpus'\nout = 'out'\nrecipe = '{rules}'\n[scores.edu]\nfasttext = 'edu.bin'\n")
    assert [*needed_extras(file)] == ["language", "personal", "fasttext"]
    rules.write_text("personal = { mail = true }\n")
    assert [*needed_extras(file)] == ["fasttext"]
    rules.write_text("personal = \n")
    with pytest.raises(UsageError, match=r"rules\.toml: invalid TOML"):
        needed_extras(file)


def test_without_extras_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    known = doctor._version_of
    monkeypatch.setattr(doctor, "_version_of", lambda name: "" if name in ("torch", "resiliparse") else known(name))
    monkeypatch.setattr(doctor, "cache_folders", lambda: iter([tmp_path]))
    monkeypatch.setattr(doctor, "_gpus", list)
    advice = "\n".join(doctor._advice())
    assert "pip install 'gristmill[train,web" in advice and "gristmill compile" in advice
    first = "first torch's CPU build, as pytorch.org names it, or pip fetches CUDA, which this machine has no GPU for"
    assert advice.index(first) < advice.index("pip install 'gristmill[train,web")
    monkeypatch.setattr(doctor, "_gpus", lambda: ["H200"])
    assert first not in "\n".join(doctor._advice())
    monkeypatch.setattr(doctor, "_gpus", list)
    monkeypatch.setattr(doctor, "_version_of", lambda name: "" if name == "resiliparse" else known(name))
    assert first not in "\n".join(doctor._advice())
