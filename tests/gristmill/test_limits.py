"""Limits: the cores and the memory of a container are what is used by default."""

import os
from pathlib import Path

import psutil
import pytest

from gristmill.budget import free_memory, usable_cores

ALL_CORES = len(os.sched_getaffinity(0))


def process_in(folder: Path, group: str, version: int, controller: str, root: str = "/", **files: str) -> Path:
    """A folder as /proc/self, of a process in `group`, mounted at `folder` from `root` on; `files` are its limits."""
    kind = "cgroup2 cgroup2 rw" if version == 2 else f"cgroup cgroup rw,{controller}"
    (folder / "mountinfo").write_text(f"22 1 0:21 / / rw - ext4 /dev/vda rw\n35 31 0:32 {root} {folder} rw - {kind}\n")
    (folder / "cgroup").write_text(f"7:pids:/\n{'0:' if version == 2 else f'4:{controller}'}:{group}\n")
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(path.name.replace("_of_", ".", 1)).write_text(f"{text}\n")
    return folder


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", None), ("100000 100000", 1), ("50000 100000", 1), ("150000 100000", 1), ("", None)],
)
def test_a_quota_of_cores_holds(tmp_path: Path, quota: str, cores: int | None) -> None:
    assert usable_cores(process_in(tmp_path, "/", 2, "", cpu_of_max=quota)) == (cores or ALL_CORES)


@pytest.mark.parametrize(("quota", "cores"), [("-1", None), ("150000", 1)])
def test_a_quota_of_version_1_holds(tmp_path: Path, quota: str, cores: int | None) -> None:
    limits = {"a__cpu_of_cfs_quota_us": quota, "a__cpu_of_cfs_period_us": "100000"}
    process = process_in(tmp_path, "/a/b", 1, "cpu,cpuacct", **limits)  # of the group above its own
    assert usable_cores(process) == (cores or ALL_CORES)


def test_a_limit_of_memory_holds_and_files_in_memory_are_free(tmp_path: Path) -> None:
    process = process_in(tmp_path, "/", 2, "", memory_of_max="300000000", memory_of_current="200000000")
    assert free_memory(process) == 100_000_000
    (tmp_path / "memory.stat").write_text("anon 150000000\ninactive_file 50000000\n")
    assert free_memory(process) == 150_000_000
    (tmp_path / "memory.high").write_text("250000000\n")
    assert free_memory(process) == 100_000_000
    for name in ("max", "high"):
        (tmp_path / f"memory.{name}").write_text("max\n")
    assert free_memory(process) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
    assert free_memory() > 0 and usable_cores() >= 1


@pytest.mark.parametrize(("group", "root"), [("/docker/x", "/docker/x"), ("/docker/x", "/"), ("/../x", "/")])
def test_a_limit_of_memory_of_version_1_holds(tmp_path: Path, group: str, root: str) -> None:
    """Whether the container sees its own group as the root, the whole hierarchy, or a group whose place is hidden."""
    folder = "docker__x__" if (group, root) == ("/docker/x", "/") else ""
    process = process_in(tmp_path, group, 1, "memory", root=root, **{
        f"{folder}memory_of_limit_in_bytes": "300000000", f"{folder}memory_of_usage_in_bytes": "200000000",
        f"{folder}memory_of_stat": "inactive_file 1\ntotal_inactive_file 30000000",
    })  # fmt: skip
    assert free_memory(process) == 130_000_000
    for path in tmp_path.rglob("memory.limit_in_bytes"):
        path.write_text("9223372036854771712\n")  # no limit
    assert free_memory(process) == pytest.approx(psutil.virtual_memory().available, rel=0.2)
