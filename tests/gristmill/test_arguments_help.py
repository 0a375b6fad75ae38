"""Help is for people: what an option that is not given stands for is unset, not None."""

from dataclasses import dataclass
from typing import Literal

import pytest

from gristmill.arguments import parse


@dataclass
class Options:
    """Options of a test."""

    norm: Literal["rms", "layer"] | None = None
    rate: float | None = None
    lengths: tuple[int, ...] = ()


def test_help_shows_unset_in_place_of_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(Options, ["--help"], "test")
    printed = capsys.readouterr().out
    assert "{rms,layer}" in printed and printed.count("(default: unset)") == 3 and "None" not in printed
    assert parse(Options, ["--norm", "rms"], "test") == Options("rms")
    assert parse(Options, [], "test") == Options()
