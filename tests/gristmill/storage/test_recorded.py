"""Files of earlier stages in a bucket: found in the ledgers there, not in a listing, where these tell all."""

from datetime import timedelta
from pathlib import Path

import pytest

from gristmill.engine.inputs import find_recorded
from gristmill.errors import InputError
from gristmill.io.files import mark_unfinished
from gristmill.storage import objects
from gristmill.storage.objects import delete_objects, read_object, write_object
from tests.gristmill.engine.upper_stage import upper_stage
from tests.object_store import Store


@pytest.fixture
def norm(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with two sources, each of which a stage wrote by itself."""
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    for name in ("book", "web"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_text(f"{name}\n")
        upper_stage(tmp_path / name, folder / "norm" / name)
    write_object(folder / "run.json", b"{}")
    return folder / "norm"


def names(norm: Path) -> list[str] | None:
    found = find_recorded(norm)
    return None if found is None else [file.path.relative_to(norm).as_posix() for file in found]


WRITTEN = ["book/a.txt", "book/whole", "web/a.txt", "web/whole"]


def test_the_sources_of_several_runs_are_found_without_a_listing_of_their_files(norm: Path, store: Store) -> None:
    store.requests.clear()
    assert names(norm) == WRITTEN and names(norm / "web") == ["a.txt", "whole"]
    folder = norm.as_posix().partition("bucket/")[2].replace("/", "%2F")
    assert not [path for _, path in store.requests if f"prefix={folder}%2Fbook%2F&" in path]
    write_object(norm / "web/own.txt", b"")  # a user's, where a ledger says what is there
    assert names(norm) == WRITTEN


def test_what_ledgers_do_not_tell_is_listed(norm: Path, tmp_path: Path) -> None:
    assert names(tmp_path) is None and names(norm / "gone") is None
    write_object(norm / "new/own.txt", b"")
    assert names(norm) is None
    ledger = norm / "web/.gristmill/upper.ledger"
    write_object(ledger, read_object(ledger)[0].replace(b"whole", b"whore", 1))
    assert names(norm / "web") is None


def test_what_no_whole_run_wrote_is_listed(norm: Path, tmp_path: Path) -> None:
    """Stages may have been run by hand into folders at any depth."""
    delete_objects([norm.parent / "run.json"])
    upper_stage(tmp_path / "web", norm / "book/more")
    assert names(norm) is None


def test_a_folder_whose_largest_object_has_another_version_is_listed(norm: Path) -> None:
    """As the objects of a copy may have; in one part, an object's version is a hash of its bytes."""
    copy = norm / "../copy"
    for name in ("a.txt", "whole", ".gristmill/upper.ledger"):
        write_object(copy / name, read_object(norm / "book" / name)[0])
    assert names(copy) == ["a.txt", "whole"]
    write_object(copy / "whole", read_object(copy / "whole")[0].lower())
    assert names(copy) is None


def test_a_source_that_is_not_finished_is_refused(norm: Path) -> None:
    mark_unfinished(norm / "web", "upper")
    with pytest.raises(InputError, match=r"norm is not complete: upper, which writes .*norm/web, was interrupted"):
        find_recorded(norm)
