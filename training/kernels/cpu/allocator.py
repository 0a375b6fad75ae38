"""CPU allocator: keep freed memory for the next step, in 2 MiB huge pages, by tuning glibc's malloc.

By default glibc returns the memory of every backward pass to the system and takes it again in the next step, with
a page fault per 4 KiB. For the smallest models those faults and the TLB misses of 4 KiB pages take 5 % of a
step.
"""

import ctypes
import os
import sys
from pathlib import Path

_BLOCK_BYTES = 16 << 20  # less than MMAP_THRESHOLD, so malloc takes it from the heap
_HUGE_PAGE_BYTES = 2 << 20
_MADV_HUGEPAGE = 14  # from mman.h
# mallopt(3) options: number in malloc.h, bytes
_OPTIONS = {
    # larger blocks are mapped one by one and unmapped when freed; this is glibc's maximum
    "MMAP_THRESHOLD": (-3, 2 * _BLOCK_BYTES),
    "TRIM_THRESHOLD": (-1, 1 << 30),  # free memory kept at the top of the heap
    "TOP_PAD": (-2, 512 << 20),  # address space by which the heap grows; pages are allocated when first written
}


def keep_freed_memory() -> None:
    """Tune malloc for this process; call it before large allocations.

    Does nothing if the C library is not glibc, or if MALLOC_TRIM_THRESHOLD_ or a similar variable is set.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "mallopt") or any(f"MALLOC_{name}_" in os.environ for name in _OPTIONS):
        return
    for number, value in _OPTIONS.values():
        libc.mallopt(number, value)
    libc.malloc.restype = ctypes.c_void_p
    libc.free(ctypes.c_void_p(libc.malloc(ctypes.c_size_t(_BLOCK_BYTES))))  # makes the heap grow by TOP_PAD now
    start, stop = _heap_range()
    start = -(-start // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    if start < stop:
        libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _MADV_HUGEPAGE)


def _heap_range() -> tuple[int, int]:
    """Start and stop address of the heap; (0, 0) if there is none."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("[heap]"):
            start, stop = line.split()[0].split("-")
            return int(start, 16), int(stop, 16)
    return 0, 0
