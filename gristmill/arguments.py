"""Arguments as they are written: options, tables, what is empty, given twice or unknown; seconds in the environment."""

import difflib
import os
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, get_args, get_origin

from gristmill.errors import UsageError, require

_SHORTEST, _LONGEST = 0.1, 86_400  # seconds


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


class TableWords(NamedTuple):
    """Words of a command line for an option that is a table: all of its keys and values, or one of each."""

    option: str
    is_whole: bool
    values: dict[str, str]


def take_tables(arguments: Sequence[str], tables: Collection[str]) -> tuple[list[TableWords], list[str]]:
    """Return what is given for the options `tables`, whole ones first, and the other arguments.

    Raises UsageError for a key without a value or with two.

    >>> take_tables(["--weights.web=3", "--out", "o", "--weights", "web", "2"], {"--weights"})
    Traceback (most recent call last):
    gristmill.errors.UsageError: --weights: web is given twice; give it one value
    >>> take_tables(["--weights.web=3", "--out", "o"], {"--weights"})
    ([TableWords(option='--weights', is_whole=False, values={'web': '3'})], ['--out', 'o'])
    """
    given, rest = list[tuple[str, bool, list[str]]](), list[str]()
    words = rest
    for argument in arguments:
        option, equals, value = argument.partition("=")
        name = option_name(option)
        if table := next((each for each in tables if name == each or name.startswith(f"{each}.")), ""):
            key = option[len(table) + 1 :]
            words = [*([key] if key else []), *([value] if equals else [])]
            given.append((table, not key, words))
        else:
            words = rest if argument.startswith("--") else words
            words.append(argument)
    return _pair_words(given), rest


def _pair_words(given: Sequence[tuple[str, bool, list[str]]]) -> list[TableWords]:
    seen, paired = set[tuple[str, str]](), list[TableWords]()
    for table, is_whole, words in sorted(given, key=lambda each: not each[1]):
        if len(words) % 2 or (len(words) != 2 and not is_whole):
            raise UsageError(f"{table} {' '.join(words)}: wanted a value for each key: {table} KEY VALUE …")
        for key in words[::2]:
            require((table, key) not in seen, f"{table}: {key} is given twice; give it one value")
            seen.add((table, key))
        paired.append(TableWords(table, is_whole, dict(zip(words[::2], words[1::2], strict=True))))
    return paired


def suggestion(given: str, known: Sequence[str], new_names: Mapping[str, str]) -> str:
    """End of an error message: the options of the section `given`, or the known name most similar to it, or all.

    `new_names` has the current names of renamed ones, which are similar to `given` by their old names.

    >>> suggestion("--mill", ["--mill.stones", "--mill.wheels", "--grain"], {})
    '; there are --mill.stones, --mill.wheels'
    """
    if section := [name for name in known if name.startswith(f"{given}.")]:
        return f"; there are {', '.join(section)}"
    # For a key without its section (`--steps`), suggest the same key in a section (`--optim.steps`).
    candidates = [*known, *new_names]
    sectioned = [name for name in candidates if name.rpartition(".")[2] == given.lstrip("-").rpartition(".")[2]]
    matches = sectioned or difflib.get_close_matches(given, candidates, n=1, cutoff=0.4)
    return f"; did you mean {new_names.get(matches[0], matches[0])}?" if matches else f"; there are {', '.join(known)}"


def seconds_in(variable: str, default: int, hint: str = "") -> float:
    """The seconds that an environment variable gives. Raises UsageError for what is none."""
    given, seconds = os.environ.get(variable, str(default)), 0.0
    with suppress(ValueError):
        seconds = float(given)
    require(
        _SHORTEST <= seconds <= _LONGEST,
        f"{variable} {given!r}: wanted seconds, from {_SHORTEST:g} to {_LONGEST:,}; unset it for {default}{hint}",
    )
    return seconds
