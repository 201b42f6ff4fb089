"""What a person sees of a run on standard error: a live table on a terminal, now and then a line elsewhere. No torch.

`table` (rich) is loaded when the first thing is to be drawn: until then the ranks' own import has the machine.
"""

import importlib
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self, TextIO

from unisono.launch.board import Board
from unisono.launch.run.verdict import listed
from unisono.spec.settings import silence, tell

PLAIN_EVERY = 10.0
"""Seconds between lines where there is no terminal."""
DRAW_EVERY = 0.125
"""Seconds between drawings of the table."""
NARROW = 60
"""Columns below which the table would be cut to nothing, so that there are lines instead."""


def changed(event: Mapping[str, Any]) -> str:
    """A change of a run's ranks, for a person: who was lost, or that all have met again."""
    if "met" in event:
        return f"all ranks have met again, after step {event['met']}"
    if event.get("why"):
        several = "s" * (event["ranks"] != 1)
        return f"going on with {event['ranks']} rank{several} under {event['plan']}: {event['why']}"
    who = {lost: "the fork server" if lost == "helper" else f"rank {lost}" for lost in event["lost"]}
    lost = "; ".join(f"{who[rank]} was lost ({how})" for rank, how in event["lost"].items())
    new = f"new processes for {listed(event['born'])}" if event["born"] else "no process is new"
    return f"{lost or 'ranks lost each other'}: {new}"


def words_of(event: Mapping[str, Any]) -> str:
    """What an event says to people in words; "" of one that says nothing, such as a step."""
    match event["kind"]:
        case "output" | "note":
            return event["text"]
        case "members":
            return changed(event)
        case "host":
            came = event.get("came")
            return (
                f"host {came} has come, with room for {event['room']}"
                if came
                else f"host {event['gone']} is gone"
            )
        case "stopping":
            return "stopping after this step, then saving"
    return ""


class Screen:
    """Hears the events of a run (`event`) and shows them.

    Live on a terminal with colour; else plain lines, at most one per ten seconds, the first and the last always;
    with `quiet`, only what ranks print, what goes wrong, and the answer to Ctrl-C.
    """

    def __init__(
        self,
        ranks: int,
        steps: int,
        title: str = "",
        quiet: bool = False,
        color: bool = True,
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
        unit: str = "tokens",
    ) -> None:
        self.board = Board(steps, unit)
        self._ranks, self._title, self._quiet = ranks, title, quiet
        self._stream = stream or sys.stderr
        self._clock = clock
        self._wants_table = color and not quiet and self._stream.isatty()
        self._console: Any = None
        self._live: Any = None
        self._shown_at: float | None = None
        self._shown_step = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None:
        """Leave the last state on the screen."""
        if self._live is not None:
            self._draw()
            self._live.stop()
        elif not self._quiet and self.board.step != self._shown_step and self.board.step:
            self.say(self.board.line())

    def event(self, rank: int, event: dict[str, Any]) -> None:
        """An `on_event` for ForkServer.run and env.run_in_env."""
        match event["kind"]:
            case "output":
                self.say(f"rank {rank} | {event['text']}" if self._ranks > 1 else event["text"])
            case "note":
                self._note(event["text"] + (f" (rank {rank})" if rank >= 0 else ""))
            case "stopping":
                how = " (Ctrl-C again: stop now)" if event["how"] == "interrupt" else ""
                self.say(f"{words_of(event)}{how}")
            case "host" | "members":
                self._note(words_of(event))
            case "imported":
                self.board.expect(self._ranks)
                if event["threads"] > 1:
                    self._note(f"the program's import started {event['threads'] - 1} threads; forks may hang")
                self._show(news=False)
            case _:
                self.board.hear(rank, event, self._clock())
                self._show(news=event["kind"] == "step" and rank == self.board.speaker(),
                           at_once=event["kind"] == "doing")  # fmt: skip

    def _note(self, text: str) -> None:
        if not self._quiet:
            self.say(f"note  {text}")

    def say(self, line: str) -> None:
        """One line, above the table where there is one."""
        if self._live is not None:
            self._console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            tell(line, self._stream)

    def _show(self, news: bool, at_once: bool = False) -> None:
        if self._quiet:
            return
        if self._wants_table:
            now = self._clock()
            if at_once or self._shown_at is None or now - self._shown_at >= DRAW_EVERY:
                self._draw()
        elif news:
            self._plain()

    def _plain(self) -> None:
        board, now = self.board, self._clock()
        if board.step == self._shown_step:
            return
        first = self._shown_at is None
        if first or now - (self._shown_at or 0.0) >= PLAIN_EVERY or board.step >= board.steps:
            self._shown_at, self._shown_step = now, board.step
            self.say(board.line())

    def _draw(self) -> None:
        table = importlib.import_module("unisono.launch.table")
        if self._live is None:
            self._console = table.Console(file=self._stream)
            if self._console.is_dumb_terminal or self._console.width < NARROW:
                self._wants_table = False
                return
            self._live = table.live(self._console)
            self._live.start()
        self._shown_at = self._clock()
        try:
            self._live.update(table.draw(self.board, self._title), refresh=True)
        except OSError:  # the terminal has gone: the run has not
            self._live, self._wants_table = None, False
            silence(self._stream)
