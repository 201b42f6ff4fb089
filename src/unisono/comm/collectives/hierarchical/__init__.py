"""Inside hosts first, then between them; the rounds are in programs.collectives.hierarchical. Where each of several
hosts has equally many ranks, sums inside it are taken in memory: see `live`."""

from typing import TYPE_CHECKING

from pydantic import Field, PrivateAttr

from unisono.comm.collectives import Algorithm, ProgramCollective
from unisono.programs.collectives import Program, hierarchical

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Nodes = tuple[tuple[int, ...], ...]


class HierarchicalCollective(ProgramCollective):
    """Ranks of one host first, then hosts: what one has for the others crosses the slow links once."""

    name = "hierarchical"
    main = "node"

    node: int = Field(
        default=0, ge=0, description="ranks of each node, in their order; 0: those that are on one host"
    )
    _nodes: Nodes = PrivateAttr(())  # as they were found

    def program(self, op: str, size: int, root: int = 0, pieces: int = 1) -> Program:
        if self.node and size % self.node:
            raise ValueError(f"{size} ranks are no nodes of {self.node}")
        each = self.node or size
        nodes = self._nodes or tuple(tuple(range(at, at + each)) for at in range(0, size, each))
        return hierarchical.program(op, size, root, pieces, nodes)

    def bind(self, pg: "ProcessGroup", axis: str) -> Algorithm:
        from unisono.comm.collectives.hierarchical.live import on_hosts
        from unisono.comm.hosts import nodes_of

        if self.node:
            return super().bind(pg, axis)
        if (hosts := on_hosts(self, pg, axis)) is not None:
            return hosts
        bound = self.model_copy()
        bound._nodes = nodes_of(pg)
        return super(HierarchicalCollective, bound).bind(pg, axis)
