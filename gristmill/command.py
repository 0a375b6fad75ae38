"""Command lines made from typed functions: arguments, help, exit codes, errors without a traceback.

    if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])
    …
    if __name__ == "__main__":
        command(generate_duplicate_pairs)

`python dedup/x.py`, `python -m dedup.x`, `gristmill x` and `from dedup import x` all call the same function.
"""

import dataclasses
import functools
import importlib
import inspect
import io
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.text import Text

from gristmill.arguments import check_words
from gristmill.engine.options import RunOptions
from gristmill.errors import (
    LIMIT_HINTS,
    FinishedElsewhere,
    GristmillError,
    OutputError,
    UsageError,
    wrap_write_errors,
)
from gristmill.process_end import TERMINATED, raised_signals
from gristmill.urls import unknown_scheme_in

_POSITIONAL = get_args(tyro.conf.Positional[int])[1]  # the marker in the metadata of a positional argument's type
INTERRUPTED = 130  # the exit code that shells report for Ctrl-C


def command(*functions: Callable[..., Any], arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line, call the function, print its result, and exit.

    Several functions become subcommands. The exit code is 0; 2 for an invalid command line or a
    UsageError; 1 for another GristmillError; 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        functions: Typed functions; their docstrings are the help.
        arguments: Command-line arguments; sys.argv[1:] by default.
        prog: Name of the program in the help.
    """
    named = {function.__name__: _checked(_name_positionals(_imported_by_name(function))) for function in functions}
    parser = next(iter(named.values())) if len(named) == 1 else named
    kinds = {name: kind for function in named.values() for name, kind in _option_kinds(function).items()}
    words = _spell_flags(kinds, sys.argv[1:] if arguments is None else arguments)

    def call() -> Any:
        check_words(words, kinds)
        return _parse_and_call(parser, words, prog)

    sys.exit(run_with_exit_code(call))


def run_with_exit_code(action: Callable[[], Any]) -> int:
    """Call `action`; print its result, or the GristmillError it raises; return the exit code.

    A character that the encoding of standard output lacks, as in the name of a source, is printed as its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with raised_signals(sigint=signal.getsignal(signal.SIGINT) == signal.default_int_handler) as received:
            result = action()
            if result is not None:
                wide_console().print(result)
    except GristmillError as error:
        if signal.SIGTERM in received:  # the signal went to the workers, too, and they ended first
            return _resumable("terminated", TERMINATED)
        if isinstance(error, FinishedElsewhere):
            print(error, file=sys.stderr)
            return error.exit_code
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        is_terminated = signal.SIGTERM in received
        return _resumable("terminated", TERMINATED) if is_terminated else _resumable("interrupted", INTERRUPTED)
    except BrokenPipeError:
        return 0  # the reader of the pipe, such as `head`, has ended
    except OSError as error:
        if error.errno not in LIMIT_HINTS:
            raise
        _print_error(LIMIT_HINTS[error.errno])
        return GristmillError.exit_code
    return 0


def _print_error(message: str) -> None:
    # As Text: a string would be parsed for markup and emoji names, which file names may contain.
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), message))


class _Output(Console):
    """Console on standard output whose errors are an OutputError, or the end of the program if its reader has ended."""

    def print(self, *objects: Any, **options: Any) -> None:
        try:
            with wrap_write_errors(Path("standard output")):
                super().print(*objects, **options)
        except OutputError:
            _discard_output()
            raise

    def on_broken_pipe(self) -> None:
        _discard_output()
        sys.exit(0)  # the reader, such as `head`, has read what it wanted


def _discard_output() -> None:
    """Send what is still in the buffer of standard output nowhere: Python would fail to write it at its end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _resumable(what: str, exit_code: int) -> int:
    print(f"{what}: run the same command again to resume", file=sys.stderr)
    return exit_code


def wide_console() -> Console:
    """Console on standard output; 160 columns wide if that is not a terminal, so that tables are not cut."""
    is_terminal = sys.stdout is not None and sys.stdout.isatty()  # None: closed, as by `>&-`
    return _Output(soft_wrap=True, width=None if is_terminal else 160)


def _parse_and_call(parser: Any, arguments: Sequence[str] | None, prog: str | None) -> Any:
    if isinstance(parser, dict):
        return tyro.extras.subcommand_cli_from_dict(parser, args=arguments, prog=prog, use_underscores=True)
    return tyro.cli(parser, args=arguments, prog=prog, use_underscores=True)


def _option_kinds(function: Callable[..., Any]) -> dict[str, Any]:
    """Types of the options of a function, those of its dataclasses of options included, by `--option`."""
    kinds = get_type_hints(function)
    for kind in [*kinds.values()]:
        kinds |= get_type_hints(kind) if dataclasses.is_dataclass(kind) else {}
    return {f"--{name}": kind for name, kind in kinds.items()}


def _spell_flags(kinds: Mapping[str, Any], arguments: Sequence[str]) -> list[str]:
    """Return the arguments with `--flag true` as `--flag`, and `--flag=False` as `--no_flag`, as tyro takes them."""
    flags = {name for name, kind in kinds.items() if kind is bool}
    words: list[str] = []
    for argument in arguments:
        option, _, value = argument.partition("=")
        if words and words[-1] in flags and argument.lower() in ("true", "false"):
            option, value = words.pop(), argument
        flag = option[:2] + option[2:].replace("-", "_")
        spelt = {"": flag, "true": flag, "false": f"--no_{flag[2:]}"}.get(value.lower(), argument)
        words.append(spelt if flag in flags else argument)
    return words


def _imported_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function from its module imported by name, if the module was run as a script.

    A function of `__main__` cannot be pickled for worker processes.
    """
    if function.__module__ != "__main__":
        return function
    file, spec = Path(inspect.getfile(function)).resolve(), function.__globals__.get("__spec__")  # None: run by path
    module = importlib.import_module(spec.name if spec else f"{file.parent.name}.{file.stem}")
    return getattr(module, function.__name__)


def _checked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which refuses paths that are URLs of an unknown scheme, and a scratch size without effect."""

    @functools.wraps(function)
    def call(*arguments: Any, **named: Any) -> Any:
        if fault := unknown_scheme_in([arguments, named]):
            raise UsageError(fault)
        for options in (value for value in (*arguments, *named.values()) if isinstance(value, RunOptions)):
            options.check_scratch([arguments, named])
        return function(*arguments, **named)

    return call


def _name_positionals(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a copy of the function whose help shows a positional argument as INPUT_DIR, not as PATH."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__doc__, copy.__kwdefaults__ = function.__doc__, function.__kwdefaults__
    for name, hint in get_type_hints(function, include_extras=True).items():
        is_positional = _POSITIONAL in getattr(hint, "__metadata__", ())
        copy.__annotations__[name] = Annotated[hint, tyro.conf.arg(metavar=name.upper())] if is_positional else hint
    return copy
