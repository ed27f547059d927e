"""Memory that is in use comes into huge pages; other memory is neither touched nor taken."""

import ctypes
import mmap
import platform
import sys

import pytest

from service.runtime import huge_pages
from service.runtime.huge_pages import HUGE, PAGE
from service.runtime.huge_pages import huge_pages as in_huge_pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has /proc/self/pagemap")

MAPS = """\
55d000000000-55d000900000 rw-p 00000000 00:00 0                          [heap]
7f0000100000-7f0000700000 rw-p 00000000 00:00 0
7f0001000000-7f0001100000 rw-p 00000000 00:00 0
7f0002000000-7f0002800000 r--p 00000000 00:00 0
7f0003000000-7f0003800000 rw-p 00000000 08:01 123                        /tmp/model.onnx.data
7ffc00000000-7ffc00800000 rw-p 00000000 00:00 0                          [stack]
"""


def test_the_heap_and_anonymous_memory_can_have_huge_pages() -> None:
    assert list(huge_pages._writable(MAPS)) == [(0x55D000000000, 0x55D000800000), (0x7F0000200000, 0x7F0000600000)]


def test_only_memory_that_is_nearly_all_in_use_is_collapsed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four huge pages of memory, of which the first and the last are in use."""
    with mmap.mmap(-1, 5 * HUGE) as memory:
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        begin = -(-start // HUGE) * HUGE
        for part in (0, 3):
            first = begin - start + part * HUGE
            for at in range(first, first + HUGE, PAGE):
                memory[at] = 1
        asked: list[tuple[int, int]] = []

        class C:
            @staticmethod
            def madvise(address: ctypes.c_void_p, size: ctypes.c_size_t, advice: int) -> int:
                assert (size.value, advice) == (HUGE, 25)
                asked.append((address.value or 0, size.value))
                return 0

        monkeypatch.setattr(huge_pages, "_writable", lambda maps: iter([(begin, begin + 4 * HUGE)]))
        assert huge_pages.collapse(C()) == 2 * HUGE  # type: ignore[arg-type]
        assert [(address - begin) // HUGE for address, _ in asked] == [0, 3]


@pytest.mark.skipif(tuple(map(int, platform.release().split(".")[:2])) < (6, 1), reason="MADV_COLLAPSE is in Linux since 6.1")
def test_this_system_collapses_pages() -> None:
    with mmap.mmap(-1, 3 * HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        memory[:] = bytes([7]) * len(memory)
        assert huge_pages.collapse(ctypes.CDLL(None)) >= 2 * HUGE
        assert memory[:] == bytes([7]) * len(memory)


def test_values_stay_the_same() -> None:
    with in_huge_pages():
        blocks = [bytes([number]) * (3 * HUGE // 2) for number in range(8)]
    assert [block[0] for block in blocks] == list(range(8))
    assert all(block == bytes([block[0]]) * len(block) for block in blocks)
