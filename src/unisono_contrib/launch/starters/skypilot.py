"""SkyPilot: one process a node of a cluster task."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import Environ, Started, Starter
from unisono_contrib.launch import nodes


class SkyPilot(Starter):
    """`SKYPILOT_NODE_RANK` and `SKYPILOT_NODE_IPS`: a node is a rank, if it has no more than one GPU."""

    name: ClassVar[str] = "skypilot"
    turn: ClassVar[int] = 45
    one_a_host: ClassVar[bool] = True

    def detect(self, environ: Environ) -> Started | None:
        place = nodes.skypilot(environ)
        return None if place is None else place.started()

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        ips = "\n".join(f"10.0.0.{number + 1}" for number in range(len(hosts)))
        return {"SKYPILOT_NODE_RANK": str(host), "SKYPILOT_NODE_IPS": ips, "SKYPILOT_NUM_GPUS_PER_NODE": "1"}
