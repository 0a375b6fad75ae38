"""Call a function in a process of its own, which ends at once when this one is to end.

For calls of libraries that last minutes, in which Python handles no signal, such as the training of a tokenizer.
"""

import ctypes
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gristmill.errors import WorkerDied

_SERVE = "from gristmill.apart import serve; serve()"
_SIGNAL_AT_DEATH = 1  # of the parent: PR_SET_PDEATHSIG of Linux's prctl


def call_apart(function: Callable[..., Any], **arguments: Any) -> Any:
    """What `function`, of a module that can be imported, returns for `arguments` in a new process, or raises there.

    The process is killed if a signal, or another exception, interrupts the call here, and if this process is killed.
    Raises WorkerDied if it died by itself.
    """
    folders = [str(Path(__file__).resolve().parents[1]), *filter(None, sys.path)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONSAFEPATH": "1"}
    command = [sys.executable, "-c", _SERVE]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            answer = child.communicate(pickle.dumps((os.getpid(), function, arguments)))[0]
        except BaseException:
            child.kill()
            raise
    if child.returncode:
        how = f"exit code {child.returncode}" if child.returncode > 0 else signal.Signals(-child.returncode).name
        raise WorkerDied(
            f"the process of {function.__name__} died ({how}): most often the machine ran out of memory. Give a "
            "smaller --sample, or more memory"
        )
    is_error, found = pickle.loads(answer)
    if is_error:
        raise found
    return found


def serve() -> None:
    """Read a call from standard input, make it, and write what comes of it to standard output."""
    for number in (signal.SIGINT, signal.SIGTERM):  # which a terminal or a scheduler sends to all: the parent obeys
        signal.signal(number, signal.SIG_IGN)
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a library prints
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SIGNAL_AT_DEATH, signal.SIGKILL)
    parent, function, arguments = pickle.loads(sys.stdin.buffer.read())
    if os.getppid() != parent:
        return  # it died before
    try:
        answer = False, function(**arguments)
    except Exception as error:
        answer = True, error
    with output:
        output.write(pickle.dumps(answer))
