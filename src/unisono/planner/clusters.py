"""Clusters by name (`laptop`, `dgx-a100:64`: nodes after the colon) or from a user's TOML file."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path

from unisono.plan.grammar import meant
from unisono.planner.machines.cluster import DTYPES, TOPOLOGIES, Cluster, Device, Link, Loader
from unisono.planner.source import Source
from unisono.planner.toml_tables import Table, bundled, from_file, inherited, is_file, likeness
from unisono.spec.doubtful import LARGEST
from unisono.spec.errors import UsageError
from unisono.spec.words import whole

DEVICE_KEYS = (
    "peak_tflops", "memory_gb", "bandwidth_tb_s", "reserved_gb", "products", "attention", "units", "host_gb_s",
    "like", "name",
)  # fmt: skip
# Of each number of a device its key in a file, the unit, and the usual value where there is one.
_DEVICE_NUMBERS: Mapping[str, tuple[str, float, float | None]] = {
    "memory": ("memory_gb", 1e9, None), "bandwidth": ("bandwidth_tb_s", 1e12, None),
    "reserved": ("reserved_gb", 1e9, 0.0), "products": ("products", 1.0, 1.0), "attention": ("attention", 1.0, 1.0),
    "units": ("units", 1.0, 0.0), "host": ("host_gb_s", 1e9, 0.0),
}  # fmt: skip
LINK_KEYS = (
    "name",
    "size",
    "bandwidth_gb_s",
    "ceiling_gb_s",
    "latency_us",
    "oversubscription",
    "topology",
    "work_s_gb",  # of files of earlier versions: no longer read
)
# Words of the field for networks in which switches connect any pair; how far at full rate is their oversubscription.
_SWITCHED = ("fat-tree", "leaf-spine")
CLUSTER_KEYS = ("name", "device", "node", "nodes", "stack", "cost_per_hour", "link", "like", "cores", "host",
            "loader_samples_s", "loader_gb_s")  # fmt: skip


def cluster(text: str) -> Cluster:
    """A cluster by built-in name or file. Raises UsageError, with file and line for what is wrong in a file."""
    if "+" in text and not is_file(text):
        what = f"{text} is a mixture: it has no one kind of device"
        fix = "one of its pools, or unisono simulate or plan, which take mixtures"
        raise UsageError(what, where="--cluster", fix=fix, code="C21")
    if is_file(text):
        return _from_file(Path(text))
    name, colon, nodes = text.partition(":")
    table = bundled("clusters.toml")
    if name not in table.values:
        what = f"no cluster is called {name!r}{meant(name, tuple(table.values))}"
        raise UsageError(
            what, where="--cluster", fix=f"one of {' '.join(table.values)}, or FILE.toml", code="C21"
        )
    if colon and not whole(nodes):
        what = f"{text}: {nodes!r} is not a number of nodes"
        raise UsageError(what, where="--cluster", fix=f"{name}:8", code="C21")
    return _cluster(inherited(table, name), name, int(nodes) if colon else None)


def is_mixture(text: str) -> bool:
    """Whether `--cluster` names several pools. Raises UsageError where a file cannot be read."""
    if is_file(text):
        return "pool" in from_file(Path(text)).values
    return "+" in text


def of_size(text: str, devices: int) -> Cluster:
    """The cluster that `cluster(text)` names, with so many devices: whole nodes, or one smaller node.

    Raises UsageError where its nodes do not add up to that.
    """
    name = text.partition(":")[0]
    base = (
        _from_file(Path(text), 1) if is_file(text) else cluster(name)
    )  # one node, whatever its links connect
    if devices < base.node:
        inner = [link for link in base.links if link.size < devices]
        around = [replace(link, size=devices) for link in base.links if link.size >= devices > 1]
        links = (*inner, *around[:1])
        return replace(base, name=f"{base.name}, {devices} of a node", devices=devices, links=links)
    if devices % base.node:
        near = max(1, round(devices / base.node)) * base.node
        what = f"{devices} devices are no whole number of nodes of {base.node}"
        raise UsageError(what, where="--sweep", fix=f"{near} devices", code="C21")
    nodes = devices // base.node
    return _from_file(Path(text), nodes) if is_file(text) else cluster(f"{name}:{nodes}")


def device(name: str) -> Device:
    """A built-in device. Raises UsageError."""
    table = bundled("devices.toml")
    if name not in table.values:
        what = f"no device is called {name!r}{meant(name, tuple(table.values))}"
        raise UsageError(what, where="device", fix=f"one of: {' '.join(table.values)}", code="C21")
    return _device(inherited(table, name), name)


@cache
def names() -> tuple[str, ...]:
    """Built-in clusters."""
    return tuple(bundled("clusters.toml").values)


def _from_file(path: Path, nodes: int | None = None) -> Cluster:
    table = from_file(path)
    if "pool" in table.values:
        raise table.wrong("a mixture of pools has no one kind of device", "pool",
                          "unisono simulate or plan with it, or a file of one pool")  # fmt: skip
    return cluster_of(table, path.stem, nodes)


def cluster_of(table: Table, name: str, nodes: int | None = None) -> Cluster:
    """The cluster that a user's table describes, alone or beside the built-in one that it is like."""
    if "like" not in table.values:
        return _cluster(table, name, nodes)
    table.known(CLUSTER_KEYS)
    return _cluster(likeness(table, bundled("clusters.toml"), "cluster"), name, nodes)


