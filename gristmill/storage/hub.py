"""Datasets on the Hugging Face Hub, `hf://datasets/ORG/NAME[@REVISION]/folder`: listed and read, never written.

A revision is resolved to a commit when a corpus is listed, and the tree of that commit is asked for once. Files are
fetched by revision, with one request each; one whose content is not as it was listed is noticed by its ETag, which is
the SHA-256 of a large file and the git blob id of a small one. Needs huggingface_hub, which repeats requests that fail
for a passing reason, and waits as long as the Hub says; it finds HF_TOKEN and HF_ENDPOINT.
"""

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from urllib.parse import quote, unquote

from gristmill.errors import StorageError, UsageError
from gristmill.paths import ObjectName, hide_passwords
from gristmill.storage.listings import FileInfo, Tree
from gristmill.storage.problems import CHECK_NETWORK, explain_hub_problem

_RETRIES: dict[str, Any] = {"max_retries": 5, "base_wait_time": 1, "max_wait_time": 16}
_SECONDS = 60  # without a byte
_COMMIT = re.compile(r"[0-9a-f]{40}")
_MAIN = "main"


class _Dataset:
    """A dataset at one revision: the commit that this led to, and the trees of folders that have been listed."""

    def __init__(self, name: ObjectName) -> None:
        kind, _, rest = name.bucket.partition("/")
        self.id, _, revision = rest.partition("@")
        self.revision = unquote(revision) or _MAIN
        if kind != "datasets" or self.id.count("/") != 1:
            raise UsageError(
                f"{name.url}: expected hf://datasets/ORG/NAME/folder, or hf://datasets/ORG/NAME@REVISION/…"
            )
        with hub_library(name):
            from huggingface_hub.utils import validate_repo_id

            validate_repo_id(self.id)
        self._name = name
        self._commit = ""
        self._trees: dict[str, Tree] = {}

    def refresh(self) -> None:
        """Resolve the revision anew; if it leads to another commit, forget the trees."""
        before = self._commit
        self._commit = self._resolve()
        if self._commit != before:
            self._trees = {}

    def held(self, key: str) -> Tree | None:
        """Return the tree of a folder that has been listed, and is `key` or above it."""
        for top, tree in self._trees.items():
            if not top or f"{key}/".startswith(f"{top}/"):
                return tree
        return None

    def tree(self, key: str) -> Tree:
        """Return a tree with the folder `key`, which is listed if need be."""
        held = self.held(key)
        if held is None:
            held = self._trees[key] = Tree(self._list(key))
        return held

    def url(self, key: str) -> str:
        """Return where a file is fetched."""
        return f"{_endpoint()}/datasets/{self.id}/resolve/{quote(self.revision, safe='')}/{quote(key)}"

    def ask_for(self, key: str) -> FileInfo | None:
        """Return the FileInfo of one file, asked of the Hub; None if there is none."""
        data = {"paths": [key], "expand": False}
        entries, _ = _ask(self._name, f"{self._api}/paths-info/{self._at_commit()}", method="POST", data=data)
        return next((_info(entry) for entry in entries if entry["type"] == "file"), None)

    @property
    def _api(self) -> str:
        return f"{_endpoint()}/api/datasets/{self.id}"

    def _at_commit(self) -> str:
        if not self._commit:
            self.refresh()
        return self._commit

    def _resolve(self) -> str:
        if _COMMIT.fullmatch(self.revision):
            return self.revision
        # A Hub that cannot be reached at the first question is most likely not there: the user hears it at once.
        options: dict[str, Any] = {} if self._commit else {"retry_on_exceptions": ()}
        url = f"{self._api}/revision/{quote(self.revision, safe='')}"
        revision, _ = _ask(self._name, url, params={"expand": "sha"}, **options)
        return str(revision["sha"])

    def _list(self, key: str) -> Iterator[tuple[str, FileInfo]]:
        url = f"{self._api}/tree/{self._at_commit()}{'/' if key else ''}{quote(key, safe='')}"
        options: dict[str, Any] = {"params": {"recursive": True, "expand": False}}
        while url:
            try:
                entries, url = _ask(self._name._replace(key=key), url, **options)
            except FileNotFoundError:
                if options:
                    return
                raise
            yield from ((entry["path"], _info(entry)) for entry in entries if entry["type"] == "file")
            options = {}  # the next page's URL has them


def refresh(name: ObjectName) -> None:
    """Look again which commit a revision leads to."""
    _dataset(name).refresh()


def tree(name: ObjectName) -> Tree:
    """Return a tree of the dataset with a folder in it."""
    return _dataset(name).tree(name.key)


def find_file(name: ObjectName) -> FileInfo | None:
    """Return the FileInfo of a file, None if there is none."""
    dataset = _dataset(name)
    held = dataset.held(name.key)  # an empty one may be that of a file
    if not name.key or (held and held.files):
        return held.files.get(name.key) if held else None
    return dataset.ask_for(name.key)


