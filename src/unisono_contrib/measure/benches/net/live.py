"""Messages between two ranks, by the backend and over a plain connection. Imports torch: rank side only."""

import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist

from unisono.launch.context import RankContext
from unisono.launch.env import place_here
from unisono.train.build.build import Place
from unisono_contrib.measure.benches import Row, compared, spread
from unisono_contrib.measure.turns import in_turns

OURS, TCP = "backend", "tcp"
_PATIENCE = 60.0  # seconds


def rows(ctx: RankContext, place: Place, question: Mapping[str, Any]) -> list[Row]:
    """One for each pair, size, and number of ways at once; the others wait meanwhile."""
    timings: list[Row] = []
    for first, other in question["pairs"]:
        with _connected(ctx, first, other) as line:
            for nbytes in question["sizes"]:
                for ways in ("one way", "both at once"):
                    calls = _calls(ctx.rank, (first, other), nbytes, ways, place.device, line)
                    times = in_turns(calls, place.device, question["seconds"])
                    if ways == "one way":  # there and back
                        times = {name: [seconds / 2 for seconds in took] for name, took in times.items()}
                    took = spread(times[OURS])
                    timings.append(
                        {
                            "from": first, "to": other, "from_host": question["hosts"][first],
                            "to_host": question["hosts"][other], "bytes": nbytes, "ways": ways, **took,
                            "bytes_s": nbytes / took["seconds"], "turns": len(times[OURS]),
                            "tcp_seconds": spread(times[TCP])["seconds"],
                            "ratio_vs_tcp": compared(times, OURS, TCP),
                        }
                    )  # fmt: skip
    return timings


def _calls(
    rank: int, pair: tuple[int, int], nbytes: int, ways: str, device: torch.device, line: socket.socket | None
) -> dict[str, Callable[[], object]]:
    if line is None:
        return {OURS: _nothing, TCP: _nothing}
    mine, theirs = (torch.zeros(nbytes, dtype=torch.uint8, device=device) for _ in range(2))
    peer, out, into = pair[1 - pair.index(rank)], bytearray(nbytes), bytearray(nbytes)
    first = rank == pair[0]
    if ways == "one way":
        return {
            OURS: lambda: _there_and_back(mine, theirs, peer, first),
            TCP: lambda: _over_there_and_back(line, out, into, first),
        }
    return {OURS: lambda: _both(mine, theirs, peer), TCP: lambda: _over_both(line, out, into)}


def _nothing() -> None:
    """Of a rank that is not one of the pair."""


def _there_and_back(mine: torch.Tensor, theirs: torch.Tensor, peer: int, first: bool) -> None:
    if first:
        dist.send(mine, peer)
    dist.recv(theirs, peer)
    if not first:
        dist.send(mine, peer)


def _both(mine: torch.Tensor, theirs: torch.Tensor, peer: int) -> None:
    begun = [dist.irecv(theirs, peer), dist.isend(mine, peer)]  # receives first: see ADR 0014
    for work in begun:
        if work is not None:
            work.wait()


def _over_there_and_back(line: socket.socket, out: bytearray, into: bytearray, first: bool) -> None:
    if first:
        line.sendall(out)
    _filled(line, into)
    if not first:
        line.sendall(out)


def _over_both(line: socket.socket, out: bytearray, into: bytearray) -> None:
    sender = threading.Thread(target=line.sendall, args=(out,))
    sender.start()
    _filled(line, into)
    sender.join()


def _filled(line: socket.socket, into: bytearray) -> None:
    view = memoryview(into)
    while view:
        got = line.recv_into(view)
        if not got:
            raise ConnectionError("the other rank of the pair has gone")
        view = view[got:]


@contextlib.contextmanager
def _connected(ctx: RankContext, first: int, other: int) -> Iterator[socket.socket | None]:
    """A plain connection between two ranks; None for the others. `other` listens where the first can reach it."""
    key = f"bench/net/{first}/{other}"
    line: socket.socket | None = None
    if ctx.rank == other:
        with socket.create_server((_own_address(ctx), 0)) as door:
            door.settimeout(_PATIENCE)
            ctx.store.set(key, json.dumps(door.getsockname()))
            line, _ = door.accept()
    elif ctx.rank == first:
        address, port = json.loads(ctx.store.get(key))
        line = socket.create_connection((address, port), timeout=_PATIENCE)
    if line is not None:
        line.settimeout(_PATIENCE)
        line.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    try:
        yield line
    finally:
        if line is not None:
            line.close()


def _own_address(ctx: RankContext) -> str:
    """By which the other ranks reach this host: of the device that leads to where all meet."""
    started = place_here() if ctx.local_world < ctx.world else None
    if started is None:
        return "127.0.0.1"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:  # nothing is sent
        probe.connect((started.master, started.port))
        return probe.getsockname()[0]
