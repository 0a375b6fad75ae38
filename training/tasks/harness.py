"""Command: lm_eval's own command line, which knows our models as `gristmill`.

lm_eval finds no models of other packages by itself; its documentation tells these to register theirs and call it.
"""

import sys
from collections.abc import Sequence
from importlib.util import find_spec

from gristmill.errors import require
from training.distributed.command_line import exit_on_user_error


def main(argv: Sequence[str] | None = None) -> None:
    """`gristmill lm-eval --model_args checkpoint=OUT/model --tasks …`, with all options of lm_eval."""
    words = list(sys.argv[1:] if argv is None else argv)
    with exit_on_user_error():
        require_lm_eval("lm-eval")
        from lm_eval.__main__ import cli_evaluate

        import training.tasks.lm_eval_model  # noqa: F401  registers it

        is_run = not words or words[0].startswith("-") or words[0] == "run"
        has_model = any(word == "--model" or word.startswith(("--model=", "-M")) for word in words)
        model = ["--model", "gristmill"] if is_run and not has_model and words and words != ["-h"] else []
        sys.argv = ["lm_eval", *words, *model]
        cli_evaluate()


def require_lm_eval(what: str) -> None:
    """Raise UsageError where lm_eval, which `what` needs, is not installed."""
    require(find_spec("lm_eval") is not None, f"{what} needs lm_eval: pip install 'gristmill[eval]'")
