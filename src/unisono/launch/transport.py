"""What carries bytes between ranks: network devices as the kernel describes them under /sys, and which one is taken.

Loopback between ranks of one host; between hosts the device that leads to where all meet. What a user has set
(GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_IB_HCA) stays. No torch.

The files are described in the kernel's Documentation/ABI/testing/sysfs-class-net and sysfs-class-infiniband.
"""

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

SYSFS = Path("/sys")
SOCKETS = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
ADAPTERS = "NCCL_IB_HCA"
Kind = Literal["loopback", "ethernet", "infiniband", "roce", "virtual"]
_INFINIBAND, _LOOPBACK, _UP = 32, 772, 1  # of linux/if_arp.h, and IFF_UP of linux/if.h
_WORDS = {"ethernet": "Ethernet", "infiniband": "InfiniBand", "roce": "RoCE"}
_NOT_OURS = ("bridge", "tap")  # they lead to guests of this host


@dataclass(frozen=True, slots=True)
class NetworkTransport:
    """One way for bytes.

    name: of the network device; "" for an InfiniBand port that has none. kind: `roce` is Ethernet whose adapter also
    does RDMA; `virtual` is no hardware (veth, bridges, taps). rate: bit/s, None where nobody says; of a device that is
    no hardware nobody does. up: whether it carries anything now. rdma: adapter and port that belong to it, as
    `mlx5_0:1`. made: bond, bridge, vlan, veth or tap, "" for a plain device. part_of: the bond or bridge that it is
    a member of.
    """

    name: str
    kind: Kind
    rate: float | None = None
    up: bool = True
    rdma: str = ""
    made: str = ""
    part_of: str = ""

    def says(self) -> str:
        """For people: `ib0 (InfiniBand, 100 Gbit/s, mlx5_0:1)`."""
        kind = self.made if self.kind == "virtual" and self.made else _WORDS.get(self.kind, self.kind)
        link = self.made if self.kind != "virtual" else ""
        parts = [kind, link, *([speed(self.rate)] if self.rate else []), self.rdma if self.name else ""]
        parts += ["" if self.up else "down", f"in {self.part_of}" if self.part_of else ""]
        return f"{self.name or self.rdma} ({', '.join(filter(None, parts))})"


@dataclass(frozen=True, slots=True)
class Route:
    """What ranks of this host take. device: a name as Gloo and NCCL want it; "" leaves the search to them. why: in a
    few words. settings: variables that ranks get, none of which the user has set."""

    device: str
    why: str
    settings: Mapping[str, str]


def speed(rate: float) -> str:
    """1e11 is `100 Gbit/s`."""
    return f"{rate / 1e9:g} Gbit/s" if rate >= 1e9 else f"{rate / 1e6:g} Mbit/s"


def transports(root: Path = SYSFS) -> tuple[NetworkTransport, ...]:
    """All that a tree like /sys describes, by name; InfiniBand ports without a network device follow. What cannot be
    read is not known: no file of it is an error."""
    nets = {path.name: path for path in sorted(_entries(root / "class" / "net")) if path.is_dir()}
    ports = [port for path in sorted(_entries(root / "class" / "infiniband")) for port in _ports(path)]
    by_net = {net: port for port in reversed(ports) for net in port.nets}
    devices = [_net(path, by_net.get(name)) for name, path in nets.items()]
    rates = {device.name: device.rate for device in devices}
    whole = [replace(device, rate=_bonded(nets[device.name], devices, rates)) if device.made == "bond" else device
             for device in devices]  # fmt: skip
    bare = [
        NetworkTransport("", port.kind, port.rate, port.up, port.name)
        for port in ports
        if not {*port.nets} & {*nets}
    ]
    return (*whole, *bare)


def choose(
    devices: Sequence[NetworkTransport],
    leading: Sequence[str],
    one_host: bool,
    environ: Mapping[str, str],
    meeting: str = "the coordinator",
) -> Route:
    """What ranks take, and why. leading: devices that lead to where all meet, the kernel's own choice first, as
    `leading_to` gives them. one_host: all ranks are on this one. meeting: its name.

    Of devices that lead there the fastest is taken. Where none is known (a host's own name often means its loopback),
    it is the fastest that is up.
    """
    variables = [f"{name}={environ[name]}" for name in (*SOCKETS, ADAPTERS) if environ.get(name)]
    if one_host:
        device, why = "lo", "all ranks are on this host"
    else:
        device, why = _between(devices, leading, meeting)
    # To NCCL a bare name is the beginning of one: eth1 would mean eth10 too.
    exact = zip(SOCKETS, (device, f"={device}"), strict=True)
    settings = {name: text for name, text in exact if device and not environ.get(name)}
    adapters = [] if one_host or environ.get(ADAPTERS) else _adapters(devices)
    if adapters:
        settings[ADAPTERS] = "=" + ",".join(adapters)
        why += f"; RDMA by {', '.join(adapters)}"
    if variables:
        why = f"{', '.join(variables)} of the environment" + (f"; else {device}, {why}" if settings else "")
        device = environ.get(SOCKETS[0]) or device
    return Route(device, why, settings)


