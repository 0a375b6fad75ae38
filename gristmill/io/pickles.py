"""SlimPajama's .pickle artefacts: plain containers, loaded without running code that a file names."""

import pickle
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

from gristmill.errors import InputError, UsageError
from gristmill.io.files import atomic_write, atomic_write_bytes

PROTOCOL = 4
_UNFRAMED = 3  # the last protocol without frames, so that pickles can be put together
_ADMITTED = {
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
        if name in _ADMITTED.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}, which is neither a builtin container nor an array")


def load_pickle(path: Path) -> Any:
    """The containers, numbers, strings and arrays in a pickle.

    Raises UsageError if there is no file, InputError if it is damaged or holds anything else.
    """
    if not path.is_file():
        raise UsageError(f"{path}: wanted a .pickle file, and there is none of that name. Run the stage that writes it")
    try:
        with path.open("rb") as file:
            return _Unpickler(file).load()
    except Exception as error:  # a damaged pickle may ask for anything: a terabyte, a module that is not there
        raise InputError(f"{path} is not a pickle we can read ({error}): make it again") from error


def dump_pickle(path: Path, value: Any) -> None:
    """Write a pickle of builtins, whole or not at all."""
    atomic_write_bytes(path, pickle.dumps(value, protocol=PROTOCOL))


def stream_list(items: Iterable[Any]) -> Iterator[bytes]:
    """The pickle of list(items), without PROTO and STOP, in pieces: the list is never in memory."""
    yield pickle.EMPTY_LIST
    yield from chain([pickle.MARK], map(_bare, items), [pickle.APPENDS])


def stream_dict(items: Iterable[tuple[Any, Any]]) -> Iterator[bytes]:
    """The pickle of dict(items), likewise."""
    yield pickle.EMPTY_DICT
    yield from chain([pickle.MARK], (_bare(key) + _bare(value) for key, value in items), [pickle.SETITEMS])


def stream_value(value: Callable[[], Any]) -> Iterator[bytes]:
    """The pickle of what a function returns, called when the stream gets there."""
    yield _bare(value())


def write_stream(path: Path, stream: Iterable[bytes]) -> None:
    """Write what comes as a stream, whole or not at all."""
    with atomic_write(path) as temporary, temporary.open("wb") as file:
        file.writelines(chain([pickle.PROTO + bytes([_UNFRAMED])], stream, [pickle.STOP]))


def write_tuple(path: Path, parts: Iterable[Iterable[bytes]]) -> None:
    """Write a tuple whose items come as streams, whole or not at all.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a.pickle"
    >>> write_tuple(path, [stream_list([[1, 2], [3]]), stream_dict([("a", 1)])])
    >>> load_pickle(path)
    ([[1, 2], [3]], {'a': 1})
    """
    write_stream(path, chain([pickle.MARK], chain.from_iterable(parts), [pickle.TUPLE]))


def _bare(value: Any) -> bytes:
    """The pickle of a value that may stand within another: no PROTO, no frame, no memo, no STOP."""
    buffer = BytesIO()
    pickler = pickle.Pickler(buffer, _UNFRAMED)
    pickler.fast = True
    pickler.dump(value)
    return buffer.getvalue()[2:-1]
