"""A grid of rings; the rounds are in programs.collectives.torus."""

from pydantic import Field

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program
from unisono_contrib.programs.collectives import torus


class TorusCollective(ProgramCollective):
    """Rings along rows and columns of a grid of ranks: fewer rounds than one long ring."""

    name = "torus"
    main = "rows"

    rows: int = Field(0, ge=0, description="rows of the grid; 0: as near to a square as there is")

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return torus.program(op, size, root, pieces, self.rows)
