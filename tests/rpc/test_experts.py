"""A mixture of experts on peers that come and go: the same layer as on one device while all answer, and training that
goes on while some do not."""

import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import unisono.rpc as rpc
from tests.forked import Forked
from tests.rpc.test_rpc import EXAMPLES, at_once, until
from unisono.spec.errors import UsageError
from unisono_contrib.rpc.current import HERE
from unisono_contrib.rpc.experts import Point, expert_name
from unisono_contrib.rpc.meeting import CallMeeting
from unisono_contrib.rpc.objects import offered
from unisono_contrib.rpc.worker import RpcWorker

pytestmark = pytest.mark.timeout(60)

WIDTH = 4
EXPERTS: dict[Point, str] = {(0, 0): "w1", (0, 1): "w1", (1, 0): "w2", (1, 1): "w2"}


class Peers:
    """Workers of one process that may leave and come back."""

    def __init__(self) -> None:
        self.store = dist.HashStore()
        self.workers = dict(enumerate(at_once(*(lambda rank=rank: self.join(rank) for rank in range(3)))))
        self.modules: dict[Point, nn.Module] = {}

    def join(self, rank: int) -> RpcWorker:
        meeting = CallMeeting(rank, 3, f"w{rank}", self.store, "token")
        return RpcWorker(meeting, "", [], 64, 20.0, 30.0, False)

    def serve(self, rank: int, kind: Callable[..., Any] = rpc.Expert) -> None:
        """Offer this worker's experts, as they are before any update."""
        token = HERE.set(self.workers[rank])
        for point, name in EXPERTS.items():
            if name == f"w{rank}":
                module = self.modules[point] = expert(point)
                rpc.offer(expert_name(point), kind(module, torch.optim.SGD(module.parameters(), lr=0.1)))
        HERE.reset(token)

    def leave(self, rank: int) -> None:
        """Returns when the first worker has seen it."""
        self.workers.pop(rank).shutdown(graceful=False)
        until(lambda: self._is_lost(f"w{rank}"))

    def _is_lost(self, name: str) -> bool:
        try:
            self.workers[0].call(name, offered, ("nothing",)).wait()
        except rpc.PeerLost:
            return True
        except UsageError:
            return False
        return False


def expert(point: Point) -> nn.Module:
    torch.manual_seed(10 * point[0] + point[1])
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)).double()


@pytest.fixture
def peers() -> Iterator[Peers]:
    made = Peers()
    token = HERE.set(made.workers[0])
    made.serve(1)
    made.serve(2)
    yield made
    HERE.reset(token)
    for worker in made.workers.values():
        worker.shutdown(graceful=False)


def layer_of(k: int = 2, **options: Any) -> rpc.UnreliableExperts:
    torch.manual_seed(3)
    return rpc.UnreliableExperts(WIDTH, EXPERTS, k=k, **options).double()


def on_one_device(
    gate: nn.Module, experts: Mapping[Point, nn.Module], x: Tensor, k: int, alive: list[int]
) -> Tensor:
    """The same layer in plain words, over the experts that answer."""
    scores = gate(x)[:, alive]
    best, at = scores.topk(min(k, len(alive)), 1)
    weights = best.softmax(1)
    outputs = torch.stack([list(experts.values())[i](x) for i in alive], 1)
    return (weights[..., None] * outputs.gather(1, at[..., None].expand(-1, -1, WIDTH))).sum(1)


def trained(layer: Callable[[Tensor], Tensor], parameters: list[nn.Parameter], steps: int) -> list[Tensor]:
    """Outputs and gradients of inputs, step by step."""
    optimizer, seen = torch.optim.SGD(parameters, lr=0.1), []
    drawn = torch.Generator().manual_seed(5)
    for _ in range(steps):
        x = torch.randn(3, 5, WIDTH, generator=drawn, dtype=torch.float64).requires_grad_()
        y = layer(x)
        optimizer.zero_grad()
        (y - x.detach().flip(-1)).square().mean().backward()
        optimizer.step()
        seen += [y.detach(), x.grad]
    return seen


