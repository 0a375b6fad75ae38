"""Google Cloud Storage and Azure Blob Storage for tests, in a thread of this process: one bucket, as obstore asks."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import count
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

PAGE = 3  # objects in an answer to a listing
ACCOUNT, KEY = "devstoreaccount1", "AAAA"
Answer = tuple[int, dict[str, str], bytes]


class Stored(NamedTuple):
    """An object: its bytes, and the number of its version."""

    data: bytes
    version: int

    @property
    def headers(self) -> dict[str, str]:
        return {"ETag": f'"0x{self.version}"', "x-goog-generation": str(self.version), "Last-Modified": formatdate()}


class Bucket:
    """The bucket of one of the two services, and its requests: verb, path with query."""

    def __init__(self, scheme: str) -> None:
        self.scheme, self.url = scheme, ""
        self.objects: dict[str, Stored] = {}
        self.parts: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self._versions = count(1)
        self._lock = threading.Lock()

    @property
    def environment(self) -> dict[str, str]:
        """Variables with which a process reaches it, without credentials that are checked."""
        if self.scheme == "az":
            return {
                "AZURE_STORAGE_ACCOUNT_NAME": ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": KEY,
                "AZURE_STORAGE_USE_EMULATOR": "true", "AZURITE_BLOB_STORAGE_URL": self.url,
            }  # fmt: skip
        account = dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
        account |= {"gcs_base_url": self.url, "disable_oauth": True}  # type: ignore[dict-item]
        return {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(account)}

    def answer(self, verb: str, target: str, headers: dict[str, str], body: bytes) -> Answer:
        """Status, headers and body of the answer to a request."""
        url = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(url.query, keep_blank_values=True).items()}
        path = unquote(url.path).lstrip("/").removeprefix(f"{ACCOUNT}/")
        bucket, _, key = path.partition("/")
        with self._lock:
            self.requests.append((verb, target))
            if bucket != "bucket":
                return self._error(404, "NoSuchBucket" if self.scheme == "gs" else "ContainerNotFound")
            if query.get("comp") == "batch":
                return self._delete_all(body)
            if not key:
                return self._list(query)
            if "uploads" in query or "uploadId" in query or query.get("comp") in ("block", "blocklist"):
                return self._put_part(verb, key, query, body)
            return self._object(verb, key, headers, body)

    def _object(self, verb: str, key: str, headers: dict[str, str], body: bytes) -> Answer:
        found = self.objects.get(key)
        if not self._holds(headers, found):
            return self._error(409 if headers.get("if-none-match") and self.scheme == "az" else 412, "ConditionNotMet")
        if verb == "PUT":
            return self._put(key, body)
        if found is None:
            return self._error(404, "NoSuchKey" if self.scheme == "gs" else "BlobNotFound")
        if verb == "DELETE":
            del self.objects[key]
            return 204, {}, b""
        size = len(found.data)
        if "range" not in headers:
            return 200, found.headers | {"Content-Length": str(size)}, found.data
        first, last = headers["range"].removeprefix("bytes=").split("-")
        start, end = int(first), min(int(last or size), size - 1) + 1
        return 206, found.headers | {"Content-Range": f"bytes {start}-{end - 1}/{size}"}, found.data[start:end]

    def _holds(self, headers: dict[str, str], found: Stored | None) -> bool:
        """Whether a request's conditions hold."""
        generation, tag = headers.get("x-goog-if-generation-match"), headers.get("if-match")
        wanted = found is None or "if-none-match" not in headers
        if generation is not None:
            wanted = wanted and int(generation) == (found.version if found else 0)
        return wanted and (tag is None or (found is not None and tag == found.headers["ETag"]))

    def _put(self, key: str, data: bytes) -> Answer:
        self.objects[key] = Stored(data, next(self._versions))
        return 201 if self.scheme == "az" else 200, self.objects[key].headers, b""

    def _put_part(self, verb: str, key: str, query: dict[str, str], body: bytes) -> Answer:
        """Uploads in parts: begun, continued, ended."""
        if "uploads" in query:
            return 200, {}, b"<InitiateMultipartUploadResult><UploadId>1</UploadId></InitiateMultipartUploadResult>"
        part = query.get("partNumber") or query.get("blockid")
        if part:
            self.parts[part] = body
            return 201 if self.scheme == "az" else 200, {"ETag": f'"{part}"'}, b""
        names = re.findall(r"<(?:PartNumber|Uncommitted)>(.*?)<", body.decode())
        answer = self._put(key, b"".join(self.parts.pop(name) for name in names))
        tag = answer[1]["ETag"].replace('"', "&quot;")
        xml = f"<CompleteMultipartUploadResult><ETag>{tag}</ETag></CompleteMultipartUploadResult>"
        return answer[0], answer[1], xml.encode() if verb == "POST" else b""

    def _delete_all(self, body: bytes) -> Answer:
        """Azure's batch of requests to delete."""
        parts = []
        for number, name in re.findall(r"Content-ID: (\d+).*?DELETE /\w+/(?:devstoreaccount1/|bucket/)*(\S+) HTTP",
                                       body.decode(), re.DOTALL):  # fmt: skip
            known = self.objects.pop(unquote(name), None)
            status = "202 Accepted" if known else "404 The specified blob does not exist."
            code = "" if known else "x-ms-error-code: BlobNotFound\r\n"
            head = f"--of\r\nContent-Type: application/http\r\nContent-ID: {number}"
            parts.append(f"{head}\r\n\r\nHTTP/1.1 {status}\r\n{code}\r\n\r\n")
        return 202, {"Content-Type": "multipart/mixed; boundary=of"}, ("".join(parts) + "--of--\r\n").encode()

    def _list(self, query: dict[str, str]) -> Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("marker") or query.get("start-after", "")
        names = dict.fromkeys(
            prefix + name.removeprefix(prefix).partition(delimiter)[0] + delimiter
            if delimiter and delimiter in name.removeprefix(prefix)
            else name
            for name in sorted(self.objects)
            if name.startswith(prefix) and name > after
        )
        page = list(names)[:PAGE]
        more = page[-1] if len(names) > PAGE else ""
        if more.endswith("/"):
            more += "\U0010ffff"
        entry = _azure_entry if self.scheme == "az" else _google_entry
        items = "".join(entry(escape(name), self.objects.get(name)) for name in page)
        if self.scheme == "az":
            marker = f"<NextMarker>{escape(more)}</NextMarker>"
            xml = f"<EnumerationResults><Blobs>{items}</Blobs>{marker}</EnumerationResults>"
        else:
            token = f"<NextContinuationToken>{escape(more)}</NextContinuationToken>" if more else ""
            xml = f"<ListBucketResult>{items}{token}</ListBucketResult>"
        return 200, {"Content-Type": "application/xml"}, xml.encode()

    def _error(self, code: int, name: str) -> Answer:
        xml = f"<Error><Code>{name}</Code><Message>no</Message></Error>"
        return code, {"Content-Type": "application/xml", "x-ms-error-code": name}, xml.encode()


