"""Weights: parsing and errors. (Their effect: test_shuffle_holdout.)"""

import pytest

from gristmill.command import command
from gristmill.errors import UsageError
from preprocessing.datasets import source_weights
from preprocessing.shuffle_holdout import pass1, pass2


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("boook=2", "names 'boook': the corpus has the sources 'book', 'c4'"),
        ("book=-1", "0 or more"),
        ("book=nan", "0 or more"),
        ("book=inf", "0 or more"),
        ("book=1e300", "at most 1,000"),
        ("book=1000.5", "at most 1,000"),
        ("book", "source=number"),
        ("book=two", "source=number"),
        ("=2", "source=number"),
        ("book=1,book=2", "each source once"),
        ("none.toml", "expected a TOML file"),
    ],
)
def test_invalid_weights_are_rejected(given: str, wanted: str) -> None:
    with pytest.raises(UsageError, match=wanted):
        source_weights(given, ["book", "c4"])


ODD = ("a,b", "c=d", "e f", 'g"h', "i.j")


@pytest.mark.parametrize(
    "given",
    [
        dict.fromkeys(ODD, 2.5),
        '"a,b"=2.5,c=d=2.5, e f = 2.5,g"h=2.5,i.j=2.5',
        '"a,b"=2.5,"c=d"=2.5,"e f"=2.5,"g""h"=2.5,"i.j"=2.5',
    ],
)
def test_any_name_of_a_source_can_have_a_weight(given) -> None:
    assert source_weights(given, ODD) == dict.fromkeys(sorted(ODD), 2.5)


def test_pass1_takes_quoted_names_on_its_command_line(tmp_path, corpus, capsys) -> None:
    norm = corpus(**{"a,b": 4, "c=d": 4})
    words = ["pass1", "--input_dir", str(norm), "--out_dir", str(tmp_path / "out"), "--weights", '"a,b"=2,c=d=0.5']
    with pytest.raises(SystemExit, match="0"):
        command(pass1, pass2, arguments=[*words, "--workers", "1"])
    shares = capsys.readouterr().out.splitlines()[2:4]
    table = {line.split()[0]: line.split()[1:3] for line in shares}
    assert (table["a,b"], table["c=d"]) == (["2", "8"], ["0.5", "2"])


def test_a_toml_file_takes_any_name_in_quotes(tmp_path) -> None:
    (tmp_path / "mix.toml").write_text('"a,b" = 2\n\'g"h\' = 0.5\n')
    assert source_weights(str(tmp_path / "mix.toml"), ["a,b", 'g"h']) == {"a,b": 2.0, 'g"h': 0.5}
    (tmp_path / "mix.toml").write_text("a = true\n")
    with pytest.raises(UsageError, match="True is not a number"):
        source_weights(str(tmp_path / "mix.toml"), ["a"])


def test_a_source_cannot_have_the_name_of_the_manifest_of_pass1() -> None:
    with pytest.raises(UsageError, match=r"a source is named pass1\.json"):
        source_weights("", ["book", "pass1.json"])


def test_sources_without_a_weight_get_one_epoch() -> None:
    assert source_weights("book=0", ["book", "wikipedia", "blogs"]) == {"blogs": 1.0, "book": 0.0, "wikipedia": 1.0}
