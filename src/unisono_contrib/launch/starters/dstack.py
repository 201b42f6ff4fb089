"""dstack: one process a node of a distributed task."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import Environ, Started, Starter
from unisono_contrib.launch import nodes


class Dstack(Starter):
    """`DSTACK_NODE_RANK` `DSTACK_NODES_NUM` `DSTACK_MASTER_NODE_IP`: a node is a rank, if it has at most one GPU."""

    name: ClassVar[str] = "dstack"
    turn: ClassVar[int] = 46
    one_a_host: ClassVar[bool] = True

    def detect(self, environ: Environ) -> Started | None:
        place = nodes.dstack(environ)
        return None if place is None else place.started()

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        numbers = {"DSTACK_NODE_RANK": host, "DSTACK_NODES_NUM": len(hosts), "DSTACK_GPUS_PER_NODE": 1}
        return {"DSTACK_MASTER_NODE_IP": "10.0.0.1", **{name: str(value) for name, value in numbers.items()}}
