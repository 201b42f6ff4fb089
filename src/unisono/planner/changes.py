"""The same cluster with one thing changed: what sensitivities, sweeps and comparisons of networks are made of."""

from dataclasses import replace

from unisono.planner.machines.cluster import Cluster, Device


def faster_link(cluster: Cluster, name: str, factor: float) -> Cluster:
    """One level's bandwidth, and what its collectives reach, times `factor`."""
    links = tuple(
        replace(
            link,
            bandwidth=link.bandwidth * factor,
            ceiling=link.ceiling * factor if link.ceiling is not None else None,
            groups=tuple((members, rate * factor) for members, rate in link.groups),
        )
        if link.name == name
        else link
        for link in cluster.links
    )
    return replace(cluster, links=links)


def quicker_links(cluster: Cluster, factor: float) -> Cluster:
    """Every level's latency times `factor`."""
    return replace(
        cluster, links=tuple(replace(link, latency=link.latency * factor) for link in cluster.links)
    )


def faster_arithmetic(cluster: Cluster, factor: float) -> Cluster:
    """Peak FLOP/s of every dtype times `factor`."""
    peak = {dtype: rate * factor for dtype, rate in cluster.device.peak.items()}
    return _with_device(cluster, replace(cluster.device, peak=peak, best=cluster.device.best * factor))


def faster_memory(cluster: Cluster, factor: float) -> Cluster:
    """Bandwidth of the devices' memory times `factor`."""
    return _with_device(cluster, replace(cluster.device, bandwidth=cluster.device.bandwidth * factor))


def more_memory(cluster: Cluster, size: float) -> Cluster:
    """`size` bytes more on each device."""
    return _with_device(cluster, replace(cluster.device, memory=cluster.device.memory + size))


def larger_memory(cluster: Cluster, factor: float) -> Cluster:
    """The devices' memory times `factor`."""
    return _with_device(cluster, replace(cluster.device, memory=cluster.device.memory * factor))


def faster_loader(cluster: Cluster, factor: float) -> Cluster:
    """What each host's input pipeline gives, times `factor`."""
    own = cluster.loader
    return replace(
        cluster, loader=replace(own, samples=own.samples * factor, bandwidth=own.bandwidth * factor)
    )


def _with_device(cluster: Cluster, device: Device) -> Cluster:
    return replace(cluster, device=device)
