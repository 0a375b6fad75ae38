"""Pickles: SlimPajama's are read, and nothing that a file names is ever run."""

import os
import pickle
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.budget import Budget, memory_budget
from gristmill.errors import InputError, UsageError
from gristmill.io.artefacts import load_pickle, stream_dict, write_sets, write_stream
from gristmill.io.keys import read_keys, write_keys

SLIMPAJAMA = defaultdict(set, {"book/a.jsonl": {3, 1}, "c4/b@1.jsonl.zst": {0}})


class Attack:
    """What pickles into a call of os.system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Mine:
    pass


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [SLIMPAJAMA, OrderedDict(a=[1, (2.5, None, b"x", True)]), frozenset("ab"), ([{1, 2}], 2, {"a@1": 0, 0: "a@1"})],
)
def test_plain_values_are_read(tmp_path: Path, value, protocol: int) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value, protocol))
    assert load_pickle(tmp_path / "a.pickle") == value


@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value]}])
def test_nothing_is_run(tmp_path: Path, wrap) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(wrap(Attack(tmp_path / "pwned"))))
    for read in (load_pickle, read_keys):
        with pytest.raises(InputError, match="which is not a builtin container"):
            read(tmp_path / "a.pickle")
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("value", [Mine(), len, Path("x"), getattr, np.arange(3)])
def test_other_classes_and_functions_are_refused(tmp_path: Path, value) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=r"a\.pickle"):
        load_pickle(tmp_path / "a.pickle")


def test_a_pickle_that_exceeds_the_budget_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": set(range(100_000))}))
    with memory_budget(Budget.of(4 << 20, 1)), pytest.raises(UsageError, match=r"a\.pickle takes about .*--memory"):
        load_pickle(tmp_path / "a.pickle")
    with memory_budget(Budget.of(64 << 20, 1)):
        assert len(load_pickle(tmp_path / "a.pickle")["a"]) == 100_000


@pytest.mark.parametrize("data", [b"", b"\x80\x04N", b"\x80\x04s.", pickle.dumps(SLIMPAJAMA)[:-9]])
def test_a_truncated_pickle_is_an_input_error(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.pickle").write_bytes(data)
    with pytest.raises(InputError, match=r"a\.pickle is not a pickle that can be read"):
        load_pickle(tmp_path / "a.pickle")


def test_no_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="run the stage that writes it"):
        load_pickle(tmp_path / "none.pickle")


def test_ours_is_read_by_plain_pickle_as_slimpajama_reads_it(tmp_path: Path) -> None:
    write_keys(tmp_path / "a.pickle", {"b": np.array([1, 2]), "a": np.array([7]), "none": np.array([], np.int64)})
    with (tmp_path / "a.pickle").open("rb") as file:
        assert pickle.load(file) == {"a": {7}, "b": {1, 2}}


KEYS = st.dictionaries(st.text(min_size=1).filter(str.isprintable), st.sets(st.integers(0, 2**62), min_size=1))


@pytest.mark.parametrize("suffix", [".pickle", ".pkl", ".parquet"])
@given(keys=KEYS)
def test_keys_are_what_was_written(tmp_path_factory: pytest.TempPathFactory, suffix: str, keys) -> None:
    path = tmp_path_factory.getbasetemp() / f"keys{suffix}"
    write_keys(path, {file: np.array(sorted(rows), np.int64) for file, rows in keys.items()})
    assert {file: rows.tolist() for file, rows in read_keys(path).items()} == {f: sorted(r) for f, r in keys.items()}


def test_slimpajamas_keys_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(SLIMPAJAMA))
    assert {f: rows.tolist() for f, rows in read_keys(tmp_path / "a.pickle").items()} == {
        "book/a.jsonl": [1, 3],
        "c4/b@1.jsonl.zst": [0],
    }


@pytest.mark.parametrize("value", [[1], 3, {"a": 5}, {"a": {"x"}}, {"a": {None}}, {"a": {2**70}}])
def test_pickles_that_hold_no_keys_are_refused(tmp_path: Path, value) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=r"a\.pickle"):
        read_keys(tmp_path / "a.pickle")


def test_tables_that_hold_no_keys_are_refused(tmp_path: Path) -> None:
    write_keys(tmp_path / "a.parquet", {"a": np.arange(1000)})
    whole = (tmp_path / "a.parquet").read_bytes()
    for damaged in (b"", whole[:-1], whole[:4] + b"\xff" * 40 + whole[44:], b"x" * 100):
        (tmp_path / "a.parquet").write_bytes(damaged)
        with pytest.raises(InputError, match=r"a\.parquet"):
            read_keys(tmp_path / "a.parquet")


def test_another_suffix_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.pickle .* or \.parquet"):
        write_keys(tmp_path / "a.json", {})


def test_sets_are_written_as_pickle_does(tmp_path: Path) -> None:
    sets = {f"{number}.jsonl": set(range(number, 40_000 * number, 9)) for number in range(4)}
    write_sets(tmp_path / "a.pickle", sets, (sorted(found) for found in sets.values()))
    assert (tmp_path / "a.pickle").read_bytes() == pickle.dumps(sets, 4)  # in several frames


def test_a_stream_of_sets_is_read_as_a_dict(tmp_path: Path) -> None:
    write_stream(tmp_path / "a.pickle", stream_dict(SLIMPAJAMA.items()))
    assert load_pickle(tmp_path / "a.pickle") == SLIMPAJAMA
