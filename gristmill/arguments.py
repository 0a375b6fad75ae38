"""Arguments as they are written: tyro parses them; tables; words that are empty, given twice or unknown."""

import contextlib
import difflib
import io
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import msgspec
import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from gristmill.errors import UsageError, require

_METAVARS = {int: "N", float: "NUMBER", str: "TEXT", Path: "PATH"}
_FRAME = re.compile("[─│╭╮╰╯]+|-{8,}")  # the box that tyro draws around its errors
_CHOICE = re.compile(
    r"invalid choice '(?P<given>.*?)' for argument '(?P<option>.*?)'\. [Ee]xpected one of \((?P<names>.*?)\)"
)
_NOT_A_NUMBER = re.compile(
    r"parsing (?P<option>[^ :]+): .*?(?:(?P<whole>invalid literal for int.*?)|could not convert string to float): "
    r"(?P<given>'.*?')"
)
# a required argument, whose help is indented further; the box is of spaces where the encoding has no lines
_MISSING = re.compile(r"^[│ ] {5}(\S.*?) *[│ ]$", re.MULTILINE)


def parse(
    parser: Any,
    words: Sequence[str],
    prog: str | None,
    markers: Sequence[Any] = (),
    default: Any = None,
    positional: Sequence[str] = (),
) -> Any:
    """Parse the arguments with tyro: return a dataclass, or what the function that they call returns.

    `--help` prints the options and exits. Raises UsageError, one sentence, for wrong words; `positional`, names of
    arguments without an option, are all named where one is missing, as the one that is there may be any of them.
    """
    printed = io.StringIO()
    if not isinstance(parser, dict) and {"-h", "--help"} & {*words}:
        words = ["--help"]  # tyro's leaves out of the usage what other words give
    options: dict[str, Any] = {"prog": prog, "args": words, "use_underscores": True, "config": tuple(markers)}
    options["registry"] = _Registry()
    if default is not None:
        options["default"] = default
    try:
        with contextlib.redirect_stderr(printed):
            if isinstance(parser, dict):
                return tyro.extras.subcommand_cli_from_dict(parser, **options)
            return tyro.cli(parser, **options)
    except SystemExit as end:
        if not end.code:
            raise  # --help
        raise UsageError(_plain_message(printed.getvalue(), positional, prog)) from None


def _plain_message(printed: str, positional: Sequence[str], prog: str | None) -> str:
    """Return the text of tyro's error message, without its box and its pointer to the help."""
    lines = list[str]()
    for line in printed.splitlines():
        text = _FRAME.sub("", line).strip()
        if text.startswith("For full helptext"):
            break
        lines.append(text)
    message = " ".join(" ".join(lines[1:]).split()).replace(" Argument helptext:", "; expected")
    _, _, further = message.partition("Unrecognized options: ")
    if further:
        help_option = " ".join(filter(None, (prog, "--help")))
        return f"expected options, each with its name, got {further!r}; try {help_option}"
    if message.startswith("Missing from "):  # without the help of each
        program = message.removeprefix("Missing from ").partition(":")[0]
        missing = _MISSING.findall(printed.partition("For full helptext")[0])
        names = [name.upper() for name in positional]
        absent = [name for name in missing if name in names]
        if absent:
            missing = [" ".join(names), *(name for name in missing if name not in absent)]
        return f"expected {', '.join(missing)}; try {program} --help"
    if choice := _CHOICE.search(message):
        names = [name for name in re.findall(r"'(.*?)'", choice["names"]) if name != "None"]
        fault = f"{choice['option']}: got {choice['given']!r}, expected one of {', '.join(names)}"
        nearest = difflib.get_close_matches(choice["given"], names, n=1)
        if nearest:
            fault += f"; did you mean {nearest[0]}?"
        return fault
    if number := _NOT_A_NUMBER.search(message):
        return f"{number['option']}: got {number['given']}, expected a {'whole ' * bool(number['whole'])}number"
    return message


class _Registry(ConstructorRegistry):
    """tyro's constructors, with values shown in help as N, PATH or TEXT …, not as {None}|INT or [PATH [PATH ...]]."""

    _is_inner = False

    def __init__(self) -> None:
        super().__init__()
        self.primitive_rule(self._rule)

    def _rule(self, info: PrimitiveTypeInfo) -> Any:
        if self._is_inner:  # a member of the type, or the type itself as tyro constructs it
            return None
        self._is_inner = True
        try:
            spec = self.get_primitive_spec(info)
        finally:
            self._is_inner = False
        name = metavar(info.type)
        if isinstance(spec, PrimitiveConstructorSpec):
            spec = replace(spec, str_from_instance=partial(_words_of_default, spec.str_from_instance))
        if isinstance(spec, PrimitiveConstructorSpec) and spec.choices:  # tyro's are unordered for `Literal | None`
            places = {name: position for position, name in enumerate(re.split("[{},|]", spec.metavar))}
            choices = tuple(sorted(spec.choices, key=lambda choice: (places.get(choice, -1), choice)))
            shown = ",".join(choice for choice in choices if choice != "None")
            return replace(spec, choices=choices, metavar=f"{{{shown}}}")
        if isinstance(spec, PrimitiveConstructorSpec) and not name:
            return replace(spec, metavar=spec.metavar.removesuffix("|None"))
        is_plain = isinstance(spec, PrimitiveConstructorSpec) and name
        return replace(spec, metavar=name) if is_plain else spec  # type: ignore[type-var]


