"""What profiled steps cost: by module, operator and line, over all ranks; what the memory held at its peak; and how
much of a rank's time was computing, communicating, idle. Means of a step, seconds and bytes."""

import math
import statistics
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from unisono_contrib.report.profile.kineto import (
    MODULE,
    NODE,
    Allocation,
    MomentIndex,
    Node,
    RankProfile,
    tree,
)
from unisono_contrib.report.profile.pieces import NOT_COMPUTING, innermost, own_pieces, union_ns

OUTSIDE = "(outside modules)"


@dataclass(frozen=True)
class ModuleCost:
    """A module on the ranks that have it: seconds of its own in a step, mean over ranks, without modules inside it.
    bytes_at_peak: that its forwards and backwards had allocated when the rank held most; the most of any rank. calls:
    of its forward in a step."""

    name: str
    forward_s: float
    backward_s: float
    calls: float
    bytes_at_peak: int
    ranks: int

    @property
    def seconds(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class OperatorCost:
    """An operator: its own seconds in a step, mean over ranks, and how often it was called."""

    name: str
    seconds: float
    calls: float


@dataclass(frozen=True)
class LineCost:
    """A line of Python on which ranks stood: seconds in a step, mean over ranks, and its part of all."""

    file: str
    line: int
    function: str
    seconds: float
    share: float


@dataclass(frozen=True)
class Breakdown:
    """A rank's profiled time from its first kernel to its last, as Holistic Trace Analysis counts it: computing,
    communication that no computing hid, and neither. Seconds of all profiled steps."""

    rank: int
    whole_s: float
    computing_s: float
    communicating_s: float
    idle_s: float


@dataclass(frozen=True)
class PeakMemory:
    """A rank when its tensors were most, in bytes by kind: `params`, `grads`, `optim`, `activations` (of forwards),
    `working` (what backwards and the update need meanwhile), `buffers`. modules: that had allocated what is not there
    between steps. before, after: the process and its allocator around the profiled steps, see
    `observe.memory.heap`."""

    rank: int
    total: int
    kinds: Mapping[str, int]
    modules: Mapping[str, int]
    before: Mapping[str, float]
    after: Mapping[str, float]

    @property
    def fragmented(self) -> float | None:
        """The part of what the allocator has from the system that no tensor uses; None where it does not say."""
        if "reserved" in self.after:
            return self.after["split"] / max(1.0, self.after["reserved"])
        if "heap_free" not in self.after:
            return None
        whole = self.after["heap_used"] + self.after["heap_free"] + self.after["mapped"]
        return (self.after["heap_free"] - self.after["heap_top"]) / max(1.0, whole)


@dataclass(frozen=True)
class ProfileDigest:
    """All ranks' profiles of the steps first .. last. The tables are in order of cost, whole."""

    first: int
    last: int
    modules: tuple[ModuleCost, ...]
    operators: tuple[OperatorCost, ...]
    lines: tuple[LineCost, ...]
    breakdown: tuple[Breakdown, ...]
    memory: tuple[PeakMemory, ...]
    pause_s: float

    def as_json(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


def digest(profiles: Sequence[RankProfile]) -> ProfileDigest:
    """Sum up the profiles of all ranks, at least one."""
    trees = [tree(profile) for profile in profiles]
    memory = tuple(map(peak_memory, profiles, trees))
    facts = [profile.facts for profile in profiles]
    return ProfileDigest(
        first=min(int(f["first"]) for f in facts),
        last=max(int(f["last"]) for f in facts),
        modules=_modules(profiles, trees, memory),
        operators=_operators(profiles, trees),
        lines=_lines(profiles),
        breakdown=tuple(map(breakdown, profiles)),
        memory=memory,
        pause_s=max(float(f["start_s"]) + float(f["stop_s"]) for f in facts),
    )


def module_seconds(nodes: Sequence[Node]) -> dict[str, tuple[float, float]]:
    """Each module's own seconds in forward and in backward; what lies outside of modules under `OUTSIDE`, and
    communication under none. A forward that is made again in a backward pass counts there."""
    spent: defaultdict[str, list[int]] = defaultdict(lambda: [0, 0])
    for node in nodes:
        if not node.comm:
            spent[node.module or OUTSIDE][node.backward] += node.own_ns
    return {name: (forward * 1e-9, backward * 1e-9) for name, (forward, backward) in spent.items()}


def _modules(
    profiles: Sequence[RankProfile], trees: Sequence[Sequence[Node]], memory: Sequence[PeakMemory]
) -> tuple[ModuleCost, ...]:
    parts: defaultdict[str, list[tuple[float, float, float, int]]] = defaultdict(list)
    for profile, nodes, peak in zip(profiles, trees, memory, strict=True):
        calls = Counter(n.module for n in nodes if n.range.name.startswith(MODULE))
        for name, (forward, backward) in module_seconds(nodes).items():
            bytes_at_peak = peak.modules.get(name, 0)
            parts[name].append(
                (
                    forward / profile.steps,
                    backward / profile.steps,
                    calls[name] / profile.steps,
                    bytes_at_peak,
                )
            )
    costs = [
        ModuleCost(name, _mean(rows, 0), _mean(rows, 1), _mean(rows, 2), max(r[3] for r in rows), len(rows))
        for name, rows in parts.items()
    ]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _mean(rows: Sequence[Sequence[float]], column: int) -> float:
    return statistics.fmean(row[column] for row in rows)


def _operators(profiles: Sequence[RankProfile], trees: Sequence[Sequence[Node]]) -> tuple[OperatorCost, ...]:
    seconds: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    weight = sum(profile.steps for profile in profiles)
    for nodes in trees:
        for node in nodes:
            if not node.comm and not node.range.name.startswith((MODULE, NODE)):
                seconds[node.range.name] += node.own_ns * 1e-9
                calls[node.range.name] += 1
    costs = [OperatorCost(name, spent / weight, calls[name] / weight) for name, spent in seconds.items()]
    return tuple(sorted(costs, key=lambda cost: -cost.seconds))


def _lines(profiles: Sequence[RankProfile]) -> tuple[LineCost, ...]:
    seconds: defaultdict[tuple[str, int, str], float] = defaultdict(float)
    weight = sum(profile.steps for profile in profiles)
    whole = sum(float(profile.facts["sampled_s"]) for profile in profiles)
    for profile in profiles:
        for file, line, function, spent in profile.facts["lines"]:
            seconds[file, line, function] += spent
    rows = sorted(seconds.items(), key=lambda item: -item[1])
    return tuple(LineCost(*key, spent / weight, spent / (whole or 1.0)) for key, spent in rows)


def breakdown(profile: RankProfile) -> Breakdown:
    """How a rank's device spent its time."""
    computing = [(k.start_ns, k.stop_ns) for k in profile.kernels if not k.name.startswith(NOT_COMPUTING)]
    every = [(k.start_ns, k.stop_ns) for k in profile.kernels]
    whole = max((stop for _, stop in every), default=0) - min((start for start, _ in every), default=0)
    busy, computed = union_ns(every), union_ns(computing)
    return Breakdown(
        profile.rank, whole * 1e-9, computed * 1e-9, (busy - computed) * 1e-9, (whole - busy) * 1e-9
    )


def peak_memory(profile: RankProfile, nodes: Sequence[Node]) -> PeakMemory:
    """What a rank's tensors were when they were most: what it held before, and what came and went since."""
    kinds = Counter({kind: int(n) for kind, n in profile.facts["held"].items()})
    total, at, there = _fullest(profile.allocations, kinds.total())
    modules = Counter[str]()
    where = MomentIndex(innermost((n.start_ns, n.stop_ns, n) for n in nodes))
    phases = MomentIndex(own_pieces(profile.spans))
    update = min((s.start_ns for s in profile.spans if s.kind == "optim" and s.start_ns > at), default=at)
    for allocation, gone_ns in there:
        span, node = phases.at(allocation.at_ns), where.at(allocation.at_ns)
        phase = "" if span is None else span.kind
        lasts = phase in ("backward", "comm") and gone_ns >= update
        kinds["activations" if phase == "forward" else "grads" if lasts else "working"] += allocation.nbytes
        modules[(node.module if node else "") or OUTSIDE] += allocation.nbytes
    before, after = profile.facts["memory"]
    return PeakMemory(profile.rank, total, dict(kinds), dict(modules.most_common()), before, after)


def _fullest(allocations: Sequence[Allocation], held: int) -> tuple[int, int, list[tuple[Allocation, float]]]:
    """(bytes when they were most, when that was, what had come until then and was there, each with when it went)."""
    total = most = held
    last, gone, alive = -1, dict[int, int](), dict[int, int]()
    for place, allocation in enumerate(allocations):
        total += allocation.nbytes
        if allocation.nbytes > 0:
            if (
                before := alive.get(allocation.address)
            ) is not None:  # freed on a thread that is not profiled
                gone[before] = place
                total -= allocations[before].nbytes
            alive[allocation.address] = place
        elif (born := alive.pop(allocation.address, None)) is not None:
            gone[born] = place
        if total > most:
            most, last = total, place
    there = [
        (a, allocations[gone[place]].at_ns if place in gone else math.inf)
        for place, a in enumerate(allocations[: last + 1])
        if a.nbytes > 0 and gone.get(place, last + 1) > last
    ]
    return most, allocations[last].at_ns if last >= 0 else 0, there
