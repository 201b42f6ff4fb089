"""A run of forked ranks: they compute together, and nobody stays behind."""

import json
import os
import select
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist

from tests.ranks import World
from unisono.launch.fork_server import ForkServer
from unisono.spec.errors import UsageError

pytestmark = pytest.mark.timeout(120)


def everything(ctx, add):
    x = torch.ones(3) * ctx.rank + add
    dist.all_reduce(x)
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    y = torch.ones(1) * ctx.rank
    dist.all_reduce(y, group=halves[ctx.rank // 2])
    z = torch.zeros(1)
    if ctx.rank % 2:
        dist.send(torch.ones(1) * ctx.rank, ctx.rank - 1)
    else:
        dist.recv(z, ctx.rank + 1)
    dist.barrier()
    store = dist.PrefixStore("p", ctx.store)
    store.set("k", "v")
    return {
        "x": x.tolist(),
        "y": y.item(),
        "z": z.item(),
        "k": store.get("k").decode(),
        "threads": torch.get_num_threads(),
    }


def test_ranks_compute_together(world: World) -> None:
    results = world(everything, 4, add=1.0, threads=1)
    assert [r["x"] for r in results] == [[10.0] * 3] * 4
    assert [r["y"] for r in results] == [1.0, 1.0, 5.0, 5.0]
    assert [r["z"] for r in results] == [1.0, 0.0, 3.0, 0.0]


def where_am_i(ctx):
    return {
        "rank": ctx.rank,
        "world": ctx.world,
        "local": [ctx.local_rank, ctx.local_world],
        "threads": [ctx.threads, torch.get_num_threads()],
        "backend": ctx.backend,
        "environ": [os.environ[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")],
        "meets_over": [os.environ[f"{backend}_SOCKET_IFNAME"] for backend in ("GLOO", "NCCL")],
        "pid": os.getpid(),
        "parent": os.getppid(),
        "token": ctx.run_token,
        "threads_alive": len(os.listdir("/proc/self/task")),
        "sockets": sum("socket" in os.readlink(f"/proc/self/fd/{fd}") for fd in fds()),
    }


def fds() -> list[int]:
    return [int(fd) for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def shouts(ctx, count):
    for number in range(count):
        ctx.channel.send("step", step=number, words="x" * 1000)
    print("line\n\n" * 20_000 + f"said {ctx.rank}", end="")


def test_a_rank_knows_its_place_and_has_only_its_own_sockets(world: World, nursery: ForkServer) -> None:
    results = world(where_am_i, 3, threads=2, group=False)
    for rank, said in enumerate(results):
        assert said["rank"] == rank and said["world"] == 3 and said["local"] == [rank, 3]
        assert said["threads"] == [2, 2] and said["backend"] == "gloo"
        assert said["environ"] == [str(rank), "3", str(rank), "3"]
        assert said["meets_over"] == ["lo", "=lo"], "no other host can knock"
        # Its own thread, one that hears signals over a pair of sockets, one that hears the supervisor, two of its
        # watchdog.
        assert said["parent"] == nursery.pid and said["threads_alive"] == 5 and said["sockets"] == 4
    assert len({said["pid"] for said in results}) == 3
    assert len({said["token"] for said in results}) == 1


def test_runs_follow_each_other_from_one_import(world: World) -> None:
    tokens = {world(where_am_i, ranks, group=False)[0]["token"] for ranks in (1, 4, 2)}
    assert len(tokens) == 3


def test_many_events_all_arrive_in_order_and_output_is_named(nursery: ForkServer) -> None:
    heard: list[tuple[int, dict]] = []
    argument = {
        "module": __name__, "file": __file__, "function": "shouts", "group": False, "kwargs": {"count": 2000}
    }  # fmt: skip
    outcome = nursery.run(argument, 2, on_event=lambda rank, event: heard.append((rank, event)))
    assert outcome.exit == 0 and outcome.error is None
    for rank in range(2):
        steps = [event["step"] for who, event in heard if who == rank and event["kind"] == "step"]
        assert steps == list(range(2000))
        lines = [event["text"] for who, event in heard if who == rank and event["kind"] == "output"]
        assert lines == ["line", ""] * 20_000 + [f"said {rank}"]


def test_an_error_of_the_listener_leaves_nobody_and_the_next_run_is_clean(
    nursery: ForkServer, world: World
) -> None:
    def choke(rank: int, event: dict) -> None:
        raise RuntimeError("the screen broke")

    argument = {
        "module": __name__,
        "file": __file__,
        "function": "shouts",
        "group": False,
        "kwargs": {"count": 9},
    }
    with pytest.raises(RuntimeError, match="screen broke"):
        nursery.run(argument, 3, on_event=choke)
    assert len(world(where_am_i, 2, group=False)) == 2


def test_no_ranks_is_refused(nursery: ForkServer) -> None:
    with pytest.raises(UsageError, match="0 ranks"):
        nursery.run({}, 0)


def test_what_fails_before_the_fork_is_told_whenever_it_is_asked_for() -> None:
    with ForkServer("unisono.spec.errors:nothing") as broken:
        with suppress(
            ProcessLookupError
        ):  # gone before the first run; on a busy machine, even before this line
            assert select.select([os.pidfd_open(broken.pid)], [], [], 60)[0]
        first, second = broken.run({}, 2), broken.run({}, 2)
    assert isinstance(first.error, UsageError) and "no function nothing" in first.error.what
    assert second.error is not None and first.results == second.results == [None, None]


def many_collectives(ctx):
    for _ in range(200):
        dist.all_reduce(torch.ones(1))
    dist.barrier()
    seen = json.loads(torch._C._distributed_c10d._dump_fr_trace_json())
    return {"remembered": len(seen["entries"]), "last": max(e["collective_seq_id"] for e in seen["entries"])}


def test_a_rank_remembers_its_last_collectives_and_not_so_many_that_they_cut_its_memory_up(
    world: World,
) -> None:
    for result in world(many_collectives, 2):
        assert 1 < result["remembered"] <= 64
        assert result["last"] > 190
