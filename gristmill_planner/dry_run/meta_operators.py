"""Meta operators: torch's operators on the meta device, each computed once for the same kinds of inputs."""

from collections.abc import Hashable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor


class _Kind(NamedTuple):
    """All that there is of a tensor on the meta device."""

    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype


class MetaOperators:
    """Calls operators, and remembers what those returned that make new tensors.

    torch takes 0.1 to 5 ms for the shapes of one, and the thousands of micro-batches of a step have the same.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What `func` returns."""
        if not _makes_tensors(func):
            return func(*args, **kwargs)
        key = func, *map(_describe, args), *((name, _describe(value)) for name, value in kwargs.items())
        if key not in self._known:
            self._known[key] = _describe(func(*args, **kwargs))
        return _make(self._known[key])


@cache
def _makes_tensors(func: Any) -> bool:
    """True if no output is a view of an input, and no input is written to."""
    schema, is_mathematical = func._schema, func.namespace == "aten"
    return is_mathematical and not schema.is_mutable and not any(output.alias_info for output in schema.returns)


def _describe(value: Any) -> Any:
    """An argument or a result without its tensors; numbers with their type, as 1 and 1.0 are equal."""
    if isinstance(value, Tensor):
        assert value.is_meta, "a step on the meta device has a tensor with values"
        return _Kind(value.shape, value.stride(), value.dtype)
    if isinstance(value, (list, tuple)):
        return tuple(map(_describe, value))
    return type(value), value


def _make(described: Any) -> Any:
    if isinstance(described, _Kind):
        return torch.empty_strided(described.shape, described.stride, dtype=described.dtype, device="meta")
    if described and isinstance(described[0], type):
        return described[1]
    return tuple(map(_make, described))
