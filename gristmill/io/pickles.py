"""SlimPajama's .pickle artefacts, loaded without running code from the file, and written as a stream."""

import mmap
import pickle
import re
from collections.abc import Callable, Iterable, Iterator
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gristmill.errors import InputError, UsageError
from gristmill.storage.files import is_file
from gristmill.storage.local import atomic_write, atomic_write_bytes

PROTOCOL = 4
_BLOCK = 1 << 17  # rows in a block
_CHUNK = 1 << 20  # bytes read at a time
_MAX_NAME = 1 << 24  # bytes of a file's name
_DICT = re.compile(  # the beginning of a pickled dict or defaultdict(set), up to its items
    rb"\x80[\x02-\x05](\x95.{8})?(\}|\x8c\x0bcollections\x94\x8c\x0bdefaultdict\x94\x93\x94\x8c\x08builtins\x94"
    rb"\x8c\x03set\x94\x93\x94\x85\x94R)",
    re.DOTALL,
)
_UNFRAMED = 3  # the last protocol without frames, whose pickles can be concatenated
_NUMPY = {"numpy.core.multiarray", "numpy._core.multiarray", "numpy.core.numeric", "numpy._core.numeric"}
_TYPES = {"list", "dict", "tuple", "int", "str", "bytes", "bool", "float"}  # of a defaultdict's missing values


