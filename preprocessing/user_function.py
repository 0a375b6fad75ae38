"""A user's function, given as module:function: imports it, and says when it has changed."""

import hashlib
import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from gristmill.engine.executors.local import Call, LocalExecutor
from gristmill.errors import UsageError
from gristmill.io.documents import Document
from gristmill.process_end import Terminated
from preprocessing.process_settings import keep_folder

DocumentFunction = Callable[[Iterator[Document]], Iterable[Document]]
_INSTALLED = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


def load_function(name: str) -> DocumentFunction:
    """Import `module:function`, again if its source has changed. UsageError if it cannot be imported."""
    module, _, function = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), function)) or module == "__main__":
        raise UsageError(f"{name!r} is not a function's name: wanted module:function, such as my_filters:keep_english")
    _search_here()
    found = _find(_import(module), function)
    home = _home(found)
    if home and home.__name__ != module and _is_changed(home):
        _import(home.__name__)
        return _find(_import(module, again=True), function)
    return found


def version_of(name: str) -> str:
    """The function's `version`, or the SHA-256 of the source of its module. UsageError as load_function."""
    function, module = load_function(name), sys.modules[name.partition(":")[0]]
    if hasattr(function, "version"):
        return f"version {function.version}"
    sources = {found.__name__: _source(found) for found in (module, _home(function)) if found}
    return hashlib.sha256(b"\0".join(sources.values())).hexdigest()


def recorded_version(name: str) -> str:
    """As version_of, by a worker process: the import of a user's module may end its process, which is not this one.

    It is imported again where one of its files has changed. Raises WorkerDied, which names the module, if it dies.
    """
    _search_here()
    found = _ask_worker(name, tuple(sys.path))
    if any(_hash(path) != sha256 for path, sha256 in found.files.items()):
        _ask_worker.cache_clear()
        found = _ask_worker(name, tuple(sys.path))
    return found.version


def describe(error: BaseException) -> str:
    """An error of a user's code in one line: its class, its message if that can be had, and where it was raised."""
    # a generator cannot raise a StopIteration: Python makes a RuntimeError of it, outside of the user's code
    raised = error.__cause__ if isinstance(error.__cause__, StopIteration) else error
    place = traceback.extract_tb(raised.__traceback__)[-1]
    try:
        message = ": " + " ".join(str(error).split())
    except Exception as fault:
        message = f" (without a message, as its __str__ raises a {type(fault).__name__})"
    return f"{type(error).__name__}{message.removesuffix(': ')} ({place.filename}, line {place.lineno})"


@dataclass(frozen=True)
class _Imported:
    """The version of a user's function, and the files that were imported for it, with the SHA-256 of each."""

    version: str
    files: dict[str, str]


@lru_cache(maxsize=1)
def _ask_worker(name: str, searched: tuple[str, ...]) -> _Imported:  # noqa: ARG001
    """What a worker process, which searches the same folders, finds of a function."""
    with LocalExecutor(1) as executor:
        call = Call(_find_version, {"name": name}, foreign=f"the import of {name.partition(':')[0]}")
        return next(executor.run([call]))[1]


def _find_version(name: str) -> _Imported:
    version, module = version_of(name), sys.modules[name.partition(":")[0]]
    modules = filter(None, (module, _home(load_function(name))))
    files = [file for found in modules if (file := getattr(found, "__file__", None))]
    return _Imported(version, {file: _hash(file) for file in files})


def _hash(file: str) -> str:
    """The SHA-256 of a file; '' if it is gone."""
    return hashlib.sha256(Path(file).read_bytes()).hexdigest() if Path(file).is_file() else ""


def _search_here() -> None:
    """Let modules be found in the current folder, too, as workers will, which are given sys.path."""
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))


class _SourceLoader(SourceFileLoader):
    """Executes a module's source, and keeps what it executed.

    Python would run bytecode of an earlier source that has the same size and was written in the same second.
    """

    executed = b""
    _read = b""

    def get_code(self, fullname: str) -> CodeType:  # noqa: ARG002
        self._read = self.get_data(self.path)
        return self.source_to_code(self._read, self.path)

    def exec_module(self, module: ModuleType) -> None:
        super().exec_module(module)
        self.executed = self._read  # not if it failed: then it is executed again


class _FromSource(MetaPathFinder):
    """Finds modules as Python does; `module`, and those that are not installed, are executed from their source."""

    def __init__(self, module: str) -> None:
        self.module = module

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        others = (finder.find_spec(fullname, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if (
            spec
            and type(spec.loader) is SourceFileLoader
            and (fullname == self.module or not _is_installed(spec.loader))
        ):
            spec.loader = _SourceLoader(spec.loader.name, spec.loader.path)
        return spec


def _import(module: str, again: bool = False) -> ModuleType:
    """Import a module from its source, again if that has changed. UsageError if it cannot be imported."""
    before, finder = sys.modules.get(module), _FromSource(module)
    if before and not again and not _is_changed(before):
        return before
    importlib.invalidate_caches()
    sys.meta_path.insert(0, finder)
    try:
        with _import_errors(module), keep_folder():
            return importlib.reload(before) if before else importlib.import_module(module)
    finally:
        sys.meta_path.remove(finder)


def _find(module: ModuleType, function: str) -> DocumentFunction:
    if not getattr(module, "__file__", None):
        raise UsageError(f"{module.__name__} has no file: wanted a function of yours, such as my_filters:keep_english")
    found = getattr(module, function, None)
    if callable(found):
        return found
    others = [name for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    raise UsageError(f"{module.__file__} has no function {function!r}: it has {', '.join(others) or 'none'}")


def _home(function: DocumentFunction) -> ModuleType | None:
    """The module that defines a function."""
    return sys.modules.get(function.__module__ or "")


def _is_changed(module: ModuleType) -> bool:
    """Whether a module's source is not what was executed, as far as is known."""
    loader = getattr(module.__spec__, "loader", None)
    if isinstance(loader, _SourceLoader):
        return not Path(loader.path).is_file() or loader.executed != loader.get_data(loader.path)
    return isinstance(loader, SourceFileLoader) and not _is_installed(loader)


def _is_installed(loader: SourceFileLoader) -> bool:
    return loader.path.startswith(_INSTALLED)


def _source(module: ModuleType) -> bytes:
    """The source that was executed, or the file of a module that is none of ours to execute."""
    loader = getattr(module.__spec__, "loader", None)
    if isinstance(loader, _SourceLoader):
        return loader.executed
    file = getattr(module, "__file__", None)  # a module that is built in has no such attribute
    return Path(file).read_bytes() if file else b""


@contextmanager
def _import_errors(module: str) -> Iterator[None]:
    """Context: turn what goes wrong in an import into UsageErrors that say where."""
    try:
        yield
    except ModuleNotFoundError as error:
        if f"{module}.".startswith(f"{error.name}."):
            raise _no_module(module) from error
        raise UsageError(f"{module} needs the module {error.name!r}, and there is none: is it installed?") from error
    except (KeyboardInterrupt, Terminated):
        raise
    except BaseException as error:  # of sys.exit(), too
        raise UsageError(f"{module} cannot be imported: {describe(error)}") from error


def _no_module(module: str) -> UsageError:
    file = f"{module.replace('.', '/')}.py"
    return UsageError(f"there is no module {module!r}: wanted {file} in the current folder, or on PYTHONPATH")
