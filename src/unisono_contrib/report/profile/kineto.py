"""A rank's profile, read back: torch's operators, our spans and module ranges, in one tree a thread."""

import gzip
import json
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from unisono.observe.files import whole_file
from unisono.observe.span import Span
from unisono.observe.trace import span_of

MODULE = "module "
"""How the range of a module's forward begins; its name in the whole model follows."""
NODE = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_KERNELS = ("kernel", "gpu_memcpy", "gpu_memset")


class TimedRange(NamedTuple):
    """An operator, a module's forward, or a Python function. sequence: that ties a backward to its forward, -1
    without. shapes: of its tensors, as text."""

    name: str
    start_ns: int
    stop_ns: int
    sequence: int
    shapes: str


class KernelRun(NamedTuple):
    """What a device did: name, stream, nanoseconds of the clock that ranks share."""

    name: str
    stream: str
    start_ns: int
    stop_ns: int


class Allocation(NamedTuple):
    """Bytes that came (above 0) or went, and where."""

    at_ns: int
    address: int
    nbytes: int


@dataclass(frozen=True)
class RankProfile:
    """One rank. facts: what the rank says of itself (`held`, `memory`, `lines`, `first`, `last`, ...). threads:
    ranges by thread, `main` that of the steps. functions: of Python, if they were recorded."""

    rank: int
    world: int
    facts: dict[str, Any]
    spans: list[Span]
    threads: dict[int, list[TimedRange]]
    main: int
    functions: dict[int, list[TimedRange]]
    kernels: list[KernelRun]
    allocations: list[Allocation]
    on_gpu: bool = False

    @property
    def steps(self) -> int:
        return int(self.facts["last"]) - int(self.facts["first"]) + 1


def read(path: str | Path) -> RankProfile:
    """Read `profile/rank*.json.gz`. Raises OSError, EOFError (cut short), ValueError (something else)."""
    document = json.loads(gzip.decompress(whole_file(path)))
    try:
        return _profile(document)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a profile: {error!r}") from error


def _profile(document: dict[str, Any]) -> RankProfile:
    base, info = int(document["baseTimeNanoseconds"]), document["distributedInfo"]
    spans: list[Span] = []
    threads: dict[int, list[TimedRange]] = {}
    functions: dict[int, list[TimedRange]] = {}
    kernels: list[KernelRun] = []
    memory: list[tuple[int, Allocation]] = []
    for event in document["traceEvents"]:
        if event["name"] == "[memory]":
            args = event["args"]
            at = base + round(1000 * event["ts"])
            memory.append((args["Device Type"], Allocation(at, args["Addr"], args["Bytes"])))
        if event["ph"] != "X":
            continue
        category, args = event.get("cat"), event.get("args", {})
        if "kind" in args:
            spans.append(span_of(event, base))
            continue
        start = base + round(1000 * event["ts"])
        stop = start + round(1000 * event["dur"])
        if category in _KERNELS:
            kernels.append(KernelRun(event["name"], str(args.get("stream", 0)), start, stop))
        elif category in ("cpu_op", "user_annotation", "python_function"):
            kept = functions if category == "python_function" else threads
            shapes = str(args["Input Dims"]) if "Input Dims" in args else ""
            row = TimedRange(event["name"], start, stop, args.get("Sequence number", -1), shapes)
            kept.setdefault(event["tid"], []).append(row)
    kernels.sort(key=lambda kernel: kernel.start_ns)
    device = int(any(kind for kind, _ in memory))  # torch numbers CPUs 0 and GPUs 1
    return RankProfile(
        int(info["rank"]), int(info["world_size"]), document["unisono"], spans, threads, _main(threads), functions,
        kernels, sorted((a for kind, a in memory if kind == device), key=lambda a: a.at_ns), bool(device),
    )  # fmt: skip


def _main(threads: dict[int, list[TimedRange]]) -> int:
    """The thread of the steps: the one with the most backward nodes, or ranges at all."""
    marks = {tid: sum(r.name.startswith((NODE, MODULE)) for r in rows) for tid, rows in threads.items()}
    return max(marks, key=lambda tid: (marks[tid], len(threads[tid])), default=0)


@dataclass(slots=True)
class Node:
    """A range in its tree. own_ns: its time without that of ranges inside. module: the innermost around it. backward:
    in a backward pass. comm: communication, or waiting. top: whether no other operator is around it."""

    range: TimedRange
    start_ns: int
    stop_ns: int
    own_ns: int
    depth: int
    module: str
    backward: bool
    comm: bool
    parent: "Node | None" = field(repr=False)


def tree(profile: RankProfile) -> list[Node]:
    """The ranges of the thread of the steps, and communication in between, in order of their starts. A range that ends
    after the one around it, by the last digit of a clock, ends with it."""
    waits = [
        TimedRange(s.kind, s.start_ns, s.stop_ns, -1, "")
        for s in profile.spans
        if s.kind in ("comm", "wait") and s.tags.get("exposed", True) and s.stop_ns > s.start_ns
    ]
    ranges = sorted([*profile.threads.get(profile.main, ()), *waits], key=lambda r: (r.start_ns, -r.stop_ns))
    of_sequence: dict[int, str] = {}
    nodes: list[Node] = []
    around: list[Node] = []
    behind = ""  # the module of the backward node before
    for r in ranges:
        while around and around[-1].stop_ns <= r.start_ns:
            around.pop()
        outer = around[-1] if around else None
        stop = r.stop_ns if outer is None else min(r.stop_ns, outer.stop_ns)
        module, backward = ("", False) if outer is None else (outer.module, outer.backward)
        if r.name.startswith(MODULE):
            module = r.name[len(MODULE) :]
        elif r.name.startswith(NODE):
            # What collects a gradient has no forward: it follows the node that made it.
            module, backward = of_sequence.get(r.sequence, behind), True
            behind = module
        elif r.sequence >= 0 and not backward:
            of_sequence[r.sequence] = module
        comm = r.name in ("comm", "wait")
        node = Node(r, r.start_ns, stop, stop - r.start_ns, len(around), module, backward, comm, outer)
        if outer is not None:
            outer.own_ns -= node.own_ns
        nodes.append(node)
        around.append(node)
    return nodes


class MomentIndex:
    """Which of some stretches lasts at a moment, where none overlap."""

    def __init__(self, stretches: Iterable[tuple[int, int, Any]]) -> None:
        self._rows: Sequence[tuple[int, int, Any]] = sorted(stretches, key=lambda row: row[:2])
        self._starts = [row[0] for row in self._rows]

    def at(self, moment: int) -> Any:
        """What lasts then; None where nothing does."""
        place = bisect_right(self._starts, moment) - 1
        if place >= 0 and moment < self._rows[place][1]:
            return self._rows[place][2]
        return None
