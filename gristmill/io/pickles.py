"""SlimPajama's .pickle artefacts, loaded without running code from the file, and written as a stream."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, UsageError
from gristmill.io.files import atomic_write, atomic_write_bytes

PROTOCOL = 4
_UNFRAMED = 3  # the last protocol without frames, whose pickles can be concatenated
_ALLOWED = {
    "builtins": {"set", "frozenset", "dict", "list", "tuple", "int", "str", "bytes", "bytearray", "bool", "float"},
    "collections": {"defaultdict", "OrderedDict"},
    "numpy": {"ndarray", "dtype"},
    "numpy.core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.multiarray": {"_reconstruct", "scalar"},
    "numpy._core.numeric": {"_frombuffer"},
    "numpy.core.numeric": {"_frombuffer"},
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _ALLOWED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it contains {module}.{name}, which is neither a builtin container nor an array")


def load_pickle(path: Path) -> Any:
    """Load a pickle of containers, numbers, strings and arrays.

    Raises UsageError if there is no file, InputError if it is damaged or holds any other type.
    """
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .pickle file, and there is none of that name. Run the stage that writes it")
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # a damaged pickle can raise anything, such as MemoryError
        raise InputError(f"{path} is not a pickle that can be read ({error}): make it again") from error


def dump_pickle(path: Path, value: Any) -> None:
    """Write a pickle of builtins atomically."""
    atomic_write_bytes(path, pickle.dumps(value, protocol=PROTOCOL))


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
