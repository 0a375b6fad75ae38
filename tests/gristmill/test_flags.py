"""Boolean options of commands: every way to write them is taken."""

from dataclasses import dataclass

import pytest
import tyro

from gristmill.command import command


@tyro.conf.configure(tyro.conf.arg(name=""))
@dataclass(frozen=True)
class Options:
    quiet_please: bool = False


def grind(
    grain: tyro.conf.Positional[str], fine: bool = False, sieve: bool = True, options: Options = Options()
) -> str:
    """Grind grain."""
    return f"{grain} {fine:d}{sieve:d}{options.quiet_please:d}"


def sweep(fine: bool = False) -> str:
    """Sweep the mill."""
    return f"sweep {fine:d}"


def said(capsys: pytest.CaptureFixture[str], words: str, *functions) -> str:
    with pytest.raises(SystemExit) as end:
        command(*functions, arguments=words.split())
    assert end.value.code == 0, capsys.readouterr().err
    return capsys.readouterr().out.strip()


@pytest.mark.parametrize("form", ["--X", "--X true", "--X True", "--X=true", "--X=True"])
def test_true(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert said(capsys, f"{form.replace('X', 'fine')} rye", grind) == "rye 110"
    assert said(capsys, f"rye {form.replace('X', 'quiet-please')} --no_sieve", grind) == "rye 001"
    assert said(capsys, f"sweep {form.replace('X', 'fine')}", grind, sweep) == "sweep 1"


@pytest.mark.parametrize("form", ["--no_sieve", "--no-sieve", "--sieve false", "--sieve False", "--sieve=false"])
def test_false(capsys: pytest.CaptureFixture[str], form: str) -> None:
    assert said(capsys, f"{form} rye --fine", grind) == "rye 100"


def test_values_of_other_options_are_left(capsys: pytest.CaptureFixture[str]) -> None:
    assert said(capsys, "false --fine", grind) == "false 110"
    with pytest.raises(SystemExit) as end:
        command(grind, arguments=["rye", "--fine=maybe"])
    assert end.value.code == 2 and "maybe" in "".join(capsys.readouterr())
