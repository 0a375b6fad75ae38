"""Configuration: dataclass defaults, overridden by TOML files, overridden by the command line.

A nested dataclass is a `[section]` of the file and `--section.key value` on the command line. A dataclass lists the
values that its numbers may have in `RANGES: ClassVar[dict[str, Range]]`.
"""

import dataclasses
import functools
import json
import math
import re
import sys
import tomllib
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec
import tyro

from gristmill.arguments import check_words, expected, option_name, parse, suggestion, take_tables
from gristmill.errors import UsageError, require
from gristmill.paths import unknown_scheme_in
from gristmill.wording import message_of

Config = TypeVar("Config")
INT64 = 2**63 - 1


def load_config(cls: type[Config], argv: Sequence[str], prog: str | None = None) -> Config:
    """Build `cls` from its defaults, then each `--config FILE` (TOML) in order, then the other arguments in `argv`.

    Of several files a later one replaces the values of the keys that it has; tables are merged. A relative path in a
    file is kept as written. `--help` prints the options and exits. Raises UsageError for a file that is not TOML, an
    unknown key (naming the most similar one), a value of the wrong type, a URL of an unknown scheme, or a missing
    value that is required.

    >>> @dataclasses.dataclass
    ... class Oven:
    ...     degrees: int = 180
    >>> load_config(Oven, ["--degrees", "220"])
    Oven(degrees=220)
    """
    check_words(argv, option_types(cls), _positional_types(cls))
    files, arguments = take_options(list(argv), "--config")
    default = _from_tables(cls, [(file, _read_toml(Path(file))) for file in files], "")
    default, arguments = _set_tables(cls, default, _check_options(cls, arguments))
    config: Config = parse(cls, arguments, prog, [tyro.conf.FlagConversionOff], default)  # `--key true`, as in the file
    require(not (fault := unknown_scheme_in(config)), fault)
    return config


class Range(NamedTuple):
    """The values of a number: from `min`, or above it if `above`, to `max`; never NaN or infinite."""

    min: float
    max: float = sys.float_info.max
    above: bool = False

    def fault(self, value: float) -> str:
        """Return what was expected instead of `value`; empty if it is in the range.

        >>> Range(0, above=True).fault(0), Range(0).fault(math.nan), Range(0, 9).fault(10), Range(0).fault(1)
        ('more than 0', 'a finite number, 0 or more', '9 or less', '')
        """
        is_large_enough = self.min < value if self.above else self.min <= value
        if is_large_enough and value <= self.max:
            return ""
        at_least = f"{self.min:g} or more"
        if self.above:
            at_least = f"more than {self.min:g}"
        if isinstance(value, float) and not math.isfinite(value):
            return f"a finite number, {at_least}"
        if value > self.max:
            return f"{self.max:,} or less"
        return at_least


def check_ranges(options: Any, prefix: str = "") -> None:
    """Raise UsageError for a number of a dataclass that is not in its RANGES; `prefix` is that of the options' names.

    A tuple is checked number by number, and None is a default; the error says to try an option's default.
    """
    defaults: dict[str, Any] = {field.name: field.default for field in dataclasses.fields(options)}
    for name, allowed in options.RANGES.items():
        value = getattr(options, name)
        default = defaults[name]
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if number is None:
                continue
            fault = allowed.fault(number)
            if fault:
                if isinstance(value, tuple):
                    default = " ".join(map(str, default))
                raise UsageError(f"{prefix}{name} is {value}; expected {fault}; try --{prefix}{name} {default}")


