"""`unisono.notebook_launch`: a function of a notebook's cell on several processes of this host.

def train(lr):
    job = unisono.init()
    ...
    return {"loss": loss.item()}

first, second = unisono.notebook_launch(train, 0.1, ranks=2)

It is in the place of Accelerate's `notebook_launcher(function, args, num_processes)`. The function may stand in the
cell, because ranks are forked from the notebook's own process. They have all that the notebook has defined.
"""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import unisono.launch.rank.main  # noqa: F401  # before the fork: a child need not import
from unisono.comm import device
from unisono.launch.context import RankContext
from unisono.launch.env import place_here
from unisono.launch.fork_server import ForkServer
from unisono.library.enter import ScriptStage, is_staged, staged
from unisono.library.explain import explained
from unisono.spec.errors import UsageError
from unisono.spec.settings import tell
from unisono_contrib.launch.forked_here import start_here, threads_of_libraries

_WHERE = "unisono.notebook_launch"


def notebook_launch(
    function: Callable[..., Any],
    *args: Any,
    ranks: int = 2,
    threads: int = 1,
    timeout: float | None = None,
    backend: str = "auto",
    **kwargs: Any,
) -> list[Any]:
    """Run `function(*args, **kwargs)` in `ranks` processes, and return what each rank returned, rank 0's first.

    In the function, `unisono.init()` joins the other ranks. What ranks print appears in the cell with the rank in
    front. They are gone when this returns or raises.

    threads: of torch in each rank. timeout: seconds that a rank may keep the others waiting; follows the steps if None.
    backend: auto, gloo or nccl. A result holds tensors, numbers, text, and lists and dicts of these; tensors of a GPU
    come back on the CPU.

    Raises the error of the first rank that failed, with its traceback as a note: UserCodeError R01 for one of the
    function, HangError for a rank that kept the others waiting; the other ranks are killed. KeyboardInterrupt for
    Ctrl-C or the notebook's interrupt. UsageError: J32 where this process cannot be forked into ranks, J22 for a result
    that cannot be sent, L02 for fewer than one rank.
    """
    with explained():
        _check(threads)
        if ranks < 1:
            raise UsageError(f"cannot start {ranks} ranks", where=_WHERE, fix="ranks=1 or more", code="L02")
        files = [os.memfd_create(f"result {rank}") for rank in range(ranks)]
        try:
            entry = partial(_play, lambda: function(*args, **kwargs), files)
            with ForkServer("", start=partial(start_here, entry)) as server:
                outcome = server.run({}, ranks, threads, _show, timeout, backend)
            outcome.returned()  # raises the error of a run that did not end well
            return [_read(file, rank) for rank, file in enumerate(files)]
        finally:
            for file in files:
                os.close(file)


def _play(
    call: Callable[[], Any], files: list[int], ctx: RankContext, argument: dict[str, Any], shared: Any
) -> dict[str, Any]:
    """In a rank: play the function, and leave its result in this rank's file in memory, which the parent has too."""
    with staged(ScriptStage(None, ctx)):
        result = call()
    with os.fdopen(files[ctx.rank], "wb", closefd=False) as file:
        try:
            torch.save(result, file)
        except Exception as error:
            raise _unsendable(ctx.rank, error) from error
    return {}


def _read(file: int, rank: int) -> Any:
    """Return what a rank returned. Pickle of anything but data is refused, by torch."""
    os.lseek(file, 0, os.SEEK_SET)
    with os.fdopen(file, "rb", closefd=False) as reader:
        try:
            return torch.load(reader, map_location="cpu", weights_only=True)
        except Exception as error:
            raise _unsendable(rank, error) from None


def _unsendable(rank: int, error: Exception) -> UsageError:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return UsageError(
        f"what rank {rank} returned cannot be sent to the notebook: {said}",
        where=_WHERE,
        likely="it is an object of a class of yours or of a library's",
        fix="return tensors, numbers, text, and lists and dicts of these, such as model.state_dict()",
        code="J22",
    )


def _show(rank: int, event: dict[str, Any]) -> None:
    """What ranks print, in the cell. Raises KeyboardInterrupt where the run was asked to stop, which ends it."""
    match event:
        case {"kind": "output", "text": text}:
            print(f"rank {rank} | {text}", flush=True)
        case {"kind": "note", "text": text}:
            tell(f"note  {text}", sys.stderr)
        case {"kind": "stopping", "how": "interrupt"}:
            raise KeyboardInterrupt
        case {"kind": "stopping"}:
            raise SystemExit(143)  # as a SIGTERM ends a process
        case _:
            pass


def _check(threads: int) -> None:
    """Whether ranks may be started from this process, and forked from it. Raises UsageError J32."""
    if is_staged() or dist.is_initialized() or place_here() is not None:
        raise UsageError(
            "this process is a rank already", where=_WHERE, code="J32",
            likely="a launcher has started it, or a cell has called torch.distributed.init_process_group",
            fix="call the function itself; or restart the kernel, and join the ranks inside of the function",
        )  # fmt: skip
    if device.in_use():
        raise UsageError(
            "the GPU is in use in this process, and a forked child of it could not use it", where=_WHERE, code="J32",
            likely="a cell before has moved a tensor or a model to the GPU",
            fix="restart the kernel, and touch the GPU only inside of the function",
        )  # fmt: skip
    if threads > 1 and (names := threads_of_libraries()):
        raise UsageError(
            f"torch has {len(names)} threads in this process, which a forked child would wait for in vain",
            where=f"{_WHERE}(threads={threads})", code="J32",
            likely=f"a cell before has computed on several threads ({names[0]})",
            fix="threads=1; or restart the kernel, and compute only inside of the function",
        )  # fmt: skip
