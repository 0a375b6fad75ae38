"""Memory that is freed is used again without page faults: in processes of their own, as it is for a process's life."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from training.kernels.cpu.allocator import keep_freed_memory

SCRIPT = """
import resource
import torch
from training.kernels.cpu.allocator import keep_freed_memory

keep_freed_memory()

def step():
    return [torch.ones(size) for size in range(100_000, 4_000_000, 200_000)]

for number in range(13):
    if number == 3:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    step()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(sum(int(line.split()[1]) for line in open("/proc/self/smaps") if line.startswith("AnonHugePages")))
"""
REPOSITORY = Path(__file__).resolve().parents[4]
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator only")


def run(**environment: str) -> tuple[int, int]:
    """Page faults of ten steps, and KiB in huge pages."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    faults, huge = done.stdout.split()
    return int(faults), int(huge)


def test_freed_memory_is_reused() -> None:
    assert run()[0] < 500


def test_the_users_malloc_settings_take_precedence() -> None:
    """bench_memory.py's, who measures what is in use. They show as well that the test above could fail."""
    assert run(MALLOC_TRIM_THRESHOLD_="1000000", MALLOC_MMAP_THRESHOLD_="1000000")[0] > 50_000


@pytest.mark.skipif(not HUGE_PAGES.exists() or "[never]" in HUGE_PAGES.read_text(), reason="no huge pages here")
def test_the_heap_uses_huge_pages() -> None:
    assert run()[1] > 8_000


def test_other_c_libraries_are_not_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ctypes.CDLL", lambda _: object())
    keep_freed_memory()
