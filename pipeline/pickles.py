"""SlimPajama's .pickle artefacts: plain containers, loaded without running code that a file names."""

import pickle
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, UsageError
from pipeline.files import write_whole

PROTOCOL = 4
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
    write_whole(path, pickle.dumps(value, protocol=PROTOCOL))
