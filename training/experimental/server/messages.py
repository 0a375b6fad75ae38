"""Messages between the server and a worker: a line of JSON, and a flat tensor or none, over a TCP connection.

Nothing that is received is executed: JSON and numbers only.
"""

import json
import math
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing import BufferTooShort
from multiprocessing.connection import Connection
from typing import Any, Self

import torch
from torch import Tensor

_RETRY_SECONDS = 0.2
ALIVE_SECONDS = 0.25  # between two messages that say so
_ALIVE = "alive"


class Link:
    """One end of a connection. `send` and `receive` raise EOFError or OSError when the other end is gone.

    Also if it is silent for `seconds`, and for what is no message.
    """

    def __init__(self, opened: socket.socket, seconds: float) -> None:
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            opened.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", math.ceil(seconds), 0))
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = Connection(opened.detach())
        self._sending = threading.Lock()

    def send(self, header: dict[str, Any], values: Tensor | None = None) -> None:
        """Send a header, and the values of a flat tensor on the CPU."""
        with self._sending:
            self._connection.send_bytes(json.dumps(header | {"has_values": values is not None}).encode())
            if values is not None:
                self._connection.send_bytes(values.contiguous().view(torch.uint8).numpy().data)

    def receive(self, into: Tensor | None = None) -> dict[str, Any]:
        """Receive a header; its values, if it has some, are written to `into`."""
        while _ALIVE in (header := self._receive(into)):
            pass
        return header

    def say_alive(self) -> None:
        """Tell the other end, which waits for a message, that this one is there."""
        self.send({_ALIVE: True})

    @contextmanager
    def alive(self) -> Iterator[None]:
        """Context: say so every now and then, from a thread."""
        ended = threading.Event()

        def tell() -> None:
            with suppress(OSError):  # whoever waits for the other end will notice
                while not ended.wait(ALIVE_SECONDS):
                    self.say_alive()

        thread = threading.Thread(target=tell, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def _receive(self, into: Tensor | None) -> dict[str, Any]:
        try:
            header = dict(json.loads(self._connection.recv_bytes(1 << 16)))
            if header["has_values"]:
                values = torch.empty(0) if into is None else into
                self._connection.recv_bytes_into(values.view(torch.uint8).numpy())
        except (ValueError, TypeError, KeyError, RecursionError, BufferTooShort) as error:  # of another program
            raise OSError(f"received something that is not a message: {error}") from error
        return header

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(host: str, port: int, seconds: float) -> Link:
    """Connect to a server, which may start later. Raises OSError after so many seconds, as the link does then."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            opened = socket.create_connection((host, port), timeout=seconds)
            opened.settimeout(None)
            return Link(opened, seconds)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
