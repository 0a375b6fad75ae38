"""The process that commands of tests are forked from: it has their modules imported, which takes them longest.

A forked process is one of its own, with the arguments, folder, environment and files that it is given, and ends as a
fresh one does. See tests/warm_process.py, which asks for them.
"""

import fcntl
import gc
import importlib
import os
import runpy
import selectors
import shutil
import signal
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from multiprocessing import process, util
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.command_request import Request, limits, receive, send, write_number

LATE = "READ_LATE_IN_TESTS"  # a variable: names of others that are read late
# variables that are read when a command runs, not when its modules are imported, and those that a shell sets
_READ_LATE = ("AWS_", "HF_", "PYTEST_", "GRISTMILL_LEASE", "PATH", "PYTHONPATH", "COLUMNS", "LINES", LATE)
_READ_LATE += ("_", "SHLVL", "PWD", "OLDPWD")
_RESTARTED = {"jemalloc_bg_thd"}  # threads that a library starts again in a fork: pyarrow's allocator
_ROOT = Path(__file__).resolve().parents[1]


class _Process:
    """A forked process, and the connection on which its end is told."""

    def __init__(self, pid: int, connection: socket.socket) -> None:
        self.pid = pid
        self.connection = connection
        self.handle = os.pidfd_open(pid)

    def tell_status(self) -> None:
        """Send the wait status. The process stays a zombie, whose number nobody else gets, until that is read."""
        ended = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)
        assert ended is not None
        by_itself = ended.si_code == os.CLD_EXITED
        core = 0x80 if ended.si_code == os.CLD_DUMPED else 0
        status = ended.si_status << 8 if by_itself else ended.si_status | core
        with suppress(OSError):
            write_number(self.connection, status)

    def reap(self) -> None:
        """Wait for the process, and tell that."""
        os.waitpid(self.pid, 0)
        with suppress(OSError):
            write_number(self.connection, 0)
        self.connection.close()
        os.close(self.handle)


def serve(listener: socket.socket, life: int) -> Request | None:
    """Fork a process for each request, in which this returns it; return None when the other end of `life` is closed."""
    with selectors.DefaultSelector() as selector:
        selector.register(life, selectors.EVENT_READ)
        selector.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj == life:
                    return None
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    with suppress(EOFError, OSError):  # of a client that has ended
                        request, its_limits, cores = receive(connection)
                        pid = os.fork() if its_limits == _LIMITS and _is_alike(request) else -1
                        if pid == 0:
                            os.sched_setaffinity(0, cores)
                            return request
                        for file in request.files:
                            os.close(file)
                        if pid > 0:
                            forked = _Process(pid, connection)
                            selector.register(forked.handle, selectors.EVENT_READ, forked)
                        write_number(connection, max(0, pid))
                elif key.fileobj == key.data.handle:
                    key.data.tell_status()
                    selector.unregister(key.data.handle)
                    selector.register(key.data.connection, selectors.EVENT_READ, key.data)
                else:  # the status was read, or nobody is left who would
                    selector.unregister(key.data.connection)
                    key.data.reap()


def _is_alike(request: Request) -> bool:
    """Return whether a fork would be as a fresh process: its folders have no modules with the names of those here.

    Variables that are read as modules are imported are the same. A thread, which no fork has, would make a difference,
    too, unless it is of a library that starts it again.
    """
    if _read_early(request.environment) != _read_early(_ENVIRONMENT):
        return False
    folders = [request.folder] if request.words[0] in ("-m", "-c") else []
    folders += filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep))
    names = {"sitecustomize", "usercustomize"} | {name.partition(".")[0] for name in sys.modules}
    own = [Path(request.folder, folder) for folder in folders]
    packages = (path for folder in own if folder != _ROOT for path in _importable(folder))
    tasks = Path("/proc/self/task").iterdir()
    threads = {(task / "comm").read_text().strip() for task in tasks if task.name != str(os.getpid())}
    return names.isdisjoint(packages) and threads <= _RESTARTED


