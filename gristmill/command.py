"""A command line from a typed function: arguments, help, errors without a traceback.

    if not __package__: sys.path[0] = str(Path(__file__).resolve().parents[1])
    …
    if __name__ == "__main__":
        command(generate_duplicate_pairs)

The same function behind `python dedup/x.py`, `python -m dedup.x`, `gristmill x` and `from dedup import x`.
"""

import importlib
import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FunctionType
from typing import Annotated, Any, get_args, get_type_hints

import tyro
from rich.console import Console
from rich.text import Text

from gristmill.errors import GristmillError

_POSITIONAL = get_args(tyro.conf.Positional[int])[1]  # the mark that tyro leaves on such a type
INTERRUPTED = 130  # what a shell reports for Ctrl-C


def command(*functions: Callable[..., Any], arguments: Sequence[str] | None = None, prog: str | None = None) -> None:
    """Parse the command line for one function, or for several as subcommands, and call it.

    Exits with 0, with 2 for a wrong command line or a UsageError, with 1 for other errors of ours.
    """
    named = {function.__name__: _name_positionals(_by_its_own_name(function)) for function in functions}
    parser = next(iter(named.values())) if len(named) == 1 else named
    sys.exit(run_with_exit_code(lambda: _parse_and_call(parser, arguments, prog)))


def run_with_exit_code(action: Callable[[], Any]) -> int:
    """Run `action`; print what it returns, or the error it ends in; return the exit code."""
    try:
        result = action()
    except GristmillError as error:
        # Text, as a file name may look like markup or an emoji's name
        Console(stderr=True, soft_wrap=True).print(Text.assemble(("error: ", "bold red"), str(error)))
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted: run the same command again, and it goes on from here", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        return 0  # whoever was reading, such as `head`, has seen enough
    if result is not None:
        wide_console().print(result)
    return 0


def wide_console() -> Console:
    """Standard output; where no terminal sets its width, wide enough for a table."""
    return Console(soft_wrap=True, width=None if sys.stdout.isatty() else 160)


def _parse_and_call(parser: Any, arguments: Sequence[str] | None, prog: str | None) -> Any:
    if isinstance(parser, dict):
        return tyro.extras.subcommand_cli_from_dict(parser, args=arguments, prog=prog, use_underscores=True)
    return tyro.cli(parser, args=arguments, prog=prog, use_underscores=True)


def _by_its_own_name(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function from its module imported by name, when that module was started as a script.

    Functions of `__main__` cannot be sent to other processes, and would differ from door to door.
    """
    if function.__module__ != "__main__":
        return function
    file = Path(inspect.getfile(function)).resolve()
    module = importlib.import_module(f"{file.parent.name}.{file.stem}")
    return getattr(module, function.__name__)


def _name_positionals(function: Callable[..., Any]) -> Callable[..., Any]:
    """A copy whose help shows INPUT_DIR for a positional argument rather than PATH."""
    copy = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__)
    copy.__doc__, copy.__kwdefaults__ = function.__doc__, function.__kwdefaults__
    for name, hint in get_type_hints(function, include_extras=True).items():
        is_positional = _POSITIONAL in getattr(hint, "__metadata__", ())
        copy.__annotations__[name] = Annotated[hint, tyro.conf.arg(metavar=name.upper())] if is_positional else hint
    return copy
