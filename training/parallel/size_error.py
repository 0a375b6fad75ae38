"""SizeError: a size of a layout that its model cannot have, with the sizes that could take its place."""

from collections.abc import Sequence

from gristmill.errors import UsageError


class SizeError(UsageError):
    """Fault of an option of [parallel]; `Layout.resolve` adds which of `sizes` passes all checks."""

    def __init__(self, fault: str, option: str, sizes: Sequence[int], other: str = "") -> None:
        """`sizes` that the fault allows, the best first. `other`: an option that mends it, too, as it is typed."""
        super().__init__(fault)
        self.fault = fault
        self.option = option
        self.sizes = sizes
        self.other = other


def require_size(condition: bool, fault: str, option: str, sizes: Sequence[int], other: str = "") -> None:
    """Raise SizeError unless `condition` holds."""
    if not condition:
        raise SizeError(fault, option, sizes, other)
