"""GradientServer: gives weights and parts of batches to workers, and collects their gradients; a thread a worker."""

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from gristmill.errors import UsageError
from gristmill.wording import count_of
from training.experimental.server.messages import ALIVE_SECONDS, Link
from training.experimental.server.part_queue import Part, PartQueue
from training.sharding.sharded_parameter import ShardedParameter


class StoppedError(Exception):
    """The server got a stop signal while it waited for gradients."""


class NoWorkersError(UsageError):
    """Nobody computes gradients, or fewer do than the server waits for."""


class GradientServer:
    """Serves the weights `params`, which its owner updates between two calls of `collect`;
    begins with so many `workers`.

    A worker that goes, or is silent for `timeout` seconds, loses its unfinished part only, and another takes it; one
    that comes gets the weights. `identity` must be equal on both ends; `say` prints a line.
    """

    def __init__(
        self,
        params: Sequence[ShardedParameter],
        queue: PartQueue,
        identity: dict[str, Any],
        say: Callable[[str], None],
        timeout: float,
        workers: int = 1,
    ) -> None:
        self.params = list(params)
        self.queue = queue
        self.say = say
        self.timeout = timeout
        self.identity = comparable(identity)
        self.updates = 0
        """Updates that gradients were collected for; set it when resuming."""
        self.ahead = queue.done_ahead()
        """Parts whose gradients the updates so far have, as `PartQueue.done_ahead`."""
        self._changed = threading.Condition()  # guards all below
        self._weights: Tensor | None = None  # flat, never changed: of `_version` updates
        self._sum = torch.empty(0)
        self._loss = 0.0
        self._count = 0
        self._workers: dict[int, Link] = {}
        self._joined = 0
        self._expected = workers
        self._most = 0
        self._ended = False
        self._socket: socket.socket | None = None

    def open(self, host: str, port: int) -> None:
        """Listen for workers. Raises UsageError where the address cannot be used."""
        try:
            self._socket = socket.create_server((host, port))
        except OSError as error:
            raise UsageError(
                f"cannot listen at host {host}, port {port} ({error.strerror}); try another --port"
            ) from error
        threading.Thread(target=self._accept, daemon=True).start()

    def collect(self, is_stopping: Callable[[], bool] = lambda: False) -> float:
        """Publish the weights, wait for the gradients of an update, and leave their sum on the parameters.

        Returns the sum of the workers' terms of the mean loss. Raises StoppedError if it `is_stopping`, and
        NoWorkersError if for `timeout` seconds nobody works, or fewer than are waited for.
        """
        weights = flat_weights(self.params)
        with self._changed:
            # Both change under one lock, as a worker that begins a part takes both.
            self._weights = weights
            self.queue.updates = self.updates
            self._changed.notify_all()
            self._wait_for_gradients(is_stopping)
            parts = self._sum.split([p.local.numel() for p in self.params])
            for p, values in zip(self.params, parts, strict=True):
                p.local.grad = values.view_as(p.local).to(p.local.device)
            loss = self._loss
            self._loss = 0.0
            self._count = 0
            self.updates += 1
            self.ahead = self.queue.done_ahead()  # the next gradients may come before a checkpoint is saved
            return loss

    def _wait_for_gradients(self, is_stopping: Callable[[], bool]) -> None:
        end = time.monotonic() + self.timeout
        while not self._changed.wait_for(lambda: self._count == self.queue.parts, ALIVE_SECONDS):
            if is_stopping():
                raise StoppedError
            if self._workers and self._joined >= self._expected:
                end = time.monotonic() + self.timeout
            elif time.monotonic() > end:
                joined = f"{self._joined} of {count_of(self._expected, 'worker')}"
                missing = f"only {joined} joined" if self._workers else "no worker connected"
                raise NoWorkersError(
                    f"{missing} within {self.timeout:g} s; start some with --role worker and the same "
                    "options, and this command again to resume from the last checkpoint; or try a longer --timeout"
                )

    def most_workers(self) -> int:
        """Return how many have worked at the same time since the last call."""
        with self._changed:
            max_workers = self._most
            self._most = len(self._workers)
            return max_workers

    def close(self) -> None:
        """Tell the workers that all is done, or that the server stops, and stop listening."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not self._workers, self.timeout)
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)  # ends the wait of `accept`, which would keep it open
            self._socket.close()

    def _accept(self) -> None:
        assert self._socket is not None
        while True:
            try:
                opened, _ = self._socket.accept()
            except OSError:  # closed
                return
            threading.Thread(target=self._serve, args=(Link(opened, self.timeout),), daemon=True).start()

    def _serve(self, link: Link) -> None:
        """Give a worker its parts until all are done, or it is gone."""
        with link:
            try:
                if (given := link.receive().get("identity")) != self.identity:
                    link.send({"refused": differing(self.identity, given)})
                    return
            except (EOFError, OSError):
                return
            worker = self._join(link)
            try:
                held = -1
                gradient = flat_weights(self.params)
                while (job := self._next(worker, link)) is not None:
                    part, version, weights = job
                    link.send({"part": part, "version": version}, weights if version != held else None)
                    held = version
                    loss = float(link.receive(gradient)["loss"])
                    self._add(worker, link, part, gradient, loss)
                link.send({"done": self.queue.oldest == self.queue.steps})
            except (EOFError, OSError):
                pass
            finally:
                self._leave(worker)

    def _join(self, link: Link) -> int:
        with self._changed:
            self._joined += 1
            self._workers[self._joined] = link
            self._most = max(self._most, len(self._workers))
            self.say(f"worker {self._joined} joined: {count_of(len(self._workers), 'worker')} active")
            self._changed.notify_all()
            return self._joined

    def _leave(self, worker: int) -> None:
        with self._changed:
            del self._workers[worker]
            for step, number in self.queue.drop(worker):
                self.say(
                    f"worker {worker} has stopped: part {number} of step {step + 1} goes to another; "
                    f"{count_of(len(self._workers), 'worker')} active"
                )
            self._changed.notify_all()

    def _next(self, worker: int, link: Link) -> tuple[Part, int, Tensor] | None:
        """Return the worker's next part, and the weights to compute it with, of so many updates.

        None when all are done.
        """
        with self._changed:
            part: Part | None = None

            def is_there() -> bool:
                nonlocal part
                if self._weights is not None and not self._ended and self._joined >= self._expected:
                    part = self.queue.take(worker)
                return part is not None or self._ended or self.queue.oldest == self.queue.steps

            self._wait_for(link, is_there)
            return None if part is None or self._weights is None else (part, self.queue.updates, self._weights)

    def _add(self, worker: int, link: Link, part: Part, gradient: Tensor, loss: float) -> None:
        """Add a gradient to those of the next update, once the update before is made."""
        with self._changed:
            self._wait_for(link, lambda: self._count < self.queue.parts or self._ended)
            self.queue.give(worker, part)
            self._sum = gradient.clone() if self._count == 0 else self._sum.add_(gradient)
            self._loss += loss
            self._count += 1
            self._changed.notify_all()

    def _wait_for(self, link: Link, is_there: Callable[[], bool]) -> None:
        """Wait for a change; send the worker signs of life while it waits."""
        while not self._changed.wait_for(is_there, ALIVE_SECONDS):
            link.say_alive()


def flat_weights(params: Sequence[ShardedParameter]) -> Tensor:
    """Return a copy of the parameters, one after the other, on the CPU."""
    return torch.cat([p.local.detach().flatten().cpu() for p in params])


def comparable(identity: dict[str, Any]) -> dict[str, Any]:
    """Return an identity as it is after a journey through JSON."""
    return dict(json.loads(json.dumps(identity, default=str)))


def differing(one: dict[str, Any], other: Any) -> str:
    """Return the first options in which two identities differ, with both values."""
    theirs = other if isinstance(other, dict) else {}
    keys = [key for key in {**one, **theirs} if one.get(key) != theirs.get(key)]
    return "; ".join(f"{key} ({one.get(key)} at the server, {theirs.get(key)} here)" for key in keys[:3])
