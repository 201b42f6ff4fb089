"""A profile in a run's report: what is in the run's folder is digested, and shown as tables."""

import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from unisono.observe.files import write_whole
from unisono.report import html
from unisono.report.collect import RunRecord
from unisono.spec import words
from unisono.spec.words import percent
from unisono_contrib.report.profile import perfetto
from unisono_contrib.report.profile.digest import PeakMemory, ProfileDigest, digest
from unisono_contrib.report.profile.kineto import read

FOLDER, TRACE = "profile", "trace.pftrace"
ROWS = 10
"""Rows of each table."""
NEIGHBOURS = 10
"""Steps before the profiled ones, and as many after, with which these are compared."""


def digested(run_dir: Path) -> ProfileDigest | None:
    """The digest of a run's profile; None where it has none. Writes the trace of all ranks beside the ranks' own
    files. Raises OSError, EOFError and ValueError where one is damaged."""
    folder = run_dir / FOLDER
    paths = sorted(folder.glob("rank*.json.gz"), key=lambda path: int(re.sub(r"\D", "", path.name) or 0))
    if not paths:
        return None
    profiles = [read(path) for path in paths]
    write_whole(folder / TRACE, perfetto.write(profiles))
    return digest(profiles)


def overhead(run: RunRecord, first: int, last: int) -> float | None:
    """How much longer a profiled step took than its neighbours, as a part of these; medians over ranks and steps, the
    first three steps of a run left out. None where there is no neighbour."""
    profiled, beside = list[float](), list[float]()
    for facts in run.ranks:
        begin = min((line["step"] for line in facts.steps), default=0) + 3
        for line in facts.steps:
            step, wall = line["step"], sum(v for k, v in line["time"].items() if k != "comm_hidden")
            if first <= step <= last:
                profiled.append(wall)
            elif begin <= step and first - NEIGHBOURS <= step <= last + NEIGHBOURS:
                beside.append(wall)
    return statistics.median(profiled) / statistics.median(beside) - 1.0 if profiled and beside else None


def as_json(run: RunRecord, seen: ProfileDigest) -> dict[str, Any]:
    """What `unisono report --json` says of a profile: the digest, and what it cost."""
    return {
        **seen.as_json(),
        "overhead": overhead(run, seen.first, seen.last),
        "trace": str(run.folder / FOLDER / TRACE),
        "predicted_bytes": run.prediction.get("ledger"),
    }


def section(run: RunRecord, seen: ProfileDigest) -> str:
    """Modules, operators, lines and memory of the profiled steps."""
    more = overhead(run, seen.first, seen.last)
    longer = "no" if more is None or more <= 0 else percent(more)
    cost = "" if more is None else f"A profiled step took {longer} longer than its neighbours. "
    said = (
        f"Means of a step, over all ranks. {cost}The run stood still for {words.seconds(seen.pause_s)}"
        f" around these steps. profile/{TRACE} has all ranks on one clock, for Perfetto;"
        " profile/rank0.json.gz and the others are for tools that read traces of torch's profiler."
    )
    return html.section(
        "profile",
        f"Steps {seen.first} to {seen.last}, profiled",
        html.note(said),
        _modules(seen),
        html.pair(_operators(seen), _lines(run, seen)),
        _breakdown(seen),
        _memory(run, seen.memory),
    )


def _modules(seen: ProfileDigest) -> str:
    rows = [
        [
            m.name,
            f"{m.calls:g}",
            *map(words.seconds, (m.forward_s, m.backward_s)),
            words.nbytes(m.bytes_at_peak),
        ]
        for m in seen.modules[:ROWS]
    ]
    heads = ("module", "calls", "forward", "backward", "bytes at the peak")
    return "<h3>Dearest modules, without modules inside</h3>" + html.table(heads, rows, numeric=4)


def _operators(seen: ProfileDigest) -> str:
    rows = [[o.name, f"{o.calls:g}", words.seconds(o.seconds)] for o in seen.operators[:ROWS]]
    return (
        "<div><h3>Dearest operators</h3>"
        + html.table(("operator", "calls", "own time"), rows, numeric=2)
        + "</div>"
    )


def _lines(run: RunRecord, seen: ProfileDigest) -> str:
    rows = [
        [f"{_short(line.file)}:{line.line} {line.function}", percent(line.share), words.seconds(line.seconds)]
        for line in seen.lines[:ROWS]
    ]
    heads = ("line of Python", "part", "time")
    return "<div><h3>Dearest lines, sampled</h3>" + html.table(heads, rows, numeric=2) + "</div>"


def _short(file: str) -> str:
    """A file by its package, or its last two folders."""
    parts = Path(file).parts
    begin = max((i for i, part in enumerate(parts) if part in ("unisono", "unisono_contrib")), default=-3)
    return "/".join(parts[begin:])


def _breakdown(seen: ProfileDigest) -> str:
    rows = [
        [f"rank {b.rank}", *map(words.seconds, (b.whole_s, b.computing_s, b.communicating_s, b.idle_s))]
        for b in seen.breakdown
    ]
    heads = ("rank", "all profiled steps", "computing", "communicating alone", "neither")
    return "<h3>Where the time went</h3>" + html.table(heads, rows[: 2 * ROWS], numeric=4)


def _memory(run: RunRecord, memory: Sequence[PeakMemory]) -> str:
    kinds = list(dict.fromkeys(kind for peak in memory for kind in peak.kinds))
    ledger = run.prediction.get("ledger")
    rows = []
    if isinstance(ledger, dict):
        known = [ledger.get(kind) for kind in kinds]
        rows.append(
            ["predicted, fullest rank", words.nbytes(sum(ledger.values())), *map(_bytes, known), "", ""]
        )
    rows += [
        [
            f"rank {peak.rank}",
            words.nbytes(peak.total),
            *(_bytes(peak.kinds.get(kind)) for kind in kinds),
            _bytes(peak.after.get("rss")),
            "–" if peak.fragmented is None else percent(peak.fragmented),
        ]
        for peak in memory[: 2 * ROWS]
    ]
    heads = ("at the peak", "all", *kinds, "resident", "fragmented")
    said = (
        "Bytes of tensors when they were most; the prediction counts what is working among activations."
        " Fragmented: the part of what the allocator has from the system that lies unused between pieces in use."
    )
    return "<h3>Memory</h3>" + html.table(heads, rows, numeric=len(heads) - 1) + html.note(said)


def _bytes(value: float | None) -> str:
    return "–" if value is None else words.nbytes(value)
