"""A user's function, given as module:function: its import, and the version by which tasks notice that it changed."""

import hashlib
import importlib
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType

from gristmill.errors import UsageError
from gristmill.io.documents import Document

DocumentFunction = Callable[[Iterator[Document]], Iterable[Document]]
_hashes: dict[str, str] = {}  # of the source of each user module, as it was imported


def load_function(name: str) -> DocumentFunction:
    """Import `module:function` from the current folder or PYTHONPATH. UsageError if that fails."""
    module_name, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module_name.split("."), attribute)) or module_name == "__main__":
        raise UsageError(f"expected module:function, such as my_filters:keep_english, got {name!r}")
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    module = _import(module_name)
    function = getattr(module, attribute, None)
    if callable(function):
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    raise UsageError(f"{module.__file__} has no function {attribute!r}: it has {', '.join(others) or 'none'}")


def version_of(name: str) -> str:
    """The function's `version`, or the SHA-256 of the source of its module. UsageError as load_function."""
    function, module = load_function(name), sys.modules[name.partition(":")[0]]
    if hasattr(function, "version"):
        return f"version {function.version}"
    home = sys.modules.get(function.__module__ or "", module)  # its module may have imported it from there
    return hashlib.sha256("\0".join(map(_hash, dict.fromkeys((module, home)))).encode()).hexdigest()


def describe(error: BaseException) -> str:
    """An error of a user's code in one line: its class, its message, and where it was raised."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    message = " ".join(str(error).split())
    return f"{type(error).__name__}{message and ': ' + message} ({place.filename}, line {place.lineno})"


def _import(name: str) -> ModuleType:
    """Import a module, again if its source has changed since this process imported it."""
    try:
        module = importlib.import_module(name)
        if not getattr(module, "__file__", None):
            raise UsageError(f"{name} has no file: expected a function of yours, such as my_filters:keep_english")
        if _hashes.setdefault(name, _hash(module)) != _hash(module):
            importlib.invalidate_caches()
            if module.__cached__:  # bytecode of a source of the same size that was edited in the same second
                Path(module.__cached__).unlink(missing_ok=True)
            module, _hashes[name] = importlib.reload(module), _hash(module)
        return module
    except UsageError:
        raise
    except ModuleNotFoundError as error:
        if f"{name}.".startswith(f"{error.name}."):
            file = f"{name.replace('.', '/')}.py"
            raise UsageError(f"there is no module {name!r}: expected {file} here, or on PYTHONPATH") from error
        raise UsageError(f"{name} needs the module {error.name!r}, which is not installed") from error
    except (Exception, SystemExit) as error:
        raise UsageError(f"{name} cannot be imported: {describe(error)}") from error


def _hash(module: ModuleType) -> str:
    """The SHA-256 of a module's file; '' if it has none."""
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
