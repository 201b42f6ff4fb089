"""`unisono bench`, on the supervisor's side: start ranks, or be one, and hand over what they measured. No torch."""

import os
import platform
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from unisono.launch import env, fork_server
from unisono.launch.outcome import Outcome
from unisono.report import sheet
from unisono.spec.settings import Settings
from unisono_contrib.measure.benches import Bench, Row

ENTRY = "unisono_contrib.measure.bench_rank:main"
_SILENCE = 900.0  # seconds: one call of a large vector over a slow link takes long


def run(
    bench: Bench, question: Mapping[str, Any], ranks: int, settings: Settings, environ: Mapping[str, str]
) -> dict[str, Any] | None:
    """The object of --json; None on ranks but the first. Raises UnisonoError."""
    place = env.detect(environ)
    argument = {**question, "live": bench.live}
    if place is not None:
        outcome = env.run_in_env(ENTRY, argument, None, environ, None, "auto", _SILENCE)
    else:
        settings.note(f"bench {bench.name}: {ranks} {'rank' if ranks == 1 else 'ranks'}, {_busy()}")
        with fork_server.start(ENTRY, ranks, settings.quiet) as nursery:
            threads = bench.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
            outcome = nursery.run(argument, ranks, threads, None, _SILENCE, "auto")
    result = _result(outcome)
    if place is not None and place.rank:
        return None
    rows: list[Row] = result["rows"]
    return {
        "bench": bench.name, "ranks": len(result["hosts"]), "hosts": sorted(set(result["hosts"])),
        "backend": result["backend"], "threads_per_rank": result["threads"], "machine": machine(), "rows": rows,
    }  # fmt: skip


def _result(outcome: Outcome) -> dict[str, Any]:
    if outcome.error is not None:
        raise outcome.error
    if outcome.stopped or outcome.results[0] is None:
        from unisono.spec.errors import Interrupted, Stopped

        kind = Interrupted if outcome.stopped == "interrupt" else Stopped
        raise kind("stopped before all was measured")
    return outcome.results[0]


def machine() -> dict[str, Any]:
    """What the figures were seen on, and how busy it is."""
    return {
        "host": socket.gethostname(), "cores": len(os.sched_getaffinity(0)), "machine": platform.machine(),
        "load": round(os.getloadavg()[0], 2), "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def _busy() -> str:
    cores, load = len(os.sched_getaffinity(0)), os.getloadavg()[0]
    said = f"{cores} cores, load {load:.1f}"
    return said + ("; other work runs here: trust the ratios only" if load > 0.5 * cores else "")


def draw(bench: Bench, result: Mapping[str, Any], path: Path) -> Path:
    """The picture of --out. Raises OSError."""
    seen = result["machine"]
    said = (
        f"unisono bench {bench.name} · {result['ranks']} ranks on {len(result['hosts'])} hosts · "
        f"{seen['cores']} cores, load {seen['load']} · {seen['date']}"
    )
    charts = bench.charts(result["rows"])
    return sheet.write(
        path, f"Bench: {bench.about}.", said, [charts[i : i + 2] for i in range(0, len(charts), 2)]
    )
