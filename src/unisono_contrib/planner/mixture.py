"""Devices of several kinds: pools of equal devices, the link that joins them, and where a plan lies on them.

Two ways: rows of one pipeline lie on whole pools or parts of them; or each pool has whole replicas, and the slowest
sets the pace. Mixtures have names (`dgx-a100:16+dgx-v100:16`), or stand in a user's TOML file of several `[[pool]]` and
a `[join]`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from pathlib import Path
from typing import Literal

from unisono.plan import Plan
from unisono.planner.clusters import cluster, cluster_of, link_of
from unisono.planner.machines.cluster import Cluster, Device, Link
from unisono.planner.source import Source
from unisono.planner.toml_tables import from_file, is_file
from unisono.spec.errors import UsageError

_KEYS = ("name", "stack", "pool", "join")
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


# Where mixtures are named ---------------------------------------------------------------------------------------------


def mixture(text: str) -> Mixture:
    """The mixture of that name or file; its join, where nobody has said, is the slower of the pools' own links between
    nodes. Raises UsageError, with file and line for what is wrong in a file."""
    if is_file(text):
        return _from_file(Path(text))
    names = [name.strip() for name in text.split("+")]
    if not all(names):
        raise UsageError(
            f"{text}: a pool has no name", where="--cluster", fix="dgx-a100:16+dgx-v100:16", code="C21"
        )
    pools = tuple(replace(cluster(name), cores=0) for name in names)
    outer = [_between_nodes(name, pool) for name, pool in zip(names, pools, strict=True)]
    slowest = min(outer, key=lambda link: link.bandwidth / link.oversubscription)
    latest = max(outer, key=lambda link: link.latency)
    join = Link(
        slowest.name,
        sum(pool.devices for pool in pools),
        slowest.bandwidth,
        latest.latency,
        slowest.oversubscription,
        sources={
            "bandwidth": _slower(slowest, "bandwidth"),
            "latency": _slower(latest, "latency"),
            "oversubscription": _slower(slowest, "oversubscription"),
        },
    )
    return Mixture("+".join(pool.name for pool in pools), pools, join, _stack(pools))


def _slower(link: Link, key: str) -> Source:
    source = link.sources[key]
    return Source(source.origin, f"the slower of the pools' own links between nodes; {source.text}")


def _between_nodes(name: str, pool: Cluster) -> Link:
    """What connects nodes of this kind, also where the pool has one alone."""
    if pool.devices == pool.node and not is_file(name):
        return cluster(f"{name.partition(':')[0]}:2").links[-1]
    if not pool.links:
        raise UsageError(f"{name} has one device and no link: what joins it to others is not known",
                         where="--cluster", fix="a file of several [[pool]] and a [join]", code="C21")  # fmt: skip
    return pool.links[-1]


def _stack(pools: tuple[Cluster, ...]) -> str:
    """One software runs on all pools: that of the one whose devices are fastest."""
    return max(pools, key=lambda pool: pool.device.flops("bf16")).stack


def _from_file(path: Path) -> Mixture:
    table = from_file(path)
    table.known(_KEYS)
    entries = table.tables("pool")
    if len(entries) < 2:
        raise table.wrong("a mixture has two pools at least", "pool", "another [[pool]]")
    named = [
        entry.text("name", entry.text("like", f"pool {place}")) for place, entry in enumerate(entries, 1)
    ]
    pools = tuple(cluster_of(entry, name) for entry, name in zip(entries, named, strict=True))
    for entry, pool in zip(entries, pools, strict=True):
        if pool.loader.samples or pool.loader.bandwidth:
            raise entry.wrong(
                "loaders cannot be priced on a mixture of devices", "loader_samples_s", "leave it out"
            )
    if "join" not in table.values:
        what = "what joins the pools is not said"
        raise table.wrong(
            what, "pool", '[join] with name = "ethernet", bandwidth_gb_s = 3.1, latency_us = 30'
        )
    join = link_of(table.table("join"), sum(pool.devices for pool in pools))
    if join.topology != "switched":
        raise table.wrong(
            f"pools joined as {join.topology} cannot be priced", "join", 'topology = "switched"'
        )
    name = table.text("name", path.stem)
    pools = tuple(replace(pool, cores=0) for pool in pools)
    return Mixture(name, pools, join, table.text("stack", _stack(pools)))
