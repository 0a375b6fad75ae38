"""Limits: the cores and the memory of a container are what is used by default."""

import os
from pathlib import Path

import psutil
import pytest

from gristmill.engine.limits import free_memory, usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 1), ("", None)],
)
def test_a_quota_of_cores_holds(tmp_path: Path, quota: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_a_limit_of_memory_holds_and_files_in_memory_are_free(tmp_path: Path) -> None:
    for name, text in (("memory.max", "300000000"), ("memory.current", "200000000")):
        (tmp_path / name).write_text(text + "\n")
    assert free_memory(tmp_path) == 100_000_000
    (tmp_path / "memory.stat").write_text("anon 150000000\ninactive_file 50000000\n")
    assert free_memory(tmp_path) == 150_000_000
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory(tmp_path) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert free_memory() > 0 and usable_cores() >= 1
