"""A Hugging Face Hub for tests, in a thread of this process: one repository, as a dataset and as a model."""

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

DATASET = "org/name"
PAGE = 2  # entries of a tree in an answer
Answer = tuple[int, dict[str, str], bytes]
Fault = Callable[[str, str], Answer | None]  # (verb, path)


class Hub:
    """The running Hub: branches and commits lead to files; `faults` answer the next requests in its place."""

    def __init__(self) -> None:
        self.commits: dict[str, dict[str, bytes]] = {}
        self.branches: dict[str, str] = {}
        self.requests: list[tuple[str, str]] = []  # verb, path
        self.faults: list[Fault] = []
        self.sent = 0  # bytes of content
        self.token = ""  # wanted, if the dataset is private
        self.url = ""

    def commit(self, files: dict[str, bytes], branch: str = "main") -> str:
        """Make a branch lead to these files."""
        sha = hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()
        self.commits[sha], self.branches[branch] = files, sha
        return sha

    def answer(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Status, headers and body of the answer to a request."""
        url = urlsplit(target)
        self.requests.append((verb, url.path))
        if self.faults and (fault := self.faults.pop(0)(verb, url.path)):
            return fault
        if url.path.startswith("/cdn/"):
            return _content(self._with_digest(url.path[5:]), headers, {"ETag": '"of the CDN"'})
        if self.token and headers.get("authorization") != f"Bearer {self.token}":
            return _error(401, "")
        if url.path.startswith(f"/api/models/{DATASET}/"):  # of the same repository as a model
            return self.answer(verb, target.replace("/api/models/", "/api/datasets/", 1), headers, body)
        api, found = f"/api/datasets/{DATASET}/", f"/datasets/{DATASET}/resolve/"
        if url.path.startswith(f"/{DATASET}/"):  # a model
            code, own, data = self.answer(verb, f"/datasets{target}", headers, body)
            return code, own | {"X-Repo-Commit": self.branches["main"]}, data
        if not url.path.startswith((api, found)):
            return _error(404, "RepoNotFound")
        kind, revision, path = (*url.path.removeprefix(api).split("/", 2), "")[:3]
        if url.path.startswith(found):
            revision, path = url.path.removeprefix(found).split("/", 1)
            kind = "resolve"
        sha = self.branches.get(unquote(revision), revision)
        if sha not in self.commits:
            return _error(404, "RevisionNotFound")
        files, path = self.commits[sha], unquote(path)
        if kind == "revision":
            return _json({"id": DATASET, "sha": sha})
        if kind == "paths-info":
            return _json([_entry(name, files[name]) for name in parse_qs(body.decode())["paths"] if name in files])
        if kind == "tree":
            return self._tree(files, path, url.path, parse_qs(url.query))
        return self._file(files, path, headers)

    def _tree(self, files: dict[str, bytes], folder: str, path: str, query: dict[str, list[str]]) -> Answer:
        prefix = f"{folder}/" if folder else ""
        found = [_entry(name, data) for name, data in reversed(files.items()) if name.startswith(prefix)]
        if folder and not found:
            return _error(404, "EntryNotFound")
        entries = [{"type": "directory", "oid": "0" * 40, "size": 0, "path": "some/folder"}, *found]
        start = int(query.get("cursor", ["0"])[0])
        status, headers, body = _json(entries[start : start + PAGE])
        if start + PAGE < len(entries):
            headers["Link"] = f'<{self.url}{path}?recursive=True&cursor={start + PAGE}>; rel="next"'
        return status, headers, body

    def _file(self, files: dict[str, bytes], path: str, headers: dict[str, str]) -> Answer:
        if path not in files:
            return _error(404, "EntryNotFound")
        entry, data = _entry(path, files[path]), files[path]
        if "lfs" not in entry:
            return _content(data, headers, {"ETag": f'W/"{entry["oid"]}"'})
        digest = hashlib.sha256(data).hexdigest()
        linked = {"X-Linked-Size": str(len(data)), "X-Linked-Etag": f'"{digest}"', "Location": f"/cdn/{digest}"}
        return 302, linked, b""

    def _with_digest(self, digest: str) -> bytes:
        every = (data for files in self.commits.values() for data in files.values())
        return next(data for data in every if hashlib.sha256(data).hexdigest() == digest)


def status(code: int, **headers: str) -> Fault:
    """A fault: an answer without content."""
    return lambda verb, path: (code, headers, b"")


def _entry(path: str, data: bytes) -> dict[str, object]:
    blob = hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
    entry = {"type": "file", "oid": blob, "size": len(data), "path": path}
    lfs = {"oid": hashlib.sha256(data).hexdigest(), "size": len(data), "pointerSize": 134}
    return entry | ({"lfs": lfs} if path.endswith(".parquet") else {})


def _json(found: object) -> Answer:
    return 200, {"Content-Type": "application/json"}, json.dumps(found).encode()


def _error(code: int, name: str) -> Answer:
    return code, {"X-Error-Code": name} if name else {}, b""


def _content(data: bytes, headers: dict[str, str], own: dict[str, str]) -> Answer:
    if "range" not in headers:
        return 200, own, data
    first, last = headers["range"].removeprefix("bytes=").split("-")
    start, end = int(first), min(int(last or len(data)), len(data) - 1) + 1
    return 206, own | {"Content-Range": f"bytes {start}-{end - 1}/{len(data)}"}, data[start:end]


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Context: a Hub on this machine."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def handle_request(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            code, own, data = hub.answer(self.command, self.path, headers, body)
            self.send_response(code)
            for name, value in ({"Content-Length": str(len(data))} | own).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)
            hub.sent += len(data)
            self.close_connection = len(data) < int(own.get("Content-Length", 0))  # a body that is cut off

        do_GET = do_POST = do_HEAD = handle_request

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
