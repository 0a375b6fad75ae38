import os
import signal
import threading

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