def stream(name: ObjectName, start: int, end: int | None) -> Iterator[tuple[FileInfo, bytes]]:
    """Yield the bytes of a file from `start` to `end`, by one request, in chunks with its FileInfo.

    The first is empty.
    """
    with hub_library(name):
        from huggingface_hub.utils import build_hf_headers, http_stream_backoff

        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        if start or end is not None:
            headers["Range"] = f"bytes={start}-{'' if end is None else end - 1}"
        url = _dataset(name).url(name.key)
        with http_stream_backoff("GET", url, headers=headers, timeout=_SECONDS, **_RETRIES) as response:
            yield from _chunks_of(name, response, 206 if "Range" in headers else 200)


def _chunks_of(name: ObjectName, response: Any, status: int) -> Iterator[tuple[FileInfo, bytes]]:
    with hub_library(name):  # here, too: an error must not reach the library, which would ask again in our place
        from huggingface_hub.utils import hf_raise_for_status

        hf_raise_for_status(response)
        info = _info_of_answer(response)
        if response.status_code != status:
            raise UsageError(f"cannot read {name.url}: expected status {status}, got {response.status_code}")
        yield info, b""
        yield from ((info, chunk) for chunk in response.iter_bytes())


def _dataset(name: ObjectName) -> _Dataset:
    return _open(name._replace(key=""))


@cache  # what is known of it, in this process
def _open(name: ObjectName) -> _Dataset:
    return _Dataset(name)


def _ask(name: ObjectName, url: str, method: Any = "GET", **options: Any) -> tuple[Any, str]:
    """Return the JSON that the Hub answers, and the URL of the next page or ''. Raises FileNotFoundError."""
    with hub_library(name):
        from huggingface_hub.utils import build_hf_headers, hf_raise_for_status, http_backoff

        options |= {"headers": build_hf_headers(), "timeout": _SECONDS}
        answer = http_backoff(method, url, **_RETRIES, **options)
        hf_raise_for_status(answer)
        try:
            return answer.json(), answer.links.get("next", {}).get("url", "")
        except ValueError as error:
            raise StorageError(
                f"cannot read {name.url}: the server that answered is not the Hub: {CHECK_NETWORK}"
            ) from error


def _info(entry: dict[str, Any]) -> FileInfo:
    """Return the FileInfo of a file in a tree, as the Hub describes it."""
    return FileInfo(entry["size"], e_tag=(entry.get("lfs") or entry)["oid"])


def _info_of_answer(answer: Any) -> FileInfo:
    """Return the FileInfo of a fetched file, from the answer or, where it is stored elsewhere, from the redirection."""
    hop = next((hop for hop in answer.history if "X-Linked-Etag" in hop.headers), answer)
    tag = hop.headers.get("X-Linked-Etag") or hop.headers.get("ETag", "")
    size = answer.headers.get("Content-Range", "").rpartition("/")[2] or answer.headers.get("Content-Length", "-1")
    return FileInfo(int(hop.headers.get("X-Linked-Size") or size), e_tag=tag.removeprefix("W/").strip('"'))


def _endpoint() -> str:
    """HF_ENDPOINT, or https://huggingface.co. Raises UsageError if it is no URL."""
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or "https://huggingface.co"
    if not endpoint.startswith(("http://", "https://")):
        raise UsageError(f"HF_ENDPOINT {hide_passwords(endpoint)!r} is not a URL: expected https://host")
    return endpoint


@contextmanager
def hub_library(name: ObjectName) -> Iterator[None]:
    """Context: use huggingface_hub, and convert its errors; FileNotFoundError for a file that is not there."""
    try:
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, HTTPError, OfflineModeIsEnabled
    except ImportError as error:
        raise UsageError(
            f"{name.url}: the package huggingface_hub is not installed, or too old: pip install 'gristmill[hub]'"
        ) from error
    try:
        yield
    except HfHubHTTPError as error:
        code = error.response.headers.get("X-Error-Code", "")
        if code == "EntryNotFound":
            raise FileNotFoundError(errno.ENOENT, "there is no such file", name.url) from error
        raise explain_hub_problem(name, error.response.status_code, code) from error
    except OfflineModeIsEnabled as error:
        raise UsageError(f"cannot read {name.url}: HF_HUB_OFFLINE is set: unset it") from error
    except HFValidationError as error:
        raise UsageError(
            f"{name.url}: the Hub has no such names: expected hf://datasets/ORG/NAME/folder, or a model's hf://ORG/NAME"
        ) from error
    except HTTPError as error:
        raise StorageError(
            f"cannot read {name.url}: the Hub cannot be reached, or its answer was cut off: {CHECK_NETWORK}"
        ) from error
