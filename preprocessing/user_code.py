"""Functions of users: imported by name, module:function, and identified by their version or their module's source."""

import hashlib
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.errors import UsageError
from gristmill.steps import describe_error

_hashes: dict[str, str] = {}  # of the source of each user module, as it was imported


def load_function(name: str) -> Callable[..., Any]:
    """Import `module:function` from the current folder or PYTHONPATH. UsageError if that fails."""
    module_name, _, attribute = name.partition(":")
    if module_name.endswith(".py"):
        plain = module_name.removesuffix(".py").replace("/", ".")
        raise UsageError(f"expected a module's name, such as {plain}:{attribute}, got the file {name!r}")
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
    """Return the function's `version`, or the SHA-256 of the source of its module. UsageError as load_function."""
    function = load_function(name)
    module = sys.modules[name.partition(":")[0]]
    if hasattr(function, "version"):
        return f"version {function.version}"
    home = sys.modules.get(function.__module__ or "", module)  # its module may have imported it from there
    hashes = "\0".join(map(_hash, dict.fromkeys((module, home))))
    return hashlib.sha256(hashes.encode()).hexdigest()


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
        raise UsageError(f"{name} cannot be imported: {describe_error(error)}") from error


def _hash(module: ModuleType) -> str:
    """Return the SHA-256 of a module's file; '' if it has none."""
    file = getattr(module, "__file__", None)
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else ""
