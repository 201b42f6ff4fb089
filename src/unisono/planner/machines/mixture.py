"""Devices of several kinds: pools of equal devices, and the link that joins them."""

from dataclasses import dataclass, replace

from unisono.planner.machines.cluster import Cluster, Link


@dataclass(frozen=True, slots=True)
class Mixture:
    """Pools, and the link between any two of them. join: what one device of a pool has to another pool; its size is
    that of all pools together. stack: the software that runs on all of them."""

    name: str
    pools: tuple[Cluster, ...]
    join: Link
    stack: str = "plain"

    @property
    def devices(self) -> int:
        return sum(pool.devices for pool in self.pools)

    @property
    def across(self) -> Cluster:
        """The network between pools alone; its device is nobody's."""
        return Cluster(
            self.name, self.pools[0].device, self.devices, (replace(self.join, size=self.devices),)
        )

    def seen_from(self, pool: int) -> Cluster:
        """All devices as one pool's are: its own device and links, and those of the others behind the join. Groups that
        span pools are priced from each of them, and go at the pace of the slowest."""
        own = self.pools[pool]
        join, links = replace(self.join, size=self.devices), own.links
        last = links[-1] if len(links) > 1 else None
        if last is not None and join.bandwidth >= last.bandwidth and join.latency <= last.latency:
            # What joins the pools is no worse than what joins the nodes of this one: they are one level.
            return replace(own, devices=self.devices, links=(*links[:-1], replace(last, size=self.devices)))
        return replace(own, devices=self.devices, links=(*links, join))