def _words_of_default(words: Callable[[Any], list[str]], default: Any) -> list[str]:
    """Return how help shows a default: one that is None or empty as unset."""
    if default in (None, "", (), {}):
        return ["unset"]
    return words(default)


def metavar(kind: Any) -> str:
    """Return how the values of a type are shown in help; empty as tyro shows them.

    >>> metavar(Path | tuple[Path, ...]), metavar(int | None), metavar(tuple[float, float]), metavar(bool)
    ('PATH …', 'N', 'NUMBER NUMBER', '')
    """
    members = [member for member in get_args(kind) if member is not NoneType]
    if get_origin(kind) in (tuple, list):
        if ... in members or len(members) == 1:
            return f"{metavar(members[0])} …"
        return " ".join(map(metavar, members))
    if get_origin(kind) is Literal:
        return "|".join(map(str, members))
    if members:
        return max(map(metavar, members), key=lambda name: name.endswith("…"))
    return _METAVARS.get(kind, "")


def expected(kind: Any) -> str:
    """Return a type in words.

    >>> expected(int | None), expected(tuple[Path, ...]), expected(Literal["a", "b"]), expected(tuple[float, float])
    ('a whole number', 'a list of paths', 'a or b', '2 numbers')
    """
    origin = get_origin(kind)
    members = [member for member in get_args(kind) if member not in (NoneType, ...)]
    if origin in (Union, UnionType):
        return " or ".join(map(expected, members))
    if origin is Literal:
        names = list(map(str, members))
        if len(names) < 4:
            return " or ".join(names)
        return f"one of {', '.join(names)}"
    if origin is dict:
        return f"a table of {_words(members[1])[1]}"
    if origin in (tuple, list):
        _, plural = _words(members[0])
        if origin is list or ... in get_args(kind):
            return f"a list of {plural}"
        return f"{len(members)} {plural}"
    return _words(kind)[0]


def _words(kind: Any) -> tuple[str, str]:
    """Return a plain type in words: one, and several."""
    if kind is bool:
        return "true or false", "true or false"
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return "a table", "tables"
    name = {int: "whole number", float: "number", Path: "path", str: "text"}.get(kind, "value")
    return f"a {name}", f"{name}s"


def check_words(arguments: Sequence[str], kinds: Mapping[str, Any], positional: Sequence[Any] = ()) -> None:
    """Raise UsageError for an empty argument that is not text, and for an option of many values that is given twice.

    `kinds` has the types of the options, by `--option`, and `positional` the types of arguments without an option, in
    order: of many texts some may be empty. Of an option given twice only the last values would count; Path("") would be
    this folder.

    >>> check_words(["--out", ""], {})
    Traceback (most recent call last):
    gristmill.errors.UsageError: --out is empty: is a variable of your shell not set?
    """
    option = ""  # to which the next argument belongs, if it is none itself
    count = 0  # of arguments without an option
    given = set[str]()
    for number, argument in enumerate(arguments, 1):
        name = option_name(argument)
        option = name or option
        kind = kinds.get(option)
        if not option:
            if positional:
                kind = positional[min(count, len(positional) - 1)]
            count += 1
        is_empty = not argument or (name and argument.find("=") == len(argument) - 1)
        is_text = str in get_args(kind) or (bool(option) and kind is str)
        if is_empty and not is_text:
            raise UsageError(f"{option or f'argument {number}'} is empty: is a variable of your shell not set?")
        if name and name in given and _has_many(kind):
            raise UsageError(f"{name} is given twice: give all its values after one, such as {name} A B")
        given.add(name)
        has_values = _has_many(kind)
        if name:
            has_values = "=" not in argument
        if not has_values:
            option = ""


def _has_many(kind: Any) -> bool:
    """Return whether a type is one of any number of values, such as tuple[Path, ...], or has such a member."""
    return any(map(_is_open_ended, (kind, *get_args(kind))))


def _is_open_ended(kind: Any) -> bool:
    return ... in get_args(kind) or get_origin(kind) is dict


def option_name(argument: str) -> str:
    """Return the option of an argument `--option` or `--option=value`, with underscores; "" for a value."""
    if not argument.startswith("--"):
        return ""
    name = argument.removeprefix("--").partition("=")[0]
    return f"--{name.replace('-', '_')}"


class TableWords(NamedTuple):
    """Words of a command line for an option that is a table: all of its keys and values, or one of each."""

    option: str
    is_whole: bool
    values: dict[str, str]


