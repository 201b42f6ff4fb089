"""The other sides of benchmarks/recovery.py: one model on two ranks by hand, kept alive by torchrun, torchft or NVRx.

    python benchmarks/recovery_peers.py torchrun FOLDER     one rank, started by torchrun; restarts from checkpoints
    python benchmarks/recovery_peers.py torchft FOLDER      its lighthouse, two replicas, and whoever starts one again
    python benchmarks/recovery_peers.py nvrx FOLDER         two ranks and spares, restarted within their processes

In FOLDER each rank writes pid-RANK, and steps-RANK.jsonl: a line for each step that counts, with the share of the batch
where it was not all of it. known.jsonl has a line for each time that a survivor noticed a fault.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

SAVED = 10
"""Steps between two of torch's distributed checkpoints, where there are any."""
SPARES = 1
"""Processes of NVRx beside two: each that is killed takes the place of one."""
HEART = 1000
"""Milliseconds of silence after which torchft's lighthouse takes a replica for dead; its default is 5000."""


def torchrun(folder: Path) -> None:
    """DDP, AdamW, a checkpoint every SAVED steps, resumed where there is one."""
    import torch.distributed as dist

    dist.init_process_group("gloo")
    _from_checkpoints(folder, dist.get_rank(), dist.get_world_size())


def _from_checkpoints(folder: Path, rank: int, world: int) -> None:
    """The loop of a rank whose group is there."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.nn.parallel import DistributedDataParallel

    model, optimizer, get, clip = _task(folder, rank, world)
    model, made = DistributedDataParallel(model), 0
    saved = sorted(folder.glob("step-*/.metadata"))
    if saved:
        weights, moments = get_state_dict(model, optimizer)
        dcp.load({"model": weights, "optim": moments}, checkpoint_id=saved[-1].parent)
        set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)
        made = int(saved[-1].parent.name.removeprefix("step-"))
    while True:
        _backward(model, *get(made))
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        made += 1
        _tell(folder / f"steps-{rank}.jsonl", step=made)
        if made % SAVED == 0:
            weights, moments = get_state_dict(model, optimizer)
            dcp.save({"model": weights, "optim": moments}, checkpoint_id=folder / f"step-{made:08d}")


def torchft(folder: Path) -> None:
    """A lighthouse, two replicas, and a new process at once for each that ends. One goes on alone meanwhile."""
    from torchft.coordination import LighthouseServer

    house = LighthouseServer(
        bind="127.0.0.1:0",
        min_replicas=1,
        join_timeout_ms=10_000,
        quorum_tick_ms=20,
        heartbeat_timeout_ms=HEART,
    )
    os.environ["TORCHFT_LIGHTHOUSE"] = house.address()
    _kept_alive(2, [sys.executable, __file__, "torchft-replica", str(folder)])


def torchft_replica(folder: Path) -> None:
    """DDP whose gradients go over a quorum, a vote before each update, the state of a new replica from its peer."""
    import torch.distributed as dist
    from torchft import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

    number, within = int(os.environ["NUMBER"]), timedelta(seconds=5)
    late = timedelta(seconds=1)  # a sum over one that has died ends no sooner
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    model, inner, get, _ = _task(folder, number, 2)

    def load(state: Any) -> None:
        model.load_state_dict(state["model"])
        inner.load_state_dict(state["optim"])

    manager = Manager(
        pg=ProcessGroupGloo(timeout=late), min_replica_size=1, timeout=within, rank=0, world_size=1,
        state_dict=lambda: {"model": model.state_dict(), "optim": inner.state_dict()}, load_state_dict=load,
        store_addr="127.0.0.1", store_port=store.port, replica_id=f"replica_{number}", hostname="127.0.0.1",
    )  # fmt: skip
    wrapped, optimizer = DistributedDataParallel(manager, model), Optimizer(manager, inner)
    while True:
        made = manager.current_step()
        optimizer.zero_grad()
        _backward(wrapped, *get(made))
        optimizer.step()  # without clipping: gradients are whole only inside
        there = manager.num_participants()
        if manager.current_step() == made or there < 2:
            _tell(folder / "known.jsonl", number=number)
        if manager.current_step() > made:
            _tell(folder / f"steps-{number}.jsonl", step=manager.current_step(), share=there / 2)


def nvrx(folder: Path) -> None:
    """Two ranks that train and some that wait, each in a process of its own."""
    with socket.socket() as probe:  # NVRx takes a number, and its own store listens there
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(2 + SPARES)}
    _kept_alive(2 + SPARES, [sys.executable, __file__, "nvrx-rank", str(folder)], again=False)


def nvrx_rank(folder: Path) -> None:
    """The loop of torchrun's side in a function that NVRx calls again after a fault, with settings tuned for speed."""
    import torch.distributed as dist
    from nvidia_resiliency_ext import inprocess

    os.environ["RANK"] = os.environ["NUMBER"]
    port, rounds = int(os.environ["MASTER_PORT"]), iter(range(1 << 30))
    quick = partial(timedelta, milliseconds=100)

    @inprocess.Wrapper(
        store_kwargs={"host_name": "127.0.0.1", "port": port, "timeout": timedelta(seconds=60)},
        rank_assignment=inprocess.Compose(
            inprocess.rank_assignment.MaxActiveWorldSize(2), inprocess.rank_assignment.ShiftRanks()
        ),
        monitor_thread_interval=quick(), monitor_process_interval=quick(), heartbeat_interval=quick(),
        progress_watchdog_interval=quick(), last_call_wait=quick(), heartbeat_timeout=timedelta(seconds=5),
        soft_timeout=timedelta(seconds=5), hard_timeout=timedelta(seconds=8),
    )  # fmt: skip
    def train(call: inprocess.CallWrapper | None = None) -> None:
        number, rank = next(rounds), int(os.environ["RANK"])
        if number:
            _tell(folder / "known.jsonl", number=rank)
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        epoch = call.iteration if call is not None else number
        dist.init_process_group(
            "gloo", store=dist.PrefixStore(f"round/{epoch}", store), rank=rank, world_size=2,
            timeout=timedelta(seconds=30),
        )  # fmt: skip
        _from_checkpoints(folder, rank, 2)

    train()


