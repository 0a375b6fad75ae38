"""Fixture: one finished run, shared by several tests."""

from pathlib import Path

import pytest

from tests.gristmill_cli.corpus import make_corpus, run


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, str]:
    """A corpus, the folder of a finished run of it, and what that printed."""
    folder = tmp_path_factory.mktemp("finished")
    corpus = make_corpus(folder / "corpus")
    done = run(corpus, folder / "out", "--workers", "2", PYTHONHASHSEED="0")
    assert done.returncode == 0, done.stderr
    return corpus, folder / "out", done.stdout
