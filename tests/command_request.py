"""What is asked of the server of commands, and how; see tests/command_server.py. It imports little: clients do so."""

import json
import os
import resource
import signal
import socket
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_HEADER = 8  # bytes of the length of a message
_MAX_FILES = 16
_NUMBER = 4  # bytes of one
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


@dataclass(frozen=True)
class Request:
    """What a process is to be: as `python WORDS`, with `files` under the numbers `numbers`."""

    words: list[str]
    folder: str
    environment: dict[str, str]
    files: list[int]
    numbers: list[int]
    is_session: bool = False  # a new session, of which it is the leader
    mask: tuple[int, ...] = ()  # signals that are blocked


def send(connection: socket.socket, request: Request) -> None:
    """Send a request, with what a process inherits beside it."""
    message = {name: value for name, value in vars(request).items() if name != "files"}
    message |= {"limits": limits(), "cores": sorted(os.sched_getaffinity(0))}
    data = json.dumps(message).encode("utf-8", "surrogateescape")
    socket.send_fds(connection, [len(data).to_bytes(_HEADER, "big")], request.files)
    connection.sendall(data)


def receive(connection: socket.socket) -> tuple[Request, list[Any], list[int]]:
    """Read a request, its limits and its cores; raises EOFError if the other end is closed."""
    header, files, _, _ = socket.recv_fds(connection, _HEADER, _MAX_FILES)
    if not header:
        raise EOFError
    data = bytearray()
    while len(data) < int.from_bytes(header, "big"):
        more = connection.recv(1 << 20)
        if not more:
            raise EOFError
        data += more
    message = json.loads(data.decode("utf-8", "surrogateescape"))
    own_limits = message.pop("limits")
    cores = message.pop("cores")
    return Request(**message, files=list(files)), own_limits, cores


def limits() -> list[Any]:
    """Return what a process inherits beside its environment, its files and its cores."""
    fields = Path("/proc/self/status").read_text().splitlines()
    masks = [line for line in fields if line.startswith(("Umask", "SigBlk", "SigIgn"))]
    return [masks, *(list(resource.getrlimit(name)) for name in _LIMITS)]


def start(path: str, request: Request) -> tuple[socket.socket | None, int]:
    """Ask the server at `path` for a process; return the connection on which it is told of, and its number.

    They are None and 0 if the server refuses, as a fresh process would be another.
    """
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)
    send(connection, request)
    pid = read_number(connection)
    if pid:
        return connection, pid
    connection.close()
    return None, 0


def wait(connection: socket.socket) -> int:
    """Return the wait status of a process once it has ended and is no zombie any more."""
    status = read_number(connection)
    write_number(connection, 0)
    read_number(connection)
    connection.close()
    return status


def read_number(connection: socket.socket) -> int:
    """Read a number that the other end sends."""
    data = connection.recv(_NUMBER, socket.MSG_WAITALL)
    if len(data) < _NUMBER:
        raise RuntimeError("the server of commands has ended")
    return int.from_bytes(data, "big")


def write_number(connection: socket.socket, number: int) -> None:
    """Send a number."""
    connection.sendall(number.to_bytes(_NUMBER, "big"))


def run_as(path: str, script: str, words: list[str]) -> None:
    """Have the server at `path` run a Python script with the files of this process, and end as it does."""
    request = Request([script, *words], str(Path.cwd()), dict(os.environ), [0, 1, 2], [0, 1, 2])
    connection, pid = start(path, request)
    if connection is None:
        os.execv(script, [script, *words])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda caught, _: os.kill(pid, caught))
    code = os.waitstatus_to_exitcode(wait(connection))
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)
