"""Compiled kernels are kept on disk, and never used once anything that was compiled into them has changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numba as nb
import numpy as np
import pytest

from gristmill.kernels import Instruction, fingerprint, is_compiled, kernel, note_compilation, prefetch
from tests.patience import patience

ROOT = Path(__file__).resolve().parents[2]
HASH = """
import sys
import numpy as np
from dedup.minhash.xxh32 import xxh32
from gristmill.kernels import is_compiled
print(is_compiled(xxh32), xxh32(np.frombuffer(b"the mill grinds the grain", np.uint8), 0, 25))
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A copy of the packages, without compiled kernels, and without the import of all of dedup, which takes a while."""
    for name in ("gristmill", "dedup"):
        shutil.copytree(ROOT / name, tmp_path / "site" / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "site/dedup/__init__.py").write_text("")
    return tmp_path / "site"


def start(site: Path, code: str = HASH) -> subprocess.Popen[str]:
    environment = {**os.environ, "PYTHONPATH": str(site), "XDG_CACHE_HOME": str(site.parent / "user")}
    environment.pop("NUMBA_CACHE_DIR", None)
    return subprocess.Popen([sys.executable, "-c", code], env=environment, cwd=site, stdout=subprocess.PIPE, text=True)


def output(process: subprocess.Popen[str]) -> str:
    printed, _ = process.communicate(timeout=patience(120))
    assert process.returncode == 0
    return printed.strip()


def change(path: Path, old: str, new: str) -> None:
    """Change a source, keeping its time of modification, as a checkout or an archive may."""
    stat, source = path.stat(), path.read_text()
    assert old in source
    path.write_text(source.replace(old, new))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.thorough
def test_a_change_in_a_called_kernel_is_compiled(site: Path) -> None:
    both = [start(site), start(site)]  # at the same time, with nothing compiled
    first = {output(process).partition(" ")[2] for process in both}
    assert len(first) == 1
    kernels = site / "gristmill/__pycache__/kernels"
    files = sorted(kernels.iterdir())
    assert files and all(path.name.endswith(".kernel") for path in files)
    change(site / "dedup/minhash/message_words.py", "(_U(value) << _U(bits))", "(_U(value) << _U(bits + 0 + 1))")
    compiled, value = output(start(site)).split()
    assert compiled == "False" and {value} != first
    assert len(list(kernels.iterdir())) == len(files) and sorted(kernels.iterdir()) != files  # the old ones are gone
    for path in kernels.iterdir():
        path.write_bytes(path.read_bytes()[:100])  # as a crash may leave it
    assert output(start(site)) == f"True {value}"


def test_a_package_that_cannot_be_written_uses_the_users_cache(site: Path) -> None:
    """From there a kernel is read without what numba imports to compile, which takes a second."""
    (site / "gristmill/__pycache__").mkdir()
    (site / "gristmill/__pycache__/kernels").write_text("no folder can be made here")
    first = output(start(site)).split()
    assert first[0] == "False"
    assert output(start(site, HASH + "print('numba.np.linalg' in sys.modules)")) == f"True {first[1]}\nFalse"
    assert list((site.parent / "user").rglob("dedup.minhash.xxh32.xxh32-*.kernel"))


LIMIT, TABLE = 3, np.arange(4)


@kernel(inline="always")
def called(value):
    """Not a part of what is compiled."""
    return value + LIMIT + TABLE[1]


@kernel
def caller(value):
    return called(value) * 2


@kernel
def countdown(value):
    return countdown(value - 1) if value > 0 else 0


def test_a_fingerprint_depends_on_what_is_compiled_and_on_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    before = fingerprint(caller)
    assert fingerprint(caller) == before and fingerprint(countdown) != before
    called.py_func.__doc__ = "Another"
    assert fingerprint(caller) == before
    for name, value in [("LIMIT", 4), ("TABLE", np.arange(1, 5)), ("LIMIT", 3.0), ("LIMIT", np.int32(3))]:
        with monkeypatch.context() as changed:
            changed.setitem(globals(), name, value)
            assert fingerprint(caller) != before
    for options in ({"inline": "always", "fastmath": True}, {}):
        with monkeypatch.context() as changed:
            changed.setitem(globals(), "called", kernel(called.py_func, **options))
            assert fingerprint(caller) != before
    assert fingerprint(caller) == before


@kernel
def sum_of_rows(table, rows):
    for row in rows:
        prefetch(table, row)
    total = 0
    for row in rows:
        total += table[row, 0]
    return total


def test_a_kernel_prefetches_what_it_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match="prefetch is for kernels alone"):
        prefetch(np.arange(3), 0)
    table = np.arange(40).reshape(10, 4)[:, 1:]
    rows = np.array([7, 0, 9], np.int32)
    assert sum_of_rows(table, rows) == table[rows, 0].sum()
    compiled = nb.njit(sum_of_rows.py_func)
    assert compiled(table, rows) == table[rows, 0].sum()
    assert any("prefetch" in code for code in compiled.inspect_asm().values())
    before = fingerprint(sum_of_rows)
    monkeypatch.setitem(globals(), "prefetch", Instruction(lambda context, array, index: None))
    assert fingerprint(sum_of_rows) != before


def test_a_fingerprint_refuses_what_it_cannot_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "LIMIT", object())
    with pytest.raises(TypeError, match="a kernel uses <object"):
        fingerprint(caller)
    monkeypatch.setitem(globals(), "LIMIT", 3)
    assert not is_compiled(countdown)


def test_another_order_of_fields_is_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """numba's own types of the two have one name."""
    monkeypatch.setattr(nb.config, "CACHE_DIR", str(tmp_path))
    before, after = (NamedTuple("Pair", [(name, int) for name in names]) for names in ("ab", "ba"))
    assert kernel(first_field)(before(a=1, b=2)) == 1
    assert kernel(first_field)(after(a=1, b=2)) == 1
    assert is_compiled(kernel(first_field), before(1, 2))


def first_field(pair):
    return pair.a


def double(value):
    return value * 2


def test_a_note_is_printed_only_before_a_kernel_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nb.config, "CACHE_DIR", str(tmp_path))
    first, again = kernel(double), kernel(double)
    note_compilation(first, 3, seconds=7, quiet=True)
    assert capsys.readouterr().err == ""
    note_compilation(first, 3, seconds=7)
    assert "once per installation, about 7 s" in capsys.readouterr().err
    assert first(3) == 6
    note_compilation(again, 3, seconds=7)  # from the files: it has compiled nothing itself
    assert capsys.readouterr().err == ""
    note_compilation(again, 3.0, seconds=7)
    assert capsys.readouterr().err != ""
