"""Memory that one step frees is kept for the next one, in pages of 2 MiB: glibc's allocator, told so.

Left alone it gives what it can back to the system after every backward pass, and takes it again in the next
step: a page fault and 4 KiB of zeros at a time. On the smallest models that and the misses of an address
table of 4 KiB pages are a twentieth of a step.
"""

import ctypes
import os
import sys
from pathlib import Path

_BLOCK = 16 << 20
_PAGE = 2 << 20
_MADV_HUGEPAGE = 14  # as mman.h has it
# By their names in mallopt(3): their numbers in malloc.h, and bytes
_OPTIONS = {
    "MMAP_THRESHOLD": (-3, 2 * _BLOCK),  # a larger block is mapped, and given back, by itself: glibc's upper limit
    "TRIM_THRESHOLD": (-1, 1 << 30),  # what is kept free at the end of the heap, at most
    "TOP_PAD": (-2, 512 << 20),  # of addresses by which it grows: memory is taken where they are written to
}


def keep_freed_memory() -> None:
    """To be called before much is allocated.

    Does nothing where the C library is not glibc, or its own environment variables (MALLOC_TRIM_THRESHOLD_
    and the like) say what is wanted.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt") or any(f"MALLOC_{name}_" in os.environ for name in _OPTIONS):
        return
    for number, value in _OPTIONS.values():
        libc.mallopt(number, value)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(_BLOCK))))  # so that it grows now
    start, stop = _heap()
    start = -(-start // _PAGE) * _PAGE
    if start < stop:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def _heap() -> tuple[int, int]:
    """The addresses between which it lies; (0, 0) where it is not one."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, stop = line.split()[0].split("-")
            return int(start, 16), int(stop, 16)
    return 0, 0
