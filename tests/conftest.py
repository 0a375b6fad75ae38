"""Settings of all tests: which of them run, and `--hypothesis-profile search`, which draws other examples each time.

What repeats in more ways what another test shows is thorough, and runs with `--thorough`, before a release: a test
marked `thorough`, and of one marked `every(n)` all cases but each nth.
"""

import gc
import signal
from collections import Counter
from collections.abc import Generator

import pytest
from hypothesis import settings

from gristmill.processes import keep_objects

settings.register_profile("search", deadline=None)  # a busy machine is slow, and that is no error
settings.register_profile("gristmill", settings.get_profile("search"), derandomize=True)  # same tree, same result
settings.load_profile("gristmill")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--thorough`."""
    parser.addoption("--thorough", action="store_true", help="run also what repeats in more ways what others show")


def pytest_configure() -> None:
    """Let processes that tests start end at Ctrl-C: a suite in a shell's background ignores it, and they inherit it."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Let the garbage collector pass over modules and tests, which stay: it takes a tenth of the suite's time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        keep_objects()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave thorough tests out, unless they are asked for."""
    if config.getoption("--thorough"):
        return
    cases, kept, left = Counter[str](), list[pytest.Item](), list[pytest.Item]()
    for item in items:
        case, every = item.nodeid.partition("[")[0], item.get_closest_marker("every")
        is_thorough = item.get_closest_marker("thorough") or (every and cases[case] % every.args[0])
        (left if is_thorough else kept).append(item)
        cases[case] += 1
    config.hook.pytest_deselected(items=left)
    items[:] = kept
