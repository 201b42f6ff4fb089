"""What a rank was doing from moment to moment, each under the innermost span; and the same as kernels of a device."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from unisono.observe.span import Span

T = TypeVar("T")

NOT_COMPUTING = ("nccl", "Memcpy", "Memset")
"""How the names of kernels begin that compute nothing: communication, and copies."""
COMPUTING = frozenset({"forward", "backward", "optim", "sync"})


def innermost(rows: Iterable[tuple[int, int, T]]) -> list[tuple[int, int, T]]:
    """Stretches (start, stop, what) that lie in each other → the time of all, cut where one begins or ends, each part
    with the innermost that lasts then; none overlap."""
    ordered = sorted(rows, key=lambda row: (row[0], -row[1]))
    parts: list[tuple[int, int, T]] = []
    around: list[tuple[int, T]] = []  # (stop, what)
    at = 0
    for start, stop, what in [*ordered, (max((row[1] for row in ordered), default=0), 0, None)]:
        while around and around[-1][0] <= start:
            end, inner = around.pop()
            if end > at:
                parts.append((at, end, inner))
                at = end
        if around and start > at:
            parts.append((at, start, around[-1][1]))
        at = max(at, start)
        if what is not None:
            around.append((stop, what))
    return parts


def own_pieces(spans: Iterable[Span]) -> list[tuple[int, int, Span]]:
    """The time of the step's thread, each piece under the innermost span. What ran beside (`exposed=False`) is left
    out, and moments are."""
    return innermost(
        (s.start_ns, s.stop_ns, s) for s in spans if s.tags.get("exposed", True) and s.stop_ns > s.start_ns
    )


def lanes(stretches: Sequence[tuple[int, int]]) -> list[int]:
    """A lane for each stretch, in order of their starts, so that none overlap in a lane; as few lanes as it takes."""
    ends: list[int] = []
    chosen = []
    for start, stop in stretches:
        lane = next((i for i, end in enumerate(ends) if end <= start), len(ends))
        ends[lane:] = [stop, *ends[lane + 1 :]]
        chosen.append(lane)
    return chosen


def union_ns(stretches: Iterable[tuple[int, int]]) -> int:
    """Nanoseconds in which at least one of them lasts."""
    total, end = 0, 0
    for start, stop in sorted(stretches):
        total += max(0, stop - max(start, end))
        end = max(end, stop)
    return total


def kernels(spans: Sequence[Span], rank: int, shift_us: float) -> list[dict[str, Any]]:
    """A rank that computes on its CPU, as a device: objects of a Kineto trace, of the category `kernel`. Stream 0 is
    what it computed, stream 1 communication that it waited for, the others communication beside. The names are those
    by which Holistic Trace Analysis knows communication. What a rank waits for otherwise is a gap."""
    rows: list[tuple[str, int, int, int]] = []
    for start, stop, span in own_pieces(spans):
        if span.kind in COMPUTING:
            rows.append((span.kind, 0, start, stop))
        elif span.kind == "comm":
            rows.append((_collective(span), 1, start, stop))
    beside = sorted(
        (s for s in spans if not s.tags.get("exposed", True)), key=lambda s: (s.start_ns, s.stop_ns)
    )
    taken = lanes([(s.start_ns, s.stop_ns) for s in beside])
    rows += [(_collective(s), 2 + lane, s.start_ns, s.stop_ns) for s, lane in zip(beside, taken, strict=True)]
    return [
        {
            "ph": "X", "cat": "kernel", "name": name, "pid": rank, "tid": f"stream {stream}",
            "ts": start / 1000 + shift_us, "dur": (stop - start) / 1000,
            "args": {"stream": stream, "device": 0, "correlation": number, "External id": number},
        }
        for number, (name, stream, start, stop) in enumerate(rows, 1)
    ]  # fmt: skip


def _collective(span: Span) -> str:
    return f"ncclKernel_{span.tags.get('op', 'meet')} ({span.tags.get('axis', '')})"
