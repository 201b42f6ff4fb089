"""Remote calls: what travels, what may be called, who holds what, backwards through calls, and who has gone."""

import gc
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import unisono.rpc as rpc
from tests.forked import Forked
from tests.ports import kept_port
from unisono.launch import agent, link
from unisono.spec.errors import PeerGone, UsageError
from unisono_contrib.rpc.current import HERE
from unisono_contrib.rpc.meeting import CallMeeting
from unisono_contrib.rpc.worker import RpcWorker

EXAMPLES = Path(__file__).parents[2] / "examples"
KEPT: list[Any] = []


@rpc.exported
def echo(*args: Any, **kwargs: Any) -> Any:
    return [*args, kwargs]


@rpc.exported
def raises() -> None:
    raise ValueError("not today\nnor tomorrow")


@rpc.exported
def waits(seconds: float) -> None:
    threading.Event().wait(seconds)


@rpc.exported
def calls_on(target: str, depth: int) -> int:
    here = HERE.get().info.name
    return depth if not depth else rpc.rpc_sync(target, calls_on, args=(here, depth - 1)) + 1


@rpc.exported
def keep(rref: Any) -> Any:
    KEPT.append(rref)
    return rref


@rpc.exported
def hand_on(target: str, rref: Any) -> Any:
    return rpc.rpc_sync(target, keep, args=(rref,))


def hidden() -> str:
    return "secret"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 3, dtype=torch.float64)
        drawn = torch.Generator().manual_seed(
            0
        )  # of its own: others are made at the same time on other threads
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(torch.rand(p.shape, generator=drawn, dtype=p.dtype) - 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inner(x))


@rpc.exported
class RemoteNet(Net):
    def rrefs(self) -> list[Any]:
        return [rpc.RRef(p) for p in self.parameters()]

    def _private(self) -> None: ...


