"""The arguments of a command line as they are written: names of options, what is empty, what is given twice."""

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_origin

from gristmill.errors import UsageError


def check_words(arguments: Sequence[str], kinds: Mapping[str, Any]) -> None:
    """Raise UsageError for an empty argument that is not text, and for an option of many values that is given twice.

    `kinds` has the types of the options, by `--option`. Of an option given twice only the last values would count;
    Path("") would be this folder.

    >>> check_words(["--out", ""], {})
    Traceback (most recent call last):
    gristmill.errors.UsageError: --out is empty: is a variable of your shell not set?
    """
    before, given = "", set[str]()
    for number, argument in enumerate(arguments, 1):
        name = option_name(argument)
        kind = kinds.get(name or before)
        is_empty = not argument or (name and argument.find("=") == len(argument) - 1)
        if is_empty and str not in (kind, *get_args(kind)):
            raise UsageError(f"{name or before or f'argument {number}'} is empty: is a variable of your shell not set?")
        if name and name in given and _has_many(kind):
            raise UsageError(f"{name} is given twice: give all its values after one, such as {name} A B")
        given.add(name)
        before = name


def _has_many(kind: Any) -> bool:
    """Whether a type is one of any number of values, such as tuple[Path, ...], or has such a member."""
    return any(... in get_args(it) or get_origin(it) is dict for it in (kind, *get_args(kind)))


def option_name(argument: str) -> str:
    """The option of an argument `--option` or `--option=value`, with underscores; "" for a value."""
    return "--" + argument[2:].partition("=")[0].replace("-", "_") if argument.startswith("--") else ""
