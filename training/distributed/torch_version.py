"""Refusal of what an older torch cannot do: with the reason and another way, never a wrong result."""

from gristmill.errors import require


def require_torch(version: str, what: str, reason: str, advice: str) -> None:
    """Raise UsageError where `what` needs torch `version`, such as "2.13", or later, and this one is older."""
    import torch  # takes seconds; few options need this check

    require(
        torch.__version__ >= version,  # compares versions, not letters
        f"{what} needs torch {version} or later, and this is {torch.__version__}: {reason}; try {advice}",
    )
