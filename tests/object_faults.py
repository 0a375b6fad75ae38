"""Faults of an object store: each answers a request in the store's place, as networks and busy stores do."""

import io
import random
import select
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

Environment = dict[str, Any]  # of a WSGI request
Fault = Callable[[Any, Environment, Any], Iterable[bytes] | None]  # (application, environment, start_response)

SLOW_SECONDS = 0.5
_BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def unavailable(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The store is too busy: status 503, no effect."""
    _read_body(environment)
    start_response("503 Slow Down", [("Content-Type", "application/xml"), ("Content-Length", str(len(_BUSY)))])
    return [_BUSY]


def dropped(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The connection ends before the request has an effect."""
    _read_body(environment)
    return _hang_up(environment, start_response)


def lost_answer(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The request has its effect, and the connection ends before the answer."""
    _call(application, environment)
    return _hang_up(environment, start_response)


def short_body(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The connection ends in the middle of the answer's body."""
    status, headers, body = _call(application, environment)
    if not body:
        return _hang_up(environment, start_response)
    start_response(status, [*headers, ("Content-Length", str(len(body)))])
    return _half(body, environment)


def slow(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The answer comes after SLOW_SECONDS."""
    time.sleep(SLOW_SECONDS)
    status, headers, body = _call(application, environment)
    start_response(status, [*headers, ("Content-Length", str(len(body)))])
    return [body]


def given_up(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
    """The request has its effect once the client, to which no answer comes, has ended the connection."""
    body = environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))
    environment["wsgi.input"] = io.BytesIO(body)
    select.select([environment["werkzeug.socket"]], [], [])
    return lost_answer(application, environment, start_response)


FAULTS: tuple[Fault, ...] = (unavailable, dropped, lost_answer, short_body, slow)


class Times:
    """Makes a fault of the first `times` requests for which `of` holds."""

    def __init__(self, fault: Fault, times: int, of: Callable[[Environment], bool] = lambda environment: True) -> None:
        self.fault, self.times, self.of = fault, times, of
        self.made = 0
        self.ended = 0
        self._lock = threading.Lock()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        with self._lock:
            if self.made >= self.times or not self.of(environment):
                return None
            self.made += 1
        try:
            return self.fault(application, environment, start_response)
        finally:
            self.ended += 1


class Seldom:
    """Makes a random fault of a `share` of all requests."""

    def __init__(self, seed: int, share: float, faults: tuple[Fault, ...] = FAULTS[:-1]) -> None:
        self.chance, self.share, self.faults = random.Random(seed), share, faults
        self.made = 0
        self._lock = threading.Lock()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        with self._lock:
            if self.chance.random() >= self.share:
                return None
            fault = self.chance.choice(self.faults)
            self.made += 1
        return fault(application, environment, start_response)


class Evenly:
    """Makes random faults of a `share` of all requests, about as many for each verb: rare ones fail more often.

    `made` counts them by verb and fault.
    """

    most = 0.25  # of the requests of a verb

    def __init__(self, seed: int, share: float) -> None:
        self.chance, self.share = random.Random(seed), share
        self.seen, self.made = Counter[str](), Counter[tuple[str, str]]()
        self._lock = threading.Lock()

    def __call__(self, application: Any, environment: Environment, start_response: Any) -> Iterable[bytes] | None:
        with self._lock:
            verb = name_verb(environment)
            self.seen[verb] += 1
            share = self.share * self.seen.total() / (len(self.seen) * self.seen[verb])
            if self.chance.random() >= min(share, self.most):
                return None
            fault = self.chance.choice(FAULTS)
            self.made[verb, fault.__name__] += 1
        return fault(application, environment, start_response)


def name_verb(environment: Environment) -> str:
    """The verb of a request, and what kind of it, such as a GET of a range or a PUT on a condition."""
    verb, query = environment["REQUEST_METHOD"], environment.get("QUERY_STRING", "")
    kinds = {
        "of a range": "HTTP_RANGE" in environment,
        "on a condition": "HTTP_IF_NONE_MATCH" in environment or (verb == "PUT" and "HTTP_IF_MATCH" in environment),
        "of a part": "partNumber" in query,
        "to delete": verb == "POST" and "delete" in query,
    }
    return " ".join(["LIST" if "list-type" in query else verb, *(kind for kind, holds in kinds.items() if holds)])


def refuse(status: str, code: str, message: str = "refused", **headers: str) -> Fault:
    """The store refuses every request with this status and code."""
    body = f"<Error><Code>{code}</Code><Message>{message}</Message></Error>".encode()

    def answer(application: Any, environment: Environment, start_response: Any) -> Iterable[bytes]:
        _read_body(environment)
        more = [(name.replace("_", "-"), value) for name, value in headers.items()]
        start_response(status, [("Content-Type", "application/xml"), ("Content-Length", str(len(body))), *more])
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [body]

    return answer


def _read_body(environment: Environment) -> None:
    environment["wsgi.input"].read(int(environment.get("CONTENT_LENGTH") or 0))


def _call(application: Any, environment: Environment) -> tuple[str, list[tuple[str, str]], bytes]:
    """The status, headers without the length, and body that the store answers."""
    answer: list[Any] = []
    body = b"".join(application(environment, lambda status, headers, *_: answer.extend((status, headers))))
    return answer[0], [(name, value) for name, value in answer[1] if name.lower() != "content-length"], body


def _half(body: bytes, environment: Environment) -> Iterator[bytes]:
    yield body[: len(body) // 2]
    with suppress(OSError):
        environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionResetError


def _hang_up(environment: Environment, start_response: Any) -> Iterable[bytes]:
    start_response("500 Hung Up", [])
    with suppress(OSError):
        environment["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    return [b"not heard"]
