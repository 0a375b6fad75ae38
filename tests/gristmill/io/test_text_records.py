"""Fields of a line: what Python's json module reads is read, byte for byte; what it refuses is malformed."""

import json

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gristmill.io.text_records import Malformed, decode_string, decode_text, decode_value, parse_fields

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def json_fields(line: bytes) -> dict:
    return {name: bytes(value) for name, value in parse_fields(line).items()}


@given(st.dictionaries(st.text(), VALUES), st.booleans(), st.sampled_from([(",", ":"), (" , ", " :\t")]))
@example({"text": "a", "x": float("nan"), "y": [float("inf"), float("-inf")]}, True, (",", ":"))
def test_what_python_writes_is_read_and_kept(record: dict, ascii: bool, separators: tuple[str, str]) -> None:
    line = json.dumps(record, ensure_ascii=ascii, separators=separators).encode()
    values = {name: json.dumps(value, ensure_ascii=ascii, separators=separators) for name, value in record.items()}
    assert json_fields(line) == {name: value.encode() for name, value in values.items()}
    assert repr({name: decode_value(value) for name, value in parse_fields(line).items()}) == repr(record)


@pytest.mark.parametrize(
    "value",
    [
        b"NaN",
        b"[ -Infinity,Infinity ]",
        b"1" * 5000,
        b'"\\ud800"',
        b'{"a": NaN, "a": 1.00}',
        b'{"d":[{"x":"\\u00e9"}]}',
    ],
)
def test_values_that_a_strict_parser_refuses_are_kept_byte_for_byte(value: bytes) -> None:
    line = b' {"text" : "a\\n" , "x":' + value + b', "y":NaN} \r'
    assert json_fields(line) == {"text": b'"a\\n"', "x": value, "y": b"NaN"}
    decode_value(parse_fields(line)["x"])


def test_the_last_of_two_fields_of_a_name_counts() -> None:
    for line in (b'{"x":1,"text":"a","x":2}', b'{"x":NaN,"text":"a","x":2}'):
        assert json_fields(line) == {"x": b"2", "text": b'"a"'}


@given(st.text(st.sampled_from('{}[]",:\\ 1.eENaItrue\u00fc')))
@example('{"a":NaN,}')
@example('{"a":NaN} x')
@example('{,"a":NaN}')
@example('{"a" NaN}')
@example("{NaN:1}")
def test_what_python_refuses_is_malformed(text: str) -> None:
    try:
        wanted = json.loads(text)
    except ValueError:
        with pytest.raises(Malformed, match=r"broken JSON|several JSON values"):
            parse_fields(text.encode())
        return
    if isinstance(wanted, dict):
        assert parse_fields(text.encode()).keys() == wanted.keys()
    else:
        with pytest.raises(Malformed, match=r"not an object|a JSON array"):
            parse_fields(text.encode())


@pytest.mark.parametrize(
    "line, reason",
    [
        (b'{"a\xff":1}', "invalid UTF-8"),
        (b'{"\\ud800":1}', "lone surrogate"),
        (b'{"x":NaN,"deep":' + b"[" * 100_000 + b"}", "nested too deeply"),
        (b'{"deep":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "nested too deeply"),
        (b'[{"text":"a"},{"text":"b"}]', "a JSON array"),
        (b'{"text":"a"}{"text":"b"}', "several JSON values on a line"),
        (b'{"text":"a"}\r{"text":"b"}\r', "several JSON values on a line"),
    ],
)
def test_the_reason_is_named(line: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        parse_fields(line)


@pytest.mark.parametrize(
    "raw, reason",
    [
        (b'"\\ud800"', "lone surrogate"),
        (b"null", "body is null"),
        (b"NaN", "body is not a string"),
        (b"[1]", "body is"),
    ],
)
def test_a_text_that_is_none_has_a_reason(raw: bytes, reason: str) -> None:
    with pytest.raises(Malformed, match=reason):
        decode_string(msgspec.Raw(raw), "body")


@given(st.dictionaries(st.sampled_from(["text", "x", "te xt"]), VALUES), st.booleans(), st.binary(max_size=2))
@example({"text": "\u00e9", "x": float("nan")}, False, b"")
@example({"text": "a"}, True, b"\xff")
def test_a_text_read_alone_is_the_field_or_left_to_the_reader_of_all_fields(
    record: dict, ascii: bool, end: bytes
) -> None:
    line = json.dumps(record, ensure_ascii=ascii).encode("utf-8", "surrogatepass") + end
    text = decode_text(line, "text")
    if text is not None:
        assert text == decode_string(parse_fields(line)["text"], "text")
    elif isinstance(record.get("text"), str) and not end and b"NaN" not in line and b"Infinity" not in line:
        with pytest.raises(Malformed):
            decode_string(parse_fields(line)["text"], "text")


def test_of_two_texts_of_a_line_the_last_one_counts_when_read_alone() -> None:
    assert decode_text(b'{"text":"a","x":1,"te\\u0078t":"b"}', "text") == "b"
    assert decode_text(b'{"text":"\xff"}', "text") is None
    assert decode_text(b'{"odd name":"a"}', "odd name") == "a"
