"""SlimPajama's .pickle artefacts: loaded without running what a file names, and written as a stream."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from gristmill.budget import reserve_memory
from gristmill.errors import GristmillError, InputError, UsageError
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write

PROTOCOL = 4
_UNFRAMED = 3  # the last protocol without frames, whose pickles can be concatenated
_MEMORY_A_BYTE = 16  # of a pickled set of rows, as Python objects
_NAMES = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "str", "int", "bytes"},
    "collections": {"defaultdict", "OrderedDict"},
}


class _BuiltinsUnpickler(pickle.Unpickler):
    """Makes the containers, strings and numbers of _NAMES, and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in _NAMES.get(module, ()):
            raise pickle.UnpicklingError(f"it contains {module}.{name}, which is not a builtin container")
        return super().find_class(module, name)


def load_pickle(path: Path) -> Any:
    """Load a pickle of containers, numbers and strings.

    UsageError if there is no such file, or it is too large for the memory budget of a task; InputError if it is
    damaged or contains any other type.
    """
    if not is_file(path):
        raise UsageError(f"{path}: expected a .pickle file, got none of that name; run the stage that writes it")
    try:
        with reserve_memory(_MEMORY_A_BYTE * path.stat().st_size, str(path)), path.open("rb") as file:
            return _BuiltinsUnpickler(file).load()
    except GristmillError:
        raise
    except Exception as error:  # a damaged pickle can raise anything, such as MemoryError
        raise InputError(f"{path} is not a pickle that can be read ({error}): make it again") from error


def write_sets(path: Path, files: Iterable[str], sets: Iterator[Iterable[int]]) -> None:
    """Write the pickle of {file: set} atomically, with one set in memory at a time; `sets` are those of the files.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pickle"
    >>> write_sets(path, ["a", "b"], iter([[1, 2], range(3)]))
    >>> load_pickle(path), path.read_bytes() == pickle.dumps({"a": {1, 2}, "b": {0, 1, 2}}, PROTOCOL)
    ({'a': {1, 2}, 'b': {0, 1, 2}}, True)
    """
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        _SetPickler(file, sets).dump({name: set[int]() for name in files})


class _SetPickler(pickle.Pickler):
    """Fills each set just before it is written, and empties it when the next one's turn comes."""

    def __init__(self, file: Any, sets: Iterator[Iterable[int]]) -> None:
        super().__init__(file, PROTOCOL)
        self.sets, self.filled = sets, set[int]()

    def persistent_id(self, value: Any) -> None:
        """Called for every value before it is written."""
        if type(value) is set:
            self.filled.clear()
            value.update(next(self.sets))
            self.filled = value


def stream_list(items: Iterable[Any]) -> Iterator[bytes]:
    """Yield the pickle of list(items) in pieces, without PROTO and STOP; the list is never in memory."""
    yield pickle.EMPTY_LIST
    yield from chain([pickle.MARK], map(_pickle_body, items), [pickle.APPENDS])


def stream_dict(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """Yield the pickle of dict(items) in pieces, without PROTO and STOP; the dict is never in memory."""
    yield pickle.EMPTY_DICT
    yield from chain(
        [pickle.MARK], (_pickle_body(key) + _pickle_body(value) for key, value in items), [pickle.SETITEMS]
    )


def stream_value(value: Callable[[], Any]) -> Iterator[bytes]:
    """Yield the pickle of value(), without PROTO and STOP; `value` is called only when its turn comes."""
    yield _pickle_body(value())


def write_stream(path: Path, stream: Iterable[bytes]) -> None:
    """Write a pickle atomically from a stream of stream_list, stream_dict or stream_value."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines(chain([pickle.PROTO + bytes([_UNFRAMED])], stream, [pickle.STOP]))


def write_tuple(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write the pickle of a tuple atomically; each item is a stream.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pickle"
    >>> write_tuple(path, [stream_list([[1, 2], [3]]), stream_dict([("a", 1)])])
    >>> load_pickle(path)
    ([[1, 2], [3]], {'a': 1})
    """
    write_stream(path, chain([pickle.MARK], chain.from_iterable(parts), [pickle.TUPLE]))


def _pickle_body(value: Any) -> bytes:
    """The pickle of a value that can be part of another pickle: without PROTO, frames, memo and STOP."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, _UNFRAMED)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
