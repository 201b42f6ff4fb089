"""Run folders as a run would have left them, made up from a timetable and a clock that always tells the same."""

import json
import random
from pathlib import Path
from typing import Any

from unisono.observe import trace
from unisono.observe.metrics import JsonLines
from unisono.observe.span import Span
from unisono.programs.pipeline import play_costs
from unisono.programs.schedules import SCHEDULES

MS = 1_000_000


def write_run(
    folder: Path,
    *,
    dp: int = 2,
    pp: int = 1,
    micros: int = 4,
    steps: int = 240,
    straggler: int | None = None,
    slow: float = 1.5,
    trace_steps: int = 2,
    seed: int = 0,
) -> Path:
    """A run of `dp` x `pp` ranks; the forwards and backwards of rank `straggler` take `slow` times as long."""
    luck = random.Random(seed)
    folder.mkdir(parents=True, exist_ok=True)
    ranks = dp * pp
    plan = f"dp={dp} pp={pp} schedule=1f1b micros={micros}"
    (folder / "config.resolved.toml").write_text(
        f'name = "stdlib-gpt"  # file\nseed = 0  # default\nplan = "{plan}"  # flag\n\n'
        '[model]\nkind = "gpt"\nn_layer = 4\nn_head = 4\nd_model = 128\ncontext = 64\n\n'
        f"[train]\nsteps = {steps}\nglobal_batch = 32\nlr = 0.001\n"
    )
    (folder / "env.json").write_text(json.dumps(ENVIRONMENT))
    with JsonLines(folder / "metrics.jsonl") as metrics:
        logs = [JsonLines(folder / "events" / f"rank{rank}.jsonl") for rank in range(ranks)]
        for rank, log in enumerate(logs):
            coords = {"pp": rank // dp, "dp": rank % dp}
            log.write({"kind": "info", "rank": rank, "host": "laptop", "coords": coords})
        for step in range(steps):
            spans = {r: _rank_step(r, dp, pp, micros, straggler, slow, luck) for r in range(ranks)}
            end = max(span.stop_ns for mine in spans.values() for span in mine)
            for rank, log in enumerate(logs):
                time = _totals(spans[rank], end)
                sent = {"dp.all_reduce": 1_150_000} if dp > 1 else {}
                if pp > 1:
                    sent["pp.send"] = micros * 262_144
                size = 291.5 + 12 * rank + min(step, 5)
                log.write(
                    {
                        "kind": "step",
                        "step": step,
                        "rank": rank,
                        "time": time,
                        "bytes": sent,
                        "mem_mib": size,
                        "start": 1_700_000_000.0 + 0.2 * step,
                        "calls": [],
                    }
                )
                if rank == 0:
                    metrics.write(_metric(step, time, end, sum(sent.values()), size, luck))
            if step >= steps - trace_steps:
                base = 1_700_000_000 * 10**9 + step * 200 * MS
                _keep(folder, spans, base, step, ranks, dp)
        for log in logs:
            log.close()
    summary = {
        "plan": plan,
        "steps": steps,
        "ranks": ranks,
        "timetable": {"schedule": "1f1b", "ranks": pp, "micros": micros},
        "sample": 'def __init__(self, name, value):\n    """Return the value."""\n    self.name = name',
        "parity": "same run on one process: max |d loss| 1.2e-6 over 20 steps: PASS",
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    return folder


ENVIRONMENT: dict[str, Any] = {
    "schema_version": 1,
    "python": "3.11.7",
    "platform": "Linux-6.1-x86_64",
    "host": "laptop",
    "cpu": "AMD EPYC 9R14 96-Core Processor",
    "cores": 8,
    "cores_usable": 8,
    "memory_gib": 23.5,
    "packages": {"unisono": "0.1.0", "torch": "2.13.0", "numpy": "2.4.6"},
    "git": {"commit": "0c540e6f00ba42a0", "changed": True},
    "argv": ["unisono", "train", "--demo"],
    "env": {"OMP_NUM_THREADS": "1"},
}


def _rank_step(
    rank: int, dp: int, pp: int, micros: int, straggler: int | None, slow: float, luck: random.Random
) -> list[Span]:
    """The spans of one rank: its stage's row of the timetable, the all-reduce, the update; times from zero."""
    row = rank // dp
    mine = [slow if row_rank == straggler else 1.0 for row_rank in range(rank % dp, dp * pp, dp)]
    jitter = [luck.uniform(0.96, 1.06) for _ in mine]
    costs = [5.0 * s * j for s, j in zip(mine, jitter, strict=True)]
    placed = play_costs(SCHEDULES.read("1f1b").timetable(pp, micros), costs, [2 * c for c in costs], send=0.3)
    spans = [Span("data", 0, 2 * MS, {})]
    clock = 2 * MS
    for p in (p for p in placed if p.row == row):
        start, stop = 2 * MS + round(p.start * MS), 2 * MS + round(p.stop * MS)
        if start > clock:
            spans.append(Span("wait", clock, start, {"axis": "pp", "op": "recv"}))
        kind = "forward" if p.action.kind == "F" else "backward"
        spans.append(Span(kind, start, stop, {"micro": p.action.micro, "stage": p.action.stage}))
        clock = stop
    if dp > 1:
        tags = {"axis": "dp", "op": "all_reduce", "bytes": 1_150_000}
        spans.append(Span("comm", clock - 6 * MS, clock, {**tags, "exposed": False}))
        spans.append(Span("comm", clock, clock + 3 * MS, tags))
        clock += 3 * MS
    spans.append(Span("optim", clock, clock + 4 * MS, {}))
    return spans


def _totals(spans: list[Span], end: int) -> dict[str, float]:
    time = dict.fromkeys(
        ("data", "forward", "backward", "comm_exposed", "comm_hidden", "wait", "optim", "other"), 0.0
    )
    for span in spans:
        exposed = span.tags.get("exposed", True)
        kind = ("comm_exposed" if exposed else "comm_hidden") if span.kind == "comm" else span.kind
        time[kind] += (span.stop_ns - span.start_ns) * 1e-9
    time["wait"] += (end - spans[-1].stop_ns) * 1e-9
    time["other"] += 0.001
    return time


def _metric(
    step: int, time: dict[str, float], end: int, nbytes: int, size: float, luck: random.Random
) -> dict[str, Any]:
    loss = 2.1 + 3.4 * 0.985**step + luck.gauss(0, 0.05)
    record = {
        "step": step,
        "loss": loss,
        "lr": 1e-3 * min(1, (step + 1) / 20),
        "grad_norm": 1.1,
        "tokens": 2048,
        "tokens_per_s": 2048 / (end * 1e-9) * luck.uniform(0.93, 1.03),
        "time": time,
        "bytes_sent": nbytes,
        "mem_mib": size,
    }
    if step % 40 == 39:
        record["val_loss"] = loss + 0.08
    return record


def _keep(folder: Path, spans: dict[int, list[Span]], base: int, step: int, world: int, dp: int) -> None:
    """Add a step to the traces of all ranks."""
    for rank, mine in spans.items():
        path = folder / "trace" / f"rank{rank}.json.gz"
        before = trace.read(path).spans if path.exists() else []
        moved = [Span(s.kind, s.start_ns + base, s.stop_ns + base, {**s.tags, "step": step}) for s in mine]
        coords = {"pp": rank // dp, "dp": rank % dp}
        trace.write(path, [*before, *moved], rank, world, host="laptop", backend="gloo", coords=coords)
