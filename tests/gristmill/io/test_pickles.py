"""Pickles: SlimPajama's are read, and nothing that a file names is ever run."""

import contextlib
import os
import pickle
import subprocess
import sys
from collections import OrderedDict, defaultdict
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gristmill.errors import InputError, UsageError
from gristmill.io.keys import read_keys, write_keys
from gristmill.io.pickles import dump_pickle, load_pickle, stream_dict, stream_rows, write_sets, write_stream

SLIMPAJAMA = defaultdict(set, {"book/a.jsonl": {3, 1}, "c4/b@1.jsonl.zst": {0}})


class Attack:
    """What pickles into a call of os.system."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


class Sneaky(Attack):
    def __reduce__(self):
        return eval, (f"open({str(self.path)!r}, 'w')",)


class Mine:
    pass


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "value",
    [
        SLIMPAJAMA,
        OrderedDict(a=[1, (2.5, None, b"x", True)]),
        frozenset("ab"),
        ([{1, 2}], 2, {"a@1": 0, 0: "a@1"}),
        {"a": np.int64(5)},
    ],
)
def test_plain_values_are_read(tmp_path: Path, value, protocol: int) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value, protocol))
    assert load_pickle(tmp_path / "a.pickle") == value


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("dtype", [np.int64, ">u4", np.uint8, np.float32, bool])
def test_arrays_of_numbers_are_read_as_lists(tmp_path: Path, dtype, protocol: int) -> None:
    array = np.arange(6).astype(dtype)
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": array, "b": array[1], "c": array[:0]}, protocol))
    loaded = load_pickle(tmp_path / "a.pickle")
    assert loaded == {"a": array.tolist(), "b": array[1], "c": []}
    assert not isinstance(loaded["a"][1], np.generic)


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize("array", [np.arange(6).reshape(2, 3), np.array(["a"]), np.array([None]), np.zeros(2, "i4,i4")])
def test_other_arrays_are_refused(tmp_path: Path, array, protocol: int) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps({"a": array}, protocol))
    with pytest.raises(InputError, match="array of"):
        load_pickle(tmp_path / "a.pickle")


@pytest.mark.parametrize("kind", [Attack, Sneaky])
@pytest.mark.parametrize("wrap", [lambda value: value, lambda value: {"a": [value]}, lambda value: np.array([value])])
def test_nothing_is_run(tmp_path: Path, kind: type, wrap) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(wrap(kind(tmp_path / "pwned"))))
    with pytest.raises(InputError, match=r"neither a builtin container nor an array|wanted numbers"):
        load_pickle(tmp_path / "a.pickle")
    assert not (tmp_path / "pwned").exists()
    with pytest.raises(InputError):
        read_keys(tmp_path / "a.pickle")


@pytest.mark.parametrize("value", [Mine(), Mine, len, Path("x"), getattr])
def test_other_classes_and_functions_are_refused(tmp_path: Path, value) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value))
    with pytest.raises(InputError, match=r"a\.pickle"):
        load_pickle(tmp_path / "a.pickle")


@settings(max_examples=300)
@given(st.data())
def test_a_damaged_pickle_is_an_input_error_or_a_value(tmp_path_factory: pytest.TempPathFactory, data) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.pickle"
    whole = bytearray(pickle.dumps({"a": {1, 2}, "b": np.arange(3)}, 4))
    for _ in range(data.draw(st.integers(0, 3))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(bytes(whole[: data.draw(st.integers(0, len(whole)))]))
    with contextlib.suppress(InputError):
        load_pickle(path)


def short(*strings: str) -> bytes:
    return b"".join(b"\x8c" + bytes([len(string)]) + string.encode() for string in strings)


SET, DICT = short("builtins", "set") + b"\x93", short("collections", "OrderedDict") + b"\x93)R"


class HiddenObjects:
    """What pickles into a dtype with a field of objects, and without the flag that says so."""

    def __reduce__(self):
        fields = {"a": (np.dtype("O"), 0)}
        return np.dtype, ("V8", False, True), (3, "|", None, ("a",), fields, 8, 8, 0)


class WildPointer:
    def __reduce__(self):
        reconstruct = np.arange(1).__reduce__()[0]
        return reconstruct, (np.ndarray, (0,), b"b"), (1, (1,), HiddenObjects(), False, b"A" * 8)


TUPLES = b"\x80\x04\x8f(" + b")" + b"\x85" * 200_000 + b"\x90."
HOSTILE = {
    "a pointer to anywhere": pickle.dumps({"a": WildPointer()}),
    "a terabyte": b"\x80\x04" + short("builtins", "bytearray") + b"\x93" + b"\x8a\x06\x00\x10\xa5\xd4\xe8\x00\x85R.",
    "a string of a terabyte": b"\x80\x04\x8d\x00\x10\xa5\xd4\xe8\x00\x00\x00.",
    "a bytearray of a terabyte": b"\x80\x05\x96\x00\x10\xa5\xd4\xe8\x00\x00\x00.",
    "a frame of a terabyte": b"\x80\x04\x95\x00\x10\xa5\xd4\xe8\x00\x00\x00N.",
    "a memo of 64 GB": b"\x80\x04Nr\xff\xff\xff\x7f.",
    "a number of any length": b"\x80\x04\x8b\xff\xff\xff\x7f.",
    "deep tuples": TUPLES,
    "deep tuples by way of the memo": b"\x80\x04\x8f()\x94"
    + b"".join(b"0j" + i.to_bytes(4, "little") + b"\x85\x94" for i in range(100_000))
    + b"\x90.",
    "deep tuples, hidden": b"\x80\x04\x8f()" + b"\x85Nb" * 100_000 + b"\x90.",
    "many copies": b"\x80\x04](" + b"K\x01" * 1000 + b"e\x940(" + (SET + b"h\x00\x85R") * 1000 + b"l.",
    "a changed function": b"\x80\x04" + SET + b"N}" + short("__doc__", "x") + b"s\x86b.",
    "a call of a type": b"\x80\x04" + short("builtins", "tuple") + b"\x93]\x85R.",
    "a call of a result": b"\x80\x04" + DICT + b")R.",
    "an empty stack": b"\x80\x04s.",
    "no end": b"\x80\x04N",
    "nothing": b"",
}
LOAD = """
import sys
from pathlib import Path
from gristmill.errors import InputError
from gristmill.io.keys import read_keys
for path in sorted(Path(sys.argv[1]).iterdir()):
    try:
        print(path.name, read_keys(path))
    except InputError as error:
        assert path.name in str(error)
        print(path.name, "refused")
