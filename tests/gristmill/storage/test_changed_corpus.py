"""Objects of a raw corpus that are overwritten while `normalize_text` works: one clear error; the next run is right."""

import json
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest

from gristmill.engine.options import RunOptions
from gristmill.errors import InputError
from gristmill.paths import object_name
from gristmill.storage import objects
from gristmill.storage.objects import read_object, write_object
from preprocessing.normalize_text import normalize_text
from tests.object_store import BUCKET, Store

NAMES = ("a", "b", "c")
QUIET = RunOptions(workers=1, quiet=True)
IsMoment = Callable[[str, str], bool]  # whether a request, its verb and key, is that before which an object changes


@pytest.fixture
def corpus(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    for name in NAMES:
        write_text(folder / "corpus", name, f"text {name}")
    return folder / "corpus"


def write_text(corpus: Path, name: str, text: str) -> None:
    write_object(corpus / f"web/{name}.jsonl", json.dumps({"text": text}).encode() + b"\n")


def texts(target: Path) -> list[str]:
    return [json.loads(read_object(target / f"web/{name}.jsonl")[0])["text"] for name in NAMES]


def change_before(store: Store, corpus: Path, is_moment: IsMoment) -> None:
    """Have the object b overwritten, with a text of the same length, before the first request of which this holds."""
    changes: list[str] = []

    def fault(application: Any, environment: dict[str, Any], start_response: Any) -> Iterable[bytes] | None:
        key = environment["PATH_INFO"].removeprefix(f"/{BUCKET}/")
        if not changes and is_moment(environment["REQUEST_METHOD"], key):
            changes.append(key)
            write_text(corpus, "b", "TEXT B")
        return None

    store.fault = fault


def listings(store: Store, corpus: Path) -> int:
    """How often the corpus was listed."""
    prefix = f"{object_name(corpus).key}/"
    asked = [parse_qs(path.partition("?")[2]) for verb, path in store.requests if verb == "GET"]
    return sum("list-type" in query and query.get("prefix") == [prefix] for query in asked)


def test_before_and_after_it_is_read(store: Store, folder: Path, corpus: Path) -> None:
    """An object that changes after the listing is refused when it is read, and at the end if it was read before."""
    moments: dict[str, IsMoment] = {
        "was changed while it was read": lambda verb, key: verb == "GET" and key.endswith("/b.jsonl"),
        "was changed while normalize_text worked": lambda verb, key: (
            verb == "PUT" and key.endswith("norm1/web/c.jsonl")
        ),
    }
    for number, (message, is_moment) in enumerate(moments.items()):
        write_text(corpus, "b", "text b")
        target = folder / f"norm{number}"
        change_before(store, corpus, is_moment)
        with pytest.raises(InputError, match=f"b.jsonl {message}: run the same command again"):
            normalize_text(corpus, target, options=QUIET)
        assert normalize_text(corpus, target, options=QUIET).total("written").documents == len(NAMES)
        assert texts(target) == ["text a", "TEXT B", "text c"]


def test_the_corpus_is_listed_once_before_and_once_after(store: Store, folder: Path, corpus: Path) -> None:
    for expected in (2, 1):  # the second run reads nothing
        store.requests.clear()
        normalize_text(corpus, folder / "norm", options=QUIET)
        heads = [path for verb, path in store.requests if verb == "HEAD" and "/corpus/web/" in path]
        assert listings(store, corpus) == expected and not heads
