"""What a person sees: a board gathered from events, drawn as a table or as few plain lines."""

import io
import math

import pytest
from rich.console import Console

from unisono.launch import table
from unisono.launch.board import Board, shares, sparkline
from unisono.launch.screen import PLAIN_EVERY, Screen


def step(number: int, wait: float = 0.0, **more: object) -> dict:
    times = {"forward": 0.04, "backward": 0.04, "comm_exposed": 0.02, "comm_hidden": 9.0, "wait": wait}
    return {
        "kind": "step", "step": number, "steps": 40, "loss": 5.0 - number / 10, "tokens_per_s": 28900.0,
        "ms": 139.0, "times": times, "mem_mib": 307.2, "stage": 0, **more,
    }  # fmt: skip


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_shares_leave_hidden_communication_out() -> None:
    assert shares({"forward": 1.0, "backward": 2.0, "comm_exposed": 1.0, "comm_hidden": 50.0}) == (
        0.75,
        0.25,
        0.0,
    )
    assert shares({}) == (0.0, 0.0, 0.0)


def test_the_rank_that_waits_least_is_the_one_others_wait_for() -> None:
    board = Board(40)
    for rank in range(4):
        board.hear(rank, step(1, wait=0.01 if rank == 2 else 0.1), 0.0)
    assert board.awaited() == 2
    for rank in range(4):
        board.hear(rank, step(2, wait=0.05), 0.0)
    assert board.awaited() is None


def test_time_left_follows_the_pace_after_the_first_step() -> None:
    board = Board(40)
    board.hear(0, {"kind": "start"}, 0.0)
    board.hear(0, step(1), 50.0)  # the first step is not the pace
    assert board.seconds_left() is None
    board.hear(0, step(11), 60.0)
    assert board.seconds_left() == pytest.approx(29.0)


def test_few_plain_lines_the_first_and_the_last_always() -> None:
    stream, clock = io.StringIO(), Clock()
    with Screen(2, 40, stream=stream, clock=clock) as screen:
        for rank in range(2):
            screen.event(rank, {"kind": "start"})
        for number in range(1, 38):
            clock.now += PLAIN_EVERY / 10
            for rank in (1, 0):
                screen.event(rank, step(number))
        screen.event(0, {"kind": "saved", "path": "checkpoints/step-37"})
    lines = stream.getvalue().splitlines()
    assert [line.split()[1] for line in lines] == ["1/40", "11/40", "21/40", "31/40", "37/40"]
    assert "28.9k tokens/s" in lines[1] and "loss 1.3" in lines[-1] and "checkpoints/step-37" in lines[-1]


def test_quiet_shows_only_what_ranks_print() -> None:
    stream = io.StringIO()
    with Screen(2, 2, quiet=True, stream=stream) as screen:
        screen.event(0, {"kind": "note", "text": "collective: engine, as asked for"})
        screen.event(-1, {"kind": "imported", "threads": 2})
        screen.event(0, step(1))
        screen.event(1, {"kind": "output", "text": "[red]hello"})
    assert stream.getvalue() == "rank 1 | [red]hello\n"


def test_ctrl_c_is_answered_in_one_line() -> None:
    stream = io.StringIO()
    Screen(2, 2, stream=stream).event(-1, {"kind": "stopping", "how": "interrupt"})
    assert stream.getvalue() == "stopping after this step, then saving (Ctrl-C again: stop now)\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, clock = Terminal(), Clock()
    with Screen(2, 40, title="demo", stream=stream, clock=clock) as screen:
        screen.event(0, {"kind": "start"})
        for rank in range(2):
            clock.now += 1.0
            screen.event(rank, step(7, wait=0.1 * rank))
        screen.event(1, {"kind": "output", "text": "[b]words of a rank"})
    text = stream.getvalue()
    assert "others wait" in text and "[b]words of a rank" in text and "307 MiB" in text


def test_a_validation_is_shown_from_its_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may take longer than many steps, in which the bar stands still."""
    monkeypatch.setenv("TERM", "xterm-256color")
    stream, clock = Terminal(), Clock()
    with Screen(1, 40, title="demo", stream=stream, clock=clock) as screen:
        clock.now += 1.0
        screen.event(0, step(7))
        screen.event(0, {"kind": "doing", "text": "validating, 20 batches"})
        assert "validating, 20 batches" in stream.getvalue()
        screen.event(0, {"kind": "val", "step": 7, "loss": 1.5})
        assert not screen.board.doing


def test_what_a_policy_says_of_its_replicas_stands_in_the_line_and_above_the_table() -> None:
    board = Board(40)
    board.hear(0, step(1, instruments={"staleness": 1.5, "idle_share": 0.25}), 0.0)
    board.hear(0, step(2, instruments={"staleness": 2.0}), 1.0)
    board.hear(0, step(3), 2.0)
    assert "staleness 2   idle share 25 %" in board.line()
    console = Console(file=io.StringIO(), width=200)
    console.print(table.draw(board, "demo"))
    assert "staleness 2   idle share 25 %" in console.file.getvalue()  # type: ignore[attr-defined]


def test_large_worlds_are_cut_but_the_slow_rank_stays() -> None:
    board = Board(40)
    for rank in range(100):
        board.hear(rank, step(1, wait=0.0 if rank == 77 else 0.1), 0.0)
    console = Console(file=io.StringIO(), width=120)
    console.print(table.draw(board, "demo"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert " 77 " in text and " 76 " not in text and "68 more ranks" in text


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([3.0]) == "▁"
    assert sparkline([2.0, 1.0]) == "█▁"
    assert sparkline([1.0, math.nan, 2.0]) == "▁x█"
    assert sparkline([math.inf]) == "x"
    assert len(sparkline(list(range(1000)), 24)) == 24
