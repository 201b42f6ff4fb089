"""The same cluster with one thing changed: what sensitivities are made of."""

from dataclasses import replace

from unisono.planner.machines.cluster import Cluster, Link


def scaled(cluster: Cluster, what: str, factor: float, link: str = "") -> Cluster:
    """arithmetic, memory_bandwidth, latency, loader, or the bandwidth of the link called so, times `factor`."""
    if what == "loader":
        own = cluster.loader
        return replace(
            cluster, loader=replace(own, samples=own.samples * factor, bandwidth=own.bandwidth * factor)
        )
    if what == "bandwidth":
        return replace(
            cluster, links=tuple(_faster(one, factor) if one.name == link else one for one in cluster.links)
        )
    if what == "latency":
        return replace(
            cluster, links=tuple(replace(one, latency=one.latency * factor) for one in cluster.links)
        )
    own = cluster.device
    changed = {
        "arithmetic": {
            "peak": {dtype: rate * factor for dtype, rate in own.peak.items()},
            "best": own.best * factor,
        },
        "memory_bandwidth": {"bandwidth": own.bandwidth * factor},
    }[what]
    return replace(cluster, device=replace(own, **changed))  # pyright: ignore[reportArgumentType]


def _faster(link: Link, factor: float) -> Link:
    return replace(
        link,
        bandwidth=link.bandwidth * factor,
        ceiling=link.ceiling * factor if link.ceiling is not None else None,
        groups=tuple((members, rate * factor) for members, rate in link.groups),
    )
