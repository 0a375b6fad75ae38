"""An object of a stage that is overwritten, damaged or gone: the next stage refuses it and names the first one."""

from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from gristmill.engine.run import open_stage
from gristmill.engine.task import FileSet, Stage, Task
from gristmill.errors import InputError
from gristmill.storage import objects
from gristmill.storage.files import is_file
from gristmill.storage.objects import delete_objects, read_object, write_object
from tests.gristmill.engine.upper_stage import QUIET, join, upper_stage
from tests.object_store import Store

NEXT = Stage("next", libraries=())
NAMES = ("a", "b")  # written with their join, "whole", the largest: if that is another one, the folder is listed


@pytest.fixture
def written(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the bucket, of which a stage wrote two objects."""
    monkeypatch.setitem(objects._CLIENT, "timeout", timedelta(seconds=20))
    objects._open.cache_clear()
    (tmp_path / "in").mkdir()
    for name in NAMES:
        (tmp_path / "in" / name).write_text(f"text {name}\n")
    upper_stage(tmp_path / "in", folder / "upper")
    return folder / "upper"


def join_objects(source: Path, as_set: bool = False) -> bytes:
    """The next stage: join the objects, as single files or as a set."""
    target = source.parent / "joined"
    parts = [path for name in (*NAMES, "whole") if is_file(path := source / name)]
    arguments = {"parts": FileSet(tuple(parts)) if as_set else parts, "target": target / "whole"}
    function = join_set if as_set else join
    with open_stage(NEXT, target, QUIET, reads={source: parts}, publishes=[target]) as run:
        run.finish(run.step("join", [Task("whole", function, arguments, (target / "whole",))]).counts)
    return read_object(target / "whole")[0]


def join_set(parts: FileSet, target: Path) -> None:
    join(list(parts.paths), target)


def overwrite(path: Path, store: Store) -> None:
    write_object(path, b"TEXT X\n")


def damage(path: Path, store: Store) -> None:
    """Every answer with its bytes has one that is another, under the same ETag."""

    def answer(application: Any, environment: dict[str, Any], start_response: Any) -> Iterable[bytes] | None:
        if environment["REQUEST_METHOD"] != "GET" or not environment["PATH_INFO"].endswith(f"/{path.name}"):
            return None
        return [b"".join(application(environment, start_response)).swapcase()]

    store.fault = answer


def remove(path: Path, store: Store) -> None:
    delete_objects([path])


@pytest.mark.every(3)
@pytest.mark.parametrize(("happens", "message"), [
    (overwrite, r"upper/{} is not what upper wrote: it was changed .* run upper again"),
    (damage, r"upper/{} is not what upper wrote: it was changed or damaged since\. Remove it, run upper again"),
    (remove, r"upper/{}, which upper wrote, is missing\. Run upper again"),
])  # fmt: skip
@pytest.mark.parametrize(("name", "as_set"), [("a", False), ("a", True), ("whole", True)])
def test_the_next_stage_names_who_wrote_it(
    tmp_path: Path,
    written: Path,
    store: Store,
    happens: Callable[[Path, Store], None],
    message: str,
    name: str,
    as_set: bool,
) -> None:
    happens(written / name, store)
    with pytest.raises(InputError, match=message.format(name)):
        join_objects(written, as_set)
    store.fault = None
    delete_objects([written / name])
    upper_stage(tmp_path / "in", written)
    assert join_objects(written, as_set) == b"TEXT A\nTEXT B\n" * 2
