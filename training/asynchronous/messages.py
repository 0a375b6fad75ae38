"""Messages between the server and a worker: a line of JSON, and a flat tensor or none, over a TCP connection.

Nothing that is received is executed: JSON and numbers only.
"""

import json
import socket
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

_RETRY_SECONDS = 0.2


class Link:
    """One end of a connection. `send` and `receive` raise EOFError or OSError when the other end is gone."""

    def __init__(self, opened: socket.socket) -> None:
        opened.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        opened.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = Connection(opened.detach())

    def send(self, header: dict[str, Any], values: Tensor | None = None) -> None:
        """Send a header, and the values of a flat tensor on the CPU."""
        self._connection.send_bytes(json.dumps(header | {"has_values": values is not None}).encode())
        if values is not None:
            self._connection.send_bytes(values.contiguous().view(torch.uint8).numpy().data)

    def receive(self, into: Tensor | None = None) -> dict[str, Any]:
        """Receive a header; its values, if it has some, are written to `into`."""
        header = json.loads(self._connection.recv_bytes(1 << 16))
        if header["has_values"]:
            assert into is not None
            self._connection.recv_bytes_into(into.view(torch.uint8).numpy())
        return dict(header)

    def close(self) -> None:
        """Close this end."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        self.close()


def connect(host: str, port: int, seconds: float) -> Link:
    """Connect to a server, which may start later. Raises OSError after so many seconds."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            opened = socket.create_connection((host, port), timeout=seconds)
            opened.settimeout(None)
            return Link(opened)
        except ConnectionRefusedError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_RETRY_SECONDS)
