"""Own code: classes and functions of a user's file, which options name as FILE.py:NAME.

Code runs only of files that the command line, or its configuration, names (`allow_file`): a checkpoint records the
name of the file and the class, and neither its code nor where it is.
"""

import hashlib
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from gristmill.arguments import suggestion
from gristmill.errors import UsageError, require
from gristmill.steps import describe_error

_MARK = ".py:"


@dataclass(frozen=True)
class _OwnFile:
    """A file whose code may run, as it was read."""

    path: Path
    sha256: str
    module: ModuleType


_files: dict[str, _OwnFile] = {}  # by the file's name


def is_own(value: object) -> bool:
    """Return whether an option's value names code of the user's.

    >>> is_own("parts/my.py:Lion"), is_own("adamw"), is_own(None)
    (True, False, False)
    """
    return isinstance(value, str) and _MARK in value


def recorded_name(value: str) -> str:
    """Return what a record has of an option's value: of own code the file without its folder.

    >>> recorded_name("parts/my.py:Lion"), recorded_name("adamw")
    ('my.py:Lion', 'adamw')
    """
    return value.rpartition("/")[2] if is_own(value) else value


def check_own(value: str, option: str) -> None:
    """Raise UsageError unless the file that a value names is there; runs nothing."""
    file, _, name = value.partition(":")
    require(name.isidentifier(), f"{option} is {value}; expected FILE.py:NAME, such as my_parts.py:{name or 'Block'}")
    require(
        Path(file).is_file(),
        f"{option} is {value}, and there is no file {file}; expected FILE.py:NAME, with FILE.py as a path from the "
        "current folder; check the path",
    )


def allow_file(path: Path, option: str) -> None:
    """Run a user's file, if it is not the one that has run: from now on `load_own` finds it by its name.

    Raises UsageError for a file that cannot be read or run, or one of the name of another one.
    """
    path = path.absolute()
    before = _files.get(path.name)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise UsageError(f"{option}: cannot read {path}: {error.strerror}; check the path") from error
    digest = hashlib.sha256(source).hexdigest()
    if before is not None and (before.path, before.sha256) == (path, digest):
        return
    module = ModuleType(f"own_{path.stem}")
    module.__file__ = str(path)
    sys.modules[module.__name__] = module  # dataclasses and pickles look it up
    if str(path.parent) not in sys.path:  # for what it imports from its folder
        sys.path.append(str(path.parent))
    try:
        exec(compile(source, str(path), "exec"), module.__dict__)
    except (Exception, SystemExit) as error:
        raise UsageError(f"{option}: {path} cannot be run: {describe_error(error)}") from error
    _files[path.name] = _OwnFile(path, digest, module)


def allow_named(options: Mapping[str, str]) -> None:
    """Run the files that values of options, by name, name. Raises UsageError as `allow_file`, and for two of a name."""
    paths: dict[str, Path] = {}
    for option, value in options.items():
        check_own(value, option)
        path = Path(value.partition(":")[0]).absolute()
        other = paths.setdefault(path.name, path)
        require(
            other == path,
            f"{option} is {value}, and another option names {other}: records know a file by its name alone; rename one",
        )
        allow_file(path, option)


def allow_files(paths: Iterable[Path]) -> None:
    """Run files that --code names. Raises UsageError as `allow_file`."""
    for path in paths:
        allow_file(path, "code")


def load_own(value: str, option: str, kind: type | None = None) -> Any:
    """Return the class, or without `kind` the function or class, that a value names; its file must be allowed.

    Raises UsageError where it is not, or has no such name, or no subclass of `kind` by that name.
    """
    file_name, _, name = recorded_name(value).partition(":")
    file = _files.get(file_name)
    if file is None:
        raise UsageError(
            f"{option} is {name} of a file {file_name}, which is not in the checkpoint, and code runs only where it is "
            f"named; give --{option} PATH/{file_name}:{name} to train, and --code PATH/{file_name} to other commands"
        )
    named = getattr(file.module, name, None)
    is_right = isinstance(named, type) and issubclass(named, kind) if kind is not None else callable(named)
    if is_right:
        return named
    own = [
        key
        for key, member in vars(file.module).items()
        if getattr(member, "__module__", None) == file.module.__name__ and callable(member)
    ]
    if kind is None or named is None:
        what = "class or function" if kind is None else "class"
        raise UsageError(f"{option}: {file.path} has no {what} {name!r}{suggestion(name, own) if own else ''}")
    raise UsageError(
        f"{option}: {name} of {file.path} is no class that derives from {kind.__name__}; expected "
        f"class {name}({kind.__name__}), with {kind.__name__} from {kind.__module__}"
    )


def call_own(call: Callable[[], Any], value: str, option: str) -> Any:
    """Call code of the user's; its error is one of the user, in one sentence."""
    try:
        return call()
    except UsageError:
        raise
    except Exception as error:
        raise UsageError(f"{option}: {recorded_name(value)} fails: {_describe(error)}") from error


def _describe(error: BaseException) -> str:
    """Return an error in one line, with the line of the user's code that it came through last."""
    files = {str(file.path) for file in _files.values()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files]
    if not frames:
        return describe_error(error)
    message = " ".join(str(error).split())
    return f"{type(error).__name__}: {message} ({frames[-1].filename}, line {frames[-1].lineno})"


def hashes_of(values: Iterable[str]) -> dict[str, str]:
    """Return the SHA-256 of the files that values name, as they have run, by the files' names."""
    names = {recorded_name(value).partition(":")[0] for value in values}
    return {name: _files[name].sha256 for name in sorted(names)}


def describe_change(before: dict[str, str]) -> str:
    """Say which files differ from those that a run has recorded, by name and SHA-256; nothing where none does."""
    changed = [name for name, digest in before.items() if name in _files and _files[name].sha256 != digest]
    if not changed:
        return ""
    return "; ".join(
        f"{name} has changed since the checkpoint was written (SHA-256 {before[name][:12]} there, "
        f"{_files[name].sha256[:12]} now): the run goes on with the file of today"
        for name in changed
    )
