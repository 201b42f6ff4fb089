"""Chrome traces: one file per rank, for chrome://tracing, Perfetto, and our own report.

Follows the Trace Event Format ("X" events, microseconds) with the `distributedInfo` and `baseTimeNanoseconds` that
PyTorch's profiler writes, so tools that merge ranks find what they look for.
"""

import gzip
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unisono.observe.files import whole_file, write_whole
from unisono.observe.span import Span

_DAY_NS = 86_400 * 10**9
_DENSEST = 200  # bytes of a trace that one of its packed ones may stand for: ours have 10 to 30
_COMPUTE, _BESIDE = 0, 1  # thread ids: what the rank was doing, and communication that ran beside it


@dataclass(frozen=True)
class Trace:
    """A trace file read back; the spans' times are Unix time in nanoseconds, so ranks share one axis."""

    rank: int
    world: int
    host: str
    spans: list[Span]
    backend: str = ""

    @property
    def on_gpu(self) -> bool:
        """Whether the rank computed on a device beside its CPU: between CPUs, and alone, the backend is Gloo."""
        return self.backend not in ("", "gloo")


def write(
    path: str | Path,
    spans: Iterable[Span],
    rank: int,
    world: int,
    *,
    epoch_ns: int = 0,
    host: str = "",
    backend: str = "",
    coords: Mapping[str, int] | None = None,
) -> Path:
    """Write `rank*.json.gz`: whole or not at all. `epoch_ns` is the recorder's: Unix time at its clock's zero.

    `coords` is the rank's place in the mesh ({"dp": 0, "pp": 1}) and becomes part of its name. Raises OSError.
    """
    kept = list(spans)
    first = min((span.start_ns for span in kept), default=0) + epoch_ns
    base_ns = first // _DAY_NS * _DAY_NS  # the same in all ranks; keeps microseconds exact in a double
    place = " ".join(f"{axis}={at}" for axis, at in (coords or {}).items())
    events = _names(rank, f"rank {rank}" + (f" ({place})" if place else ""), host)
    events += [event(span, rank, epoch_ns - base_ns) for span in kept]
    info = {"backend": backend, "rank": rank, "world_size": world}
    return _write(path, events, baseTimeNanoseconds=base_ns, distributedInfo=info, host=host)


@dataclass(frozen=True)
class TraceLane:
    """One process of a trace that was put together: its name, and spans whose times are nanoseconds from zero."""

    name: str
    spans: list[Span]


def write_groups(path: str | Path, groups: Mapping[str, Sequence[TraceLane]]) -> Path:
    """Write recordings side by side into one file, compressed if its name ends in `.gz`; whole or not at all.

    Each group's lanes stand together, one process each, named `GROUP LANE`. Raises OSError.
    """
    events: list[dict[str, Any]] = []
    pid = 0  # the first is 1: viewers take process 0 for the idle one
    for group, lanes in groups.items():
        for lane in lanes:
            pid += 1
            events += _names(pid, f"{group} {lane.name}".strip(), "")
            events += [event(span, pid, 0) for span in lane.spans]
    return _write(path, events)


def _write(path: str | Path, events: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    document = {"schemaVersion": 1, "displayTimeUnit": "ms", **more, "traceEvents": events}
    content = json.dumps(document, separators=(",", ":")).encode()
    return write_whole(path, gzip.compress(content, 6) if str(path).endswith(".gz") else content)


def _unpacked(path: Path) -> bytes:
    """Raises OSError, EOFError, and ValueError for what is packed far more densely than any trace."""
    packed = whole_file(path)
    most = _DENSEST * len(packed)
    data = gzip.GzipFile(fileobj=io.BytesIO(packed)).read(most + 1)
    if len(data) > most:
        raise ValueError(f"it holds more than {_DENSEST} times its own bytes")
    return data


def read(path: str | Path) -> Trace:
    """Read a file of `write` back. Raises OSError, EOFError (cut short) or ValueError (not a trace)."""
    document = json.loads(_unpacked(Path(path)))
    try:
        base_ns = int(document["baseTimeNanoseconds"])
        info = document["distributedInfo"]
        spans = [span_of(event, base_ns) for event in document["traceEvents"] if event.get("ph") == "X"]
        host, backend = str(document.get("host", "")), str(info.get("backend", ""))
        return Trace(int(info["rank"]), int(info["world_size"]), host, spans, backend)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a trace: {error!r}") from error


def _names(rank: int, name: str, host: str) -> list[dict[str, Any]]:
    rows: list[tuple[str, int, dict[str, Any]]] = [
        ("process_name", _COMPUTE, {"name": name}),
        ("process_labels", _COMPUTE, {"labels": host}),
        ("process_sort_index", _COMPUTE, {"sort_index": rank}),
        ("thread_name", _COMPUTE, {"name": "step"}),
        ("thread_name", _BESIDE, {"name": "communication beside compute"}),
    ]
    return [{"ph": "M", "name": row, "pid": rank, "tid": tid, "args": args} for row, tid, args in rows]


def event(span: Span, pid: int, shift_ns: float) -> dict[str, Any]:
    """A span as an object of a trace. pid: the process that it stands in. shift_ns: is added to its times."""
    tags = span.tags
    label = span.kind
    if "op" in tags:
        label = f"{tags.get('axis', '')} {tags['op']}".strip()
    elif "micro" in tags:
        label = f"{span.kind} {tags['micro']}"
    return {
        "ph": "X",
        "name": label,
        "cat": span.kind,
        "pid": pid,
        "tid": _COMPUTE if tags.get("exposed", True) else _BESIDE,
        "ts": (span.start_ns + shift_ns) / 1000,
        "dur": (span.stop_ns - span.start_ns) / 1000,
        "args": {"kind": span.kind, **tags},
    }


def span_of(event: Mapping[str, Any], base_ns: int) -> Span:
    """The span that `event` made an object of. Raises KeyError and TypeError for what is none."""
    start_ns = base_ns + round(event["ts"] * 1000)
    tags = dict(event["args"])
    return Span(str(tags.pop("kind")), start_ns, start_ns + round(event["dur"] * 1000), tags)
