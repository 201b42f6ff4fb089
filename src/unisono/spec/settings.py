"""How a command is to answer, as the command line was told."""

import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import TextIO

from unisono.spec.errors import UsageError


def tell(text: str, stream: TextIO | None = None) -> None:
    """A line of progress, on stderr unless said otherwise. Where the terminal or the reader has gone, there are no
    lines any more; the run goes on.

    Text and end of line are one write: ranks that share a stream write between two."""
    out: TextIO = sys.stderr if stream is None else stream
    try:
        out.write(f"{text}\n")
        out.flush()
    except OSError:
        silence(out)


def answer(text: str) -> None:
    """Data, on stdout. Raises BrokenPipeError where the reader has left, UsageError E02 where it finds no room."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        raise
    except OSError as error:
        silence(sys.stdout)
        what = f"cannot write the answer: {error.strerror or error}"
        fix = "another file or disk behind the >"
        raise UsageError(what, where="standard output", fix=fix, code="E02") from error


def silence(stream: TextIO) -> None:
    """From now on what is written there goes nowhere, also what waits in its buffer."""
    with suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)
        stream.flush()


def open_streams() -> None:
    """A stream that the shell has closed (`>&-`) leads to /dev/null: else the next file or socket would take its
    number, and be written to as if it were the screen."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115


@dataclass(frozen=True, slots=True)
class Settings:
    """json: stdout belongs to one object. quiet: no progress. color: progress may be coloured. dry_run: say what would
    run, and run nothing. command: the words of the command line, as a shell would take them. is_program: this process
    is that command alone; nobody's program called it."""

    json: bool = False
    quiet: bool = False
    color: bool = False
    dry_run: bool = False
    command: str = ""
    is_program: bool = False

    def say(self, text: str = "") -> None:
        """Data for people, on stdout; none with `json`."""
        if not self.json:
            answer(text)

    def note(self, text: str) -> None:
        """A line of progress, on stderr; none with `quiet`."""
        if not self.quiet:
            tell(text)
