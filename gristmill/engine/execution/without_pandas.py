"""pyarrow without pandas, which it imports with the first value that it converts, where that is installed."""

import sys
from importlib.abc import MetaPathFinder


class _NoPandas(MetaPathFinder):
    """Finds no pandas, and leaves all else to others."""

    def find_spec(self, fullname: str, *_: object) -> None:
        """Raise ModuleNotFoundError for pandas."""
        if fullname == "pandas":
            raise ModuleNotFoundError("pyarrow does without it", name=fullname)


def leave_pandas_out() -> None:
    """Have pyarrow do without pandas in this process, unless that is imported already: it takes a third of a second.

    Values of pandas' own types are then strange to pyarrow: this is for commands that run users' functions in workers.
    """
    if "pandas" in sys.modules:
        return
    import pyarrow  # here: commands without stages need none, and have this module

    finder = _NoPandas()
    sys.meta_path.insert(0, finder)
    try:
        pyarrow.scalar(0)
    finally:
        sys.meta_path.remove(finder)
