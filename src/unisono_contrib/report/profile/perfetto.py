"""All ranks' profiles as one trace of Perfetto: a track for each thread and stream, a counter of bytes, and arrows
from a message's sender to its receiver and between the ranks of a collective."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from unisono.observe.span import Span
from unisono.observe.trace import event
from unisono.report.calls import group_of
from unisono_contrib.report.profile.digest import OUTSIDE
from unisono_contrib.report.profile.kineto import MODULE, NODE, Node, RankProfile, TimedRange, tree
from unisono_contrib.report.profile.pieces import lanes
from unisono_contrib.report.profile.track_events import Slice, TraceFile

Flows = Mapping[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]]
"""Of a span, by its rank and its place among that rank's: arrows through it, and arrows that end in it."""


def message_flows(profiles: Sequence[RankProfile]) -> Flows:
    """An arrow for each message, and one for each collective from the rank that came first to the one that came last.

    A message is known on both sides by its step, direction, stage and micro-batch. The ranks of a group number their
    calls of one kind alike in a step.
    """
    rows: defaultdict[tuple[Any, ...], list[tuple[int, tuple[int, int]]]] = defaultdict(list)
    for profile in profiles:
        coords = profile.facts.get("coords", {})
        for place, span in enumerate(profile.spans):
            tags = span.tags
            if span.kind == "send" or tags.get("op") == "recv":
                ahead = 0 if span.kind != "send" else 1 if tags["way"] == "F" else -1
                at_ns, stage = span.stop_ns, tags["stage"] + ahead
                key = ("message", tags["step"], tags["way"], stage, tags["micro"], group_of("pp", coords))
            elif span.kind == "call":
                at_ns, axis = span.start_ns, tags["axis"]
                key = ("call", tags["step"], axis, tags["op"], tags["number"], group_of(axis, coords))
            else:
                continue
            rows[key].append((at_ns, (profile.rank, place)))
    flows: dict[tuple[int, int], tuple[tuple[int, ...], tuple[int, ...]]] = {}
    for number, met in enumerate(rows.values(), 1):
        if len(met) > 1:
            *first, (_, last) = sorted(met)
            flows |= {at: ((number,), ()) for _, at in first}
            flows[last] = ((), (number,))
    return flows


def write(profiles: Sequence[RankProfile]) -> bytes:
    """The content of `profile/trace.pftrace`. Its times count from the first that happened on any rank."""
    starts = (r.start_ns for p in profiles for r in (*p.spans, *p.threads.get(p.main, ())))
    file, flows = TraceFile(min(starts, default=0)), message_flows(profiles)
    used = {axis for p in profiles for axis, at in p.facts["coords"].items() if at}
    for profile in profiles:
        place = " ".join(f"{axis}={at}" for axis, at in profile.facts["coords"].items() if axis in used)
        # Process 0 is taken for the idle one.
        process = file.process(profile.rank + 1, f"rank {profile.rank}" + (f" ({place})" if place else ""))
        _spans(file, process, profile, flows)
        file.slices(file.track(process, "modules", 2), module_slices(tree(profile)))
        _threads(file, process, profile)
        if profile.on_gpu:  # of a CPU they are the spans again
            _streams(file, process, profile)
        _memory(file, process, profile)
    return file.content()


def _spans(file: TraceFile, process: int, profile: RankProfile, flows: Flows) -> None:
    """What the rank was doing; and its collectives, on as many tracks as it takes."""
    inline, calls = list[Slice](), list[Slice]()
    for place, span in enumerate(profile.spans):
        through, ends = flows.get((profile.rank, place), ((), ()))
        part = Slice(span.start_ns, span.stop_ns, _label(span), span.kind, _notes(span), through, ends)
        if span.kind == "call":
            calls.append(part)
        elif span.tags.get("exposed", True):
            inline.append(part)
    file.slices(file.track(process, "step", 0), inline)
    calls.sort(key=lambda part: part[:2])
    for lane, parts in _by_lane(calls):
        file.slices(file.track(process, f"collectives {lane + 1}", 1), parts)


def _by_lane(slices: Sequence[Slice]) -> Iterable[tuple[int, list[Slice]]]:
    taken = lanes([part[:2] for part in slices])
    for lane in range(max(taken, default=-1) + 1):
        yield lane, [part for part, at in zip(slices, taken, strict=True) if at == lane]


def module_slices(nodes: Sequence[Node]) -> list[Slice]:
    """Forwards of modules, and nodes of backward passes under their modules' names. Communication inside is a slice of
    its own, so what is left of a slice is the module's."""
    parts: list[Slice] = []
    for node in nodes:
        name = node.range.name
        if node.comm:
            parts.append(Slice(node.start_ns, node.stop_ns, name, "comm"))
        elif name.startswith(MODULE):
            parts.append(
                Slice(node.start_ns, node.stop_ns, node.module, "again" if node.backward else "forward")
            )
        elif name.startswith(NODE):
            notes = {"node": name[len(NODE) :]}
            parts.append(Slice(node.start_ns, node.stop_ns, node.module or OUTSIDE, "backward", notes))
    return parts


def _threads(file: TraceFile, process: int, profile: RankProfile) -> None:
    """Operators of each thread, and Python functions if they were recorded."""
    for names, threads in (("operators", profile.threads), ("Python", profile.functions)):
        for number, tid in enumerate(sorted(threads, key=lambda tid: tid != profile.main)):
            track = file.track(process, names + (f", thread {number + 1}" if number else ""), 3)
            shown = [_operator(r) for r in threads[tid] if not r.name.startswith(MODULE)]
            file.slices(track, shown)


def _operator(r: TimedRange) -> Slice:
    return Slice(
        r.start_ns,
        r.stop_ns,
        r.name.replace(NODE, "autograd: "),
        "",
        {"shapes": r.shapes} if r.shapes else {},
    )


def _streams(file: TraceFile, process: int, profile: RankProfile) -> None:
    """What a GPU did, a track a stream."""
    for stream in sorted({kernel.stream for kernel in profile.kernels}):
        mine = [k for k in profile.kernels if k.stream == stream]
        track = file.track(process, f"stream {stream}", 4)
        file.slices(track, [Slice(k.start_ns, k.stop_ns, k.name, "kernel") for k in mine])


def _memory(file: TraceFile, process: int, profile: RankProfile) -> None:
    """Bytes of tensors, from what the rank held when the profile began."""
    track = file.counter(process, "bytes of tensors")
    total = sum(int(nbytes) for nbytes in profile.facts["held"].values())
    for allocation in profile.allocations:
        total += allocation.nbytes
        file.value(track, allocation.at_ns, total)


def _label(span: Span) -> str:
    return str(event(span, 0, 0)["name"])


def _notes(span: Span) -> dict[str, str | int]:
    return {key: value for key, value in span.tags.items() if isinstance(value, str | int)}