def toml_lines(sections: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return texts, numbers and flags by section and name, as TOML; without sections that have none.

    >>> toml_lines({"oven": {"wood": "oak", "hot": True}, "mill": {}})
    ['', '[oven]', 'wood = "oak"', 'hot = true']
    """
    lines = list[str]()
    for name, values in sections.items():
        if values:
            lines += ["", f"[{name}]"]
            lines += [f"{key} = {json.dumps(value)}" for key, value in values.items()]
    return lines


def take_option(argv: list[str], option: str) -> tuple[str | None, list[str]]:
    """Return the last value of `option` in `argv` (`--x v` or `--x=v`), and the other arguments."""
    values, rest = take_options(argv, option)
    return (values[-1] if values else None), rest


def take_options(argv: list[str], option: str) -> tuple[list[str], list[str]]:
    """Return all values of `option` in `argv` (`--x v` or `--x=v`), in order, and the other arguments."""
    values = []
    rest = []
    waiting = False
    for argument in argv:
        if waiting or argument.startswith(option + "="):
            values.append(argument.removeprefix(option + "="))
            waiting = False
        elif argument == option:
            waiting = True
        else:
            rest.append(argument)
    if waiting:
        raise UsageError(f"{option} was given without a path; try {option} PATH")
    return values, rest


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read --config {path}: {error.strerror}; check the path") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(
            f"{path}: invalid TOML: {message_of(error)}; fix that line, or give another --config"
        ) from error


def _from_tables(cls: type, tables: Sequence[tuple[str, dict[str, Any]]], prefix: str) -> Any:
    """Build `cls` from tables of TOML files, each with its file's name; of a key that several have the last one counts.

    Missing required values are tyro.MISSING: the command line must give them.
    """
    types = _field_types(cls)
    for file, table in tables:
        for key in table:
            if key not in types:
                # as if its table was left out
                elsewhere = [name for name in option_types(cls, prefix) if name.endswith(f".{key}")]
                advice = suggestion(prefix + key, elsewhere or [prefix + name for name in types])
                raise UsageError(f"{file}: unknown key {prefix}{key}{advice}")
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        key = _key(field)
        given = [(file, table[key]) for file, table in tables if key in table]
        if dataclasses.is_dataclass(section := types[key]):
            for file, value in given:
                if not isinstance(value, dict):
                    raise UsageError(f"{file}: {prefix}{key} is {value!r}; expected a table [{prefix}{key}]")
            values[field.name] = _from_tables(typing.cast(type, section), given, f"{prefix}{key}.")
        elif given:
            for file, value in given[:-1]:  # also one that a later file replaces has to be of the type
                _convert(value, section, f"{file}: {prefix}{key}")
            files = ", ".join(file for file, _ in given)
            value = functools.reduce(_laid_over, [value for _, value in given])
            if not isinstance(value, dict):  # the last one counts
                files, _ = given[-1]
            values[field.name] = _convert(value, section, f"{files}: {prefix}{key}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            values[field.name] = tyro.MISSING
    return cls(**values)


def _laid_over(below: Any, above: Any) -> Any:
    """Return the value of two files: of tables the keys of both, of other values that of the later file.

    >>> _laid_over({"web": {"weight": 1, "kind": "html"}, "book": 2}, {"web": {"weight": 3}})
    {'web': {'weight': 3, 'kind': 'html'}, 'book': 2}
    """
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = dict(below)
    for key, value in above.items():
        if key in below:
            value = _laid_over(below[key], value)
        merged[key] = value
    return merged


def _field_types(cls: type) -> dict[str, Any]:
    """Return the types of the fields of a dataclass, by key."""
    types = typing.get_type_hints(cls)
    return {_key(field): types[field.name] for field in dataclasses.fields(cls)}


def _positional_types(cls: type) -> list[Any]:
    """Return the types of the fields that are arguments without an option, in order."""
    annotated = typing.get_type_hints(cls, include_extras=True)
    positional = list[Any]()
    for name, kind in typing.get_type_hints(cls).items():
        if tyro.conf.Positional in getattr(annotated[name], "__metadata__", ()):
            positional.append(kind)
    return positional


def _key(field: "dataclasses.Field[Any]") -> str:
    """Return the key of a field in files and on command lines: `from` for the field `from_`, as it is a keyword."""
    return field.name.rstrip("_")


def _convert(value: Any, kind: Any, where: str, strict: bool = True) -> Any:
    plain = kind
    several = [member for member in typing.get_args(kind) if typing.get_origin(member) is tuple]
    if several:  # Path | tuple[Path, …]
        plain = several[0] if isinstance(value, list) else Path
    try:
        return msgspec.convert(value, plain, dec_hook=_read_path, strict=strict)
    except (msgspec.ValidationError, TypeError) as error:
        if fault := _number_fault(value, kind):
            raise UsageError(f"{where} {fault}") from error
        if unknown := re.search("unknown field `(.*?)`", str(error)):
            members = typing.get_args(kind)  # of a table, or an array of tables, of Structs
            known = next(member.__struct_fields__ for member in members if hasattr(member, "__struct_fields__"))
            owner = _table_with(value, unknown[1])
            raise UsageError(f"{where}{owner}: unknown key {unknown[1]}{suggestion(unknown[1], known)}") from error
        if fault := _table_fault(value, kind, where):
            raise UsageError(fault) from error
        got = repr(value)
        if typing.get_origin(kind) is dict:
            got += f" ({error})"
        if typing.get_origin(kind) is tuple and isinstance(value, str) and value:
            got += f"; try {json.dumps([value])}"
        raise UsageError(f"{where}: expected {expected(kind)}, got {got}") from error


def _table_with(value: Any, key: str) -> str:
    """Return the name of the first of several tables that has a key, after a dot; '' if none has, or there is one."""
    if isinstance(value, dict):
        for name, table in value.items():
            if isinstance(table, dict) and key in table:
                return f".{name}"
    return ""


def _table_fault(value: Any, kind: Any, where: str) -> str:
    """Return what is wrong with the first value of a table, or array of tables, of Structs; '' if none is wrong."""
    members = [member for member in typing.get_args(kind) if hasattr(member, "__struct_fields__")]
    file, _, key = where.rpartition(": ")
    if not members:
        return ""
    if isinstance(value, dict):
        tables = {f"[{key}.{name}]": table for name, table in value.items()}
    elif isinstance(value, list):
        tables = {f"[[{key}]] number {number}": table for number, table in enumerate(value, 1)}
    else:
        return ""
    types = typing.get_type_hints(members[0])
    for header, table in tables.items():
        at = header
        if file:
            at = f"{file}: {header}"
        if not isinstance(table, dict):
            return f"{at}: expected a table, got {table!r}"
        for name, given in table.items():
            try:
                msgspec.convert(given, types[name], dec_hook=_read_path)
            except (msgspec.ValidationError, TypeError):
                return f"{at} {name}: expected {expected(types[name])}, got {given!r}"
    return ""


def _number_fault(value: Any, kind: Any) -> str:
    """Return what is wrong with the first value of a table that should be a number and is none; '' if none is wrong.

    >>> _number_fault({"web": 2e9, "book": "20KB"}, dict[str, float])
    "book: expected a number such as 20000 or 2e9, got '20KB'"
    """
    if not isinstance(value, dict) or float not in typing.get_args(kind):
        return ""
    for key, number in value.items():
        if isinstance(number, bool) or not _is_number(number):
            return f"{key}: expected a number such as 20000 or 2e9, got {number!r}"
    return ""


def _is_number(value: Any) -> bool:
    try:
        float(value)
    except (ValueError, TypeError):
        return False
    return True


def _read_path(kind: type, value: Any) -> Any:
    if value == "" or "\0" in value:  # Path("") is the current folder, and no file has a null in its name
        raise TypeError("an empty path, or one with a null character")
    return kind(value)


def option_types(cls: type, prefix: str = "--") -> dict[str, Any]:
    """Return the types of the options of `cls`, nested ones included, by option (`--section.key`)."""
    options: dict[str, Any] = {}
    for name, kind in _field_types(cls).items():
        if dataclasses.is_dataclass(kind):
            options |= option_types(typing.cast(type, kind), f"{prefix}{name}.")
        else:
            options[prefix + name] = kind
    return options


def _check_options(cls: type, arguments: list[str]) -> list[str]:
    """Raise UsageError for an unknown option; return the arguments as tyro reads them.

    That is with `true` as `True`, `=false` as `=False`, and `True` after a boolean option without a value.
    """
    options = {**option_types(cls), "--help": None}
    tables = tuple(f"{option}." for option in _table_types(cls))
    name = ""
    checked = list[str]()
    for argument, following in zip(arguments, [*arguments, "--"][1:], strict=True):
        if argument.startswith("--"):
            name = option_name(argument)
            if name not in options and not name.startswith(tables):
                advice = suggestion(name, list(options))
                raise UsageError(f"unknown option {argument.partition('=')[0]}{advice}")
            items = _items(options, name)
            if any(isinstance(member, type) and issubclass(member, msgspec.Struct) for member in items):
                header = f"[[{name.removeprefix('--')}]]"
                raise UsageError(f"{name}: expected tables {header} in a file; try --config FILE")
        if bool in (options.get(name), *typing.get_args(options.get(name))):
            option, equals, value = argument.rpartition("=")
            is_value = equals or not argument.startswith("--")
            if is_value:
                argument = f"{option}{equals}{value.capitalize()}"
            checked.append(argument)
            if not is_value and following.startswith("--"):
                checked.append("True")
        else:
            checked.append(argument)
    return checked


def _items(options: Mapping[str, Any], name: str) -> tuple[Any, ...]:
    """Return the types of the items of an option that is a tuple; none of others."""
    kind = options.get(name)
    if typing.get_origin(kind) is not tuple:
        return ()
    return typing.get_args(kind)


def _table_types(cls: type) -> dict[str, Any]:
    """Return the types of the options that are tables, by option."""
    return {option: kind for option, kind in option_types(cls).items() if typing.get_origin(kind) is dict}


def _set_tables(cls: type, default: Any, arguments: list[str]) -> tuple[Any, list[str]]:
    """Return `default` with the tables that the arguments give, all keys or one by one, and the other arguments.

    tyro would take all of a table only if it has no default.
    """
    kinds = _table_types(cls)
    given, rest = take_tables(arguments, kinds)
    for option, is_whole, values in given:
        table = _convert(_as_numbers(values, kinds[option]), kinds[option], option, strict=False)
        default = _put(default, option.removeprefix("--").split("."), table, is_whole)
    return default, rest


def _as_numbers(values: dict[str, Any], kind: Any) -> dict[str, Any]:
    """Return the values of a table of numbers as Python reads them: `.5`, too, which is none of JSON's."""
    if float not in typing.get_args(kind):
        return values
    try:
        return {name: float(value) for name, value in values.items()}
    except ValueError:
        return values  # which are refused


def _put(config: Any, keys: list[str], table: dict[Any, Any], is_whole: bool) -> Any:
    """Return a copy of a dataclass with `table`, alone or added to the present one, at the end of a path of keys."""
    first, *others = keys
    name = next(field.name for field in dataclasses.fields(config) if _key(field) == first)
    present = getattr(config, name)
    if others:
        new = _put(present, others, table, is_whole)
    elif is_whole:
        new = table
    else:
        new = {**present, **table}
    return dataclasses.replace(config, **{name: new})
