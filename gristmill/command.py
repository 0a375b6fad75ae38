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
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import tyro

from gristmill.arguments import check_words, option_name, parse, suggestion
from gristmill.engine.execution.without_pandas import leave_pandas_out
from gristmill.engine.options import RunOptions
from gristmill.errors import LIMIT_HINTS, FinishedElsewhere, GristmillError, UsageError, require
from gristmill.paths import spell_urls, unknown_scheme_in
from gristmill.processes import TERMINATED, discard_output, raised_signals

INTERRUPTED = 130  # the exit code that shells report for Ctrl-C
_NO_DOCUMENTS = "reads_no_documents"  # attribute of a function: see there
_Function = TypeVar("_Function", bound=Callable[..., Any])
_MARKERS = (tyro.conf.FlagCreatePairsOff, tyro.conf.PositionalMetavarFromFieldName)


def command(*functions: Callable[..., Any], arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line, call the function, print its result, and exit.

    Several functions become subcommands. The exit code is 0; 2 for an invalid command line or a
    UsageError; 1 for another GristmillError; 130 for Ctrl-C, 143 for SIGTERM.

    Args:
        functions: Typed functions; their docstrings are the help.
        arguments: Command-line arguments; sys.argv[1:] by default.
        prog: Name of the program in the help.
    """
    named = {function.__name__: _deferred(_imported_by_name(function)) for function in functions}
    chosen = list(named.values())
    parser = chosen[0] if len(named) == 1 else named
    words = given_words(arguments)
    if len(named) > 1 and words and words[0] in named:
        chosen = [named[words[0]]]
    options = dict[str, tuple[Any, Any]]()
    positional = list[str]()
    for function in chosen:
        options |= _options(function)
        positional += _positional(function)
    kinds = {name: kind for name, (kind, _) in options.items()}

    def call() -> Any:
        check_words(words, kinds)
        spelt = _spell_flags(options, words, positional, prog)
        parsed = parse(parser, spelt, prog, _MARKERS, positional=positional)
        if is_stage:
            leave_pandas_out()
        return parsed()

    is_stage = any(RunOptions in get_type_hints(function).values() for function in chosen)
    sys.exit(run_with_exit_code(call, resumes=is_stage))


def given_words(argv: Sequence[str] | None) -> list[str]:
    """Return the words of a command line: `argv`, by default this process's own."""
    if argv is None:
        return sys.argv[1:]
    return list(argv)


def run_with_exit_code(action: Callable[[], Any], resumes: bool = True) -> int:
    """Call `action`; print its result, or the GristmillError it raises; return the exit code.

    After a signal it says that the same command resumes, if it `resumes`. A character that the encoding of standard
    output lacks, as in the name of a source, is printed as its number.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with raised_signals(sigint=signal.getsignal(signal.SIGINT) == signal.default_int_handler) as received:
            result = action()
            if result is not None:
                from gristmill.console import wide_console  # rich takes a tenth of a second

                if isinstance(result, Path):
                    result = spell_urls(str(result))
                wide_console().print(result)
    except GristmillError as error:
        if signal.SIGTERM in received:  # the signal went to the workers, too, and they ended first
            return _ended("terminated", TERMINATED, resumes)
        if isinstance(error, FinishedElsewhere):
            print(error, file=sys.stderr)
            return error.exit_code
        _print_error(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        if signal.SIGTERM in received:
            return _ended("terminated", TERMINATED, resumes)
        return _ended("interrupted", INTERRUPTED, resumes)
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
    start = "error:"
    if sys.stderr.isatty():
        start = "\033[1;31merror:\033[0m"
    print(f"{start} {message}", file=sys.stderr, flush=True)


def _ended(what: str, exit_code: int, resumes: bool) -> int:
    if resumes:
        what += ": run the same command again to resume"
    print(what, file=sys.stderr)
    return exit_code


def _options(function: Callable[..., Any]) -> dict[str, tuple[Any, Any]]:
    """Return types and defaults of a function's options, also of its dataclasses of options, by `--option`."""
    kinds = get_type_hints(function)
    positional = _positional(function)
    options = dict[str, tuple[Any, Any]]()
    for name, parameter in inspect.signature(function).parameters.items():
        kind = kinds[name]
        if dataclasses.is_dataclass(kind):
            hints = get_type_hints(kind)
            for field in dataclasses.fields(kind):
                options[f"--{field.name}"] = (hints[field.name], field.default)
        elif name not in positional:
            options[f"--{name}"] = (kind, parameter.default)
    return options


def _positional(function: Callable[..., Any]) -> list[str]:
    """Return the names of the arguments without an option."""
    kinds = get_type_hints(function, include_extras=True)
    names = list[str]()
    for name, kind in kinds.items():
        if tyro.conf.Positional in getattr(kind, "__metadata__", ()):
            names.append(name)
    return names


def _usage(positional: Sequence[str], given: str) -> str:
    """Return the arguments without an option, or what was given for the only one."""
    if given and len(positional) == 1:
        return given
    return " ".join(positional).upper()


def _spell_flags(
    options: Mapping[str, tuple[Any, Any]], arguments: Sequence[str], positional: Sequence[str], prog: str | None
) -> list[str]:
    """Return the arguments with each flag at most once, at the end, as tyro takes it: `--flag`, or `--no_flag`.

    A flag may be written as `--flag true`, `--flag=false` and `--no_flag`. Raises UsageError for an unknown option.
    """
    flags = {name for name, (kind, _) in options.items() if kind is bool}
    values = dict[str, bool]()
    words = list[str]()
    previous_flag = ""  # whose value may follow
    for argument, following in zip_longest(arguments, arguments[1:], fillvalue=""):
        name = option_name(argument)
        value = argument.partition("=")[2].lower()
        flag = name if name in flags else f"--{name.removeprefix('--no_')}"
        if previous_flag and argument.lower() in ("true", "false"):
            values[previous_flag] = values[previous_flag] == (argument.lower() == "true")
            previous_flag = ""
        elif flag in flags and value in ("", "true", "false"):
            values[flag] = (value == "false") == (name != flag)
            previous_flag = ""
            if not value:
                previous_flag = flag
        else:
            previous_flag = ""
            if name and name not in (*options, "--help"):
                is_first = argument == arguments[0]
                raise UsageError(_unknown_option(argument, following, options, positional, is_first, prog))
            words.append(argument)
    for flag, is_set in values.items():
        if is_set != options[flag][1]:
            word = flag
            if not is_set:
                word = f"--no_{flag.removeprefix('--')}"
            words.append(word)
    return words


def _unknown_option(
    argument: str,
    following: str,
    options: Mapping[str, tuple[Any, Any]],
    positional: Sequence[str],
    is_first: bool,
    prog: str | None,
) -> str:
    """Return the message for an option that there is none of: what is most like it, or how to give what was meant."""
    known = [*options, "--help"]
    name = option_name(argument)
    written, _, value = argument.partition("=")
    is_unlike_all = bool(positional) and is_first and not get_close_matches(name, known, cutoff=0.75)
    if name.removeprefix("--") in positional or is_unlike_all:
        return f"unknown option {written}; try {prog} {_usage(positional, value or following)}"
    return f"unknown option {written}{suggestion(name, known)}"


def _imported_by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same function from its module imported by name, if the module was run as a script.

    A function of `__main__` cannot be pickled for worker processes.
    """
    if function.__module__ != "__main__":
        return function
    file = Path(inspect.getfile(function)).resolve()
    spec = function.__globals__.get("__spec__")  # None: run by path
    name = f"{file.parent.name}.{file.stem}"
    if spec:
        name = spec.name
    module = importlib.import_module(name)
    return getattr(module, function.__name__)


def reads_no_documents(unless: str = "") -> Callable[[_Function], _Function]:
    """Decorator of a stage that reads no documents, `unless` that argument is given: --max_malformed is then refused.

    On a command line alone: a `gristmill run` gives its limit to all stages.
    """

    def mark(function: _Function) -> _Function:
        function.__dict__[_NO_DOCUMENTS] = unless
        return function

    return mark


def _reject_limit_without_effect(function: Callable[..., Any], max_malformed: float, named: Mapping[str, Any]) -> None:
    """Raise UsageError if a limit of malformed records is given to a function that reads no documents."""
    unless = getattr(function, _NO_DOCUMENTS, None)
    if unless is None or named.get(unless) or max_malformed == RunOptions.max_malformed:
        return
    documents = "documents"
    if unless:
        documents += f" without --{unless}"
    raise UsageError(
        f"--max_malformed {max_malformed:g} has no effect on {function.__name__}, which reads no {documents}: leave it "
        "out"
    )


def _deferred(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    """Return a function with the same arguments that checks them, and returns the call: what is parsed runs later.

    Paths that are URLs of an unknown scheme are refused, and a scratch size or a limit of malformed records without
    effect.
    """

    @functools.wraps(function)
    def check(*arguments: Any, **named: Any) -> Callable[[], Any]:
        def call() -> Any:
            fault = unknown_scheme_in([arguments, named])
            require(not fault, fault)
            for value in (*arguments, *named.values()):
                if isinstance(value, RunOptions):
                    value.check_scratch([arguments, named])
                    _reject_limit_without_effect(function, value.max_malformed, named)
            return function(*arguments, **named)

        return call

    return check
