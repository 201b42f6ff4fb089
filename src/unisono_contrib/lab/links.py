"""Links in numbers, and the commands that make them: what `unisono lab --rate 100mbit --delay 20ms` means.

Frames pass a token bucket (`tc tbf`) at both ends of each cable, so that each direction carries `rate` and no more. The
buckets hold what the link carries in a quarter of a millisecond: a larger one lets the beginning of each message
through for nothing, as no network card does.
"""

import re
from dataclasses import dataclass

from unisono.spec.errors import UsageError

DEVICE = "lab0"  # a host's end of its cable
SWITCH = "switch"
HOSTS = 64  # at most: each is several processes
_NET = "10.99.77"
_BITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_FRAMES = 5000  # bytes: three frames, the least that a bucket can hold
_QUEUE = "50ms"  # how long a frame may wait in front of a bucket before it is dropped


@dataclass(frozen=True, slots=True)
class LabLink:
    """What joins two hosts. rate: bit/s each way; 0: as fast as this machine copies. delay: seconds from one host to
    another, so that a round trip takes twice as long."""

    rate: float
    delay: float = 0.0

    @property
    def burst(self) -> int:
        """Bytes that may pass at once."""
        return max(_FRAMES, round(self.rate / 8 * 0.25e-3))

    @property
    def packet(self) -> int:
        """Bytes of the largest packet that leaves whole. What is larger than a burst would be cut into frames by the
        processor, which ranks need."""
        return self.burst * 3 // 4

    def says(self) -> str:
        rate = f"{self.rate / 1e6:g} Mbit/s" if self.rate else "as fast as memory"
        return rate + (f", {1e3 * self.delay:g} ms one way" if self.delay else "")


def rate_of(text: str) -> float:
    """`100mbit`, `2.5gbit`, `0` (no limit) in bit/s, with the units of tc. Raises ValueError."""
    value = _number(text, _BITS, "100mbit, 1gbit")
    if 0 < value < 64e3:
        raise ValueError(f"{text!r}: a link of less than 64kbit carries no run")
    return value


def delay_of(text: str) -> float:
    """`20ms`, `500us`, `0.1s` in seconds. Raises ValueError."""
    value = _number(text, _SECONDS, "20ms, 500us")
    if value > 10:
        raise ValueError(f"{text!r}: more than ten seconds")
    return value


def _number(text: str, units: dict[str, float], such: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([a-z]*)", text.strip().lower())
    if match is None or (match[2] not in units and float(match[1])):
        raise ValueError(f"{text!r} is no number with one of the units {' '.join(units)}: {such}")
    return float(match[1]) * units.get(match[2], 1.0)


def dealt(ranks: int, hosts: int) -> tuple[int, ...]:
    """Ranks of each host, in runs: 5 on 2 hosts are 3 and 2. Raises UsageError C02."""
    if not 1 <= hosts <= HOSTS:
        raise UsageError(
            f"a lab of {hosts} hosts", where="--hosts", fix=f"from 1 to {HOSTS}, such as 4", code="C02"
        )
    if ranks < hosts:
        raise UsageError(
            f"{ranks} ranks on {hosts} hosts: some would have none", where="--ranks, --hosts",
            fix=f"--ranks {hosts} or more, or fewer hosts", code="C02",
        )  # fmt: skip
    return tuple(ranks // hosts + (host < ranks % hosts) for host in range(hosts))


def host_name(host: int) -> str:
    return f"host{host}"


def address(host: int) -> str:
    return f"{_NET}.{host + 1}"


def hosts_file(hosts: int) -> str:
    """What /etc/hosts says inside; also for sockets of IPv6 that carry IPv4, which torch's store listens on."""
    named = [f"{way}{address(h)} {host_name(h)}\n" for h in range(hosts) for way in ("", "::ffff:")]
    return "127.0.0.1 localhost\n" + "".join(named)


Command = tuple[str, ...]


def shaping(device: str, link: LabLink) -> list[Command]:
    """Limits what leaves by `device`."""
    if not link.rate:
        return []
    bucket = ("rate", f"{link.rate:.0f}bit", "burst", str(link.burst), "latency", _QUEUE)
    return [
        ("tc", "qdisc", "add", "dev", device, "root", "tbf", *bucket),
        ("ip", "link", "set", device, "gso_max_size", str(link.packet)),
    ]


def cable(near: str, far: str, network: int) -> Command:
    """A pair of devices, of which `far` is in the network that is open as file `network`."""
    return (
        "ip", "link", "add", near, "type", "veth", "peer", "name", far, "netns", f"/proc/self/fd/{network}"
    )  # fmt: skip


def host_side(host: int, link: LabLink) -> list[Command]:
    """Inside a host, once its device is there."""
    return [
        ("ip", "link", "set", "lo", "up"),
        ("ip", "addr", "add", f"{address(host)}/24", "dev", DEVICE),
        ("ip", "link", "set", DEVICE, "up"),
        *shaping(DEVICE, link),
    ]


def switch_itself() -> list[Command]:
    return [
        ("ip", "link", "add", SWITCH, "type", "bridge", "stp_state", "0", "mcast_snooping", "0"),
        ("ip", "link", "set", SWITCH, "up"),
    ]


def port(host: int) -> str:
    return f"port{host}"


def switch_side(host: int, link: LabLink) -> list[Command]:
    """Inside the switch, once the port of a host is there."""
    return [
        ("ip", "link", "set", port(host), "master", SWITCH),
        ("ip", "link", "set", port(host), "up"),
        *shaping(port(host), link),
    ]
