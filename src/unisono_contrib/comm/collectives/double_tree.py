"""Two trees of messages; the rounds are in programs.collectives.double_tree."""

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program
from unisono_contrib.programs.collectives import double_tree


class DoubleTreeCollective(ProgramCollective):
    """Two binary trees, each for half of the tensor, in pieces: few rounds for many ranks."""

    name = "double_tree"

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return double_tree.program(op, size, root, pieces)
