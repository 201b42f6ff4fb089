"""Devices of several kinds: pools of equal devices, the link that joins them, and where a plan lies on them.

Two ways: rows of one pipeline lie on whole pools or parts of them; or each pool has whole replicas, and the slowest
sets the pace.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Literal

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster, Device, Link

_ORDERED = 4  # pools of which every order is tried


@dataclass(frozen=True, slots=True)
class Placement:
    """Pools in the order in which they are used, each with how many rows of the pipeline or replicas it has."""

    kind: Literal["rows", "replicas"]
    pools: tuple[tuple[int, int], ...]


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

    def seen_from(self, pool: int) -> Cluster:
        """All devices as one pool's are: its own device and links, and those of the others behind the join. Groups that
        span pools are priced from each of them, and go at the pace of the slowest."""
        cluster = self.pools[pool]
        join, links = replace(self.join, size=self.devices), cluster.links
        last = links[-1] if len(links) > 1 else None
        if last is not None and join.bandwidth >= last.bandwidth and join.latency <= last.latency:
            # What joins the pools is no worse than what joins the nodes of this one: they are one level.
            return replace(
                cluster, devices=self.devices, links=(*links[:-1], replace(last, size=self.devices))
            )
        return replace(cluster, devices=self.devices, links=(*links, join))

    def clusters(self, where: Placement) -> tuple[Cluster, ...]:
        """What a plan that lies so is priced on: one cluster whose rows differ; of replicas one for each kind of
        device, of which the slowest counts."""
        if where.kind == "replicas":
            return tuple(replace(self.seen_from(pool), name=self.name) for pool, _ in where.pools)
        rows = tuple(pool for pool, count in where.pools for _ in range(count))
        used = [self.pools[pool] for pool in rows]
        costs = [pool.cost_per_hour for pool in used]
        known = [cost for cost in costs if cost is not None]
        seen = tuple(self.seen_from(pool) for pool in range(len(self.pools)))
        return (
            replace(
                seen[rows[0]],
                name=self.name,
                device=_mean([pool.device for pool in used]),
                links=(replace(self.join, size=self.devices),),
                cost_per_hour=sum(known) / len(costs) if len(known) == len(costs) else None,
                rows=rows,
                pools=seen,
            ),
        )

    def whole(self) -> Cluster:
        """All devices as if they were one cluster: what legal meshes and batches are asked of."""
        return replace(self.seen_from(0), name=self.name)

    def said(self, where: Placement) -> str:
        """A placement in words."""
        names = [pool.name for pool in self.pools]
        if where.kind == "replicas":
            return ", ".join(f"{n} replica{'s' * (n > 1)} on {names[pool]}" for pool, n in where.pools)
        parts, begun = [], 0
        for pool, count in where.pools:
            rows = f"row {begun}" if count == 1 else f"rows {begun} to {begun + count - 1}"
            parts.append(f"{rows} on {names[pool]}")
            begun += count
        return "pipeline " + ", ".join(parts)


def _mean(devices: Sequence[Device]) -> Device:
    """So that shares of a peak are of all devices together; of memory, the least."""
    names = list(dict.fromkeys(device.name for device in devices))
    dtypes = {dtype for device in devices for dtype in device.peak}
    peak = {dtype: sum(device.flops(dtype) for device in devices) / len(devices) for dtype in dtypes}
    least = min(devices, key=lambda device: device.room)
    return replace(least, name=" and ".join(names), peak=peak)


def placements(mixture: Mixture, plan: Plan) -> Iterator[Placement]:
    """All ways to lay the plan's rows, or its replicas, on pools; pools are filled one after the other."""
    sizes, pools = [pool.devices for pool in mixture.pools], range(len(mixture.pools))
    orders = list(permutations(pools)) if len(sizes) <= _ORDERED else [tuple(pools), tuple(reversed(pools))]
    seen: set[Placement] = set()
    kinds: tuple[tuple[Literal["rows", "replicas"], int], ...] = (("rows", plan.pp), ("replicas", plan.dp))
    for kind, parts in kinds:
        for filled in orders:
            counts, left = dict[int, int](), parts
            for pool in filled:
                counts[pool] = min(sizes[pool] // (plan.world // parts), left)
                left -= counts[pool]
            for order in (orders if kind == "rows" else orders[:1]) if not left else ():
                placement = Placement(kind, tuple((pool, counts[pool]) for pool in order if counts[pool]))
                if placement not in seen and (kind == "rows" or len(placement.pools) > 1):
                    seen.add(placement)
                    yield placement