def leading_to(address: str) -> tuple[str, ...]:
    """Devices of this host that lead to a host's name or address: the one that the kernel would take, then others that
    are on a network with it. () where the name means nothing, or this host itself by its loopback."""
    with suppress(OSError, ValueError):
        family, _, _, _, target = socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:  # nothing is sent
            probe.connect(target)
            source = str(probe.getsockname()[0])
        there, known = ipaddress.ip_address(str(target[0])), _addresses()
        first = [name for name, ip, _ in known if ip == source.partition("%")[0]]
        near = [name for name, ip, mask in known if mask and there in _network(ip, mask)]
        return tuple(dict.fromkeys(name for name in (*first, *near) if not _is_loopback(name, known)))
    return ()


def astray(address: str, here: bool) -> str:
    """Why nobody is met at a host's name or address; "" if it seems in order. here: it has to be this host's."""
    try:
        addresses = {str(row[4][0]) for row in socket.getaddrinfo(address, 9, type=socket.SOCK_DGRAM)}
    except OSError:
        return f"no host is called {address} here"
    mine = {ip: name for name, ip, _ in _addresses()}
    if not here or addresses & mine.keys() or any(ipaddress.ip_address(ip).is_loopback for ip in addresses):
        return ""
    return f"rank 0 is met on this host, and {address} is none of its addresses: {', '.join(mine)}"


def _between(devices: Sequence[NetworkTransport], leading: Sequence[str], meeting: str) -> tuple[str, str]:
    """(device, why) between hosts."""
    by_name = {way.name: way for way in devices if way.name}
    ways = [by_name[name] for name in leading if name in by_name and by_name[name].up]
    if ways:
        first = max(ways, key=lambda way: way.rate or 0.0)  # of equals the first
        why = f"{first.says().partition(' ')[2].strip('()')}; it leads to {meeting}"
        others = [way for way in ways if way is not first]
        if others:
            why += f", and is the fastest of {len(ways)}"
        apart = [way for way in devices if way.name and way.up and way not in ways and not way.part_of]
        quicker = max(apart, key=lambda way: way.rate or 0.0, default=None)
        if quicker is not None and (quicker.rate or 0.0) > (first.rate or float("inf")):
            why += f"; {quicker.says()} is faster: give {meeting} by its address there to take it"
        return first.name, why
    if leading:
        return leading[0], f"it leads to {meeting}"
    able = [
        way for way in devices
        if way.name and way.up and way.kind != "loopback" and not way.part_of and way.made not in _NOT_OURS
    ]  # fmt: skip
    if not able:
        return "", "no device that is up leads anywhere"
    best = max(able, key=lambda way: (way.kind != "virtual", way.rate or 0.0))
    return (
        best.name,
        f"{meeting} is this host's own name for itself, and {best.says()} is the fastest that is up",
    )


def _adapters(devices: Sequence[NetworkTransport]) -> list[str]:
    """RDMA ports that are up, the fastest alone: a slower one beside them (storage) would hold all back."""
    ports = [device for device in devices if device.rdma and device.up]
    most = max((device.rate or 0.0 for device in ports), default=0.0)
    return sorted({device.rdma for device in ports if (device.rate or 0.0) == most})


@dataclass(frozen=True, slots=True)
class _Port:
    """A port of an RDMA adapter. nets: network devices that belong to it."""

    name: str
    kind: Literal["infiniband", "roce"]
    up: bool
    rate: float | None
    nets: tuple[str, ...]


def _ports(adapter: Path) -> list[_Port]:
    ports = []
    for path in sorted(_entries(adapter / "ports")):
        layer = _text(path / "link_layer")
        nets = [_text(file) for file in sorted(_entries(path / "gid_attrs" / "ndevs"))]
        beside = sorted(entry.name for entry in _entries(adapter / "device" / "net"))
        number = path.name
        ports.append(
            _Port(
                f"{adapter.name}:{number}",
                "roce" if layer == "Ethernet" else "infiniband",
                "ACTIVE" in _text(path / "state"),
                _port_rate(_text(path / "rate")),
                # An adapter of one port has one network device; of several, those of a port say its number.
                tuple(dict.fromkeys([*filter(None, nets), *_of_port(adapter, beside, number)])),
            )
        )
    return ports


