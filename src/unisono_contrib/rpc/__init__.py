"""Remote calls between the workers of a run, as torch.distributed.rpc has them, without its pickle.

    import unisono.rpc as rpc

    @rpc.exported
    def add(x, y): return x + y

    rpc.init("worker0")                            # on every worker, each with a name
    rpc.rpc_sync("worker1", add, args=(x, 1))      # the result
    rpc.rpc_async("worker1", add, args=(x, 1))     # a CallFuture
    rpc.remote("worker1", add, args=(x, 1))        # an RRef: the result stays there
    rpc.shutdown()                                 # when all have called it

exports: what may be called · values, messages: what travels · switchboard: links, and who has gone · worker: calls ·
objects: references and their counts · autograd, optimizer: training over calls · meeting: names and addresses ·
experts: a mixture of experts on peers that come and go
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch.distributed as dist

from unisono.launch.context import RankContext
from unisono.launch.env import place_here
from unisono.launch.rank.beside import start_beside
from unisono_contrib.rpc import autograd
from unisono_contrib.rpc.current import HERE, here
from unisono_contrib.rpc.errors import CallTimeout, NoExperts, PeerLost, RemoteError, no_member
from unisono_contrib.rpc.experts import Expert, UnreliableExperts
from unisono_contrib.rpc.exports import exported
from unisono_contrib.rpc.futures import CallFuture, collect_all, wait_all
from unisono_contrib.rpc.meeting import meet
from unisono_contrib.rpc.objects import RRef, find, offer
from unisono_contrib.rpc.optimizer import DistributedOptimizer
from unisono_contrib.rpc.switchboard import WorkerInfo
from unisono_contrib.rpc.worker import RpcWorker, Target

dist_autograd = autograd

__all__ = [
    "CallFuture",
    "CallTimeout",
    "DistributedOptimizer",
    "Expert",
    "NoExperts",
    "PeerLost",
    "RRef",
    "RemoteError",
    "RpcWorker",
    "UnreliableExperts",
    "WorkerInfo",
    "autograd",
    "collect_all",
    "dist_autograd",
    "exported",
    "find",
    "get_worker_info",
    "here",
    "init",
    "offer",
    "remote",
    "rpc_async",
    "rpc_sync",
    "shutdown",
    "wait_all",
]


def init(
    name: str = "",
    *,
    modules: Sequence[str] = (),
    context: RankContext | None = None,
    threads: int = 64,
    timeout: float = 60.0,
    silence: float = 30.0,
    tls: bool = False,
    workers: int = 1,
) -> RpcWorker:
    """Join the other workers of this run and return this one. Every rank calls it; it returns when all have.

    The workers are the ranks that `unisono train`, torchrun, Slurm, MPI, TF_CONFIG or plain variables have started, or
    those of the initialised process group; one process alone is a world of one. name: by default that of the cluster's
    description, as "ps0", or "worker" and the rank. modules: whose public functions and classes others may call, beside
    those that are marked by `exported`. context: a rank's place from a launcher of your own. threads: that run calls of
    others, at most. timeout: seconds of a call, and of waiting for the others here; 0 for calls without end. silence:
    seconds after which a worker that says nothing has gone; one that is killed has gone at once. tls: encrypt.
    workers: how many, for a script that was started alone: it starts itself again for the others, on this host, and
    their prints are not shown.

    Raises CallTimeout if a worker does not come, UsageError Q06 for a name that two have.
    """
    if (known := HERE.get(None)) is not None and not known.closed:
        raise no_member("rpc.init was called before in this process", "once, or rpc.shutdown() first")
    alone = workers > 1 and context is None and not dist.is_initialized() and place_here() is None
    copies = start_beside(workers) if alone else None
    worker = RpcWorker(meet(context, timeout or 600.0), name, modules, threads, timeout, silence, tls)
    if copies is not None:
        copies.settle()
    HERE.set(worker)
    return worker


def rpc_sync(
    to: Target, func: Callable[..., Any] | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> Any:  # fmt: skip
    """Call a function on another worker and return its result.

    to: name, rank or WorkerInfo. func: an exported function, or its path "module:name" there. args, kwargs: JSON
    values, bytes, tensors, RRefs, in lists, tuples and dicts; tensors arrive on the CPU. timeout: seconds; that of
    `init` if None. Raises RemoteError with the remote traceback, PeerLost, CallTimeout; UsageError Q04 to Q06.
    """
    return here().call(to, func, args, kwargs, timeout).wait()


def rpc_async(
    to: Target, func: Callable[..., Any] | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> CallFuture[Any]:  # fmt: skip
    """As `rpc_sync`, but returns at once. What the call raises, `wait()` of the future raises."""
    return here().call(to, func, args, kwargs, timeout)


def remote(
    to: Target, func: Callable[..., Any] | str, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None,
    timeout: float | None = None,
) -> RRef[Any]:  # fmt: skip
    """Call a function, or make an object of a class, on another worker; the result stays there. Returns a reference at
    once. What making it raises, its first use raises."""
    return here().remote(to, func, args, kwargs, timeout)


def get_worker_info(name: str | None = None) -> WorkerInfo:
    """A worker by its name; this one if None. Raises UsageError Q06."""
    return here().info if name is None else here().find(name)


def shutdown(graceful: bool = True, timeout: float | None = None) -> None:
    """Leave. graceful: answer calls until all workers have called this or have gone; a server needs nothing else.

    timeout: seconds to wait for the others; for ever if None. Raises CallTimeout, which names who did not come."""
    here().shutdown(graceful, timeout)