def _cluster(table: Table, name: str, nodes: int | None) -> Cluster:
    table.known(CLUSTER_KEYS)
    count = nodes or table.count("nodes", 1)
    node = table.count("node", 1)
    if not count or not node:
        raise table.wrong("a cluster has at least one node of one device", "nodes", "nodes = 1")
    total = count * node
    decoded, read = table.number("loader_samples_s", 1.0, 0.0), table.number("loader_gb_s", 1e9, 0.0)
    cores = _cores(table)
    software = table.text("stack", "plain")
    if cores and software == "plain":  # as files of earlier versions say
        software = "plain-cpu"
    cost = table.number("cost_per_hour") if "cost_per_hour" in table.values else None
    return Cluster(
        name=table.text("name", name) + (f":{count}" if count > 1 else ""),
        device=_named_device(table),
        devices=total,
        links=_links(table, total),
        stack=software,
        cost_per_hour=cost[0] if cost else None,
        cores=cores,
        sources={"loader_samples": decoded[1], "loader_bandwidth": read[1]}
        | ({"cost_per_hour": cost[1]} if cost else {}),
        in_node=node,
        loader=Loader(decoded[0], read[0], devices=node),
    )


def _cores(table: Table) -> int:
    """CPU cores that the ranks share, 0 of devices of their own. Files of earlier versions say it in [host]."""
    if "host" not in table.values:
        return table.count("cores", 0)
    host = table.table("host")
    if not (cores := host.count("cores", 0)):
        raise host.wrong("a host has at least one core", "cores", "cores = 2")
    return cores


def _named_device(table: Table) -> Device:
    if isinstance(table.values.get("device"), dict):
        inner = table.table("device")
        if "like" not in inner.values:
            return _device(inner, inner.text("name", "device"))
        inner.known(DEVICE_KEYS)
        like = inner.text("like")
        return _device(likeness(inner, bundled("devices.toml"), "device"), inner.text("name", like))
    name = table.text("device")
    if name not in bundled("devices.toml").values:
        known = tuple(bundled("devices.toml").values)
        what = f"no device is called {name!r}{meant(name, known)}"
        raise table.wrong(what, "device", f"one of {' '.join(known)}, or a table [device]")
    return device(name)


