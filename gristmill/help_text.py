"""Help of a command: its description, arguments and options by section, wrapped once to the terminal's width."""

import ast
import dataclasses
import inspect
import re
import shutil
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from gristmill.arguments import MISSING, Option, class_options, function_options, key_of

_COLUMN, _WIDEST, _LONG = 26, 100, 34
_PARTS = re.compile(r"^(Args|Attributes|Returns|Raises|Yields|Example):$")
_NAMES = {int: "N", float: "NUMBER", Path: "PATH", str: "TEXT", bool: "true|false"}


def function_help(function: Callable[..., Any], prog: str) -> str:
    """The help of a command that is a function."""
    about, notes = _split_docstring(inspect.getdoc(function) or "")
    for kind in typing.get_type_hints(function).values():
        notes |= _field_notes(kind, "") if dataclasses.is_dataclass(kind) else {}
    return _render(prog, about, function_options(function), notes)


def class_help(cls: type, defaults: Any, prog: str) -> str:
    """The help of a command that is configured by a dataclass."""
    is_own = not (cls.__doc__ or "").startswith(f"{cls.__name__}(")  # else a dataclass made it
    about, _ = _split_docstring(inspect.getdoc(cls) or "" if is_own else "")
    file = Option("config", Path, None)
    notes = {"config": "TOML file of options; those of the command line override it."} | _field_notes(cls, "")
    return _render(prog, about, [file, *class_options(cls, defaults)], notes)


def subcommands_help(prog: str, functions: dict[str, Callable[..., Any]]) -> str:
    """The help of a command that has subcommands."""
    lines = [f"usage: {prog} {{{','.join(functions)}}} [options]", ""]
    for name, function in functions.items():
        about = (inspect.getdoc(function) or "").partition("\n\n")[0]
        lines += _row(name, " ".join(about.split()), 12, _width())
    return "\n".join([*lines, "", "Each has a --help of its own."])


def _width() -> int:
    return min(_WIDEST, shutil.get_terminal_size().columns)


def _split_docstring(text: str) -> tuple[str, dict[str, str]]:
    """The description in a docstring, without examples, and what it says of each argument."""
    about, part, notes, name = list[str](), "", dict[str, str](), ""
    for line in text.splitlines():
        if found := _PARTS.match(line):
            part = found[1]
        elif not part and line.startswith(">>>"):
            part = "Example"
        elif not part:
            about.append(line)
        elif part in ("Args", "Attributes"):
            if found := re.match(r" {4}([\w, ]+): (.*)", line):
                name = found[1]
                notes |= dict.fromkeys(name.split(", "), found[2])
            elif name and line.strip():
                notes |= {each: f"{notes[each]} {line.strip()}" for each in name.split(", ")}
    return "\n".join(about).strip(), notes


def _field_notes(cls: Any, prefix: str) -> dict[str, str]:
    """The docstrings under the fields of a dataclass, those of nested ones by section.key."""
    notes = dict[str, str]()
    for base in reversed(cls.__mro__):
        notes |= _own_notes(base, prefix) if dataclasses.is_dataclass(base) else {}
    for field in dataclasses.fields(cls):
        kind = typing.get_type_hints(cls)[field.name]
        if dataclasses.is_dataclass(kind):
            notes |= _field_notes(kind, f"{prefix}{key_of(field.name)}.")
    return notes