def _task(folder: Path, rank: int, world: int) -> tuple[Any, Any, Any, float]:
    """(model, optimiser, inputs and targets of a step, greatest norm of gradients) of a rank; notes its pid."""
    import torch
    from peers import Task, adamw, batches, model_of
    from recovery import recipe

    from unisono.config import resolve
    from unisono.train.build.build import place_of
    from unisono.train.data.load import load

    (folder / f"pid-{rank}").write_text(str(os.getpid()))
    torch.set_num_threads(1)
    told = resolve(recipe(folder), "dp=2", world).recipe
    task = Task(told, 1, place_of(rank, world, rank, "gloo", 600.0), load(told.data, told.model))
    model = model_of(task)
    return model, adamw(model, told.train), batches(task), told.train.clip or 1e9


def _backward(model: Any, inputs: Any, targets: Any) -> None:
    import torch

    torch.nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).backward()


def _tell(path: Path, **what: Any) -> None:
    with path.open("a") as log:
        log.write(json.dumps({"t": time.monotonic(), **what}) + "\n")


def _kept_alive(count: int, command: list[str], again: bool = True) -> None:
    """Start so many processes, numbered; again: each that ends is started anew. Ends them when it is ended itself."""
    start = lambda number: subprocess.Popen(command, env={**os.environ, "NUMBER": str(number)})
    processes = [start(number) for number in range(count)]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    try:
        while True:
            time.sleep(0.01)
            for number, process in enumerate(processes):
                if again and process.poll() is not None:
                    processes[number] = start(number)
    finally:
        for process in processes:
            with suppress(OSError):
                process.kill()


SIDES: dict[str, Callable[[Path], None]] = {
    "torchrun": torchrun,
    "torchft": torchft,
    "torchft-replica": torchft_replica,
    "nvrx": nvrx,
    "nvrx-rank": nvrx_rank,
}

if __name__ == "__main__":
    SIDES[sys.argv[1]](Path(sys.argv[2]))
