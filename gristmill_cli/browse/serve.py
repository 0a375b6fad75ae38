"""Command: browse what a run found alike and took out, on this machine, and mark what to keep or drop after all."""

import sys
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from rich.text import Text
from tyro.conf import Positional

from gristmill.errors import GristmillError, UsageError, require
from gristmill.io.documents import DocKey
from gristmill_cli.browse.marks import KeepMarks
from gristmill_cli.browse.pages import Pages
from gristmill_cli.browse.tables import RunTables
from gristmill_cli.report.page import render

_HOST = "127.0.0.1"
_MAX_FORM_BYTES = 1 << 16
_MAX_DIGITS = 6  # of a form's length


def browse(out: Positional[Path], port: int = 8765, keep_list: Path | None = None) -> Text:
    """Serve pages about a run on this machine: clusters, documents removed by each rule, matches with benchmarks, and
    their texts.

    You can mark documents to keep or drop; `gristmill run --keep_list` reads the list of marks. The run itself is not
    changed. Press Ctrl-C to stop.

    Args:
        out: The --out of a `gristmill run`; also s3://bucket/folder.
        port: Port of http://127.0.0.1; 0 takes any free port.
        keep_list: File of marks to read and to add new ones to; by default marks are only in the list that the page
            shows, and are lost when the command ends.

    Raises:
        UsageError: the folder is not of a run, or the port is taken.
    """
    require(0 <= port < 1 << 16, f"--port {port}: expected a number from 0 to 65535; try 0")
    with RunTables(out) as tables:
        pages = Pages(tables, KeepMarks(keep_list))
        try:
            server = ThreadingHTTPServer((_HOST, port), partial(_PageHandler, pages))
        except OSError as error:
            raise UsageError(f"--port {port}: expected a port that is free, got {error}; try --port 0") from error
        with server:
            print(f"http://{_HOST}:{server.server_port}/ (Ctrl-C ends it)", file=sys.stderr, flush=True)
            server.serve_forever()
    return Text()


class _PageHandler(BaseHTTPRequestHandler):
    """Answers GET with a page, and POST /mark with a mark; only to a browser that was given this address."""

    def __init__(self, pages: Pages, *arguments: object) -> None:
        self.pages = pages
        super().__init__(*arguments)  # type: ignore[arg-type]

    def do_GET(self) -> None:
        """Send a page, or the list of marks."""
        if not self._is_own():
            return
        target = urlsplit(self.path)
        if target.path == "/keep_list.txt":
            self._send(HTTPStatus.OK, self.pages.marks.content, "text/plain; charset=utf-8")
            return
        try:
            content = self.pages.show(target.path.strip("/"), _last_values(target.query))
        except GristmillError as error:
            self._send_message(HTTPStatus.BAD_REQUEST, str(error))
            return
        if content is None:
            self._send_message(HTTPStatus.NOT_FOUND, "There is no such page.", has_link=True)
        else:
            self._send(HTTPStatus.OK, content)

    def do_POST(self) -> None:
        """Mark a document, and send the browser back to the page that it was on."""
        if not self._is_own():
            return
        length = self.headers.get("Content-Length", "")
        is_length = length.isascii() and length.isdecimal() and len(length) <= _MAX_DIGITS
        if self.path != "/mark" or not is_length or int(length) >= _MAX_FORM_BYTES:
            self._send_message(HTTPStatus.NOT_FOUND, "There is no such page.")
            return
        body = self.rfile.read(int(length))
        form = _last_values(body.decode("utf-8", "replace"))
        try:
            key = DocKey.parse(form.get("key", ""))
            self.pages.marks.set(key, form.get("mark", ""))
        except GristmillError as error:
            self._send_message(HTTPStatus.BAD_REQUEST, str(error))
            return
        self.send_response(HTTPStatus.SEE_OTHER)
        self.send_header("Location", _own_address(form.get("back", "/")))
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _is_own(self) -> bool:
        """Return whether a request is for this server by its own name, and not from another site's page."""
        port = self.server.server_port  # type: ignore[attr-defined]
        own = (f"{_HOST}:{port}", f"localhost:{port}")
        origin = self.headers.get("Origin")
        is_own_page = origin is None or origin.removeprefix("http://") in own
        if self.headers.get("Host") in own and is_own_page:
            return True
        self._send_message(HTTPStatus.FORBIDDEN, "Only pages of this server may send requests.")
        return False

    def _send_message(self, status: HTTPStatus, message: str, has_link: bool = False) -> None:
        content = render("browse/message.html", title="gristmill", message=message, has_link=has_link)
        self._send(status, content)

    def _send(self, status: HTTPStatus, content: bytes, kind: str = "text/html; charset=utf-8") -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        """Print nothing of requests."""


def _last_values(query: str) -> dict[str, str]:
    """Return the parameters of an address or a form; of one that is given twice, the last."""
    return {name: values[-1] for name, values in parse_qs(query).items()}


def _own_address(address: str) -> str:
    r"""Return an address if it is a page of this server, or else that of the first page.

    >>> [_own_address(text) for text in ("/duplicates?first=20", "//site", "/\\site", "javascript:x()", "/\r\nA: b")]
    ['/duplicates?first=20', '/', '/', '/', '/']
    """
    is_path = address.startswith("/") and not address.startswith(("//", "/\\"))
    if is_path and address.isprintable() and address.isascii():
        return address
    return "/"
