"""Ranks on hosts that are made up: each host sees its own memory alone."""

from collections.abc import Sequence

import pytest
import torch.distributed as dist

from unisono.comm import hosts
from unisono.comm.collectives.memory import mapping


def as_hosts(monkeypatch: pytest.MonkeyPatch, host_of: Sequence[int]) -> None:
    """host_of: the host of each rank."""
    monkeypatch.setattr(hosts, "mark", lambda: host_of[dist.get_rank()])
    monkeypatch.setattr(mapping, "_network", lambda: host_of[dist.get_rank()])
