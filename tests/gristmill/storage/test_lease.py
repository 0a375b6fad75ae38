"""Leases: one holder at a time; a holder that dies is followed, and one that comes back late is told."""

import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest

from gristmill.engine.execution.progress import log_lines
from gristmill.errors import InputError, StorageError, TakenOver, UsageError
from gristmill.storage import lock
from gristmill.storage.lock import Lease, is_held, lease_seconds, stage_lock
from gristmill.storage.objects import RETRIES, find_object, list_objects, read_object, write_object
from tests.object_faults import Times, dropped, lost_answer, unavailable
from tests.patience import patience, wait_until

SECONDS = 0.4


@pytest.fixture
def path(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", str(SECONDS))
    return folder / "stage.lock"


def wait_for(lease: Lease) -> float:
    """Seconds until the lease was acquired."""
    start = time.monotonic()
    wait_until(lease.acquire)
    return time.monotonic() - start


def die(lease: Lease) -> None:
    """End the renewals and nothing else, as a process that is killed does."""
    lease._ended.set()
    assert lease._renewing
    lease._renewing.join()


@pytest.mark.parametrize("given", ["abc", "", "0", "-5", "nan", "inf", "1e9", "0.001"])
def test_seconds_that_are_none(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("GRISTMILL_LEASE_SECONDS", given)
    expected = rf"^GRISTMILL_LEASE_SECONDS '{given}': expected seconds, from 0\.1 to 86,400;"
    with pytest.raises(UsageError, match=expected):
        lease_seconds()
    monkeypatch.setenv("GRISTMILL_LOG_SECONDS", given)
    with pytest.raises(UsageError, match=rf"^GRISTMILL_LOG_SECONDS '{given}': expected"), log_lines(str):
        pass


def test_one_of_two_has_the_lease_and_renews_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(lock, "_now", lambda: clock[0])
    first, second = Lease(path), Lease(path)
    assert first.acquire() and not second.acquire()
    assert second.holder.startswith("process ") and ", since " in second.holder
    for _ in range(12):  # three times the lease's seconds, which pass only once it was renewed
        before = read_object(path)
        wait_until(lambda seen=before: read_object(path) != seen)
        assert not second.acquire()
        clock[0] += SECONDS / 4
        assert not second.acquire()
    first.check()
    first.release()
    assert find_object(path) is None and second.acquire()
    second.release()


def test_many_at_once(path: Path) -> None:
    leases, start = [Lease(path) for _ in range(8)], threading.Barrier(8)
    got: list[Lease] = []

    def run(lease: Lease) -> None:
        start.wait()
        if lease.acquire():
            got.append(lease)

    threads = [threading.Thread(target=run, args=(lease,)) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()


def test_a_dead_holder_is_followed_and_told_when_it_comes_back(path: Path) -> None:
    first, second = Lease(path), Lease(path)
    assert first.acquire()
    die(first)
    assert wait_for(second) >= SECONDS
    with pytest.raises(TakenOver, match=r"another process has taken over the work, .* not answer for 0\.4 s"):
        while True:
            first.check()
            time.sleep(0.05)
    first.release()  # leaves the other's
    assert find_object(path) and not Lease(path).acquire()
    second.check()
    second.release()


def test_workers_see_whether_the_lease_is_held(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heartbeat = tmp_path / "heartbeat"
    first, second = Lease(path, heartbeat=heartbeat), Lease(path)
    assert first.acquire() and is_held(heartbeat)
    die(first)
    time.sleep(1.5 * SECONDS)
    heartbeat.unlink()  # by somebody who tidies up
    with monkeypatch.context() as patch, pytest.raises(StorageError, match="does not renew the lock"):
        patch.setitem(RETRIES, "retry_timeout", timedelta(0))
        is_held(heartbeat)
    threading.Timer(0.2, first.check).start()
    assert is_held(heartbeat)  # as soon as it is renewed
    wait_for(second)
    threading.Timer(2 * SECONDS, first._renew).start()
    assert not is_held(heartbeat)
    second.release()


def test_the_leases_of_a_dead_process_run_out_once(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that is killed leaves its own and that of the stage which was running."""
    of_run, of_stage = Lease(path), Lease(path.with_name("stage"))
    for lease in (of_run, of_stage):
        assert lease.acquire()
        die(lease)
    monkeypatch.setattr("gristmill.storage.lock._PROCESS", "the next one")
    dead = set[str]()
    next_of_run, next_of_stage = Lease(path, dead), Lease(path.with_name("stage"), dead)
    assert wait_for(next_of_run) >= SECONDS
    assert next_of_stage.acquire()
    with pytest.raises(TakenOver, match="another process has taken over the work"):
        while True:
            of_stage.check()
            time.sleep(0.05)
    other = Lease(path.with_name("stage"), dead)
    assert not other.acquire()
    next_of_stage.release()
    next_of_run.release()


def test_a_holder_that_nobody_followed_goes_on(path: Path) -> None:
    lease = Lease(path)
    assert lease.acquire()
    die(lease)
    time.sleep(1.5 * SECONDS)
    before = read_object(path)
    lease.check()
    assert read_object(path) != before
    lease.release()
    assert find_object(path) is None


@pytest.mark.parametrize("fault", [unavailable, dropped, lost_answer], ids=lambda fault: fault.__name__)
def test_faults_while_it_is_acquired_and_renewed(path: Path, store, fault) -> None:
    lease = Lease(path)
    store.fault = Times(fault, 2)
    assert lease.acquire()
    # More than are repeated: a renewal may have had an effect, and no answer came.
    store.fault = Times(fault, 6, lambda request: request["REQUEST_METHOD"] == "PUT")
    before = read_object(path)
    wait_until(lambda: store.fault.made == 6 and read_object(path) != before)
    lease.check()
    assert not Lease(path).acquire()
    lease.release()
    assert find_object(path) is None


def test_a_store_that_is_away_for_too_long(path: Path, store) -> None:
    with pytest.raises(StorageError), stage_lock(path, quiet=True) as check:  # the first error is the one that is told
        store.fault = unavailable
        time.sleep(1.5 * SECONDS)
        check()
    store.fault = None
    lease = Lease(path)
    wait_for(lease)
    lease.release()


def test_a_lock_in_a_bucket_waits_and_says_for_whom(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    order = list[str]()
    said = threading.Event()
    other = Lease(path)
    assert other.acquire()

    def say(holder: str) -> None:
        order.append(holder.partition(" ")[0])
        said.set()

    monkeypatch.setattr(lock, "_say_waiting", say)

    def run() -> None:
        with stage_lock(path) as check:
            check()
            order.append("second")

    thread = threading.Thread(target=run)
    thread.start()
    assert said.wait(patience(60))
    order.append("first")
    other.release()
    thread.join()
    assert order == ["process", "first", "second"] and not list(list_objects(path.parent))


def test_what_another_process_that_has_taken_over_removed_is_not_told_as_missing(path: Path) -> None:
    with pytest.raises(TakenOver, match="another process has taken over the work"), stage_lock(path):
        write_object(path, b"process 1 elsewhere")
        time.sleep(SECONDS)
        raise InputError("a temporary file is missing")
    with pytest.raises(InputError, match="a file is damaged"), stage_lock(path.with_name("other.lock")):
        raise InputError("a file is damaged")
