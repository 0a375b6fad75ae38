"""Command lines of programs that every rank of a launcher runs: options, and a user's errors, which one rank prints."""

import contextlib
import io
import json
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from gristmill.config import load_config
from gristmill.errors import GristmillError
from gristmill.processes import discard_output
from training.distributed.launchers import adopt_launcher, stop_with_launcher

Config = TypeVar("Config")


def read_options(cls: type[Config], argv: Sequence[str] | None, prog: str) -> Config:
    """Build `cls` from the arguments, those of this process by default. Rank 0 alone prints help and notes."""
    adopt_launcher()
    stop_with_launcher()
    # torch.distributed.launch passes --local-rank=N as well as setting LOCAL_RANK, which is what we read
    given = sys.argv[1:] if argv is None else argv
    arguments = [word for word in given if not word.startswith(("--local-rank=", "--local_rank="))]
    with contextlib.ExitStack() as stack:
        if _rank() != 0:
            stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        return load_config(cls, arguments, prog=prog)


@contextlib.contextmanager
def exit_on_user_error() -> Iterator[None]:
    """On a user's error in the block every process exits with its code, and one prints it."""
    try:
        yield
    except GristmillError as error:
        if _rank() != 0:
            time.sleep(15)  # rank 0 met the same error and prints it; the launcher kills all once the first one exits
        print(f"error: {error}", file=sys.stderr, flush=True)
        write_error_file(f"error: {error}")
        sys.exit(error.exit_code)
    except BrokenPipeError:  # the reader of the output, such as `head`, has ended
        discard_output()
        sys.exit(128 + signal.SIGPIPE)


def write_error_file(text: str) -> None:
    """Write the error file, whose first line torchrun prints at the end of its own report on the failure."""
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        message = {"message": text.splitlines()[0], "extraInfo": {"timestamp": str(int(time.time()))}}
        with contextlib.suppress(OSError):
            Path(path).write_text(json.dumps({"message": message}))


def _rank() -> int:
    return int(os.environ.get("RANK", 0))