def _own_notes(cls: Any, prefix: str) -> dict[str, str]:
    (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(body, ast.ClassDef)
    notes = {prefix + name: note for name, note in _split_docstring(inspect.getdoc(cls) or "")[1].items()}
    for field, note in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(note, ast.Expr):
            notes[prefix + key_of(field.target.id)] = " ".join(ast.literal_eval(note.value).split())
    return notes


def _render(prog: str, about: str, options: Sequence[Option], notes: dict[str, str]) -> str:
    positional = [option for option in options if option.argument.positional]
    others = sorted((option for option in options if not option.argument.positional), key=lambda it: "." in it.name)
    required = [f"{option.flag} {metavar(option)}" for option in others if option.default is MISSING]
    given = [option.flag if option.default is MISSING else f"[{option.flag}]" for option in positional]
    width = _width()
    lines = textwrap.wrap(" ".join(["usage:", prog, *given, *required, "[options]"]), width, subsequent_indent="    ")
    for paragraph in re.split(r"\n\s*\n", about):
        is_plain = not re.search(r"^ {4}|^- ", paragraph, re.MULTILINE)
        lines += ["", *(textwrap.wrap(" ".join(paragraph.split()), width) if is_plain else paragraph.splitlines())]
    if positional:
        lines += ["", "arguments:"]
        for option in positional:
            lines += _row(option.flag, _note(option, notes), _COLUMN, width)
    lines += ["", "options:", *_row("-h, --help", "Show this help and exit.", _COLUMN, width)]
    for section, group in groupby(others, lambda option: option.name.rpartition(".")[0]):
        if section:
            lines += ["", f"options of [{section}]:"]
        for option in group:
            start = f"{option.argument.short}, " if option.argument.short else ""
            lines += _row(f"{start}{option.flag} {metavar(option)}".strip(), _note(option, notes), _COLUMN, width)
    return "\n".join(lines)


def _row(left: str, text: str, column: int, width: int) -> list[str]:
    """An option and what it does, on one line if the option is short."""
    wrapped = [f"{'':{column}}{line}" for line in textwrap.wrap(text, max(20, width - column))]
    if len(left) + 4 > column:
        return [*textwrap.wrap(left, width - 2, initial_indent="  ", subsequent_indent="      "), *wrapped]
    return [f"  {left:{column - 2}}{wrapped[0][column:] if wrapped else ''}".rstrip(), *wrapped[1:]]


def _note(option: Option, notes: dict[str, str]) -> str:
    """What an option does, with its choices and its default."""
    text = notes.get(option.name, "")
    choices = [str(it) for it in _choices(option.kind)]
    if choices and _is_long(choices):
        text += f" One of {', '.join(choices)}."
    default = option.default
    if default is MISSING:
        return text if option.argument.positional else f"{text} (required)"
    if default is None or default is False or default in ("", (), []) or dataclasses.is_dataclass(default):
        return text
    if isinstance(default, (tuple, list)):
        default = " ".join(map(str, default))
    if isinstance(default, dict):
        default = " ".join(f"{key} {value}" for key, value in default.items())
    return f"{text} (default: {str(default).lower() if default is True else default})" if default != "" else text


def _choices(kind: Any) -> tuple[Any, ...]:
    members = [kind, *get_args(kind)]
    return next((get_args(member) for member in members if get_origin(member) is Literal), ())


def _is_long(choices: Sequence[str]) -> bool:
    return len("|".join(choices)) > _LONG


def metavar(option: Option) -> str:
    """How the values of an option are shown: N, PATH, a|b, KEY NUMBER …; nothing for a flag.

    >>> metavar(Option("a", Path | tuple[Path, ...])), metavar(Option("b", int | None)), metavar(Option("c", bool))
    ('PATH …', 'N', 'true|false')
    """
    if option.argument.metavar:
        return option.argument.metavar
    if option.is_bool and not option.default:
        return f"[{'|'.join(choices)}]" if (choices := _choices(option.kind)) else ""
    return _metavar(option.kind)


def _metavar(kind: Any) -> str:
    origin, members = get_origin(kind), get_args(kind)
    if origin in (typing.Union, types.UnionType):
        shown = [_metavar(member) for member in members if member is not types.NoneType]
        return next((it for it in shown if it.endswith("…")), "|".join(dict.fromkeys(shown)))
    if origin is Literal:
        return "NAME" if _is_long([str(it) for it in members]) else "|".join(map(str, members))
    if origin is dict:
        return f"KEY {_metavar(members[1])} …"
    if origin in (tuple, list):
        return f"{_metavar(members[0])} …" if origin is list or ... in members else " ".join(map(_metavar, members))
    return _NAMES.get(kind, "VALUE")
