"""Arrow values: JSON for every type and value; times that Python's datetime cannot hold are written in full."""

import json
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gristmill.io.arrow_tables import records
from gristmill.io.arrow_values import to_python
from gristmill.io.documents import DocKey, Document
from gristmill.io.text_records import BadRecord

INT64 = st.integers(-(2**63) + 1, 2**63 - 1)
UNITS = ("s", "ms", "us", "ns")
STORED = {  # types whose values are any integers
    **{pa.timestamp(unit): INT64 for unit in UNITS},
    **{pa.timestamp(unit, "Europe/Berlin"): INT64 for unit in UNITS},
    **{pa.duration(unit): INT64 for unit in UNITS},
    pa.date32(): st.integers(-(2**31), 2**31 - 1),
    pa.date64(): INT64,
    pa.time32("s"): st.integers(0, 86_399),
    pa.time64("ns"): st.integers(0, 86_399_999_999_999),
}
OTHERS = {
    pa.null(): st.none(),
    pa.bool_(): st.booleans(),
    pa.uint64(): st.integers(0, 2**64 - 1),
    pa.float16(): st.floats(width=16).map(np.float16),
    pa.float64(): st.floats(),
    pa.decimal128(38, 10): st.decimals(-(10**20), 10**20, places=10),
    pa.decimal256(76, 0): st.integers(-(10**75), 10**75).map(Decimal),
    pa.string(): st.text(),
    pa.large_string(): st.text(),
    pa.string_view(): st.text(),
    pa.binary(): st.binary(),
    pa.large_binary(): st.binary(),
    pa.binary_view(): st.binary(),
    pa.binary(3): st.binary(min_size=3, max_size=3),
    pa.month_day_nano_interval(): st.tuples(*[st.integers(-9, 9)] * 3),
}


@st.composite
def leaves(draw: st.DrawFn, size: int) -> pa.Array:
    kind = draw(st.sampled_from([*STORED, *OTHERS]))
    values = draw(st.lists(st.none() | (STORED | OTHERS)[kind], min_size=size, max_size=size))
    if kind in OTHERS:
        return pa.array(values, kind)
    return pa.array(values, pa.int32() if kind.bit_width == 32 else pa.int64()).view(kind)


@st.composite
def arrays(draw: st.DrawFn, size: int, depth: int = 2) -> pa.Array:
    if not depth or draw(st.booleans()):
        array = draw(leaves(size))
        wrapped = draw(st.sampled_from(["plain", "dictionary", "run ends"]))
        try:
            if wrapped != "plain":
                return array.dictionary_encode() if wrapped == "dictionary" else pc.run_end_encode(array)
        except pa.ArrowNotImplementedError:
            pass
        return array
    shape = draw(st.sampled_from(["list", "large", "fixed", "view", "struct", "empty", "map", "sparse", "dense"]))
    nulls = pa.array(draw(st.lists(st.booleans(), min_size=size, max_size=size)), pa.bool_())
    if shape == "struct":
        children = [draw(arrays(size, depth - 1)) for _ in range(2)]
        return pa.StructArray.from_arrays(children, ["a", "b"], mask=nulls)
    if shape == "empty":
        return pa.array([{}] * size, pa.struct([]))
    if shape == "fixed":
        return pa.FixedSizeListArray.from_arrays(draw(arrays(2 * size, depth - 1)), 2, mask=nulls)
    if shape in ("sparse", "dense"):
        codes = pa.array([i % 2 for i in range(size)], pa.int8())
        children = [draw(arrays(size, depth - 1)) for _ in range(2)]
        if shape == "sparse":
            return pa.UnionArray.from_sparse(codes, children)
        return pa.UnionArray.from_dense(codes, pa.array(range(size), pa.int32()), children)
    lengths = draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = draw(arrays(int(offsets[-1]), depth - 1))
    if shape == "map":
        keys = pa.array([str(i) for i in range(len(values))])
        return pa.MapArray.from_arrays(pa.array(offsets, pa.int32()), keys, values)
    if shape == "view":
        starts, sizes = pa.array(offsets[:-1], pa.int32()), pa.array(lengths, pa.int32())
        return pa.ListViewArray.from_arrays(starts, sizes, values, mask=nulls)
    if shape == "large":
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, mask=nulls)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), values, mask=nulls)


@given(st.integers(0, 5).flatmap(arrays), st.integers(0, 5))
def test_every_value_of_every_type_is_valid_json(array: pa.Array, start: int) -> None:
    values = to_python(array)
    assert len(values) == len(array)
    line = Document("", DocKey("a", 0), {"text": "", "x": values}).to_json()
    assert len(json.loads(line, parse_constant=pytest.fail)["x"]) == len(array)
    assert repr(to_python(array.slice(start))) == repr(values[start:])