def _of_port(adapter: Path, nets: Sequence[str], number: str) -> list[str]:
    """Return the network devices of an adapter that belong to the port of this number."""
    names = []
    for net in nets:
        folder = adapter / "device" / "net" / net
        port = _text(folder / "dev_port") or "0"  # counted from 0, ports of RDMA from 1
        if port.isdigit() and int(port) + 1 == int(number or 0):
            names.append(net)
    return names


def _port_rate(text: str) -> float | None:
    """`100 Gb/sec (4X EDR)` in bit/s."""
    with suppress(ValueError, IndexError):
        number, unit = text.split()[:2]
        return float(number) * {"Gb/sec": 1e9, "Mb/sec": 1e6}.get(unit, 0.0) or None
    return None


def _net(path: Path, port: _Port | None) -> NetworkTransport:
    kind, link = _number(path / "type"), _link_of(path)
    hardware = (path / "device").exists() or link in ("bond", "vlan")
    up = _is_up(path)
    master = (path / "master").resolve().name if (path / "master").exists() else ""
    rate = _number(path / "speed")
    declared = float(rate) * 1e6 if rate is not None and rate > 0 and hardware else None
    if kind == _LOOPBACK:
        return NetworkTransport(path.name, "loopback", None, up)
    if kind == _INFINIBAND or (port is not None and port.kind == "infiniband"):
        known = port.rate if port is not None else declared
        is_up = up and (port is None or port.up)
        return NetworkTransport(path.name, "infiniband", known, is_up, _name(port), link, master)
    if port is not None:
        return NetworkTransport(
            path.name, "roce", port.rate or declared, up and port.up, port.name, link, master
        )
    return NetworkTransport(path.name, "ethernet" if hardware else "virtual", declared, up, "", link, master)


def _name(port: _Port | None) -> str:
    return port.name if port is not None else ""


def _link_of(path: Path) -> str:
    for folder, name in (("bonding", "bond"), ("bridge", "bridge"), ("tun_flags", "tap")):
        if (path / folder).exists():
            return name
    kind = next((row[8:] for row in _text(path / "uevent").splitlines() if row.startswith("DEVTYPE=")), "")
    if kind in ("bond", "bridge", "vlan"):
        return kind
    apart = _text(path / "iflink") != _text(path / "ifindex")
    return "veth" if apart and not (path / "device").exists() else ""


def _is_up(path: Path) -> bool:
    """Some drivers leave open whether they are: then it counts whether somebody has set them up."""
    state = _text(path / "operstate")
    return state == "up" or (state in ("unknown", "") and bool((_number(path / "flags") or 0) & _UP))


def _bonded(
    path: Path, devices: Sequence[NetworkTransport], rates: Mapping[str, float | None]
) -> float | None:
    """What a bond says itself, else what its members that are up carry together."""
    if rates[path.name]:
        return rates[path.name]
    members = _text(path / "bonding" / "slaves").split()
    speeds = [device.rate for device in devices if device.name in members and device.up]
    return sum(rate or 0.0 for rate in speeds) or None


def _addresses() -> list[tuple[str, str, str]]:
    """(device, address, mask) of this host."""
    return [
        (name, address.address.partition("%")[0], address.netmask or "")
        for name, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    ]


def _network(ip: str, mask: str) -> ipaddress.IPv4Network | ipaddress.IPv6Network:
    if ":" in ip:  # ipaddress takes a prefix only
        return ipaddress.ip_network(f"{ip}/{int(ipaddress.ip_address(mask)).bit_count()}", strict=False)
    return ipaddress.ip_network(f"{ip}/{mask}", strict=False)


def _is_loopback(name: str, known: Sequence[tuple[str, str, str]]) -> bool:
    return any(device == name and ipaddress.ip_address(ip).is_loopback for device, ip, _ in known)


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return list(folder.iterdir())
    return []


def _text(path: Path) -> str:
    """ "" for what cannot be read: `speed` of a device that is down is an error (EINVAL)."""
    with suppress(OSError, UnicodeDecodeError):
        return path.read_text(encoding="utf-8").strip()
    return ""


def _number(path: Path) -> int | None:
    with suppress(ValueError):
        return int(_text(path), 0)
    return None
