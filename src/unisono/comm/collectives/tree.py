"""A binomial tree of messages; the rounds are in programs.collectives.tree."""

from unisono.comm.collectives import ProgramCollective
from unisono.programs.collectives import Program, tree


class TreeCollective(ProgramCollective):
    """A binomial tree of messages: the fewest rounds, whole tensors in each; for small ones."""

    name = "tree"

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        return tree.program(op, size, root, pieces)
