"""Scratch files belong to one run: another one neither removes them nor writes into them."""

import os
from pathlib import Path

import pytest

from gristmill.errors import OutputError
from training.memory.scratch_files import make_scratch_folder, open_scratch_file, remove_scratch_folder


def test_a_folder_in_use_is_refused_and_keeps_its_files(tmp_path: Path) -> None:
    folder = tmp_path / "rank-00000"
    lock = make_scratch_folder(folder)
    file = open_scratch_file(folder / "exp_avg.bin", 100)
    with pytest.raises(OutputError, match=r"in use by another training run; .* with --memory.folder"):
        make_scratch_folder(folder)
    assert (folder / "exp_avg.bin").stat().st_size == 100
    remove_scratch_folder(folder, lock, [file])
    assert not list(tmp_path.iterdir())
    os.close(make_scratch_folder(folder))  # as after a kill: the lock ends with its process, the files stay
    (folder / "exp_avg.bin").touch()
    remove_scratch_folder(folder, make_scratch_folder(folder))
    assert not list(tmp_path.iterdir())
