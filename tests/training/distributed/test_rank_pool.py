import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.patience import patience
from training.distributed.rank_pool import RankError, RankPool


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(3, timeout=patience(60), job_timeout=patience(90)) as pool:
        yield pool


def add(number: int) -> tuple[int, int, float, int]:
    total = torch.tensor(float(number * (dist.get_rank() + 1)))
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item(), os.getpid()


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the grain is wet")
    dist.barrier()


def die_on_one() -> None:
    if dist.get_rank() == 1:
        os._exit(7)
    dist.barrier()


def hang_on_one() -> int:
    if dist.get_rank() == 1:
        time.sleep(1000)
    return dist.get_rank()


_locks = []  # of this process, as tqdm keeps one that a compiler makes


def make_lock() -> str:
    _locks.append(multiprocessing.RLock())
    return str(_locks[-1]._semlock.name)  # type: ignore[attr-defined]


def exit_on_all() -> None:
    sys.exit(3)


def test_jobs_of_different_sizes_reuse_the_workers(pool: RankPool) -> None:
    first, second, third = pool.run(3, add, 1), pool.run(2, add, 10), pool.run(3, add, 100)
    assert [r[:3] for r in first] == [(0, 3, 6.0), (1, 3, 6.0), (2, 3, 6.0)]
    assert [r[:3] for r in second] == [(0, 2, 30.0), (1, 2, 30.0)]
    assert [r[3] for r in third] == [r[3] for r in first] and len({r[3] for r in first}) == 3


def test_an_exception_is_reported_with_rank_and_traceback(pool: RankPool) -> None:
    """The others, which wait in a barrier, end with it: they do not time out."""
    pool.run(3, add, 1)
    with pytest.raises(RankError, match=r"rank 1: Traceback(.|\n)*fail_on_one(.|\n)*ValueError: the grain is wet") as e:
        pool.run(3, fail_on_one)
    assert e.value.rank == 1 and "imed out" not in str(e.value)
    assert pool.run(3, add, 1)[2][2] == 6.0


def test_a_worker_that_dies_is_reported_and_replaced(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 1: died with exit code 7"):
        pool.run(2, die_on_one)
    assert [r[2] for r in pool.run(3, add, 1)] == [6.0] * 3


def test_a_worker_that_died_between_jobs_is_reported(pool: RankPool) -> None:
    pid = pool.run(2, add, 1)[1][3]
    os.kill(pid, 9)
    time.sleep(0.2)
    with pytest.raises(RankError, match="rank 1: died with exit code -9"):
        pool.run(2, add, 1)
    assert pool.run(2, add, 1)[1][3] != pid


def test_a_worker_that_hangs_is_reported_and_replaced() -> None:
    with RankPool(2, timeout=patience(60), job_timeout=patience(90)) as pool:
        pool.run(2, add, 1)
        pool.job_timeout = 2.0
        # on a busy machine rank 0, which does not hang, may be late, too
        with pytest.raises(RankError, match=r"(rank|ranks 0,) 1 did not answer and had to be killed"):
            pool.run(2, hang_on_one)
        pool.job_timeout = patience(90)
        assert [r[2] for r in pool.run(2, add, 1)] == [3.0, 3.0]


def test_a_worker_that_could_not_connect_is_replaced() -> None:
    with RankPool(2, timeout=patience(2), job_timeout=patience(10)) as pool:
        stopped = pool.run(2, add, 1)[1][3]
        os.kill(stopped, signal.SIGSTOP)
        pool.job_timeout = patience(2)
        with pytest.raises(RankError, match=r"(rank|ranks 0,) 1 did not answer"):
            pool.run(2, add, 1)
        pool.timeout = pool.job_timeout = patience(60)
        assert [r[2] for r in pool.run(2, add, 1)] == [3.0, 3.0]


def test_system_exit_fails_the_job_and_keeps_the_worker(pool: RankPool) -> None:
    before = pool.run(2, add, 1)
    with pytest.raises(RankError, match="SystemExit: 3"):
        pool.run(2, exit_on_all)
    assert pool.run(2, add, 1)[0][3] == before[0][3]


PARENT = """
import os, sys, time
from training.distributed.rank_pool import RankPool
if __name__ == "__main__":
    pool = RankPool(2)
    print(*pool.run(2, os.getpid), flush=True)
    time.sleep(100)
"""


def test_workers_die_with_their_parent(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    parent = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(Path.cwd())}
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + patience(10)
    while any(Path(f"/proc/{pid}").exists() for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(pids) == 2 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_workers_are_replaced_after_a_number_of_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("training.distributed.rank_pool._MAX_JOBS", 3)
    with RankPool(2) as pool:
        pids = [pool.run(2, os.getpid)[0] for _ in range(7)]
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [3, 3, 1]


def test_workers_leave_no_semaphores() -> None:
    with RankPool(2) as pool:
        names = pool.run(2, make_lock)
        assert all(Path(f"/dev/shm/sem.{name.lstrip('/')}").exists() for name in names)
    assert not any(Path(f"/dev/shm/sem.{name.lstrip('/')}").exists() for name in names)