def at_once(*jobs: Callable[[], Any]) -> list[Any]:
    results: list[Any] = [None] * len(jobs)
    threads = [
        threading.Thread(target=lambda i=i, job=job: results.__setitem__(i, job()), daemon=True)
        for i, job in enumerate(jobs)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    return results


def joined(size: int, timeout: float = 20.0, silence: float = 30.0) -> list[RpcWorker]:
    store = dist.HashStore()
    make = lambda rank: RpcWorker(
        CallMeeting(rank, size, f"w{rank}", store, "token"), "", [], 64, timeout, silence, False
    )
    return at_once(*(lambda rank=rank: make(rank) for rank in range(size)))


@pytest.fixture
def workers() -> Iterator[list[RpcWorker]]:
    made = joined(3)
    token = HERE.set(made[0])
    yield made
    HERE.reset(token)
    KEPT.clear()
    at_once(*(worker.shutdown for worker in made))


def until(true: Callable[[], bool]) -> None:
    limit = time.monotonic() + 10
    while not true():
        assert time.monotonic() < limit
        gc.collect()
        threading.Event().wait(0.005)


def test_values_arrive_as_they_were_sent(workers: list[RpcWorker]) -> None:
    plain = [None, True, 3, 1.5, float("inf"), "text", b"\0bytes", (1, [2, (3,)]), {"a": 1, 2: (None,)}, []]
    assert rpc.rpc_sync("w1", echo, args=plain, kwargs={"k": plain}) == [*plain, {"k": plain}]
    tensors = [
        torch.arange(6).reshape(2, 3).T, torch.zeros(0, 4), torch.tensor(2.0), torch.tensor([True]),
        torch.randn(3).bfloat16(), torch.randn(700_000), nn.Parameter(torch.ones(2)),
    ]  # fmt: skip
    for sent, came in zip(tensors, rpc.rpc_sync(2, echo, args=tensors), strict=False):
        assert came.dtype == sent.dtype and not came.requires_grad and torch.equal(came, sent)
    sparse = torch.sparse_coo_tensor([[0, 0, 2]], [1.0, 2.0, 3.0], (4,), check_invariants=True)
    came, _ = rpc.rpc_sync("w1", echo, args=(sparse,))
    assert came.is_sparse and torch.equal(came.to_dense(), sparse.to_dense())


def test_a_tensor_may_change_as_soon_as_a_call_has_begun(workers: list[RpcWorker]) -> None:
    x = torch.zeros(1 << 18)
    future = rpc.rpc_async("w1", echo, args=(x,))
    x.fill_(1.0)
    assert not future.wait()[0].any()


@pytest.mark.parametrize("value", [object(), lambda: 0, {1, 2}, Net(), [torch.empty(2, device="meta")]])
def test_other_values_do_not_travel(workers: list[RpcWorker], value: Any) -> None:
    with pytest.raises(UsageError, match="does not travel") as caught:
        rpc.rpc_sync("w1", echo, args=(value,))
    assert caught.value.code == "Q05"


@pytest.mark.parametrize(
    "function", [hidden, "os:system", "builtins:eval", "torch:load", "no.such:thing", os.getcwd]
)
def test_only_what_is_exported_can_be_called(workers: list[RpcWorker], function: Any) -> None:
    for target in ("w0", "w1"):
        with pytest.raises(UsageError, match="exports no") as caught:
            rpc.rpc_sync(target, function)
        assert caught.value.code == "Q04"


def test_methods_are_public_ones_of_exported_classes(workers: list[RpcWorker]) -> None:
    net = rpc.remote("w1", RemoteNet)
    assert torch.equal(net.rpc_sync().forward(torch.ones(3).double()), Net()(torch.ones(3).double()))
    assert net.rpc_async().rrefs().wait()[0].owner_name() == "w1"
    kept = net.remote().forward(torch.ones(3).double())
    assert torch.equal(kept.to_here(), Net()(torch.ones(3).double()))
    with pytest.raises(AttributeError):
        net.rpc_sync()._private()
    with pytest.raises(UsageError, match="no exported method"):
        rpc.remote("w1", echo, args=(1,)).rpc_sync().append(2)
    with pytest.raises(UsageError, match="does not travel"):
        net.to_here()


def test_a_remote_exception_arrives_with_its_traceback(workers: list[RpcWorker]) -> None:
    with pytest.raises(ValueError, match="not today") as caught:
        rpc.rpc_sync("w1", raises)
    assert isinstance(caught.value, rpc.RemoteError) and caught.value.rank == 1
    assert caught.value.remote_type == "ValueError" and "in raises" in caught.value.remote_trace
    assert "nor tomorrow" in caught.value.__notes__[0]
    with pytest.raises(ValueError):
        rpc.remote("w1", raises).to_here()


def test_calls_within_calls_go_on(workers: list[RpcWorker]) -> None:
    assert rpc.rpc_sync("w1", calls_on, args=("w0", 30)) == 30


def test_a_call_that_takes_too_long_ends(workers: list[RpcWorker]) -> None:
    with pytest.raises(TimeoutError, match=r"waits on worker w1 did not return within 0\.05 s"):
        rpc.rpc_sync("w1", waits, args=(0.3,), timeout=0.05)
    assert rpc.rpc_sync("w1", echo) == [{}]


def test_an_object_lives_as_long_as_somebody_refers_to_it(workers: list[RpcWorker]) -> None:
    own = rpc.RRef(torch.ones(2))
    back = rpc.rpc_sync("w1", hand_on, args=("w2", own))
    assert back.is_owner() and back.local_value() is own.local_value()
    del own, back
    assert torch.equal(KEPT[0].to_here(), torch.ones(2)) and KEPT[0].owner_name() == "w0"
    until(lambda: len(workers[0].objects) == 1)
    KEPT.clear()
    until(lambda: len(workers[0].objects) == 0)
    theirs = rpc.remote("w2", echo, args=(5,))
    assert theirs.to_here() == [5, {}] and len(workers[2].objects) == 1
    del theirs
    until(lambda: len(workers[2].objects) == 0)


def test_backward_through_calls_is_that_of_one_process(workers: list[RpcWorker]) -> None:
    """There and back twice, in a diamond, beside a call that the loss does not depend on."""
    x, net = torch.randn(2, 3, dtype=torch.float64, requires_grad=True), rpc.remote("w1", RemoteNet)
    other = rpc.remote("w2", RemoteNet)
    with rpc.autograd.context() as context:
        y = net.rpc_sync().forward(x * 2)
        z = other.remote().forward(y + x).to_here() * y
        net.rpc_sync().forward(x)
        loss = (net.rpc_sync().forward(z) + y).sum()
        rpc.dist_autograd.backward(context, [loss])
        mine = rpc.dist_autograd.get_gradients(context)[x]
        params = [*net.rpc_sync().rrefs(), *other.rpc_sync().rrefs()]
        before = [p.to_here().detach() for p in params]
        rpc.DistributedOptimizer(torch.optim.SGD, params, lr=0.5).step(context)
    after = [p.to_here() for p in params]
    one, two = Net(), Net()
    y = one(x * 2)
    (one(two(y + x) * y) + y).sum().backward()
    torch.testing.assert_close(mine, x.grad, rtol=1e-12, atol=1e-14)
    for old, new, p in zip(before, after, [*one.parameters(), *two.parameters()], strict=True):
        torch.testing.assert_close(new, old - 0.5 * p.grad, rtol=1e-12, atol=1e-14)
    until(lambda: not any(len(worker.contexts) for worker in workers))


def test_who_does_not_know_the_token_is_refused(workers: list[RpcWorker]) -> None:
    door = workers[0]._meeting.door("w1", 5.0)
    place = {"address": door["addresses"][0], "port": door["port"], "certificate": ""}
    with pytest.raises(link.Refused):
        agent.call({**place, "token": "another"}, workers[0].info.as_json())
    assert rpc.rpc_sync("w1", echo) == [{}]


def test_names_are_checked(workers: list[RpcWorker]) -> None:
    assert rpc.get_worker_info("w2").rank == 2
    with pytest.raises(UsageError, match="no worker 'w7'"):
        rpc.rpc_sync("w7", echo)


def test_a_silent_worker_is_lost() -> None:
    here, there = joined(2, silence=0.4)
    token = HERE.set(here)
    try:
        future = rpc.rpc_async("w1", waits, args=(9.0,))
        rpc.rpc_sync("w1", echo)
        there._board._beat = lambda: None  # type: ignore[method-assign]
        with pytest.raises(rpc.PeerLost, match=r"silent for 0\.4 s"):
            future.wait(10)
    finally:
        HERE.reset(token)
        for worker in (here, there):
            worker.shutdown(graceful=False)


KILLED = """
import os, signal, sys, time
import unisono.rpc as rpc

@rpc.exported
def die_after(calls): seen.append(1); len(seen) == calls and os.kill(os.getpid(), signal.SIGKILL); forever.wait()
import threading
seen, forever = [], threading.Event()
worker = rpc.init(["a", "b"][int(os.environ["RANK"])])
if worker.info.name == "a":
    calls = [rpc.rpc_async("b", die_after, args=(4,), timeout=0) for _ in range(4)]
    errors = []
    for call in calls:
        try: call.wait()
        except rpc.PeerLost as error: errors.append((error.name, error.rank, bool(error.host)))
    try: rpc.rpc_sync("b", die_after, args=(1,))
    except rpc.PeerLost as error: errors.append(error.code)
    print(errors, flush=True)
rpc.shutdown()
"""


@pytest.mark.timeout(60)
def test_a_killed_worker_is_a_typed_error_for_all_its_calls(tmp_path: Path) -> None:
    """Ranks as torchrun's variables start them; MISSION: "a killed peer produces a typed error, not a hang"."""
    (tmp_path / "script.py").write_text(KILLED)
    with kept_port() as port:
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks = [
            Forked(["script.py"], tmp_path, {**os.environ, **place, "RANK": str(rank)}) for rank in range(2)
        ]
        said = [(rank.stdout.read(), rank.stderr.read(), rank.wait()) for rank in ranks]
    assert said[0] == (f"{[('b', 1, True)] * 4 + ['Q01']}\n".replace("'Q01'", "'Q01'"), "", 0), said
    assert said[1][2] == -signal.SIGKILL
    assert issubclass(rpc.PeerLost, PeerGone)


@pytest.mark.timeout(60)
def test_the_parameter_server_learns(tmp_path: Path) -> None:
    """One command; the script starts its other two processes."""
    text = (EXAMPLES / "parameter_server.py").read_text().replace("server, 300", "server, 240")
    (tmp_path / "server.py").write_text(text)
    script = Forked(["server.py"], tmp_path, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    out, err, code = script.stdout.read(), script.stderr.read(), script.wait()
    assert code == 0, err
    losses = re.findall(r"loss (\d\.\d+)  staleness (\d\.\d+)", out)
    assert len(losses) == 2 and all(float(loss) < 0.09 for loss, _ in losses), out  # 0.11 at the start
