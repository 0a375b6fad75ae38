"""Command-line words to typed values: options of functions and dataclasses, and what is said of a wrong word.

One dialect everywhere: `--option value`, `--option=value`, `--section.key value`, `--flag`, `--flag false`,
`--no_flag`, and `-` for `_`. An option of many values takes all words up to the next option.
"""

import dataclasses
import difflib
import inspect
import os
import re
import types
import typing
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple, TypeVar, get_args, get_origin

from gristmill.errors import UsageError, require

_Value = TypeVar("_Value")
_SHORTEST, _LONGEST = 0.1, 86_400  # seconds


class Argument(NamedTuple):
    """How an argument is written, where that isn't `--name VALUE`; for Annotated types."""

    positional: bool = False
    short: str = ""  # such as -d
    kind: Any = None  # of its words, if it isn't the annotated type
    metavar: str = ""


HIDDEN = Argument(kind=object)  # no option: only calls from Python give it
Positional = Annotated[_Value, Argument(positional=True)]
MISSING: Any = type("Missing", (), {"__repr__": lambda _: "MISSING"})()  # value of an option that must be given


class Option(NamedTuple):
    """An option or a positional argument: its name, such as section.key, its type and its default."""

    name: str
    kind: Any
    default: Any = MISSING
    argument: Argument = Argument()

    @property
    def flag(self) -> str:
        return self.name.upper() if self.argument.positional else f"--{self.name}"

    @property
    def is_bool(self) -> bool:
        return bool in (self.kind, *get_args(self.kind))

    @property
    def is_table(self) -> bool:
        return get_origin(self.kind) is dict

    @property
    def arity(self) -> int | None:
        """How many values it takes; None: any number."""
        if any(... in get_args(kind) or get_origin(kind) in (dict, list) for kind in (self.kind, *get_args(self.kind))):
            return None
        return len(get_args(self.kind)) if get_origin(self.kind) is tuple else 1


def function_options(function: Callable[..., Any]) -> list[Option]:
    """The options of a function; those of a dataclass that it takes come last, without a section."""
    hints = typing.get_type_hints(function, include_extras=True)
    options, shared = list[Option](), list[Option]()
    for name, parameter in inspect.signature(function).parameters.items():
        default = MISSING if parameter.default is parameter.empty else parameter.default
        if dataclasses.is_dataclass(hints[name]):
            shared += class_options(typing.cast(type, hints[name]), default)
        else:
            options += _option(name, hints[name], default)
    return options + shared


def class_options(cls: type, defaults: Any = MISSING, prefix: str = "") -> list[Option]:
    """The options of a dataclass, those of nested ones as section.key; `defaults` is an instance."""
    hints, options = typing.get_type_hints(cls, include_extras=True), list[Option]()
    for field in dataclasses.fields(cls):
        default = MISSING if defaults is MISSING else getattr(defaults, field.name)
        name, kind = prefix + key_of(field.name), hints[field.name]
        if dataclasses.is_dataclass(kind):
            options += class_options(typing.cast(type, kind), default, f"{name}.")
        else:
            options += _option(name, kind, default)
    return options


def key_of(field: str) -> str:
    """An option's name of a field or parameter: `from` for `from_`, as `from` is a keyword."""
    return field.rstrip("_")


def _option(name: str, kind: Any, default: Any) -> Iterator[Option]:
    argument = next((it for it in getattr(kind, "__metadata__", ()) if isinstance(it, Argument)), Argument())
    if argument is not HIDDEN:
        kind = kind.__origin__ if get_origin(kind) is Annotated else kind
        yield Option(name, argument.kind or kind, default, argument)


def option_name(word: str) -> str:
    """The option of a word `--option` or `--option=value`, with underscores; "" for a value."""
    return "--" + word[2:].partition("=")[0].replace("-", "_") if word.startswith("--") else ""


