"""The wire between hosts: what leaves a host of ranks, and for how long that occupies its way out."""

from typing import Annotated

from unisono.planner.machines.cluster import Cluster
from unisono.planner.source import Source

_FRAME = Source(
    "specification", "of 1,538 bytes of an Ethernet frame on a wire, IP and TCP with time stamps leave 1,448"
)
PAYLOAD: Annotated[float, _FRAME] = 1448 / 1538


def way_out(cluster: Cluster) -> float:
    """Payload bytes a second of a host's way out, where there is more than one host; else 0."""
    if len(cluster.links) < 2:
        return 0.0
    return cluster.links[-1].bandwidth * PAYLOAD * cluster.links[0].size


def crosses(cluster: Cluster, apart: int, ranks: int) -> bool:
    """Whether a group of so many ranks, `apart` from each other, lies on more than one host."""
    return bool(way_out(cluster)) and ranks > 1 and apart * ranks > cluster.links[0].size


def on_wire(cluster: Cluster, op: str, apart: int, ranks: int, nbytes: float) -> float:
    """Seconds on the way out of a host for one collective, while the other groups of the same axis do theirs."""
    moved = leaving(cluster, op, apart, ranks, nbytes)
    return moved / way_out(cluster) + cluster.links[-1].latency if moved else 0.0


def leaving(cluster: Cluster, op: str, apart: int, ranks: int, nbytes: float) -> float:
    """Bytes on the way out of a host for the collectives of all groups of an axis."""
    if not crosses(cluster, apart, ranks):
        return 0.0
    node = cluster.links[0].size
    here = max(1, node // apart)  # members of a group on one host
    groups = min(node, apart)  # of that axis which go through the same way out
    if op == "all_reduce":
        sent = 2.0 * (ranks - 1) / ranks * nbytes
    elif op == "all_gather":
        sent = (ranks - 1) / ranks * nbytes
    else:  # an exchange of parts: every member sends a part to each one outside
        sent = here * (ranks - here) / ranks * nbytes
    return groups * sent


def between(cluster: Cluster, each: int, row: int, other: int) -> float:
    """1.0 where the ranks of two rows are on two hosts."""
    node = cluster.links[0].size if cluster.links else 1
    return float(bool(way_out(cluster)) and row * each // node != other * each // node)