def _read_early(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that modules or Python may read as they start; of a script's own, LATE says which not."""
    own = environment.get(LATE, "").split()
    early = (name for name in environment if not name.startswith(_READ_LATE) and name not in own)
    return {name: environment[name] for name in early}


def _importable(folder: Path) -> Iterator[str]:
    """Yield the names of the modules in a folder."""
    if folder.is_dir():
        for path in folder.iterdir():
            if path.suffix in (".py", ".so") or (path / "__init__.py").exists():
                yield path.name.partition(".")[0]


def become(request: Request) -> None:
    """Make this forked process what a fresh one would be; close all files but its own."""
    if request.is_session:
        os.setsid()
    _move_files(request.files, request.numbers)
    os.chdir(request.folder)
    process.ORIGINAL_DIR = str(Path.cwd())  # that of the start, in which scripts are found by their names
    os.environ.clear()
    os.environ.update(request.environment)
    signal.pthread_sigmask(signal.SIG_SETMASK, request.mask)
    sys.modules["__main__"] = ModuleType("__main__")
    first = request.words[0]
    sys.argv = request.words[1:] if first in ("-m", "-c") else request.words
    given = list(filter(None, request.environment.get("PYTHONPATH", "").split(os.pathsep)))
    own = [] if request.environment.get("PYTHONSAFEPATH") else [_folder_of_script(first)]
    sys.path[:] = [*own, *given, *_INSTALLED]
    sys.path_importer_cache.clear()


def _folder_of_script(first: str) -> str:
    if first == "-m":
        return str(Path.cwd())
    return "" if first == "-c" else str(Path(first).resolve().parent)


def _move_files(files: list[int], numbers: list[int]) -> None:
    """Give each file its number, and close all others."""
    above = max([*files, *numbers]) + 1
    copies = [fcntl.fcntl(file, fcntl.F_DUPFD, above) for file in files]
    for copy, number in zip(copies, numbers, strict=True):
        os.dup2(copy, number, inheritable=True)
    opened = {int(path.name) for path in Path("/proc/self/fd").iterdir()}
    for file in opened - {*numbers}:
        with suppress(OSError):  # the folder itself, which was open while it was listed
            os.close(file)


def run(request: Request) -> None:
    """Run the program of a request as Python does."""
    first, *others = request.words
    if first == "-m":
        runpy._run_module_as_main(others[0])
        return
    space = sys.modules["__main__"].__dict__
    if first == "-c":
        code = compile(others[0], "<string>", "exec")
    else:
        code = compile(Path(first).read_bytes(), first, "exec")
        space["__file__"] = first
    space["__spec__"] = None
    space["__package__"] = None
    space["__builtins__"] = __builtins__
    exec(code, space)


def stand_by() -> Request | None:
    """Fork a process that waits to be multiprocessing's fork server: there this returns a request, here None.

    It has no threads, which this process may have later. It ends with this one.
    """
    here, there = socket.socketpair()
    pid = os.fork()
    if pid == 0:
        here.close()
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            return receive(there)[0]
        except (EOFError, ConnectionError):
            os._exit(0)
    there.close()
    spawn = util.spawnv_passfds

    def spawn_warm(path: bytes | str, words: Any, files: Any) -> int:
        """As multiprocessing's own; its first fork server is the process that stands by."""
        if here.fileno() < 0 or not isinstance(words[-1], str) or "multiprocessing.forkserver" not in words[-1]:
            return spawn(path, words, files)
        numbers = [0, 1, 2, *files]
        folder = str(Path.cwd())
        blocked = tuple(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
        request = Request(["-c", words[-1]], folder, dict(os.environ), numbers, numbers, mask=blocked)
        try:
            send(here, request)
        except OSError:  # a signal has ended it
            return spawn(path, words, files)
        finally:
            here.close()
        return pid

    util.spawnv_passfds = spawn_warm  # type: ignore[assignment]
    return None


def main() -> None:
    """Import the modules that are named, and serve; at the end remove the folder of the socket."""
    listener_number, life, folder, *modules = sys.argv[1:]
    gc.disable()  # it would search the modules, again and again, and they stay
    for module in modules:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()
    gc.enable()
    with socket.socket(fileno=int(listener_number)) as listener:
        request = serve(listener, int(life))
    if request is None:
        shutil.rmtree(folder)
        return
    become(request)
    own = stand_by()
    if own is not None:
        become(own)
        request = own
    run(request)


_ENVIRONMENT = dict(os.environ)
_GIVEN = _ENVIRONMENT.get("PYTHONPATH", "").split(os.pathsep)
_INSTALLED = [folder for folder in sys.path[1:] if folder not in _GIVEN]
_LIMITS = limits()

if __name__ == "__main__":
    main()
