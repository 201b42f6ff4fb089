"""The collectives that this process has begun lately: torch's flight recorder keeps them by itself."""

import json
import pickle
import sys
import threading
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist

from unisono.comm.device import CPU_BACKEND, RECORDER, recorded, recorded_backends

_ADDS = ("all_reduce", "reduce")
_COPIES = ("broadcast", "all_gather", "gather", "scatter")
_LATEST = 64

Frames = Sequence[tuple[str, int, str]]
"""File, line and name of each, innermost first."""


@dataclass(frozen=True)
class RecordedCollective:
    """A collective between CPUs, the `number`-th of its group.

    says: what has to be the same on all ranks of the group; "" if this is not known. shown: the same for a person, with
    all dims: "all_reduce of float32 [3, 2]". over: whether it has ended. incarnation: tells apart groups of this
    process that had the same name one after the other. far: how far its rank is; where ranks differ, the one that is
    farther has left something out. axis: the axis of its group, if the group has said so.
    """

    number: int
    says: str
    shown: str
    over: bool = True
    frames: Frames = ()
    incarnation: int = 0
    far: int = 0
    axis: str = ""


def is_any_pending(since: int = 0) -> bool:
    """Whether a collective was begun on CPUs and is not over. Messages are none. since: see `groups_made`."""
    entries = json.loads(RECORDER._dump_fr_trace_json()).get("entries", ())
    return any(not entry["retired"] for entry in entries if entry["pg_id"] >= since)


def groups_made() -> int:
    """How many groups of this process have begun a collective so far, or were made before one that has: after ranks
    have met anew, those are of the past, and what they never ended is no matter any more."""
    entries = json.loads(RECORDER._dump_fr_trace_json()).get("entries", ())
    return max((entry["pg_id"] for entry in entries), default=-1) + 1


def latest(
    frames: bool = False, backend: str = CPU_BACKEND, since: int = 0
) -> dict[tuple[str, tuple[int, ...]], dict[int, RecordedCollective]]:
    """The latest collectives of each group of several ranks that is alive, by its name and ranks and by their number.
    frames: with the lines that began them. since: leave out groups made before, see `groups_made`."""
    if backend not in recorded_backends():
        return {}  # a torch that records nothing of it
    entries = _recorded(backend, frames).get("entries", ())
    by_name: dict[str, dict[int, list[Mapping[str, Any]]]] = {}
    for entry in entries[-_LATEST:]:
        known = entry["profiling_name"].startswith(f"{backend}:") and entry["pg_id"] >= since
        if known and not entry["is_p2p"]:
            by_name.setdefault(entry["process_group"][0], {}).setdefault(entry["pg_id"], []).append(entry)
    groups: dict[tuple[str, tuple[int, ...]], dict[int, RecordedCollective]] = {}
    world = dist.distributed_c10d._world
    for group, name in list(world.pg_names.items()):
        ranks = tuple(world.pg_group_ranks.get(group, ()))
        # A name is used again once all groups were destroyed. The recorder still has the collectives of the old one;
        # the last of them is not this group's last.
        lately = by_name[name][max(by_name[name])] if name in by_name and len(ranks) > 1 else []
        if lately and (backend != CPU_BACKEND or lately[-1]["op_id"] == _count(group)):
            groups[name, ranks] = {
                entry["collective_seq_id"]: _begun(entry, _axis(group)) for entry in lately
            }
    return groups


def everywhere(
    frames: bool = False, since: int = 0
) -> dict[tuple[str, tuple[int, ...]], dict[int, RecordedCollective]]:
    """`latest` of all backends at once; a group that has several counts the collectives of each by themselves."""
    return {
        (name if backend == CPU_BACKEND else f"{backend}:{name}", ranks): calls
        for backend in recorded_backends()
        for (name, ranks), calls in latest(frames, backend, since).items()
    }


def counts() -> dict[tuple[str, tuple[int, ...]], tuple[int, str]]:
    """How many collectives and messages each group of several ranks has begun between CPUs, by its name and ranks; and
    what it is of."""
    world = dist.distributed_c10d._world
    numbers = {}
    for group, name in list(world.pg_names.items()):
        ranks = tuple(world.pg_group_ranks.get(group, ()))
        if len(ranks) > 1 and (number := _count(group)) >= 0:
            numbers[name, ranks] = number, _axis(group)
    return numbers


def _axis(group: Any) -> str:
    return {"default_pg": "default", "undefined": ""}.get(group.group_desc, str(group.group_desc))


_ONE_AT_A_TIME = threading.Lock()


def _recorded(backend: str, frames: bool) -> dict[str, Any]:
    """With frames, torch would import its compiler, which takes seconds, to look for code that it has made: there is
    none where nobody has imported it."""
    if not frames:
        return json.loads(recorded(backend, frames))
    module: Any = torch
    with _ONE_AT_A_TIME:
        bare = "torch._inductor" not in sys.modules
        if bare:
            module._inductor = None
        try:
            return pickle.loads(recorded(backend, frames))  # noqa: S301 - made by this process
        finally:
            if bare and module._inductor is None:
                del module._inductor


def _count(group: Any) -> int:
    """Collectives and messages that a group has begun on CPUs."""
    try:
        return group._get_backend(torch.device("cpu"))._get_sequence_number_for_group()
    except RuntimeError:
        return -1  # it is going, or is one of GPUs


def _begun(entry: Mapping[str, Any], axis: str) -> RecordedCollective:
    op = entry["profiling_name"].partition(":")[2]
    side = "output" if op == "scatter" else "input"
    sizes = [list(size) for size in entry[f"{side}_sizes"]]
    dtypes = [_dtype(name) for name in entry[f"{side}_dtypes"]]
    says = op
    if op in _ADDS:
        says = f"{op} {','.join(map(str, dtypes))} {sum(map(prod, sizes))}"
    elif op in _COPIES:
        says = f"{op} {sum(prod(size) * dtype.itemsize for size, dtype in zip(sizes, dtypes, strict=False))}"
    shown = ", ".join(f"{str(dtype)[6:]} {size}" for dtype, size in zip(dtypes, sizes, strict=False))
    frames = [(frame["filename"], frame["line"], frame["name"]) for frame in entry.get("frames", ())]
    text = f"{op} of {shown}" if shown else op
    return RecordedCollective(
        entry["collective_seq_id"], says, text, entry["retired"], frames, entry["pg_id"], axis=axis
    )


def _dtype(name: str) -> torch.dtype:
    """From C++'s name of it: Float, Long, BFloat16, Byte."""
    dtype = getattr(torch, {"Byte": "uint8", "Char": "int8"}.get(name, name.lower()), torch.uint8)
    return dtype if isinstance(dtype, torch.dtype) else torch.uint8


def label(name: str, ranks: Sequence[int]) -> str:
    """A group in few letters, the same on all its ranks."""
    return f"{name[:12]}-{zlib.crc32(repr(ranks).encode()):x}"