@pytest.mark.parametrize("k", [1, 2, 4])
def test_while_all_answer_it_is_the_layer_of_one_device(peers: Peers, k: int) -> None:
    layer, twin = layer_of(k), layer_of(k)
    experts = {point: expert(point) for point in EXPERTS}
    mine = trained(layer, list(layer.parameters()), 3)
    whole = lambda x: on_one_device(twin.gate, experts, x.view(-1, WIDTH), k, [0, 1, 2, 3]).view_as(x)
    theirs = [*twin.parameters(), *(p for module in experts.values() for p in module.parameters())]
    for a, b in zip(mine, trained(whole, theirs, 3), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    for point, module in experts.items():
        for a, b in zip(peers.modules[point].parameters(), module.parameters(), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)
    assert layer.counts["failed"] == layer.counts["lost"] == 0


def test_who_has_gone_is_left_out_and_the_others_share_its_weight(peers: Peers) -> None:
    layer, x = layer_of(), torch.randn(20, WIDTH, dtype=torch.float64)
    before = layer(x)
    peers.leave(2)
    after = layer(x)
    scores = layer.gate(x)
    best = scores.topk(2, 1).indices
    for row in range(len(x)):
        lives = [i for i in best[row].tolist() if i < 2]
        lives = lives or scores[row, :2].topk(2).indices.tolist()  # both have gone: the next best
        weights = scores[row, lives].softmax(0)
        right = sum(w * peers.modules[list(EXPERTS)[i]](x[row]) for w, i in zip(weights, lives, strict=True))
        torch.testing.assert_close(after[row], right, rtol=1e-12, atol=1e-14)
    assert not torch.allclose(before, after) and layer.counts["failed"] == 2
    # From now on those that answer are chosen among.
    torch.testing.assert_close(
        layer(x), on_one_device(layer.gate, peers.modules, x, 2, [0, 1]), rtol=1e-12, atol=1e-14
    )
    assert layer.counts["failed"] == 2


def test_training_goes_on_without_a_peer_that_leaves_before_its_gradient_comes(peers: Peers) -> None:
    layer = layer_of(4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    losses, x = [], torch.randn(30, WIDTH, dtype=torch.float64)
    for step in range(80):
        loss = (layer(x) - x.flip(-1)).square().sum(1).mean()
        if step == 20:
            peers.leave(2)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[20] < losses[0] and losses[-1] < 0.8 * losses[21]
    assert layer.counts["lost"] == 2 and not any(p.grad is None for p in layer.parameters())


def test_a_peer_that_returns_is_used_again(peers: Peers) -> None:
    now = [0.0]
    layer, x = layer_of(4, rest=10.0, clock=lambda: now[0]), torch.randn(6, WIDTH, dtype=torch.float64)
    whole = layer(x).detach()
    peers.leave(2)
    assert not torch.allclose(layer(x), whole)
    peers.workers[2] = peers.join(2)
    peers.serve(2)
    assert not torch.allclose(layer(x), whole)  # it rests
    now[0] = 11.0
    torch.testing.assert_close(layer(x), whole, rtol=1e-12, atol=1e-14)


@rpc.exported
class Hung(rpc.Expert):
    def forward(self, x: Tensor) -> Tensor:
        threading.Event().wait(1.0)
        return x


def test_who_takes_too_long_is_left_out(peers: Peers) -> None:
    peers.serve(2, Hung)
    layer, x = layer_of(4, timeout=0.2), torch.randn(6, WIDTH, dtype=torch.float64)
    right = on_one_device(layer.gate, peers.modules, x, 4, [0, 1])
    torch.testing.assert_close(layer(x), right, rtol=1e-12, atol=1e-14)


def test_where_none_answers_it_is_a_typed_error(peers: Peers) -> None:
    layer = layer_of()
    peers.leave(1)
    peers.leave(2)
    with pytest.raises(rpc.NoExperts, match="none of 4 experts") as caught:
        layer(torch.randn(6, WIDTH, dtype=torch.float64))
    assert caught.value.code == "Q07" and isinstance(caught.value.__cause__, rpc.PeerLost)


def test_the_example_goes_on_without_a_peer_that_is_killed(tmp_path: Path) -> None:
    """One command; the script starts its three peers, and kills one of them."""
    text = (EXAMPLES / "unreliable_experts.py").read_text().replace("train(200)", "train(100)")
    (tmp_path / "experts.py").write_text(text)
    script = Forked(["experts.py"], tmp_path, {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)})
    out, err, code = script.stdout.read(), script.stderr.read(), script.wait()
    assert code == 0, err
    losses = [float(loss) for loss in re.findall(r"loss (\d\.\d+)", out)]
    assert len(losses) == 4 and losses[3] < losses[1] < 0.11 and "failed" in out.splitlines()[3], out


def test_objects_are_found_by_the_name_under_which_they_are_offered(peers: Peers) -> None:
    assert rpc.find("w1", "expert.0.1").owner_name() == "w1"
    with pytest.raises(Exception, match=r"nothing is offered as expert\.9") as caught:
        rpc.find("w1", "expert.9")
    assert caught.value.code == "Q04"  # type: ignore[attr-defined]
