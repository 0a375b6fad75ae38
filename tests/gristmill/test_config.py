from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import pytest
import tyro

from gristmill.config import load_config
from gristmill.errors import UsageError


@dataclass(frozen=True)
class Stones:
    wood: Path
    turns_per_minute: int = 30
    speed: float = 1.5
    wet: bool = True
    sizes: tuple[float, float] = (0.1, 0.2)
    cover: bool | None = None


@dataclass(frozen=True)
class Mill:
    out_dir: Path
    stones: Stones
    weights: dict[str, float] = field(default_factory=dict)
    kind: Literal["water", "wind"] = "water"


FILE = """
out_dir = "out"
kind = "wind"
[stones]
wood = "/oak"
speed = 2
sizes = [1, 2.5]
[weights]
code = 2.5
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mill.toml"
    path.write_text(FILE)
    return path


def test_defaults_then_the_file_then_the_command_line(file: Path) -> None:
    read = load_config(Mill, ["--config", str(file)])
    assert read == Mill(Path("out"), Stones(Path("/oak"), 30, 2.0, sizes=(1.0, 2.5)), {"code": 2.5}, "wind")
    options = ["--stones.turns_per_minute", "7", "--kind", "water", "--weights.code", "3"]
    for argv in ([f"--config={file}", *options], [*options, "--config", str(file)]):
        over = load_config(Mill, argv)
        assert (over.stones.turns_per_minute, over.kind, over.weights) == (7, "water", {"code": 3.0})
        assert over.stones.speed == 2.0 and isinstance(over.stones.speed, float)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("weights = 3", "over.toml: weights: expected"),
        ("kind = 3", "over.toml: kind: expected"),
        ("stones = 3", "over"),
    ],
)
def test_a_file_of_another_type_is_refused_also_where_a_later_one_replaces_it(
    file: Path, tmp_path: Path, text: str, said: str
) -> None:
    over = tmp_path / "over.toml"
    over.write_text(text)
    for files in (("--config", str(over), "--config", str(file)), ("--config", str(file), "--config", str(over))):
        with pytest.raises(UsageError, match=said) as refused:
            load_config(Mill, files)
        assert "\n" not in str(refused.value)


def test_a_later_file_is_laid_over_an_earlier_one(file: Path, tmp_path: Path) -> None:
    """Key by key, in tables, too; the command line is above both."""
    over = tmp_path / "over.toml"
    over.write_text("kind = 'water'\n[stones]\nsizes = [3.0, 4.0]\n[weights]\nweb = 1.5\n")
    files = ["--config", str(file), f"--config={over}"]
    stones = Stones(Path("/oak"), 30, 2.0, sizes=(3.0, 4.0))
    assert load_config(Mill, files) == Mill(Path("out"), stones, {"code": 2.5, "web": 1.5}, "water")
    assert load_config(Mill, [*files, "--kind", "wind", "--weights.web", "2"]).weights == {"code": 2.5, "web": 2.0}
    assert load_config(Mill, files[2:] + files[:2]).kind == "wind"
    for text, message in [
        ("stones = 3", "over.toml: stones is 3; expected a table [stones]"),
        ("[stones]\nspeed = 'x'", "over.toml: stones.speed: expected a number, got 'x'"),
        ("[stones]\nspeeed = 1.0", "over.toml: unknown key stones.speeed; did you mean stones.speed?"),
        ("weights = 3", "over.toml: weights: expected"),
        (
            "[weights]\ncode = 'much'",
            f"{file}, {over}: weights code: expected a number such as",
        ),
    ]:
        over.write_text(text)
        with pytest.raises(UsageError) as error:
            load_config(Mill, files)
        assert message in str(error.value)


@dataclass(frozen=True)
class Range:
    from_: Annotated[str | None, tyro.conf.arg(name="from")] = None
    quick: bool = False
    slow: bool | None = None


def test_a_field_named_like_a_keyword_and_booleans_without_a_value(tmp_path: Path) -> None:
    (tmp_path / "range.toml").write_text("from = 'a'")
    assert load_config(Range, ["--config", str(tmp_path / "range.toml"), "--quick"]) == Range("a", True)
    assert load_config(Range, ["--quick", "--slow", "--from", "b"]) == Range("b", True, True)
    assert load_config(Range, ["--quick=True", "--slow", "false"]) == Range(None, True, False)
    with pytest.raises(UsageError, match=r"unknown option --from_; did you mean --from\?"):
        load_config(Range, ["--from_", "b"])


@pytest.mark.parametrize(
    "wet", ["--stones.wet false", "--stones.wet False", "--stones.wet=false", "--stones.wet=False"]
)
@pytest.mark.parametrize("cover", ["--stones.cover true", "--stones.cover=true"])
def test_underscores_hyphens_signs_and_booleans(wet: str, cover: str) -> None:
    options = f"--out-dir a --stones.wood b --stones.turns-per-minute -4 --stones.speed=-1e-3 {wet}"
    mill = load_config(Mill, f"{options} {cover} --stones.sizes 1 2".split())
    assert mill == Mill(Path("a"), Stones(Path("b"), -4, -1e-3, False, (1.0, 2.0), True))


@pytest.mark.parametrize(
    ("toml", "message"),
    [
        ("[stones]\nturns_per_minut = 3", "unknown key stones.turns_per_minut; did you mean stones.turns_per_minute?"),
        ("kindd = 'wind'", "unknown key kindd; did you mean kind?"),
        ("turns_per_minute = 3", "unknown key turns_per_minute; did you mean stones.turns_per_minute?"),
        ("[stones]\nturns_per_minute = 'x'", "stones.turns_per_minute: expected a whole number, got 'x'"),
        ("[stones]\nturns_per_minute = 1.5", "stones.turns_per_minute: expected a whole number, got 1.5"),
        ("[stones]\nsizes = [1]", "stones.sizes: expected 2 numbers, got [1]"),
        ("kind = 'steam'", "kind: expected water or wind, got 'steam'"),
        ('out_dir = "a\\u0000b"', r"out_dir: expected a path, got 'a\x00b'"),
        ("stones = 3", r"stones is 3; expected a table [stones]"),
        ("[weights]\ncode = 'much'", "weights code: expected a number such as 20000 or 2e9, got 'much'"),
    ],
)
def test_a_wrong_file_says_key_given_and_wanted(tmp_path: Path, toml: str, message: str) -> None:
    path = tmp_path / "mill.toml"
    path.write_text(toml)
    with pytest.raises(UsageError) as error:
        load_config(Mill, ["--config", str(path), "--out_dir", "a", "--stones.wood", "b"])
    assert message in str(error.value) and str(path) in str(error.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            "--stones.turns_per_minut 3",
            "unknown option --stones.turns_per_minut; did you mean --stones.turns_per_minute?",
        ),
        ("--turns_per_minute 3", "did you mean --stones.turns_per_minute?"),
        ("--zzzzzz", "there are --out_dir, --weights"),
        ("--stones 3", "unknown option --stones; there are --stones.wood, --stones.turns_per_minute, --stones.sp"),
        (
            "--stones.turns_per_minute 1.5",
            "--stones.turns_per_minute: got '1.5', expected a whole number",
        ),
        ("--kind steam", "--kind: got 'steam', expected one of water, wind"),
        ("--kind watr", "--kind: got 'watr', expected one of water, wind; did you mean water?"),
        ("--stones.speed", "--stones.speed"),
        ("stray", "stray"),
        ("--stones.wet=maybe", "Maybe"),
        ("--config", "--config was given without a path"),
        ("--config nowhere.toml", "cannot read --config nowhere.toml: No such file"),
    ],
)
def test_a_wrong_command_line_says_what_to_try(options: str, message: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UsageError) as error:
        load_config(Mill, ["--out_dir", "a", "--stones.wood", "b", *options.split()])
    assert message in str(error.value)
    assert capfd.readouterr() == ("", "")  # the caller prints it, once


def test_what_is_required_may_come_from_either_and_must_come_from_one(file: Path) -> None:
    with pytest.raises(UsageError, match=r"--stones.wood"):
        load_config(Mill, ["--out_dir", "a"])
    file.write_text("out_dir = 'out'")
    assert load_config(Mill, ["--config", str(file), "--stones.wood", "b"]).out_dir == Path("out")


def test_a_file_that_is_not_toml_is_refused(file: Path) -> None:
    file.write_text("kind = = 3")
    with pytest.raises(UsageError, match=r"invalid TOML: [a-z].*line 1.*; fix that line"):
        load_config(Mill, ["--config", str(file)])


def test_a_file_that_is_nested_too_deeply(file: Path) -> None:
    file.write_text("out_dir = " + "[" * 5000)
    with pytest.raises(UsageError, match="invalid TOML"):
        load_config(Mill, ["--config", str(file)])


def test_an_empty_path_is_not_the_current_folder(file: Path) -> None:
    file.write_text("out_dir = ''")
    with pytest.raises(UsageError, match="out_dir: expected a path, got ''"):
        load_config(Mill, ["--config", str(file)])
    with pytest.raises(UsageError, match=r"--stones.wood is empty: is a variable of your shell not set\?"):
        load_config(Mill, ["--out_dir", "out", "--stones.wood", ""])


@dataclass
class Cart:
    sacks: tuple[Path, ...] = ()
    grain: Path | tuple[Path, ...] = Path("rye")
    weights: dict[str, float] = field(default_factory=dict)
    loads: tuple[float, float] = (1, 2)


@pytest.mark.parametrize("option", ["--sacks a --sacks b", "--grain a b --grain=c", "--weights a 1 --weights b 2"])
def test_an_option_of_many_values_is_given_once(option: str) -> None:
    name = option.partition(" ")[0]
    with pytest.raises(UsageError, match=f"{name} is given twice: give all its values after one, such as {name} A B"):
        load_config(Cart, option.split())
    assert load_config(Cart, ["--loads", "3", "4", "--loads", "5", "6", "--sacks", "a", "b"]) == Cart(
        (Path("a"), Path("b")), loads=(5, 6)
    )


def test_a_table_of_the_command_line_replaces_or_extends_that_of_the_file(file: Path) -> None:
    def weights(*argv: str) -> dict[str, float]:
        return load_config(Mill, ["--config", str(file), *argv]).weights

    assert weights() == {"code": 2.5} and weights("--weights") == {}
    assert weights("--weights", "web", "3", "my-books", "1") == {"web": 3, "my-books": 1}
    assert weights("--weights.web=3", "--kind", "water", "--weights.code", "1") == {"code": 1, "web": 3}
    assert weights("--weights.my-books", "3", "--weights", "web", "1") == {"web": 1, "my-books": 3}
    assert weights("--weights", "web", ".5", "books", "1.") == {"web": 0.5, "books": 1}  # which JSON has not


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("--weights a 1 a 2", "--weights: a is given twice; give it one value"),
        ("--weights.a 1 --weights.a=2", "--weights: a is given twice; give it one value"),
        ("--weights a", r"--weights: expected a value for each key, got 'a'; try --weights KEY VALUE …"),
        ("--weights.a 1 2", "expected a value for each key, got 'a 1 2'"),
        ("--weights a much", "--weights a: expected a number such as 20000 or 2e9, got 'much'"),
    ],
)
def test_a_key_of_a_table_has_one_value(given: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_config(Cart, given.split())


def test_help_shows_the_options_with_underscores(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        load_config(Mill, ["--help"], prog="grind")
    assert end.value.code == 0 and "--stones.turns_per_minute N" in capsys.readouterr().out


def test_a_url_of_an_unknown_scheme_is_refused() -> None:
    @dataclass
    class Paths:
        out: Path = Path("out")

    with pytest.raises(UsageError, match="ftp://a/b: the scheme ftp is not known"):
        load_config(Paths, ["--out", "ftp://a/b"])
