"""The world on threads: what collectives give there, how it ends, and that it leaves this process as it was."""

import sys
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed import distributed_c10d
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono_contrib.comm.threads import WorldEnded, _TorchState, run, store


def mesh_of(rank: int, **axes: int) -> Mesh:
    return Mesh(Shape(**axes), rank, Recorder(rank), timedelta(seconds=30))


def rank_sum(rank: int) -> float:
    x = torch.tensor([float(rank)])
    dist.all_reduce(x)
    return x.item()


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_every_operation_of_torch_means_what_it_says(ranks):
    def every(rank: int) -> None:
        world = dist.get_world_size()
        own = torch.arange(2.0 * world) + 100 * rank
        all_own = [torch.arange(2.0 * world) + 100 * r for r in range(world)]
        for op, expected in (
            (dist.ReduceOp.SUM, torch.stack(all_own).sum(0)),
            (dist.ReduceOp.AVG, torch.stack(all_own).mean(0)),
            (dist.ReduceOp.MAX, all_own[-1]),
            (dist.ReduceOp.MIN, all_own[0]),
            (dist.ReduceOp.PRODUCT, torch.stack(all_own).prod(0)),
        ):
            x = own.clone()
            dist.all_reduce(x, op)
            assert torch.equal(x, expected)
        gathered = torch.empty(2 * world * world)
        dist.all_gather_single(gathered, own)
        assert torch.equal(gathered, torch.cat(all_own))
        parts = [torch.empty(2 * world) for _ in range(world)]
        dist.all_gather(parts, own)
        assert torch.equal(torch.cat(parts), gathered)
        part = torch.empty(2)
        dist.reduce_scatter_single(part, own)
        assert torch.equal(part, torch.stack(all_own).sum(0)[2 * rank : 2 * rank + 2])
        crossed = torch.empty(2 * world)
        dist.all_to_all_single(crossed, own)
        assert torch.equal(crossed, torch.cat([other[2 * rank : 2 * rank + 2] for other in all_own]))
        dist.broadcast(own, src=world - 1)
        assert torch.equal(own, all_own[-1])
        dist.scatter(part, list(gathered.split(2))[:world] if rank == 0 else None, src=0)
        assert torch.equal(part, all_own[0][2 * rank : 2 * rank + 2])

    run(ranks, every)


def test_messages_keep_their_order_whichever_half_comes_first():
    def ring(rank: int) -> list[float]:
        to, source = (rank + 1) % 3, (rank - 1) % 3
        into = [torch.empty(1) for _ in range(3)]
        works = []
        if rank == 1:
            works = [dist.irecv(x, source) for x in into]
        works += [dist.isend(torch.tensor([10.0 * rank + i]), to) for i in range(3)]
        if rank != 1:
            works += [dist.irecv(x, source) for x in into]
        for work in reversed(works):
            work.wait()
        return torch.cat(into).tolist()

    assert run(3, ring) == [[20.0, 21.0, 22.0], [0.0, 1.0, 2.0], [10.0, 11.0, 12.0]]


def test_the_groups_of_a_mesh_are_those_of_processes(world):
    assert run(8, sums_on_axes) == world(sums_on_axes_of, 8)


def sums_on_axes(rank: int) -> dict[str, float]:
    mesh = mesh_of(rank, dp=2, pp=2, tp=2)
    groups = (mesh.dp, mesh.tp, mesh.pp, mesh.data, mesh.replica, mesh.world)
    return {group.axis: group.all_reduce(torch.ones(5) * rank)[0].item() for group in groups}


def sums_on_axes_of(ctx) -> dict[str, float]:
    return sums_on_axes(ctx.rank)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**32), ranks=st.integers(2, 5))
def test_results_do_not_depend_on_whose_turn_it_is(seed, ranks):
    def work(rank: int) -> list[float]:
        dp = mesh_of(rank, dp=ranks).dp
        x = torch.full((40,), 0.1) * (rank + 1)
        pending = dp.start_all_reduce(x)
        scattered = dp.reduce_scatter(torch.full((ranks,), 1 / (rank + 3)))
        pending.wait()
        return [*x.tolist(), *dp.all_gather(scattered).tolist(), torch.rand(1).item()]

    assert run(ranks, work, seed=seed) == run(ranks, work)


def test_each_rank_draws_its_own_random_numbers():
    def draw(rank: int) -> list[float]:
        torch.manual_seed(rank)
        drawn = []
        for _ in range(3):
            drawn.append(torch.rand(1).item())
            dist.barrier()
        return drawn

    before = torch.get_rng_state()
    together = run(3, draw)
    assert torch.equal(torch.get_rng_state(), before)
    assert together == [run(1, lambda _, seed=seed: draw(seed))[0] for seed in range(3)]


def test_ddp_and_fsdp_of_torch_give_the_gradient_of_one_rank():
    x = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def model() -> nn.Sequential:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 1)).double()

    def gradient(net: nn.Module, part: torch.Tensor) -> None:
        F.mse_loss(net(part), torch.ones_like(part[:, :1]), reduction="sum").backward()

    def replicated(rank: int) -> torch.Tensor:
        net = DistributedDataParallel(model())
        gradient(net, x[2 * rank : 2 * rank + 2])
        return net.module[0].weight.grad * 4  # DDP gives the mean

    def sharded(rank: int) -> torch.Tensor:
        net = fully_shard(model())
        gradient(net, x[2 * rank : 2 * rank + 2])
        return net[0].weight.grad.full_tensor() * 4

    whole = model()
    gradient(whole, x)
    for each in (*run(4, replicated), *run(4, sharded)):
        torch.testing.assert_close(each, whole[0].weight.grad)


