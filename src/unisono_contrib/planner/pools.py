"""Mixtures by name (`dgx-a100:16+dgx-v100:16`) or from a user's TOML file of several `[[pool]]` and a `[join]`."""

from dataclasses import replace
from pathlib import Path

from unisono.planner.clusters import cluster, cluster_of, link_of
from unisono.planner.machines.cluster import Cluster, Link
from unisono.planner.source import Source
from unisono.planner.toml_tables import from_file, is_file
from unisono.spec.errors import UsageError
from unisono_contrib.planner.mixture import Mixture

_KEYS = ("name", "stack", "pool", "join")


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
