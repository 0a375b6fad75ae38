"""An object store for tests: moto's S3 in a thread of this process, which counts requests and can make faults."""

import logging
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote
from urllib.request import Request, urlopen

import obstore
import pytest
from obstore.store import S3Store

from gristmill.storage import objects
from tests.object_faults import Environment, Fault

BUCKET = "bucket"
USER_AGENT = "tests"  # of the store's own client


class Store:
    """The running store: `requests` are (verb, path with query); `fault` may answer a request in the store's place.

    Requests of `client` meet no faults: a test looks into a store that is disturbed for others.
    """

    def __init__(self, application: Any) -> None:
        self.application = application
        self.requests: list[tuple[str, str]] = []
        self.fault: Fault | None = None
        self.url = ""

    def __call__(self, environment: Environment, start_response: Any) -> Iterable[bytes]:
        query = environment["QUERY_STRING"]
        self.requests.append((environment["REQUEST_METHOD"], environment["PATH_INFO"] + (f"?{query}" if query else "")))
        if self.fault and environment.get("HTTP_USER_AGENT") != USER_AGENT:
            answer = self.fault(self.application, environment, start_response)
            if answer is not None:
                return answer
        return self.application(environment, start_response)

    @property
    def client(self) -> Any:
        """Return a client of this store's bucket, whatever the environment is."""
        keys = {"access_key_id": "tests", "secret_access_key": "tests", "region": "us-east-1"}
        options = {"allow_http": True, "user_agent": USER_AGENT}
        return S3Store(BUCKET, endpoint=self.url, client_options=options, **keys)

    def make_bucket(self) -> None:
        """Make the bucket."""
        urlopen(Request(f"{self.url}/{BUCKET}", method="PUT")).close()

    def put(self, key: str, data: bytes = b"") -> None:
        """Put an object under any key, also one that clients refuse or change."""
        headers = {"Content-Type": "application/octet-stream"}  # by default it is a form
        urlopen(Request(f"{self.url}/{BUCKET}/{quote(key, safe='/')}", data, headers, method="PUT")).close()

    def upload_tree(self, folder: Path, prefix: str) -> None:
        """Put every file below a folder under a prefix."""
        for path in folder.rglob("*"):
            if path.is_file():
                obstore.put(self.client, f"{prefix}/{path.relative_to(folder).as_posix()}", path)

    def tree(self, prefix: str) -> dict[str, bytes]:
        """Every object under a prefix: name → bytes."""
        names = sorted(each["path"] for some in obstore.list(self.client, prefix) for each in some)
        return {name[len(prefix) + 1 :]: bytes(obstore.get(self.client, name).bytes()) for name in names}

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process reaches this store."""
        return {
            "AWS_ENDPOINT_URL": self.url, "AWS_ACCESS_KEY_ID": "tests", "AWS_SECRET_ACCESS_KEY": "tests",
            "AWS_REGION": "us-east-1",
        }  # fmt: skip


@contextmanager
def object_store() -> Iterator[Store]:
    """Context: a store with the empty bucket BUCKET."""
    werkzeug_app = pytest.importorskip("moto.moto_server.werkzeug_app")
    from moto.s3 import models
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    store = Store(werkzeug_app.create_backend_app("s3"))  # moto's dispatcher looks through its folders at each request
    server = make_server("127.0.0.1", 0, store, threaded=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    store.url = f"http://127.0.0.1:{server.port}"
    store.make_bucket()
    store.requests.clear()
    objects._open.cache_clear()  # clients of another test's store
    try:
        yield store
    finally:
        store.fault = None
        models.s3_backends.reset()  # the stores of one process share their objects, and others may be open
        store.make_bucket()
        objects._open.cache_clear()
        server.shutdown()
        server.server_close()