def parse_words(options: Sequence[Option], words: Sequence[str], renamed: Mapping[str, str] = {}) -> dict[str, Any]:
    """Values by option name; raises UsageError for an unknown option, a missing or a wrong value.

    `renamed` has the present options of old ones, `--old` to `--new`. A table given key by key is (table, "by key").

    >>> parse_words([Option("grain", str), Option("mill.stones", int), Option("wet", bool)],
    ...             ["--grain=rye", "--mill.stones", "3", "--no_wet"])
    {'grain': 'rye', 'mill.stones': 3, 'wet': False}
    """
    left, given, tables, loose = deque(words), dict[str, Any](), dict[str, list[tuple[str, list[str]]]](), list[str]()
    named = {f"--{option.name}": option for option in options if not option.argument.positional}
    positional = [option for option in options if option.argument.positional]
    shorts = {option.argument.short: option for option in options if option.argument.short}
    while left:
        word = left.popleft()
        if not _is_option(word):
            require(bool(word), f"argument {len(words) - len(left)} is empty: is a variable of your shell not set?")
            loose.append(word)
            continue
        start, equals, value = word.partition("=")
        option, key, negated = _find(start, named, shorts, renamed)
        values = ["false"] if negated else [value] if equals else []
        if option.is_bool and not values:
            choices = {"true", "false", *(it for kind in get_args(option.kind) for it in get_args(kind))}
            is_value = left and (left[0].lower() in choices if positional else not _is_option(left[0]))
            values = [left.popleft()] if is_value else ["true"]
        while left and not _is_option(left[0]) and not equals and (option.arity is None or len(values) < option.arity):
            values.append(left.popleft())
        if "" in values and str not in (option.kind, *get_args(option.kind)):
            raise UsageError(f"{option.flag} is empty: is a variable of your shell not set?")
        many = option.arity is None and not key
        if many and (option.name in given or any(not before for before, _ in tables.get(option.name, []))):
            flag = option.flag
            raise UsageError(f"{flag} is given twice: give all its values after one, such as {flag} A B")
        if option.is_table:
            tables.setdefault(option.name, []).append((key, values))
        else:
            given[option.name] = values
    _place(loose, positional, given)
    by_name = {option.name: option for option in options}
    found = {name: convert_words(by_name[name], values) for name, values in given.items()}
    return found | {name: _read_table(by_name[name], parts) for name, parts in tables.items()}


def _is_option(word: str) -> bool:
    return bool(re.match(r"--\w|-[a-zA-Z]", word))


def _find(
    start: str, named: Mapping[str, Option], shorts: Mapping[str, Option], renamed: Mapping[str, str]
) -> tuple[Option, str, bool]:
    """The option that a word names, the key of a table if the word has one, and whether it is `--no_flag`."""
    if start in shorts:
        return shorts[start], "", False
    name = option_name(start)
    name = renamed.get(name, name)
    if name in named:
        return named[name], "", False
    positive = named.get(f"--{name.removeprefix('--no_')}")
    if name.startswith("--no_") and positive and positive.is_bool:
        return positive, "", True
    for flag, option in named.items():
        if option.is_table and name.startswith(f"{flag}."):
            return option, start[len(flag) + 1 :], False
    raise UsageError(f"unknown option {start}{suggestion(name or start, [*named, '--help'], renamed)}")


def _place(loose: list[str], positionals: Sequence[Option], given: dict[str, list[str]]) -> None:
    """Give the words without an option to the positional arguments, in order."""
    for number, option in enumerate(positionals):
        after = len(positionals) - number - 1
        take = max(0, len(loose) - after) if option.arity is None else min(option.arity, len(loose))
        if take:
            given[option.name], loose[:take] = loose[:take], []
    if loose:
        raise UsageError(f"expected an option, got {loose[0]!r}; try --help")


