"""Experts on workers that come and go."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD

import unisono.rpc as rpc
from tests.rpc.test_rpc import at_once, until
from unisono.spec.errors import UsageError
from unisono_contrib.rpc.current import HERE
from unisono_contrib.rpc.experts import HostedExpert, NoExpert, RemoteExperts, ask, host_experts
from unisono_contrib.rpc.meeting import CallMeeting
from unisono_contrib.rpc.worker import RpcWorker

pytestmark = pytest.mark.timeout(60)

WIDTH, GRID, LR = 6, (2, 2), 0.5
HELD = {"w1": ["0.0", "0.1"], "w2": ["1.0", "1.1"]}


class Workers:
    """A trainer, w0, and two hosts, which may go and come again."""

    def __init__(self) -> None:
        self.store, self.now = torch.distributed.HashStore(), 0.0
        self.alive = dict(
            zip(("w0", "w1", "w2"), at_once(*(lambda r=r: self._joined(r) for r in range(3))), strict=True)
        )

    def _joined(self, rank: int) -> RpcWorker:
        meeting = CallMeeting(rank, 3, f"w{rank}", self.store, "token")
        return RpcWorker(meeting, "", [], 8, 20.0, 30.0, False)

    def host(self, name: str, experts: dict[str, nn.Module]) -> dict[str, HostedExpert]:
        with inside(self.alive[name]):
            return host_experts(experts, lambda params: SGD(params, lr=LR))

    def leave(self, name: str) -> None:
        self.alive.pop(name).shutdown(graceful=False)

    def come(self, name: str) -> None:
        self.alive[name] = self._joined(int(name[1:]))

    def layer(self, **options: object) -> RemoteExperts:
        torch.manual_seed(1)
        options = {"k": 2, "retry_s": 10.0, **options}
        return RemoteExperts(
            WIDTH, GRID, ["w1", "w2"], worker=self.alive["w0"], clock=lambda: self.now, **options
        ).double()


@contextmanager
def inside(worker: RpcWorker) -> Iterator[None]:
    token = HERE.set(worker)
    yield
    HERE.reset(token)


def expert(name: str) -> nn.Module:
    torch.manual_seed(int(name.replace(".", "")) + 10)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers()
    yield made
    at_once(*(worker.shutdown for worker in made.alive.values()))


def samples(count: int = 7) -> Tensor:
    return torch.rand(count, WIDTH, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def on_one_device(layer: RemoteExperts, experts: dict[str, nn.Module], x: Tensor) -> Tensor:
    """The layer with these experts, dense: each sample's best two by the softmax of their scores."""
    scores = [gate(x) for gate in layer.gates]
    table = torch.stack([scores[0][:, int(n[0])] + scores[1][:, int(n[2])] for n in experts], 1)
    kept = table.topk(min(2, len(experts)), dim=1)
    weights = torch.zeros_like(table).scatter(1, kept.indices, kept.values.softmax(1))
    return sum(weights[:, i : i + 1] * module(x) for i, module in enumerate(experts.values()))


def test_with_all_hosts_a_step_is_that_of_one_device(workers: Workers) -> None:
    for host, names in HELD.items():
        workers.host(host, {name: expert(name) for name in names})
    layer, x = workers.layer(), samples().requires_grad_()
    alone, same = (
        {name: expert(name) for names in HELD.values() for name in names},
        samples().requires_grad_(),
    )
    y, wanted = layer(x), on_one_device(layer, alone, same)
    torch.testing.assert_close(y, wanted, rtol=1e-12, atol=1e-12)
    gate = list(layer.parameters())
    (y**2).sum().backward()
    got = [p.grad.clone() for p in gate]
    layer.zero_grad()
    (wanted**2).sum().backward()
    torch.testing.assert_close(x.grad, same.grad, rtol=1e-12, atol=1e-12)
    for mine, p in zip(got, gate, strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=1e-12, atol=1e-12)
    optimizer = SGD([p for module in alone.values() for p in module.parameters()], lr=LR)
    optimizer.step()
    torch.testing.assert_close(
        layer(samples()), on_one_device(layer, alone, samples()), rtol=1e-12, atol=1e-12
    )
    assert layer.unanswered == layer.untaught == 0


