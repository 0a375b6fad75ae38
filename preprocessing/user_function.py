"""A user's function, given as module:function: imports it, and says when it has changed."""

import hashlib
import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

from gristmill.errors import UsageError
from gristmill.io.documents import Document

DocumentFunction = Callable[[Iterator[Document]], Iterable[Document]]


def load_function(name: str) -> DocumentFunction:
    """Import `module:function`, again if its file has changed. UsageError if it cannot be imported."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)) or module == "__main__":
        raise UsageError(f"{name!r} is not a function's name: wanted module:function, such as my_filters:keep_english")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    importlib.invalidate_caches()
    with _import_errors(module):
        spec = importlib.util.find_spec(module)
    if spec is None:
        raise _no_module(module)
    origin = Path(spec.origin or "")
    return _load(module, function, origin.stat().st_mtime_ns if origin.is_file() else 0)


def version_of(name: str) -> str:
    """The function's `version`, or the SHA-256 of the source of its module. UsageError as load_function."""
    function, module = load_function(name), sys.modules[name.partition(":")[0]]
    if hasattr(function, "version"):
        return f"version {function.version}"
    defined_in = sys.modules.get(function.__module__, module)
    files = dict.fromkeys(file for file in (module.__file__, defined_in.__file__) if file)
    return hashlib.sha256(b"\0".join(Path(file).read_bytes() for file in files)).hexdigest()


@lru_cache(maxsize=4)
def _load(module: str, function: str, mtime_ns: int) -> DocumentFunction:  # noqa: ARG001
    """Import a module's function; cached until the modification time of the module's file changes."""
    with _import_errors(module):
        before = sys.modules.get(module)
        loaded = importlib.reload(before) if before else importlib.import_module(module)
    found = getattr(loaded, function, None)
    if callable(found):
        return found
    others = [name for name, value in vars(loaded).items() if callable(value) and not name.startswith("_")]
    raise UsageError(f"{loaded.__file__} has no function {function!r}: it has {', '.join(others) or 'none'}")


@contextmanager
def _import_errors(module: str) -> Iterator[None]:
    """Context: turn what goes wrong in an import into UsageErrors that say where."""
    try:
        yield
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise _no_module(module) from error
        raise UsageError(f"{module} needs the module {error.name!r}, and there is none: is it installed?") from error
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        raise UsageError(
            f"{module} cannot be imported: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
        ) from error


def _no_module(module: str) -> UsageError:
    file = f"{module.replace('.', '/')}.py"
    return UsageError(f"there is no module {module!r}: wanted {file} in the current folder, or on PYTHONPATH")
