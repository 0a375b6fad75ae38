"""Commands of tests as processes that need not import their modules: forked from a server that has them.

`WarmPopen` and `run_warm` are as subprocess's Popen and run. What cannot be forked as a fresh process would be, such as
one with another PYTHONHASHSEED, is a fresh one. Tests of what happens as a process starts use subprocess itself.
"""

import atexit
import inspect
import os
import select
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from tests.command_request import Request, start, wait

ROOT = Path(__file__).resolve().parents[1]
# what the commands of the data half import, at once or when they need it
MODULES = ["gristmill_cli.run", "gristmill_cli.estimate", "gristmill.engine.execution.fork_server_kernels"]
_SIGNATURE = inspect.signature(subprocess.Popen._execute_child)  # type: ignore[attr-defined]
_ENVIRONMENT = dict(os.environ)  # before any test changes it
_PIPES = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
_INSTALLED = str(Path(sys.executable).with_name("gristmill"))
_SCRIPT = """#!{python} -SE
import sys
sys.path.insert(0, {root!r})
from tests.command_request import run_as
run_as({path!r}, {installed!r}, sys.argv[1:])
"""
_DIFFER = ("preexec_fn", "pass_fds", "startupinfo", "creationflags", "shell")  # options that only a fresh one has


def run_warm(
    words: Sequence[Any],
    *,
    input: Any = None,
    capture_output: bool = False,
    timeout: float | None = None,
    check: bool = False,
    **named: Any,
) -> subprocess.CompletedProcess[Any]:
    """As subprocess.run."""
    if capture_output:
        named |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    if input is not None:
        named |= {"stdin": subprocess.PIPE}
    with WarmPopen(words, **named) as process:
        try:
            output, errors = process.communicate(input, timeout)
        except BaseException:
            process.kill()
            raise
    done = subprocess.CompletedProcess(process.args, process.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


class WarmPopen(subprocess.Popen[Any]):
    """As subprocess.Popen: a process that is forked from the server, where that makes no difference."""

    _connection: socket.socket | None = None

    @property
    def is_warm(self) -> bool:
        """Whether it was forked from the server."""
        return self._connection is not None

    def _execute_child(self, *given: Any) -> None:
        options = _SIGNATURE.bind(self, *given).arguments
        request = _request_of(options)
        if request is not None:
            self._connection, self.pid = start(_server().path, request)
        if self._connection is None:
            super()._execute_child(*given)
            return
        self._child_created = True
        self._close_pipe_fds(*(options[name] for name in _PIPES))

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        """Return the process and its wait status, once it has ended and is no zombie any more."""
        if self._connection is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._connection], [], [], 0)[0]:
            return 0, 0
        return self.pid, wait(self._connection)

    def _internal_poll(self, _deadstate: int | None = None, **named: Any) -> int | None:
        if self._connection is None:
            return super()._internal_poll(_deadstate, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG) if self.returncode is None else (0, 0)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


def _request_of(options: dict[str, Any]) -> Request | None:
    """Return what the server is asked for, or None for a process that it cannot start."""
    words = [os.fspath(word) if isinstance(word, os.PathLike) else word for word in options["args"]]
    is_python = words[0] == sys.executable and len(words) > 1
    if not is_python or (words[1].startswith("-") and words[1] not in ("-m", "-c")):
        return None
    given = [options[name] for name in ("uid", "gid", "gids", "process_group")]
    if any(options[name] for name in _DIFFER) or any(value not in (None, -1) for value in given):
        return None
    if options["umask"] != -1 or not options["restore_signals"] or not options["close_fds"]:
        return None
    standard = enumerate(options[name] for name in ("p2cread", "c2pwrite", "errwrite"))
    files = [number if file == -1 else file for number, file in standard]
    if any(os.isatty(file) for file in files):
        return None
    environment = dict(os.environ) if options["env"] is None else {**options["env"]}
    folder = os.path.abspath(options["cwd"] or ".")
    return Request(words[1:], folder, environment, files, [0, 1, 2], options["start_new_session"])


class _Server:
    """The process that commands are forked from; it ends with this one."""

    def __init__(self) -> None:
        folder = Path(tempfile.mkdtemp(prefix="commands-"))
        self.path = str(folder / "socket")
        life, self._life = os.pipe()
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self.path)
            listener.listen(64)
            words = [sys.executable, "-m", "tests.command_server", str(listener.fileno()), str(life), folder]
            words += MODULES
            folders = os.pathsep.join([str(ROOT), *filter(None, [_ENVIRONMENT.get("PYTHONPATH")])])
            self._process = subprocess.Popen(
                words, cwd=ROOT, env=_ENVIRONMENT | {"PYTHONPATH": folders}, pass_fds=[listener.fileno(), life],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            )  # fmt: skip
        os.close(life)
        self.scripts = folder / "bin"
        self.scripts.mkdir()
        script = self.scripts / "gristmill"
        script.write_text(_SCRIPT.format(python=sys.executable, root=str(ROOT), path=self.path, installed=_INSTALLED))
        script.chmod(0o755)
        atexit.register(self._end)

    def _end(self) -> None:
        os.close(self._life)
        self._process.communicate()


_server = cache(_Server)


def warm_scripts() -> Path:
    """Return a folder to put first on PATH: the command `gristmill` of a shell is then forked from the server, too."""
    return _server().scripts