def _google_entry(name: str, found: Stored | None) -> str:
    if found is None:
        return f"<CommonPrefixes><Prefix>{name}</Prefix></CommonPrefixes>"
    tag = found.headers["ETag"].replace('"', "&quot;")
    when = "<LastModified>2026-01-01T00:00:00.000Z</LastModified>"
    return f"<Contents><Key>{name}</Key><Size>{len(found.data)}</Size>{when}<ETag>{tag}</ETag></Contents>"


def _azure_entry(name: str, found: Stored | None) -> str:
    """As Azure writes it: the ETag has no quotes here."""
    if found is None:
        return f"<BlobPrefix><Name>{name}</Name></BlobPrefix>"
    when = f"<Last-Modified>{formatdate(usegmt=True)}</Last-Modified>"
    facts = f"{when}<Content-Length>{len(found.data)}</Content-Length><Etag>0x{found.version}</Etag>"
    facts += "<Content-Type>text/plain</Content-Type>"
    return f"<Blob><Name>{name}</Name><Properties>{facts}<BlobType>BlockBlob</BlobType></Properties></Blob>"


@contextmanager
def running_bucket(scheme: str) -> Iterator[Bucket]:
    """Context: the bucket `gs://bucket` or `az://bucket` on this machine."""
    bucket = Bucket(scheme)

    class Handler(BaseHTTPRequestHandler):
        protocol_version, disable_nagle_algorithm = "HTTP/1.1", True

        def handle_request(self) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            body = self.rfile.read(int(headers.get("content-length", 0)))
            code, own, data = bucket.answer(self.command, self.path, headers, body)
            self.send_response(code)
            for name, value in ({"Content-Length": str(len(data))} | own).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(b"" if self.command == "HEAD" else data)

        do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = handle_request

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    bucket.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield bucket
    finally:
        server.shutdown()
        server.server_close()
