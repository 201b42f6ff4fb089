"""Messages from each to each; the rounds are in programs.collectives.direct."""

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program, direct


class DirectCollective(ProgramCollective):
    """Everybody sends to everybody at once: one round, two for a sum."""

    name = "direct"

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return direct.program(op, size, root, pieces)
