"""Puts the weights into huge pages of memory: 2 MiB each in place of 4 KiB.

A run reads all weights, and the CPU must look up the address of each page. A huge page replaces 512 look-ups. Figures: docs/decisions.md.
Linux collapses pages on request since version 6.1 (`MADV_COLLAPSE`, madvise(2)); elsewhere nothing happens.
"""

import contextlib
import ctypes
import logging
import mmap
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

log = logging.getLogger("attnserve")

PAGE, HUGE = 4096, 2 << 20
_FULL = 448  # pages of 512 that a huge page replaces at least: the others take memory that was not taken before
_COLLAPSE = 25  # MADV_COLLAPSE
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # parameters of mallopt(3)
_TOGETHER = 1 << 30  # bytes from which an allocation gets a mapping of its own, while models are opened
_USUAL = 32 << 20  # the same afterwards: the largest value that glibc itself chooses; it then keeps up to twice as much freed memory


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Allocate large blocks beside each other within the `with` block, and put the memory of this process into huge pages at its end."""
    c = _glibc()
    if c is None:
        yield
        return
    c.mallopt(_MMAP_THRESHOLD, _TOGETHER)
    try:
        yield
    finally:
        c.mallopt(_MMAP_THRESHOLD, _USUAL)
        c.mallopt(_TRIM_THRESHOLD, 2 * _USUAL)
    c.malloc_trim(0)
    log.info("memory is in huge pages", extra={"bytes": collapse(c)})


def collapse(c: ctypes.CDLL) -> int:
    """Put pages that this process uses into huge pages. Returns the bytes for which the system has done so."""
    done = 0
    with contextlib.suppress(OSError), Path("/proc/self/pagemap").open("rb", buffering=0) as pages:
        for begin, end in _writable(Path("/proc/self/maps").read_text(errors="replace")):
            pages.seek(begin // PAGE * 8)
            read = pages.read((end - begin) // PAGE * 8)
            if len(read) != (end - begin) // PAGE * 8:
                continue
            entries = np.frombuffer(read, np.uint64)  # pagemap(5): bit 63 says that a page is in memory
            in_memory = (entries >> np.uint64(63)).reshape(-1, HUGE // PAGE).sum(axis=1)
            for at in np.flatnonzero(in_memory >= _FULL).tolist():
                done += HUGE * (c.madvise(ctypes.c_void_p(begin + at * HUGE), ctypes.c_size_t(HUGE), _COLLAPSE) == 0)
    return done


def _writable(maps: str) -> Iterator[tuple[int, int]]:
    """Return the parts of the heap and of anonymous memory that huge pages can have, as (begin, end), from the text of proc_pid_maps(5)."""
    for line in maps.splitlines():
        addresses, rights, _, _, inode, *name = line.split()
        if rights == "rw-p" and inode == "0" and name in ([], ["[heap]"]):
            first, last = (int(address, 16) for address in addresses.split("-"))
            begin, end = -(-first // HUGE) * HUGE, last // HUGE * HUGE
            if begin < end:
                yield begin, end


def _glibc() -> ctypes.CDLL | None:
    """Return the C library, or None if this is not Linux with glibc and pages of 4 KiB."""
    if sys.platform != "linux" or mmap.PAGESIZE != PAGE:
        return None
    with contextlib.suppress(OSError, AttributeError):
        c = ctypes.CDLL(None)
        if c.gnu_get_libc_version and c.mallopt and c.malloc_trim and c.madvise:
            return c
    return None
