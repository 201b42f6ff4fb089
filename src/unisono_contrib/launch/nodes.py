"""Schedulers that start one process a node, and say which node that is: Kubernetes, Kubeflow, SkyPilot, dstack. No
torch."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from unisono.launch.starters import PORT, Environ, Started, number, required
from unisono.spec.errors import UsageError


@dataclass(frozen=True, slots=True)
class NodePlace:
    """A node among others. source: the scheduler. ranks: of each node, as far as the scheduler says (GPUs); else 0.
    master, port: where ranks meet, "" where the scheduler does not say it."""

    source: str
    node: int
    nodes: int
    ranks: int = 0
    master: str = ""
    port: int = PORT

    def started(self) -> Started | None:
        """The one rank of this node; None where there is no other node, as it may start as many as it likes. Raises
        UsageError L02 where each node has several GPUs, which one process cannot use."""
        if self.nodes == 1:
            return None
        if self.ranks > 1:
            raise UsageError(
                f"{self.source} has started one process on each of {self.nodes} nodes, which have {self.ranks} GPUs",
                where="process environment",
                fix="python -m unisono_contrib.launch.node -- unisono train FILE, on each node; or torchrun",
                code="L02",
            )
        return Started(self.source, self.node, self.nodes, 0, 1, self.master, self.port)


def skypilot(environ: Environ) -> NodePlace | None:
    """`SKYPILOT_NODE_RANK`, `SKYPILOT_NODE_IPS` (one a line, the head first), `SKYPILOT_NUM_GPUS_PER_NODE`."""
    if "SKYPILOT_NODE_RANK" not in environ:
        return None
    required(environ, ["SKYPILOT_NODE_RANK", "SKYPILOT_NODE_IPS"], "SkyPilot")
    hosts = environ["SKYPILOT_NODE_IPS"].split()
    gpus = number(environ, "SKYPILOT_NUM_GPUS_PER_NODE", default=0)
    node, port = number(environ, "SKYPILOT_NODE_RANK"), number(environ, "MASTER_PORT", default=PORT)
    return NodePlace("SkyPilot", node, len(hosts), gpus, hosts[0], port)


def dstack(environ: Environ) -> NodePlace | None:
    """`DSTACK_NODE_RANK`, `DSTACK_NODES_NUM`, `DSTACK_MASTER_NODE_IP`, `DSTACK_GPUS_PER_NODE`."""
    if "DSTACK_NODE_RANK" not in environ:
        return None
    required(environ, ["DSTACK_NODE_RANK", "DSTACK_NODES_NUM", "DSTACK_MASTER_NODE_IP"], "dstack")
    return NodePlace(
        "dstack", number(environ, "DSTACK_NODE_RANK"), number(environ, "DSTACK_NODES_NUM"),
        number(environ, "DSTACK_GPUS_PER_NODE", default=0), environ["DSTACK_MASTER_NODE_IP"],
        number(environ, "MASTER_PORT", default=PORT),
    )  # fmt: skip


def kubeflow(environ: Environ) -> NodePlace | None:
    """`PET_*`, torchrun's own options as variables, as Kubeflow's operators leave them."""
    names = ["PET_NODE_RANK", "PET_NNODES", "PET_MASTER_ADDR"]
    if "PET_NODE_RANK" not in environ and "PET_NNODES" not in environ:
        return None
    required(environ, names, "Kubeflow")
    each = environ.get("PET_NPROC_PER_NODE", "")
    return NodePlace(
        "Kubeflow", number(environ, "PET_NODE_RANK"), number(environ, "PET_NNODES"),
        int(each) if each.isdigit() else 0, environ["PET_MASTER_ADDR"],
        number(environ, "PET_MASTER_PORT", default=PORT),
    )  # fmt: skip


def indexed(environ: Environ) -> NodePlace | None:
    """`JOB_COMPLETION_INDEX` of an Indexed Job on Kubernetes, which does not say how many nodes there are."""
    if "JOB_COMPLETION_INDEX" not in environ:
        return None
    return NodePlace("Kubernetes", number(environ, "JOB_COMPLETION_INDEX"), 0)


KNOWN: Sequence[Callable[[Environ], NodePlace | None]] = (kubeflow, indexed, skypilot, dstack)


def node_in(environ: Environ) -> NodePlace | None:
    """The node that `environ` describes. Raises UsageError L02 for a set that is there in part."""
    return next((place for read in KNOWN if (place := read(environ)) is not None), None)