def take_tables(arguments: Sequence[str], tables: Collection[str]) -> tuple[list[TableWords], list[str]]:
    """Return what is given for the options `tables`, complete ones first, and the other arguments.

    Raises UsageError for a key without a value or with two.

    >>> take_tables(["--weights.web=3", "--out", "o", "--weights", "web", "2"], {"--weights"})
    Traceback (most recent call last):
    gristmill.errors.UsageError: --weights: web is given twice; give it one value
    >>> take_tables(["--weights.web=3", "--out", "o"], {"--weights"})
    ([TableWords(option='--weights', is_whole=False, values={'web': '3'})], ['--out', 'o'])
    """
    given = list[tuple[str, bool, list[str]]]()
    rest = list[str]()
    words = rest
    for argument in arguments:
        option, equals, value = argument.partition("=")
        name = option_name(option)
        table = _table_of(name, tables)
        if table:
            key = option[len(table) + 1 :]
            words = list[str]()
            if key:
                words.append(key)
            if equals:
                words.append(value)
            given.append((table, not key, words))
        else:
            if argument.startswith("--"):
                words = rest
            words.append(argument)
    return _pair_words(given), rest


def _table_of(name: str, tables: Collection[str]) -> str:
    """Return the table of which an option gives all keys or one; '' if there is none."""
    for table in tables:
        if name == table or name.startswith(f"{table}."):
            return table
    return ""


def _pair_words(given: Sequence[tuple[str, bool, list[str]]]) -> list[TableWords]:
    seen = set[tuple[str, str]]()
    paired = list[TableWords]()
    for table, is_whole, words in sorted(given, key=lambda item: not item[1]):
        if len(words) % 2 or (len(words) != 2 and not is_whole):
            raise UsageError(
                f"{table}: expected a value for each key, got {' '.join(words)!r}; try {table} KEY VALUE …"
            )
        for key in words[::2]:
            require((table, key) not in seen, f"{table}: {key} is given twice; give it one value")
            seen.add((table, key))
        paired.append(TableWords(table, is_whole, dict(zip(words[::2], words[1::2], strict=True))))
    return paired


def suggestion(given: str, known: Sequence[str]) -> str:
    """Return the end of a message: the options of the section `given`, or the known name most similar to it, or all.

    >>> suggestion("--mill", ["--mill.stones", "--mill.wheels", "--grain"])
    '; there are --mill.stones, --mill.wheels'
    """
    section = [name for name in known if name.startswith(f"{given}.")]
    if section:
        return f"; there are {', '.join(section)}"
    parent = given.rpartition(".")[0]
    siblings = [name for name in known if name.rpartition(".")[0] == parent]
    nearest = _same_key(given, known) or _nearest_key(given, siblings) or _nearest_key(given, known)
    if nearest:
        return f"; did you mean {nearest}?"
    return f"; there are {', '.join(siblings or known)}"


# what options are called elsewhere, without underscores
_OTHER_NAMES = {
    "batch": "batch_size", "globalbatchsize": "batch_size", "blocksize": "seq_len", "clip": "max_grad_norm",
    "clipgradnorm": "max_grad_norm", "contextlength": "seq_len", "dmodel": "width", "dtype": "precision",
    "gradclip": "max_grad_norm", "hiddensize": "width", "iterations": "steps", "learningrate": "lr",
    "maxseqlen": "seq_len", "maxsteps": "steps", "nembd": "width", "nhead": "heads", "nlayer": "layers",
    "numheads": "heads", "numlayers": "layers", "outputdir": "out_dir", "sequencelength": "seq_len",
    "trainiters": "steps", "warmup": "warmup_steps",
}  # fmt: skip


def _same_key(given: str, known: Sequence[str]) -> str:
    """Return the known name with the key of `given`, in any section, or with what that key is called here; or ''."""
    key = _squeezed_key(given)
    for squeezed in (key, _OTHER_NAMES.get(key, "").replace("_", "")):
        same = [name for name in known if _squeezed_key(name) == squeezed]
        if same:
            return difflib.get_close_matches(given, same, n=1, cutoff=0.0)[0]
    return ""


def _nearest_key(given: str, known: Sequence[str]) -> str:
    """Return the known name with the key most similar to that of `given`: a common section does not count."""
    by_key = {_squeezed_key(name): name for name in reversed(known)}
    nearest = difflib.get_close_matches(_squeezed_key(given), by_key, n=1, cutoff=0.6)
    if not nearest:
        return ""
    return by_key[nearest[0]]


def _squeezed_key(name: str) -> str:
    """Return a name without its section, as it is compared.

    >>> _squeezed_key("--optim.learning_rate")
    'learningrate'
    """
    return name.rpartition(".")[2].lower().replace("_", "").replace("-", "")


def one_of(given: str, names: Collection[str]) -> str:
    """Return the end of a message: the name most similar to what was given, and all of them.

    >>> one_of("oke", ["oak", "elm"]), one_of("x", ["oak", "elm"])
    ('did you mean oak? There are oak, elm', 'expected one of oak, elm')
    """
    nearest = difflib.get_close_matches(given.lower(), names, n=1, cutoff=0.3)
    if nearest:
        return f"did you mean {nearest[0]}? There are {', '.join(names)}"
    return f"expected one of {', '.join(names)}"
