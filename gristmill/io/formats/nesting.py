"""Nesting of JSON: how deep arrays and objects may lie in one another, which no call stack decides."""

import re

import numpy as np

MAX_NESTING = 512  # levels, the record itself among them; parsers end at the interpreter's limit of 1,000 frames
_PIECE = 1 << 20  # brackets that are counted together
_STRINGS = re.compile(rb'"[^"]*"?')
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_OPENS = 2  # a bit that [ and { have, and ] and } have not


def is_too_deep(content: bytes, levels: int = MAX_NESTING) -> bool:
    """Whether arrays and objects lie more than `levels` deep in one another, in JSON or what should be.

    >>> is_too_deep(b"[" * 512 + b"]" * 512), is_too_deep(b"[" * 513), is_too_deep(b'"' + b"[" * 513 + b'"')
    (False, True, False)
    """
    if content.count(b"{") + content.count(b"[") <= levels:
        return False
    content = content.replace(rb"\\", b"").replace(rb"\"", b"")
    brackets = np.frombuffer(_STRINGS.sub(b"", content).translate(None, _NOT_BRACKETS), np.uint8)
    depth = 0
    for start in range(0, len(brackets), _PIECE):
        depths = depth + np.cumsum(np.where(brackets[start : start + _PIECE] & _OPENS, 1, -1))
        if depths.max() > levels:
            return True
        depth = int(depths[-1])
    return False