@pytest.mark.parametrize(
    "values, kind",
    [
        ([datetime(2020, 1, 2, 3, 4, 5), datetime(1, 1, 1, 0, 0, 0, 120000), None], pa.timestamp("us")),
        ([datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)], pa.timestamp("ms", "UTC")),
        ([date(1, 1, 1), None, date(9999, 12, 31)], pa.date32()),
        ([date(1969, 12, 31)], pa.date64()),
        ([time(1, 2, 3, 4000), time(0)], pa.time32("ms")),
        ([timedelta(400), timedelta(-1, 3, 5), timedelta(0), timedelta(1, 1), None], pa.duration("us")),
        ([[{"a": date(2020, 1, 1), "b": "x"}, None], None], pa.list_(pa.struct({"a": pa.date32(), "b": pa.string()}))),
        ([Decimal("1.50"), None], pa.decimal128(9, 2)),
        ([b"ab", 1.5, "x"], None),
    ],
)
def test_what_python_can_hold_is_written_as_python_values_are(values: list, kind: pa.DataType | None) -> None:
    for value in values if kind is None else [values]:
        found = to_python(pa.array([value] if kind is None else value, kind))
        assert msgspec.json.encode(found) == msgspec.json.encode([value] if kind is None else value)


@pytest.mark.parametrize(
    "value, kind, written",
    [
        (1, pa.timestamp("ns"), "1970-01-01T00:00:00.000000001"),
        (-1, pa.timestamp("ns", "Asia/Tokyo"), "1969-12-31T23:59:59.999999999Z"),
        (2**55, pa.timestamp("s"), "1141709097-06-13T06:26:08"),
        (-(2**31), pa.date32(), "-5877641-06-23"),
        (1, pa.time64("ns"), "00:00:00.000000001"),
        (-(10**18) - 1, pa.duration("ns"), "-P11574DT6400.000000001S"),
        (2**62, pa.duration("s"), "P53375995583650DT27904S"),
    ],
)
def test_what_python_cannot_hold_is_written_in_full(value: int, kind: pa.DataType, written: str) -> None:
    stored = pa.array([value], pa.int32() if kind.bit_width == 32 else pa.int64())
    assert to_python(stored.view(kind)) == [written]


def test_extension_types_are_their_storage() -> None:
    tensor = pa.ExtensionArray.from_storage(
        pa.fixed_shape_tensor(pa.int32(), (2,)), pa.array([[1, 2]], pa.list_(pa.int32(), 2))
    )
    uuid = pa.array([bytes(16)], pa.uuid())
    assert to_python(tensor) == [[1, 2]] and str(to_python(uuid)[0]) == "00000000-0000-0000-0000-000000000000"


@pytest.mark.parametrize("kind", [pa.string(), pa.large_string()])
def test_invalid_utf8_in_any_column_spoils_its_own_row_only(kind: pa.DataType) -> None:
    size = pa.array([b"", b""], pa.binary() if kind == pa.string() else pa.large_binary())
    bad = pa.Array.from_buffers(kind, 3, pa.array([b"a", b"\xff", b"c"], size.type).buffers())
    texts = pa.array(["one", '{"text": "not this"}', "three"])
    found = list(records(pa.record_batch({"text": texts, "x": pa.StructArray.from_arrays([bad], ["y"])}), "text"))
    assert [found[0], found[2]] == [{"text": "one", "x": {"y": "a"}}, {"text": "three", "x": {"y": "c"}}]
    assert isinstance(found[1], BadRecord) and found[1].reason == "invalid UTF-8"


@pytest.mark.parametrize("kind", [pa.string(), pa.string_view()])
def test_invalid_utf8_in_a_dictionary_spoils_only_the_rows_with_that_value(kind: pa.DataType) -> None:
    stored = pa.binary_view() if kind == pa.string_view() else pa.binary()
    values = pa.array([b"a", b"\xff", b"unused \xff"], stored).view(kind)
    texts = pa.DictionaryArray.from_arrays(pa.array([0, 1, None, 0]), values)
    found = list(records(pa.record_batch({"text": texts}), "text"))
    assert found == [{"text": "a"}, BadRecord("invalid UTF-8", b"\xff", 1), {"text": None}, {"text": "a"}]
    views = pa.array([b"\xfe", b"a"], pa.binary_view()).view(pa.string_view())
    assert next(records(pa.record_batch({"text": views}), "text")) == BadRecord("invalid UTF-8", b"\xfe", 1)
