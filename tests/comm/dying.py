"""A rank that is killed in the middle of an operation, and what the others say: played by forked ranks.

python -m tests.comm.dying            # every algorithm, operation and moment, as a table
"""

import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.comm import rooted
from tests.comm.made_up import as_hosts
from unisono.comm.collectives import COLLECTIVES
from unisono.comm.collectives.memory.slots import MemorySlots, slots_of
from unisono.comm.group import Group
from unisono.observe.span import Recorder
from unisono.spec.errors import PeerGone

RANKS, VICTIM = 3, 1
HOSTS = (0, 0, 1, 1)
ON_HOSTS = " on two hosts"
"""Behind the name of an algorithm whose ranks are on hosts that are made up, two on each."""
WITHIN = 20.0
"""Seconds of the groups' own deadline, on a busy machine; who is told of a death waits for some milliseconds."""
LARGE, SMALL = 3 << 20, 12  # elements
MOMENTS = {"before its first send": 0, "after its first send": 1}
OPS: dict[str, Callable[[Group, Tensor], object]] = {
    "all_reduce": lambda group, x: group.all_reduce(x),
    "all_reduce later": lambda group, x: group.start_all_reduce(x).wait(),
    "reduce_scatter": lambda group, x: group.reduce_scatter(x),
    "all_gather": lambda group, x: group.all_gather(x),
    "reduce_scatter, lent": lambda group, x: group.reduce_scatter(
        group.algorithm.lend("reduce_scatter", x.numel(), x)
    ),
    "all_gather, lent": lambda group, x: _gathered(group, group.algorithm.lend("all_gather", x.numel(), x)),
    "all_to_all": lambda group, x: group.start_exchange(x)[1].wait(),
    "broadcast": lambda group, x: group.broadcast(x, VICTIM),
    "reduce": lambda group, x: rooted.reduce(group, x),
    "send and receive": lambda group, x: _around(group, x, group),
    "through memory": lambda group, x: _around(group, x, slots_of(group, 4 * LARGE, x.device) or group),
}


def algorithms() -> list[str]:
    """All that can be had between forked ranks: those of `mpi` are mpirun's to end."""
    names = [name for name in COLLECTIVES.names() if name != "mpi"]
    return [*names, *(name + ON_HOSTS for name in ("auto", "hierarchical"))]


def ranks_of(algorithm: str) -> int:
    return len(HOSTS) if algorithm.endswith(ON_HOSTS) else RANKS


def _gathered(group: Group, out: Tensor) -> None:
    group.gather_into(out, out.chunk(group.size)[group.index].zero_())


def _around(group: Group, x: Tensor, way: Group | MemorySlots) -> None:
    """To the next rank and from the one before."""
    coming = way.start_recv(torch.empty_like(x), (group.index - 1) % group.size)
    going = way.start_send(x, (group.index + 1) % group.size)
    coming.wait()
    going.wait()


def dying(algorithm: str, op: str, moment: int, numel: int) -> list[dict[str, Any]]:
    """What each survivor says of one operation in which the victim is killed. rank; kind of error and whom it names;
    seconds until then."""
    with tempfile.TemporaryDirectory() as folder:
        pids, ranks = [], ranks_of(algorithm)
        for rank in range(ranks):
            if not (pid := os.fork()):
                _be(rank, Path(folder), algorithm, op, moment, numel)
            pids.append(pid)
        until, late = time.monotonic() + 4 * WITHIN, list[int]()
        for pid in pids:
            while os.waitpid(pid, os.WNOHANG)[0] == 0:
                if time.monotonic() > until:
                    os.kill(pid, signal.SIGKILL)
                    late.append(os.waitpid(pid, 0)[0])
                    break
                signal.sigtimedwait([], 0.005)
        said = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("said*"))]
        return [
            *said,
            *({"rank": pids.index(pid), "kind": "hangs", "names": -1, "seconds": -1} for pid in late),
        ]


def _be(rank: int, folder: Path, algorithm: str, op: str, moment: int, numel: int) -> None:
    """The life of one rank: the operation once with all, then once with the victim's end in it."""
    try:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        torch.set_num_threads(1)
        ranks, name = ranks_of(algorithm), algorithm.removesuffix(ON_HOSTS)
        if name != algorithm:
            as_hosts(pytest.MonkeyPatch(), HOSTS)
        limit = timedelta(seconds=WITHIN)
        dist.init_process_group(
            "gloo",
            store=dist.FileStore(str(folder / "store"), ranks),
            rank=rank,
            world_size=ranks,
            timeout=limit,
        )
        pg: Any = dist.group.WORLD
        group = Group("dp", range(ranks), rank, pg, Recorder(rank), False, COLLECTIVES.read(name))
        group.near(torch.device("cpu"))
        x = group.buffer(numel, torch.empty(0)) if op.endswith("later") else torch.zeros(numel)
        OPS[op](group, x)
        begun = time.monotonic()
        try:
            group.barrier()
            if rank == VICTIM:
                _arm(moment)
            OPS[op](group, x)
            OPS["all_to_all"](group, x)  # who needed nothing of the victim needs it now
            said: dict[str, Any] = {"kind": "nothing", "names": -1}
        except PeerGone as error:
            said = {"kind": type(error).__name__, "names": error.rank, "words": error.what}
        except Exception as error:
            said = {"kind": type(error).__name__, "names": -1, "words": str(error)}
        said |= {"rank": rank, "seconds": time.monotonic() - begun}
        (folder / f"said{rank}").write_text(json.dumps(said))
        _stay(folder, ranks - 1)
    finally:
        os._exit(0)


def _stay(folder: Path, others: int) -> None:
    """A survivor that has spoken leaves only when all have: so its own end tells nobody anything."""
    until = time.monotonic() + 2 * WITHIN
    while len(list(folder.glob("said*"))) < others and time.monotonic() < until:
        signal.sigtimedwait([], 0.005)


def _arm(moment: int) -> None:
    """Have this process killed at its `moment`-th message from now on, or collective of the backend's own."""
    left = moment

    def armed(act: Callable[..., Any]) -> Callable[..., Any]:
        def fatal(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return act(*args, **kwargs)

        return fatal

    dist.ProcessGroup.send = armed(dist.ProcessGroup.send)  # type: ignore[method-assign]
    for name in ("all_reduce", "all_gather_single", "all_to_all_single", "broadcast", "reduce", "isend"):
        setattr(dist, name, armed(getattr(dist, name)))


def faults(algorithm: str, op: str, moment: int, numel: int) -> list[str]:
    """What is wrong with what the survivors said."""
    told = dying(algorithm, op, moment, numel)
    wrong = [one for one in told if one["names"] != VICTIM or one["kind"] != "PeerGone"]
    left = [name for name in os.listdir("/dev/shm") if "unisono" in name]
    return (
        [json.dumps(one) for one in wrong]
        + left
        + (["a survivor is missing"] if len(told) < ranks_of(algorithm) - 1 else [])
    )


def main() -> int:
    bad = 0
    for algorithm in algorithms():
        for op in OPS:
            for words, moment in MOMENTS.items():
                for numel in (LARGE, SMALL):
                    found = faults(algorithm, op, moment, numel)
                    bad += bool(found)
                    print(
                        f"{algorithm:25} {op:20} {words:21} {numel:8}  {'; '.join(found) or 'named'}",
                        flush=True,
                    )
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