def convert_words(option: Option, words: Sequence[str]) -> Any:
    """The value of an option's words."""
    try:
        return _convert(option.kind, list(words))
    except ValueError:
        got = repr(" ".join(words)) if words else "nothing"
        default = option.default
        plain = isinstance(default, (int, float, str)) and not isinstance(default, bool) and default != ""
        hint = f"; try {option.flag} {default}" if plain and not option.argument.positional else ""
        raise UsageError(f"{option.flag}: expected {expected(option.kind)}, got {got}{hint}") from None


def _convert(kind: Any, words: list[str]) -> Any:
    origin, members = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        several = [member for member in members if get_origin(member) is tuple]
        if several and len(words) > 1:
            return _convert(several[0], words)
        if types.NoneType in members and [word.lower() for word in words] == ["none"]:
            return None
        for member in (member for member in members if member is not types.NoneType and member not in several):
            with suppress(ValueError):
                return _convert(member, words)
        raise ValueError
    if origin is tuple and ... not in members:
        return tuple(_convert(member, [word]) for member, word in zip(members, words, strict=True))
    if origin in (tuple, list):
        return origin(_convert(members[0], [word]) for word in words)
    (word,) = words  # or a ValueError
    if origin is Literal:
        return dict(zip(map(str, members), members, strict=True))[word] if word in map(str, members) else _fail()
    if kind is bool:
        return {"true": True, "false": False}[word.lower()] if word.lower() in ("true", "false") else _fail()
    if kind is Path and (not word or "\0" in word):  # Path("") is the current folder
        raise ValueError
    return kind(word) if kind in (int, float, Path) else word


def _fail() -> typing.NoReturn:
    raise ValueError


def expected(kind: Any) -> str:
    """A type in words.

    >>> expected(int | None), expected(tuple[Path, ...]), expected(Literal["a", "b"]), expected(tuple[float, float])
    ('a whole number', 'a list of paths', 'a or b', '2 numbers')
    """
    origin, members = get_origin(kind), [it for it in get_args(kind) if it not in (types.NoneType, ...)]
    if origin in (typing.Union, types.UnionType):
        return " or ".join(map(expected, members))
    if origin is Literal:
        return " or ".join(map(str, members)) if len(members) < 4 else f"one of {', '.join(map(str, members))}"
    if origin is dict:
        return f"a table of {_words(members[1])[1]}"
    if origin in (tuple, list):
        many = _words(members[0])[1]
        return f"a list of {many}" if origin is list or ... in get_args(kind) else f"{len(members)} {many}"
    return _words(kind)[0]


def _words(kind: Any) -> tuple[str, str]:
    """A plain type in words: one, and several."""
    if kind is bool:
        return "true or false", "true or false"
    name = {int: "whole number", float: "number", Path: "path", str: "text"}.get(kind, "value")
    return f"a {name}", f"{name}s"


def _read_table(option: Option, parts: Sequence[tuple[str, list[str]]]) -> tuple[dict[str, Any], bool]:
    """The table that is given, and whether as a whole; else its keys add to the default."""
    table, kind, flag = dict[str, Any](), get_args(option.kind)[1], option.flag
    for key, values in sorted(parts, key=lambda part: bool(part[0])):  # first the one that is given whole
        words = [key, *values] if key else values
        if len(words) % 2 or (key and len(words) != 2):
            raise UsageError(f"{flag}: expected a value for each key, got {' '.join(words)!r}; try {flag} KEY VALUE …")
        for name, value in zip(words[::2], words[1::2], strict=True):
            require(name not in table, f"{flag}: {name} is given twice; give it one value")
            table[name] = convert_words(Option(f"{option.name}.{name}", kind), [value])
    return table, any(not key for key, _ in parts)


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


def require_all(options: Sequence[Option], values: Mapping[str, Any], prog: str) -> None:
    """Raise UsageError if an option that has no default isn't given."""
    missing = [option.flag for option in options if option.default is MISSING and option.name not in values]
    require(not missing, f"expected {' and '.join(missing)}; try {prog} --help")


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
