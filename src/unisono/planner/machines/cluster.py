"""Where a run is spread: devices and links, as data. Every constant says where it comes from.

Units: FLOP/s, bytes, bytes per second in one direction, seconds, currency per device-hour.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import log
from typing import Literal

from unisono.planner.machines.order import USUAL, Order
from unisono.planner.source import Source

Topology = Literal["switched", "rail-only", "ring", "torus2d", "torus3d"]
TOPOLOGIES: tuple[Topology, ...] = ("switched", "rail-only", "ring", "torus2d", "torus3d")
DTYPES = ("fp8", "bf16", "fp16", "fp32", "fp64")  # the narrower first


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator (or host) as the price of a plan needs it.

    peak: dense FLOP/s by dtype. memory: bytes. bandwidth: of that memory, bytes/s. reserved: bytes that are gone
    before the first tensor (context, collectives' buffers). products, attention: share of their peak that large
    products, and fused attention, keep up for hours under the power limit, over the share that an A100 keeps up; 1
    where that is not known. units: multiprocessors that share out a product's tiles; 0 where that is not
    known, and no rounding up to full waves is charged. host: bytes/s of one device from and to its host's memory, each
    way at once; 0 where that is not known.
    """

    name: str
    peak: Mapping[str, float]
    memory: float
    bandwidth: float
    reserved: float = 0.0
    products: float = 1.0
    attention: float = 1.0
    units: int = 0
    host: float = 0.0
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)

    @property
    def room(self) -> float:
        """Bytes that a rank may allocate."""
        return self.memory - self.reserved

    def flops(self, dtype: str) -> float:
        """Peak of a dtype. Where the device has no such rate it computes in the next wider dtype that it has."""
        if dtype in self.peak:
            return self.peak[dtype]
        twin = {"bf16": "fp16", "fp16": "bf16"}.get(dtype, "")
        if twin in self.peak:
            return self.peak[twin]
        wider = [d for d in DTYPES[DTYPES.index(dtype) :] if d in self.peak] if dtype in DTYPES else []
        return self.peak[wider[0]] if wider else min(self.peak.values())


@dataclass(frozen=True, slots=True)
class Link:
    """One level of the network, the innermost first.

    size: devices that this level connects, the inner levels' included. bandwidth: bytes/s of one device in one
    direction. latency: seconds of one message. ceiling: bytes/s that a collective's bus reaches at most, as
    measured; `bandwidth` where that is not known. groups: (members, bytes/s), ascending, where the bus was measured for
    several sizes of a group. oversubscription: how much less than the sum of its ports the level carries when all talk
    at once.

    topology: switched, any pair at full rate; rail-only, where devices with the same place in their nodes alone are
    connected, and others go through the node first (Wang et al., 2023); ring, torus2d, torus3d of the units that the
    level inside connects, as near to a square or cube as their number allows: a device's bandwidth is that of all its
    cables together.
    """

    name: str
    size: int
    bandwidth: float
    latency: float
    oversubscription: float = 1.0
    ceiling: float | None = None
    groups: tuple[tuple[int, float], ...] = ()
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)
    topology: Topology = "switched"

    @property
    def bus(self) -> float:
        """Bytes/s of one device that a collective inside this level reaches."""
        return (self.ceiling or self.bandwidth) / self.oversubscription

    def bus_of(self, members: int) -> float:
        """Bytes/s of one device in a group of `members` inside this level; between measured sizes by logarithm."""
        if not self.groups:
            return self.bus
        low = self.groups[0]
        for high in self.groups:
            if members <= high[0]:
                share = log(members / low[0]) / log(high[0] / low[0]) if members > low[0] else 0.0
                return (low[1] + share * (high[1] - low[1])) / self.oversubscription
            low = high
        return low[1] / self.oversubscription


@dataclass(frozen=True, slots=True)
class Loader:
    """What the input pipeline of one host gives, 0 where nobody has said. samples: a second, read, decoded and put into
    batches. bandwidth: bytes/s that it reads of its storage. stored: bytes of a sample there, where they differ from
    what its values take (JPEG). devices: that a host feeds; 0: those of a node."""

    samples: float = 0.0
    bandwidth: float = 0.0
    stored: float = 0.0
    devices: int = 0


NO_LOADER = Loader()


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal devices under levels of links. The last level connects them all; none at all is one device.

    cost_per_hour: of one device, None where nobody has said. stack: the software whose constants price this cluster
    unless another is named. cores: CPU cores of one host, where ranks share them; 0: of devices of their own.
    order: of a plan's axes on the levels; `train` plays the usual one. in_node: devices of one node, 0: as many as the
    innermost level connects. loader: of each host. servers: of parameters, under a policy that has some: as many
    replicas carry one each. rows, pools: where the rows of a pipeline lie on devices of several
    kinds (see `machines.mixture`), the place of each row among clusters that see all devices as one kind does; `device`
    is then their mean.
    """

    name: str
    device: Device
    devices: int
    links: tuple[Link, ...]
    stack: str = "plain"
    cost_per_hour: float | None = None
    cores: int = 0
    sources: Mapping[str, Source] = field(default_factory=dict, compare=False, repr=False)
    order: Order = USUAL
    in_node: int = 0
    loader: Loader = NO_LOADER
    servers: int = 1
    rows: tuple[int, ...] = ()
    pools: tuple["Cluster", ...] = ()

    def of_row(self, row: int) -> "Cluster":
        """The cluster as the devices of a row see it."""
        return self.pools[self.rows[row]] if self.rows else self

    @property
    def node(self) -> int:
        """Devices of one node."""
        inside = self.in_node or (self.links[0].size if self.links else self.devices)
        return min(inside, self.devices)

    def levels(self, stride: int, size: int) -> tuple[int, ...]:
        """How many ways a group of `size` ranks, `stride` apart, splits at each level, the innermost first.

        (members in one node, nodes, …); their product is the group's size, rounded up where it lies unevenly.
        """
        splits, left, step = [], size, stride
        for link in self.links:
            here = min(left, max(1, link.size // step))
            splits.append(here)
            left = -(-left // here)
            step = max(step * here, link.size)
        return tuple(splits)
