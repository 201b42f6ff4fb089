"""Rings of messages; the rounds are in programs.collectives.ring."""

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program, ring


class RingCollective(ProgramCollective):
    """Every rank sends to the next one: the fewest bytes, and as many rounds as ranks."""

    name = "ring"

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return ring.program(op, size, root, pieces)