status = Path("/proc/self/status").read_text()  # ru_maxrss would count the parent's memory, too
print(status.partition("VmHWM:")[2].split()[0])
"""


def test_a_hostile_pickle_is_an_input_error(tmp_path: Path) -> None:
    for name, data in HOSTILE.items():
        (tmp_path / f"{name}.pickle").write_bytes(data)
    lists = b"\x80\x04}" + short("a") + b"]" + b"]" * 200_000 + b"a" * 200_000 + b"s."
    (tmp_path / "deep lists.pickle").write_bytes(lists)
    items = b"".join(short(str(i)) + b"h\x00s" for i in range(1000))
    (tmp_path / "shared.pickle").write_bytes(b"\x80\x04](" + b"K\x01" * 1000 + b"e\x940}" + items + b".")
    done = subprocess.run([sys.executable, "-c", LOAD, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    *lines, peak = done.stdout.splitlines()
    assert [line for line in lines if not line.endswith(" refused")] == []
    assert len(lines) == len(HOSTILE) + 2
    assert int(peak) < 1_000_000  # KiB


def test_no_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Run the stage that writes it"):
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
    dump_pickle(tmp_path / "a.pickle", SLIMPAJAMA)
    assert {f: rows.tolist() for f, rows in read_keys(tmp_path / "a.pickle").items()} == {
        "book/a.jsonl": [1, 3],
        "c4/b@1.jsonl.zst": [0],
    }


@pytest.mark.parametrize("value", [[1], 3, {"a": 5}, {"a": {"x"}}, {"a": {None}}, {"a": {2**70}}])
def test_pickles_that_hold_no_keys_are_refused(tmp_path: Path, value) -> None:
    dump_pickle(tmp_path / "a.pickle", value)
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


_SETS = st.dictionaries(
    st.text("ab/é東", max_size=3), st.sets(st.integers(0, 2**40) | st.integers(0, 300), max_size=5), max_size=5
)


@settings(deadline=None, max_examples=50)
@given(sets=_SETS, protocol=st.integers(4, 5))
def test_sets_are_read_as_a_stream(tmp_path_factory: pytest.TempPathFactory, sets, protocol: int) -> None:
    path = tmp_path_factory.getbasetemp() / "sets.pickle"
    for data in (pickle.dumps(sets, protocol), pickle.dumps(defaultdict(set, sets), protocol)):
        path.write_bytes(data)
        assert _read_stream(path) == sets
    write_stream(path, stream_dict(sets.items()))
    assert _read_stream(path) == sets
    path.write_bytes(path.read_bytes()[:-1])
    assert stream_rows(path) is None


def test_large_sets_are_written_as_pickle_does_and_read_in_blocks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets = {f"{number}.jsonl": set(range(number, 40_000 * number, 9)) for number in range(4)}
    write_sets(tmp_path / "a.pickle", sets, (sorted(found) for found in sets.values()))
    assert (tmp_path / "a.pickle").read_bytes() == pickle.dumps(sets, 4)  # in several frames
    monkeypatch.setattr("gristmill.io.pickles._BLOCK", 100)
    monkeypatch.setattr("gristmill.io.pickles._CHUNK", 1000)
    assert _read_stream(tmp_path / "a.pickle") == sets


@pytest.mark.parametrize(
    "value", [{"a": [1]}, {"a": {-1}}, {"a": {True}}, {"a": {"b"}}, {1: {1}}, [1], {"a": {1 << 63}}]
)
def test_other_pickles_are_no_stream_of_sets(tmp_path: Path, value) -> None:
    (tmp_path / "a.pickle").write_bytes(pickle.dumps(value))
    assert stream_rows(tmp_path / "a.pickle") is None


def _read_stream(path: Path) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for file, rows in stream_rows(path) or ():
        found.setdefault(file, set()).update(rows.tolist())
    return found
