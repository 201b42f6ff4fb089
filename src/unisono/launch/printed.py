"""What a rank prints, cut into lines, however it writes them. No torch."""

from dataclasses import dataclass, field

LONGEST = 1 << 20
"""Bytes after which a line that does not end is shown as one."""
BAR_EVERY = 1.0
"""Seconds between two states of a progress bar that are shown."""


@dataclass
class OutputLines:
    """Cuts what comes in pieces. A progress bar writes over its own line, by carriage returns: of it now and then the
    state of the time is shown, and at its end the last. What is kept in between has `LONGEST` bytes at most.

        OutputLines().feed(b"one\\n10 %\\r20 %\\r", now=0.0)   # ["one", "20 %"]
    """

    _rest: bytearray = field(default_factory=bytearray)
    _shown: bytes = b""
    _at: float = float("-inf")

    def feed(self, data: bytes, now: float, last: bool = False) -> list[str]:
        """Lines to show, after a piece more. now: seconds of a monotonic clock. last: nothing follows."""
        if not (last or b"\n" in data or b"\r" in data) and len(self._rest) + len(data) <= LONGEST:
            self._rest += data  # what came before is not looked at again
            return []
        *whole, rest = bytes(self._rest + data).split(b"\n")
        lines = list[bytes]()
        for line in whole:
            lines += self._ended(_over(line))
        bar, self._rest = b"\r" in rest, bytearray(_kept(rest))
        if last and self._rest.strip(b"\r"):
            lines += self._ended(_over(bytes(self._rest)))
            self._rest.clear()
        elif bar and now - self._at >= BAR_EVERY and (state := _over(rest)):
            self._at, self._shown = now, state
            lines.append(state)
        while len(self._rest) > LONGEST:
            lines.append(bytes(self._rest[:LONGEST]))
            del self._rest[:LONGEST]
        return [line.decode(errors="replace") for line in lines]

    def _ended(self, line: bytes) -> list[bytes]:
        """The line, but for a state of a bar that was shown as it is."""
        shown, self._shown = self._shown, b""
        return [] if shown and line == shown else [line]


def _over(line: bytes) -> bytes:
    """What a terminal would show of a line in which some is written over."""
    return line.rstrip(b"\r").rpartition(b"\r")[2]


def _kept(rest: bytes) -> bytes:
    """Of a line that has not ended, what may still be shown: what was written over is not."""
    state = rest.rstrip(b"\r")
    return state[state.rfind(b"\r") + 1 :] + rest[len(state) :][:1]