def test_one_failure_ends_the_world_and_is_the_one_that_is_told():
    after = []

    def fails(rank: int) -> None:
        if rank == 2:
            raise ValueError("no such leaf")
        try:
            dist.barrier()
        finally:
            after.append(rank)

    with pytest.raises(ValueError, match="no such leaf") as caught:
        run(4, fails)
    assert caught.value.__notes__ == ["raised by rank 2 of 4"]
    assert sorted(after) == [0, 1, 3]


def test_ranks_that_wait_for_each_other_are_told_at_once():
    def stuck(rank: int) -> None:
        if rank == 0:
            dist.recv(torch.empty(3), 1)
        elif rank == 1:
            dist.all_reduce(torch.empty(2))

    with pytest.raises(WorldEnded) as caught:  # and not TimeoutError
        run(3, stuck)
    for words in (
        "rank 0 waits for recv from rank 1 of torch.float32 [3]",
        "rank 1 waits for allreduce SUM torch.float32 [2] of ranks [0, 1, 2]",
        "rank 2 has returned",
    ):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (
            lambda: dist.all_reduce(torch.ones(4)),
            r"rank 1 calls allreduce SUM torch.float32 \[4\] where rank 0 calls",
        ),
        (lambda: dist.all_reduce(torch.ones(3).double()), "torch.float64"),
        (lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX), "allreduce MAX"),
        (lambda: dist.broadcast(torch.ones(3), 0), "broadcast from 0"),
    ],
)
def test_ranks_that_do_not_call_the_same_are_told(other, words):
    with pytest.raises(RuntimeError, match=words):
        run(2, lambda rank: other() if rank else dist.all_reduce(torch.ones(3)))


def test_a_message_that_does_not_fit_is_told():
    def send(rank: int) -> None:
        if rank:
            dist.recv(torch.empty(2), 0)
        else:
            dist.send(torch.empty(3), 1)

    with pytest.raises(
        RuntimeError, match=r"recv from rank 0 of torch.float32 \[2\] meets torch.float32 \[3\]"
    ):
        run(2, send)


def test_what_waits_for_something_else_is_given_up():
    never, left = threading.Event(), []

    def sleep(rank: int) -> None:
        if rank == 1:
            never.wait(60)
        left.append(rank)
        dist.barrier()

    with pytest.raises(TimeoutError, match=r"rank 0: barrier.*rank 1: runs"):
        run(2, sleep, timeout=0.2)
    never.set()


def test_a_world_begins_when_no_rank_of_the_one_before_computes():
    order, released = [], threading.Event()

    def compute(rank: int) -> None:
        if rank == 1:
            released.wait(60)
        order.append(f"rank {rank} of the first")

    with pytest.raises(TimeoutError):
        run(2, compute, join=False, timeout=0.1)
    threading.Timer(0.2, released.set).start()
    run(2, lambda rank: order.append("of the second"), join=False)
    assert order == ["rank 0 of the first", "rank 1 of the first", "of the second", "of the second"]


def test_the_store_is_waited_on():
    def tell(rank: int) -> bytes:
        if rank == 2:
            dist.PrefixStore("plan", store()).set("chosen", "step-3")
        return dist.PrefixStore("plan", store()).get("chosen")

    assert run(3, tell, join=False) == [b"step-3"] * 3


def test_a_rank_that_sleeps_lets_the_others_run(tmp_path):
    def poll(rank: int) -> int:
        polls = 0
        while rank == 0 and not (tmp_path / "there").exists():
            time.sleep(0.001)
            polls += 1
        (tmp_path / "there").touch()
        return polls

    assert run(2, poll) == [1, 0]
    assert time.sleep.__module__ == "time"


def test_one_world_at_a_time():
    with pytest.raises(RuntimeError, match="one at a time"):
        run(2, lambda rank: run(2, rank_sum))
    assert run(2, rank_sum) == [1.0, 1.0]


def test_this_process_is_left_as_it_was():
    before = (distributed_c10d._world, sys.excepthook, torch.get_num_threads(), torch.initial_seed())
    with pytest.raises(ZeroDivisionError):
        run(3, lambda rank: 1 / (rank - 1))
    assert run(3, rank_sum) == [3.0] * 3
    assert (distributed_c10d._world, sys.excepthook, torch.get_num_threads(), torch.initial_seed()) == before
    assert not dist.is_initialized()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rank ")]


def test_what_is_used_of_torchs_own_parts_is_there():
    """Private to torch, so that another version may have renamed it: the state of a process, and its threads'."""
    world = type(distributed_c10d._world)
    fields = {name for name, value in vars(world).items() if isinstance(value, property)}
    assert fields - {"pg_config_info"} == set(_TorchState.__dataclass_fields__)
    assert callable(torch._C._distributed_c10d._set_thread_isolation_mode)
