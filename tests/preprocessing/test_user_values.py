"""Raw JSON that a user's function sets is one value in one line, or is refused."""

import msgspec
import pytest

from preprocessing.user_values import record_line


def test_raw_json_is_written_in_one_line() -> None:
    raw = {"a": msgspec.Raw(b'{\n "b": 1.0\r\n}'), "c": msgspec.Raw(b"NaN"), "d": [msgspec.Raw(b" 2\n")]}
    line = record_line({"text": "x", **raw})
    assert line == b'{"text":"x","a":{  "b": 1.0  },"c":NaN,"d":[2]}\n'


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b'1}\n{"text":"injected"', "several JSON values"),
        (b'1,"text":"other"', "more than one value"),
        (b'1,"a":2', "more than one value"),
        (b"nonsense", "broken JSON"),
        (b"", "broken JSON"),
        (b'"a\nb"', "broken JSON"),
        (b"[" * 513 + b"]" * 513, "nested too deeply"),
    ],
)
def test_other_bytes_are_refused(raw: bytes, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        record_line({"text": "x", "a": msgspec.Raw(raw)})
    with pytest.raises(ValueError, match="JSON"):
        record_line({"text": "x", "a": [{"b": msgspec.Raw(raw)}]})