class _Unpickler(pickle.Unpickler):
    """Makes containers, strings and numbers, and nothing else: what a file names is replaced by a function here.

    Arrays of numbers become lists. No more than `size` values, the size of the file, are copied by all functions
    together: a file could otherwise name one large value many times.
    """

    def __init__(self, file: Any, size: int) -> None:
        super().__init__(file)
        self.left = size

    def find_class(self, module: str, name: str) -> Any:
        found: dict[str, Any] = {}
        if module == "builtins":
            found = {"set": self._set, "frozenset": self._frozenset, **dict.fromkeys(_TYPES)}
        elif module == "collections":
            found = {"defaultdict": self._dict, "OrderedDict": self._dict}
        elif module == "numpy":
            found = {"dtype": _NumberType, "ndarray": None}
        elif module in _NUMPY:
            found = {"_reconstruct": self._array, "_frombuffer": self._from_buffer, "scalar": self._scalar}
        if name not in found:
            raise pickle.UnpicklingError(
                f"it contains {module}.{name}, which is neither a builtin container nor an array"
            )
        return found[name]

    def spend(self, count: int) -> None:
        """Count values that are copied. Raises UnpicklingError if the file cannot hold so many."""
        self.left -= count
        if self.left < 0:
            raise pickle.UnpicklingError("it holds more values than its size allows")

    def _set(self, items: Any = ()) -> set:
        if not isinstance(items, list | tuple):
            raise pickle.UnpicklingError("it makes a set of something else than a list")
        self.spend(len(items))
        return set(items)

    def _frozenset(self, items: Any = ()) -> frozenset:
        return frozenset(self._set(items))

    def _dict(self, _: Any = None) -> dict:
        return {}

    def _array(self, *_: Any) -> "_Array":
        return _Array(self)

    def _from_buffer(self, data: Any, kind: Any, shape: Any, _: Any) -> list:
        return self.numbers(data, kind, shape)

    def _scalar(self, kind: Any, data: Any) -> Any:
        return self.numbers(data, kind, (1,))[0]

    def numbers(self, data: Any, kind: Any, shape: Any) -> list:
        """A one-dimensional array as a list. Raises UnpicklingError unless its bytes are of this shape."""
        if not isinstance(data, bytes | bytearray) or not isinstance(kind, _NumberType):
            raise pickle.UnpicklingError("it has an array of something else than numbers")
        if shape != (len(data) // kind.dtype.itemsize,):
            raise pickle.UnpicklingError(
                "it has an array of more than one dimension, or of another length than its data"
            )
        self.spend(len(data))
        return np.frombuffer(data, kind.dtype).tolist()


class _NumberType:
    """In place of numpy.dtype: an integer or a float in some byte order."""

    __slots__ = ("dtype",)

    def __init__(self, name: str, *_: Any) -> None:
        if not isinstance(name, str) or not re.fullmatch("[iuf][1248]|b1", name):
            raise pickle.UnpicklingError(f"it has an array of {name!r:.20}: wanted numbers")
        self.dtype = np.dtype(name)

    def __setstate__(self, state: Any) -> None:
        if not isinstance(state, tuple) or state[2:] != (None, None, None, -1, -1, 0):
            raise pickle.UnpicklingError("it has an array of fields: wanted numbers")
        if state[1] not in ("<", ">", "|"):
            raise pickle.UnpicklingError("it has an array in an unknown byte order")
        self.dtype = self.dtype.newbyteorder(state[1])


class _Array(list):
    """In place of numpy.ndarray: a list of the numbers in its state."""

    __slots__ = ("unpickler",)

    def __init__(self, unpickler: _Unpickler) -> None:
        self.unpickler = unpickler

    def __setstate__(self, state: Any) -> None:
        _, shape, kind, _, data = state
        self[:] = self.unpickler.numbers(data, kind, shape)


def load_pickle(path: Path) -> Any:
    """Load a pickle of containers, numbers and strings; arrays of numbers are loaded as lists.

    Raises UsageError if there is no file, InputError if it is damaged, holds any other type, or would need
    far more memory than its size: nothing that the file names is run, and none of its lengths is trusted.
    """
    from gristmill.io.pickle_check import find_problem  # here, as it imports numba: most commands read no pickle

    if not is_file(path):
        raise UsageError(f"{path}: wanted a .pickle file, and there is none of that name. Run the stage that writes it")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if problem := find_problem(data):
                raise pickle.UnpicklingError(problem)
            return _Unpickler(file, len(data)).load()
    except Exception as error:  # a damaged pickle can raise anything, such as MemoryError
        raise InputError(f"{path} is not a pickle that can be read ({error}): make it again") from error


def dump_pickle(path: Path, value: Any) -> None:
    """Write a pickle of builtins atomically."""
    atomic_write_bytes(path, pickle.dumps(value, protocol=PROTOCOL))


class _OtherPickle(Exception):
    """A pickle holds something else than files and rows."""


def stream_rows(path: Path) -> Iterator[tuple[str, NDArray[np.int64]]] | None:
    """The files and rows of a pickled {file: {rows}}, in its order, block by block; None if it is something else.

    A file comes first without rows, then with blocks of them. Sets pickled in the usual ways are read, with a block in
    memory; lists, arrays and damaged files are not: load_pickle reads them, or says what is wrong. Reads all twice.
    """
    try:
        for _ in _scan(path):
            pass
    except (_OtherPickle, OSError, UnicodeDecodeError):
        return None
    return _scan(path)


def _scan(path: Path) -> Iterator[tuple[str, NDArray[np.int64]]]:
    from gristmill.io.pickle_check import END, NAME, OTHER, SCAN_STATE, scan_rows  # as in load_pickle

    name, state, rows = "", np.zeros(SCAN_STATE, np.int64), np.empty(_BLOCK, np.int64)
    with path.open("rb") as file:
        data = file.read(_CHUNK)
        begin = _DICT.match(data)
        if not begin:
            raise _OtherPickle
        left = np.frombuffer(data, np.uint8)[begin.end() :]
        while True:
            at, count, found = scan_rows(left, state, rows)
            if count:
                yield name, rows[:count].copy()
            if found == END:
                return
            if found == NAME:
                name = bytes(left[state[2] : state[3]]).decode("utf-8", "surrogatepass")
                yield name, rows[:0].copy()
            left = left[at:]
            if found == OTHER or len(left) > _CHUNK + _MAX_NAME:
                raise _OtherPickle
            if found != NAME and count < _BLOCK:
                data = file.read(_CHUNK)
                if not data:
                    raise _OtherPickle
                left = np.concatenate([left, np.frombuffer(data, np.uint8)])


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
