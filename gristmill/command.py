"""Command lines made from typed functions: arguments, help, exit codes, errors without a traceback.

    if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])
    …
    if __name__ == "__main__":
        command(generate_duplicate_pairs)

`python dedup/x.py`, `python -m dedup.x`, `gristmill x` and `from dedup import x` all call the same function.
"""

import importlib
import inspect
import io
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from gristmill.arguments import function_options, key_of, parse_words, require_all
from gristmill.engine.options import RunOptions
from gristmill.errors import (
    LIMIT_HINTS,
    FinishedElsewhere,
    GristmillError,
    require,
)
from gristmill.process_end import TERMINATED, discard_output, raised_signals
from gristmill.urls import unknown_scheme_in

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
    words = list(sys.argv[1:] if arguments is None else arguments)
    prog = prog or Path(sys.argv[0]).name
    named = {function.__name__: function for function in map(_imported_by_name, functions)}
    sys.exit(run_with_exit_code(lambda: _call(named, words, prog)))


def _call(named: dict[str, Callable[..., Any]], words: list[str], prog: str) -> Any:
    """Parse the words, and call the function that they choose."""
    is_help = words[:1] in (["-h"], ["--help"])
    if len(named) > 1 and is_help:
        from gristmill.help_text import subcommands_help

        return print(subcommands_help(prog, named), flush=True)
    if len(named) > 1:
        name = words.pop(0) if words else ""
        require(name in named, f"expected {' or '.join(named)}, got {name or 'nothing'}; try {prog} --help")
        return _call({name: named[name]}, words, f"{prog} {name}")
    (function,) = named.values()
    if {"-h", "--help"} & {*words}:
        from gristmill.help_text import function_help

        return print(function_help(function, prog), flush=True)
    options = function_options(function)
    values = parse_words(options, words)
    require_all(options, values, prog)
    return _call_checked(function, values)


def _call_checked(function: Callable[..., Any], values: dict[str, Any]) -> Any:
    """Call a function with its arguments' values, unless a path is a URL of an unknown scheme."""
    arguments = dict[str, Any]()
    for name, parameter in inspect.signature(function).parameters.items():
        default: Any = parameter.default
        if is_dataclass(default):
            given = {field.name: values[field.name] for field in fields(default) if field.name in values}
            arguments[name] = replace(default, **given)  # type: ignore[type-var]
        elif key_of(name) in values:
            arguments[name] = values[key_of(name)]
    require(not (fault := unknown_scheme_in([arguments])), fault)
    for options in arguments.values():
        if isinstance(options, RunOptions):
            options.check_scratch([arguments])
    return function(**arguments)


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
                from gristmill.console import wide_console  # rich takes a tenth of a second

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
    except BrokenPipeError:  # the reader of the pipe, such as `head`, has ended
        discard_output()
        return 0
    except OSError as error:
        if error.errno not in LIMIT_HINTS:
            raise
        _print_error(LIMIT_HINTS[error.errno])
        return GristmillError.exit_code
    return 0


def _print_error(message: str) -> None:
    start = "\033[1;31merror:\033[0m" if sys.stderr.isatty() else "error:"
    print(f"{start} {message}", file=sys.stderr, flush=True)


def _resumable(what: str, exit_code: int) -> int:
    print(f"{what}: run the same command again to resume", file=sys.stderr)
    return exit_code


def _imported_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function from its module imported by name, if the module was run as a script.

    A function of `__main__` cannot be pickled for worker processes.
    """
    if function.__module__ != "__main__":
        return function
    file, spec = Path(inspect.getfile(function)).resolve(), function.__globals__.get("__spec__")  # None: run by path
    module = importlib.import_module(spec.name if spec else f"{file.parent.name}.{file.stem}")
    return getattr(module, function.__name__)
