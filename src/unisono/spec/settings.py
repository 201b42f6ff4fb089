"""How a command is to answer, as the command line was told."""

import sys
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """json: stdout belongs to one object. quiet: no progress. color: progress may be coloured. dry_run: say what would
    run, and run nothing. command: the words of the command line, as a shell would take them."""

    json: bool = False
    quiet: bool = False
    color: bool = False
    dry_run: bool = False
    command: str = ""

    def say(self, text: str = "") -> None:
        """Data for people, on stdout; none with `json`."""
        if not self.json:
            print(text, flush=True)

    def note(self, text: str) -> None:
        """A line of progress, on stderr; none with `quiet`."""
        if not self.quiet:
            print(text, file=sys.stderr, flush=True)
