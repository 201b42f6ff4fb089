"""Two "hosts" on one machine for ranks of a nursery: a cable of the lab between them. Needs root, `ip`, `tc`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from unisono.spec.errors import Skipped
from unisono_contrib.lab import spaces
from unisono_contrib.lab.links import DEVICE, LabLink
from unisono_contrib.lab.network import LabNetwork, require


def possible() -> bool:
    """Whether a link can be made here."""
    try:
        require(LabLink(1e9))
    except Skipped:
        return False
    return True


@contextmanager
def link(megabits: float) -> Iterator[tuple[str, ...]]:
    """Both ends of a link of `megabits` per second each way, as doors to enter; it is gone afterwards."""
    with LabNetwork(2, LabLink(1e6 * megabits)) as network:
        yield network.doors


def enter(host: str) -> None:
    """Move this process, which has one thread, to a host of the lab, and have Gloo meet on its link."""
    spaces.enter(host)
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
