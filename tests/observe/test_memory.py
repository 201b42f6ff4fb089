"""What a process has of memory, in its own words and in those of its allocator."""

import mmap

import pytest

from unisono.observe.memory import heap, peak_rss_mib, rss_mib

PIECE = 48 << 20


def test_resident_memory_grows_with_what_is_touched() -> None:
    before = rss_mib()
    touched = mmap.mmap(-1, PIECE)  # pages of its own, never those of something that was freed
    touched.write(b"\x01" * PIECE)
    assert rss_mib() - before > 0.9 * PIECE / 2**20
    assert peak_rss_mib() >= rss_mib() - 1 and touched


def test_the_heap_says_what_is_used_and_what_is_free() -> None:
    before = heap()
    if not before:
        pytest.skip("the C library has no mallinfo2")
    used = lambda said: said["heap_used"] + said["mapped"]
    piece = bytearray(PIECE)
    during = heap()
    assert used(during) - used(before) >= PIECE
    del piece
    assert used(heap()) - used(before) < PIECE / 2
    assert 0 <= during["heap_top"] <= during["heap_free"] + 4096
