"""What a program takes on a network: an event simulation with a latency and a rate for each pair of ranks.

A rank has one way out and one way in, which work side by side; each carries one message after the other. A message
leaves when both its ranks have come to its round.
"""

from collections.abc import Callable
from typing import NamedTuple

from unisono.programs.collectives import Move, Program


class Hop(NamedTuple):
    """Between two ranks. latency: seconds until the first byte is there. rate: bytes/s of one rank's way."""

    latency: float
    rate: float


class Passed(NamedTuple):
    """A move on the time axis, in seconds."""

    round: int
    move: Move
    start: float
    stop: float


Topology = Callable[[int, int], Hop]


def alike(latency: float, rate: float) -> Topology:
    """A network in which all pairs are alike."""
    return lambda source, to: Hop(latency, rate)


def play(program: Program, nbytes: float, topology: Topology) -> list[Passed]:
    """Every move of a whole vector of `nbytes` bytes, in the order of the program."""
    at = [0.0] * program.size  # when each rank has come to the round
    out, into = [0.0] * program.size, [0.0] * program.size  # when its ways are free again
    share = nbytes * (program.size if program.op == "all_to_all" else 1) / program.chunks
    passed: list[Passed] = []
    for number, moves in enumerate(program.rounds):
        over = list(at)
        for move in moves:
            hop = topology(move.source, move.to)
            busy = len(move.chunks) * share / hop.rate
            start = max(at[move.source], at[move.to], out[move.source], into[move.to])
            out[move.source] = into[move.to] = start + busy
            stop = start + hop.latency + busy
            over[move.source], over[move.to] = max(over[move.source], stop), max(over[move.to], stop)
            passed.append(Passed(number, move, start, stop))
        at = over
    return passed


def seconds(program: Program, nbytes: float, topology: Topology) -> float:
    """Until the last rank is done."""
    return max((piece.stop for piece in play(program, nbytes, topology)), default=0.0)
