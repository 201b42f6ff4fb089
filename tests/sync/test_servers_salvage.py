"""What is left with servers after a rank was lost: copies have the same bits, and who lags behind catches up."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from unisono_contrib.sync._servers.host import ShardHost
from unisono_contrib.sync._servers.rules import Bounded
from unisono_contrib.sync._servers.salvage import salvage
from unisono_contrib.sync._servers.sequencer import Sequencer, UpdateSchedule
from unisono_contrib.sync._servers.shard import Shard

pytestmark = pytest.mark.timeout(30)
WORKER = {"kind": "worker", "number": 0}


def host_of(copy: int) -> ShardHost:
    p = nn.Parameter(torch.zeros(5))
    shard = Shard({"w": p}, torch.optim.SGD([p], lr=0.1, momentum=0.9), {0})
    return ShardHost(shard, "127.0.0.1", b"key", 0, copy)


@pytest.fixture
def hosts() -> Iterator[list[ShardHost]]:
    both = [host_of(copy) for copy in range(2)]
    yield both
    for host in both:
        host.close()


def alone(name: str, said: Any) -> list[Any]:
    return [said]


def train(hosts: list[ShardHost], steps: int, deaf_from: int) -> None:
    """The second of two holders does not hear the log from entry number `deaf_from` on."""
    sequencer = Sequencer(Bounded(0), UpdateSchedule(lambda step: 0.1, steps=99), [0], 1, copies=2)
    log = [*sequencer.begin(0, 0)]
    for number in range(2):
        log += sequencer.filled(number)
    for step in range(steps):
        log += sequencer.ready(0, step)
        for number, host in enumerate(hosts):
            host._hear(WORKER, {"op": "push", "step": step}, [torch.randn(5, generator=seeded(step))])
            log += sequencer.have(number, 0, step)
        log += sequencer.announce(0, step, 1.0)
    for n, entry in enumerate(log):
        hosts[0]._do({**entry, "n": n})
        if n < deaf_from:
            hosts[1]._do({**entry, "n": n})


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def held(host: ShardHost) -> list[torch.Tensor]:
    return [*host.shard.params.values(), *host.shard.states()]


@pytest.mark.parametrize("deaf_from", [99, 9, 2])
def test_all_that_are_left_have_the_newest_bits(hosts: list[ShardHost], deaf_from: int) -> None:
    train(hosts, 5, deaf_from)
    assert (hosts[1].shard.version < 5) == (deaf_from < 99)
    version, whole = salvage(hosts, alone)
    assert version == 5 and whole == hosts
    for mine, other in zip(held(hosts[0]), held(hosts[1]), strict=True):
        assert mine.abs().sum() > 0
        assert torch.equal(mine, other)


def test_an_update_waits_for_every_copy() -> None:
    sequencer = Sequencer(Bounded(0), UpdateSchedule(lambda step: 0.1), [0], 1, copies=2)
    sequencer.begin(0, 0)
    assert not sequencer.filled(0)
    assert sequencer.filled(1)
    sequencer.ready(0, 0)
    sequencer.announce(0, 0, 1.0)
    assert not sequencer.have(0, 0, 0)
    assert [entry["op"] for entry in sequencer.have(1, 0, 0)] == ["took", "update"]


def test_who_has_heard_too_little_is_left_out(hosts: list[ShardHost]) -> None:
    train(hosts, 5, 2)
    hosts[0]._kept.popleft()
    hosts[0]._kept.popleft()
    hosts[0]._kept.popleft()
    assert salvage(hosts, alone) == (5, hosts[:1])


def test_before_the_first_step_there_is_nothing(hosts: list[ShardHost]) -> None:
    version, _ = salvage(hosts, alone)
    assert version == -1