def _device(table: Table, name: str) -> Device:
    table.known(DEVICE_KEYS)
    peak, source = table.constant("peak_tflops")
    if (
        not isinstance(peak, dict)
        or not peak
        or not all(isinstance(v, int | float) and v > 0 for v in peak.values())
    ):
        raise table.wrong(
            "peak_tflops gives TFLOP/s by dtype", "peak_tflops", "peak_tflops = { bf16 = 312.0 }"
        )
    for dtype in peak:
        if dtype not in DTYPES:
            what = f"peak_tflops: no dtype is called {dtype!r}{meant(str(dtype), DTYPES)}"
            raise table.wrong(what, "peak_tflops", f"one of: {' '.join(DTYPES)}")
    numbers = {name: table.number(*key) for name, key in _DEVICE_NUMBERS.items()}
    values = {name: value for name, (value, _) in numbers.items()}
    if not values["memory"] or not values["bandwidth"]:
        raise table.wrong("a device has memory and its bandwidth", "memory_gb", "memory_gb = 80")
    return Device(
        name=name,
        peak={str(dtype): float(rate) * 1e12 for dtype, rate in peak.items()},
        sources={"peak": source} | {name: source for name, (_, source) in numbers.items()},
        **values | {"units": int(values["units"])},  # pyright: ignore[reportArgumentType]
    )


def _ceiling(link: Table) -> tuple[tuple[tuple[int, float], ...], Source]:
    """(members, bytes/s of the bus) of one size of group, or of several. Raises UsageError."""
    value, source = link.constant("ceiling_gb_s")
    sizes = value if isinstance(value, dict) else {"0": value}
    numbers = [
        v
        for v in sizes.values()
        if isinstance(v, int | float) and not isinstance(v, bool) and 0 < v <= LARGEST
    ]
    if not sizes or len(numbers) < len(sizes) or not all(whole(size) is not None for size in sizes):
        fix = "ceiling_gb_s = 200, or { 2 = 190, 8 = 225 } by the group's members"
        raise link.wrong("ceiling_gb_s is no bus rate above 0", "ceiling_gb_s", fix)
    return tuple(sorted((int(size), float(rate) * 1e9) for size, rate in sizes.items())), source


def _links(table: Table, total: int) -> tuple[Link, ...]:
    links: list[Link] = []
    for entry in table.tables("link"):
        link = link_of(entry, entry.count("size", 0) or total)
        if links and link.size < links[-1].size:
            raise entry.wrong(f"link {link.name} connects fewer devices than the level inside it", "size",
                            "links from the inside out; size = 0 connects all")  # fmt: skip
        links.append(link)
        if link.size >= total:
            break
    if total > 1 and (not links or links[-1].size < total):
        raise table.wrong(f"no link connects all {total} devices", "link", "a last [[link]] with size = 0")
    return tuple(links)


def link_of(entry: Table, size: int) -> Link:
    """The link that a table describes, between so many devices. Raises UsageError."""
    entry.known(LINK_KEYS)
    bandwidth, latency = entry.number("bandwidth_gb_s", 1e9), entry.number("latency_us", 1e-6)
    ceiling = _ceiling(entry) if "ceiling_gb_s" in entry.values else None
    over = entry.number("oversubscription", 1.0, 1.0)
    if not bandwidth[0] or over[0] < 1.0:
        raise entry.wrong(
            "bandwidth is above 0, oversubscription 1 or more", "bandwidth_gb_s", "bandwidth_gb_s = 25"
        )
    said = entry.text("topology", "switched")
    topology = "switched" if said in _SWITCHED else said
    if topology not in TOPOLOGIES:
        known = (*TOPOLOGIES, *_SWITCHED)
        what = f"no topology is called {said!r}{meant(said, known)}"
        raise entry.wrong(what, "topology", f"one of: {' '.join(known)}")
    sources = {"bandwidth": bandwidth[1], "latency": latency[1], "oversubscription": over[1]}
    return Link(
        entry.text("name"),
        size,
        bandwidth[0],
        latency[0],
        over[0],
        ceiling[0][-1][1] if ceiling else None,
        ceiling[0] if ceiling else (),
        sources | ({"ceiling": ceiling[1]} if ceiling else {}),
        topology,
    )
