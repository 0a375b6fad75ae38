import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.patience import patience
from training.distributed.stop_signals import StopSignals


def test_the_first_signal_is_stored_and_the_handlers_are_restored() -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
    with StopSignals() as stop:
        assert stop.received == 0
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGTERM
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_other_threads_leave_the_handlers() -> None:
    seen: list[bool] = []

    def use() -> None:
        before = signal.getsignal(signal.SIGTERM)
        with StopSignals():
            seen.append(signal.getsignal(signal.SIGTERM) is before)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert seen == [True]


def test_while_a_run_starts_the_first_signal_ends_it() -> None:
    with pytest.raises(SystemExit) as ended, StopSignals(is_starting=True):
        os.kill(os.getpid(), signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM


PROGRAM = """
import time
from training.distributed.stop_signals import _SAME_SECONDS, StopSignals

times = iter([0.0, _SAME_SECONDS / 2, _SAME_SECONDS + 1])  # of the three signals

def clock():
    print("asked", flush=True)
    return next(times)

time.monotonic = clock
with StopSignals(says=True):
    print("ready", flush=True)
    time.sleep(600)
"""


def test_the_first_signal_is_answered_and_a_later_one_ends_the_process() -> None:
    """What a launcher passes on at once, of a Ctrl-C that the terminal sends to all, is the same signal."""
    with subprocess.Popen([sys.executable, "-c", PROGRAM], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout and process.stderr and process.stdout.readline() == b"ready\n"
        process.send_signal(signal.SIGINT)
        assert process.stderr.readline().startswith(
            b"stopping with a checkpoint, after this step or within it; another signal"
        )
        assert process.stdout.readline() == b"asked\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"asked\n"  # it was handled
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == b"asked\n"  # so the second one did not end it
        assert process.wait(patience(60)) == -signal.SIGTERM
