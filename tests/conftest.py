"""Settings of all tests: `--hypothesis-profile search` draws other examples each time."""

import signal

from hypothesis import settings

settings.register_profile("search", deadline=None)  # a busy machine is slow, and that is no error
settings.register_profile("gristmill", settings.get_profile("search"), derandomize=True)  # same tree, same result
settings.load_profile("gristmill")


def pytest_configure() -> None:
    """Let processes that tests start end at Ctrl-C: a suite in a shell's background ignores it, and they inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