def test_the_weights_of_those_who_answer_add_up_to_one(workers: Workers) -> None:
    """A host goes between two steps. A sample whose best two were with both hosts keeps the one that answers; a sample
    whose best two were with the host that is gone goes to the best two of the other, as all do from then on."""
    every = {name: expert(name) for names in HELD.values() for name in names}
    for host, names in HELD.items():
        workers.host(host, {name: expert(name) for name in names})
    layer, x = workers.layer(), samples(40)
    with torch.no_grad():
        layer.gates[0].bias.add_(torch.tensor([0.0, 0.6]))
    layer(x)
    workers.leave("w2")
    left = {name: every[name] for name in HELD["w1"]}
    first, after = layer(x), layer(x)
    table = torch.stack([layer.gates[0](x)[:, int(n[0])] + layer.gates[1](x)[:, int(n[2])] for n in every], 1)
    of_two = [sorted(row) for row in table.topk(2, dim=1).indices.tolist()]
    assert {len({n < 2 for n in two}) for two in of_two} == {1, 2} and [2, 3] in of_two
    rest = on_one_device(layer, left, x)
    for row, two in enumerate(of_two):
        stays = [n for n in two if n < 2]
        wanted = every[f"0.{stays[0]}"](x[row]) if len(stays) == 1 else rest[row]
        torch.testing.assert_close(first[row], wanted, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(after, rest, rtol=1e-12, atol=1e-12)
    assert layer.unanswered > 0


def test_a_gradient_that_cannot_be_brought_is_left_out(workers: Workers) -> None:
    hosted = {
        host: workers.host(host, {name: expert(name) for name in names}) for host, names in HELD.items()
    }
    layer, x = workers.layer(), samples().requires_grad_()
    y = layer(x)
    workers.leave("w2")
    y.sum().backward()
    assert layer.untaught > 0
    assert x.grad.isfinite().all()
    taught = {name: each.updates for host in hosted.values() for name, each in host.items()}
    assert taught["1.0"] == taught["1.1"] == 0 < taught["0.0"] + taught["0.1"]


def test_a_host_that_comes_back_is_used_again(workers: Workers) -> None:
    for host, names in HELD.items():
        workers.host(host, {name: expert(name) for name in names})
    layer = workers.layer()
    layer(samples())
    workers.leave("w2")
    layer(samples())
    workers.come("w2")
    workers.host("w2", {name: expert(name) for name in HELD["w2"]})
    assert set(layer.directory.present()) == set(HELD["w1"])  # not asked yet
    workers.now = 11.0
    until(lambda: len(layer.directory.present()) == 4)
    every = {name: expert(name) for names in HELD.values() for name in names}
    torch.testing.assert_close(
        layer(samples()), on_one_device(layer, every, samples()), rtol=1e-12, atol=1e-12
    )


def test_training_goes_on_while_hosts_come_and_go(workers: Workers) -> None:
    for host, names in HELD.items():
        workers.host(host, {name: expert(name) for name in names})
    layer, losses = workers.layer(), []
    optimizer = SGD(layer.parameters(), lr=0.1)
    x = samples(64)
    wanted = torch.sin(3 * x)
    for step in range(60):
        workers.now += 1.0
        if step == 20:
            workers.leave("w2")
        if step == 40:
            workers.come("w2")
            workers.host("w2", {name: expert(name) for name in HELD["w2"]})
        loss = nn.functional.mse_loss(layer(x), wanted) + 0.01 * layer.balance_loss(x)
        optimizer.zero_grad()
        (8 * loss).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[19] < 0.5 * losses[0]
    assert losses[39] < losses[20] and losses[59] < 0.5 * losses[0]


def test_where_nobody_is_there_it_is_a_typed_error(workers: Workers) -> None:
    layer = workers.layer()
    with pytest.raises(NoExpert, match="no expert is there for 7 of 7 samples") as caught:
        layer(samples())
    assert caught.value.code == "Q07"


def test_an_expert_that_fails_is_no_absence(workers: Workers) -> None:
    workers.host("w1", {"0.0": nn.Linear(WIDTH + 1, WIDTH).double()})
    with pytest.raises(rpc.RemoteError, match="shapes cannot be multiplied"):
        workers.layer()(samples())


def test_names_are_places_and_experts_are_where_they_are(workers: Workers) -> None:
    with pytest.raises(UsageError, match="no place of an expert"):
        workers.host("w1", {"first": expert("0.0")})
    with inside(workers.alive["w0"]), pytest.raises(UsageError, match="is not here"):
        rpc.rpc_sync("w1", ask, args=("1.1", samples()))
