"""What ranks print: every line of it comes, in pieces of any size; a bar that writes over itself costs next to nothing."""

import os
import socket
import time

from hypothesis import given
from hypothesis import strategies as st

from unisono.launch import wire
from unisono.launch.worker_handle import BAR_EVERY, LONGEST, OutputLines, WorkerHandle, line_pairs


@given(st.text("ab \r\n", max_size=60), st.integers(1, 9))
def test_lines_are_the_same_whatever_the_pieces(text: str, size: int) -> None:
    """As a terminal shows them at their ends. (States of a bar in between are not looked at: no time passes for one.)"""
    cut, data = OutputLines(_at=0.0), text.encode()
    got = [line for at in range(0, len(data), size) for line in cut.feed(data[at : at + size], 0.0)]
    got += cut.feed(b"", 0.0, last=True)
    wanted = [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")]
    assert got == (wanted if wanted[-1] else wanted[:-1])


def test_a_progress_bar_is_shown_now_and_then_and_kept_short() -> None:
    cut, shown = OutputLines(), list[str]()
    for number in range(20_000):  # ten a second
        shown += cut.feed(b"\r%5d of 20000 %s" % (number, b"#" * 60), number / 10)
        assert len(cut._rest) < 200
    shown += cut.feed(b"\r20000 of 20000\nnext\n", 2000.0)
    assert shown[-2:] == ["20000 of 20000", "next"]
    assert 2000 / (BAR_EVERY + 0.1) <= len(shown) - 2 <= 2000 / BAR_EVERY
    assert shown[0].startswith("    0 of") and all("\r" not in line for line in shown)


def test_what_has_no_end_is_shown_in_parts() -> None:
    cut = OutputLines()
    shown = [line for _ in range(1000) for line in cut.feed(b"x" * 8192, 0.0)] + cut.feed(b"", 0.0, last=True)
    assert sum(map(len, shown)) == 1000 * 8192 and max(map(len, shown)) <= LONGEST


def worker() -> tuple[WorkerHandle, list[int]]:
    ours, theirs = line_pairs()
    return WorkerHandle(1, *ours), theirs


def test_one_that_prints_without_end_is_heard_little_by_little() -> None:
    one, (_, _, writes) = worker()
    os.set_blocking(writes, False)
    sent = os.write(writes, b"y\n" * 20_000)
    first, more = one.read_output()
    assert more and 0 < len(first) < sent / 4
    rest, _ = one.read_output(last=True)
    assert len(first) + len(rest) == sent // 2


def test_what_a_rank_is_told_while_it_does_not_read_comes_later_and_whole() -> None:
    one, (_, events, _) = worker()
    for number in range(3000):
        one.tell("regroup", epoch=number, padding="x" * 200)
    assert one.send_words()  # more than the kernel holds
    frames, heard, until = wire.Frames(), list[int](), time.monotonic() + 20
    with socket.socket(fileno=events) as rank:
        rank.setblocking(False)
        while len(heard) < 3000 and time.monotonic() < until:
            heard += [wire.event(one)["epoch"] for one in frames.feed(rank.recv(1 << 16))]
            one.send_words()
    assert heard == [*range(3000)]
    one.tell("stop")  # it has gone
    assert not one.send_words()
