"""Halving and doubling; the rounds are in programs.collectives.halving_doubling."""

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program
from unisono_contrib.programs.collectives import halving_doubling


class HalvingDoubling(ProgramCollective):
    """Recursive halving and doubling: bytes of a ring in rounds of a tree; any number of ranks."""

    name = "halving_doubling"

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return halving_doubling.program(op, size, root, pieces)
