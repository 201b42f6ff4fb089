"""What more ranks gained, by runs that were made: speed-up, efficiency, what limited each, and what to change."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from unisono.report.verdict.evidence import RunEvidence
from unisono.report.verdict.judge import RunVerdict, as_json
from unisono.spec.words import count, percent, seconds

ENOUGH = 0.05
"""Of a step: communication that takes less is left alone."""


@dataclass(frozen=True, slots=True)
class GrowthPoint:
    """A run on so many ranks. kind: `strong`, the global batch of the recipe, or `weak`, as many samples a rank as the
    smallest size has. period: seconds from step to step. moving: of these, in which data moved and nothing else was
    done. why: it came to nothing, "" otherwise."""

    ranks: int
    kind: str
    batch: int
    period: float = 0.0
    moving: float = 0.0
    verdict: RunVerdict | None = None
    run_dir: str = ""
    why: str = ""

    @property
    def rate(self) -> float:
        """Samples a second; 0 where the run came to nothing."""
        return self.batch / self.period if self.period > 0 else 0.0


def seen(
    ranks: int, kind: str, batch: int, evidence: RunEvidence, verdict: RunVerdict, run_dir: str
) -> GrowthPoint:
    """A run that ended well. The rank that comes last to a collective waits for nobody: its exposed time moves data."""
    rows = evidence.rows
    least = sum(min(step.parts.get("comm_exposed", 0.0) for step in row) for row in rows) / max(1, len(rows))
    return GrowthPoint(ranks, kind, batch, evidence.period, least if ranks > 1 else 0.0, verdict, run_dir)


def rows(points: Sequence[GrowthPoint]) -> list[dict[str, Any]]:
    """The points as JSON, with speed-up and efficiency beside the smallest size of their kind that ran."""
    table = []
    for point in points:
        base = next((other for other in points if other.kind == point.kind and other.rate), None)
        speedup = point.rate / base.rate if base is not None and point.rate else None
        table.append(
            {
                "ranks": point.ranks, "kind": point.kind, "global_batch": point.batch, "step_s": point.period,
                "samples_per_s": point.rate, "speedup": speedup,
                "efficiency": None if base is None or speedup is None else speedup * base.ranks / point.ranks,
                "exposed_comm_s": point.moving, "run_dir": point.run_dir, "why": point.why,
                "verdict": None if point.verdict is None else as_json(point.verdict),
            }
        )  # fmt: skip
    return table


def said(table: Sequence[Mapping[str, Any]]) -> list[str]:
    """The rows for people."""
    heads = f"{'step':>9} {'samples/s':>10} {'speed-up':>8} {'efficiency':>10}  limited by"
    lines = [f"{'scaling':8} {'ranks':>5} {'batch':>7} {heads}"]
    for row in table:
        if row["verdict"] is None:
            lines.append(f"{row['kind']:8} {row['ranks']:5} {row['global_batch']:7} {row['why']}")
            continue
        verdict = row["verdict"]
        lines.append(
            f"{row['kind']:8} {row['ranks']:5} {row['global_batch']:7} {seconds(row['step_s']):>9} "
            f"{count(row['samples_per_s']):>10} {row['speedup']:8.2f} {percent(row['efficiency']):>10}  "
            f"{verdict['cause']}, {percent(verdict['share'])} of a step"
        )
    return lines


def advice(points: Sequence[GrowthPoint], noise_scale: float | None, noise_why: str = "") -> list[str]:
    """What to change, by the largest size that ran: accumulation, frequency, batch. noise_scale: in samples, None where
    nobody measured it, `noise_why` says why."""
    ran = [point for point in points if point.rate and point.kind == "strong"]
    if not ran:
        return []
    largest = max(ran, key=lambda point: point.ranks)
    work = largest.period - largest.moving
    share = largest.moving / largest.period
    lines = []
    if share > ENOUGH and work > 0:
        times = ceil(largest.moving * (1 - ENOUGH) / (ENOUGH * work))
        after = largest.moving / (largest.moving + times * work)
        kept = f"communication would take {percent(after)} of a step, not {percent(share)}"
        batch = largest.batch * times
        fits = (
            ""
            if noise_scale is None or batch <= noise_scale
            else (
                f"; but the noise scale is {count(noise_scale)} samples, so a batch that large wastes samples"
            )
        )
        lines.append(
            f"accumulation: {times} times the micro-batches, --train.global_batch {batch}: {kept}{fits}"
        )
        lines.append(
            f"frequency: sync=local_sgd:h={times} or diloco:h={max(30, times)} meets once in as many steps, each of as"
            f" many samples as now (LOSSY: replicas drift between): {kept}"
        )
    else:
        lines.append(
            f"accumulation, frequency: nothing to gain: communication takes {percent(share)} of a step"
        )
    lines.append(_batch(largest, noise_scale, noise_why))
    return lines


def _batch(largest: GrowthPoint, noise_scale: float | None, why: str) -> str:
    if noise_scale is None:
        said = f" ({why})" if why else ""
        return f"batch: not known{said}; --noise_scale.smoothing 0.95 measures how large one may be"
    if largest.batch < noise_scale:
        return (
            f"batch: {largest.batch} samples are below the noise scale of {count(noise_scale)}: twice the batch takes "
            f"{percent(1 - _steps(2 * largest.batch, noise_scale) / _steps(largest.batch, noise_scale))} fewer steps"
        )
    more = _steps(largest.batch / 2, noise_scale) / _steps(largest.batch, noise_scale) - 1
    return (
        f"batch: {largest.batch} samples are above the noise scale of {count(noise_scale)}: half of them would take "
        f"{percent(more)} more steps, each of half the samples"
    )


def _steps(batch: float, noise_scale: float) -> float:
    """Steps to a loss, over those of an endless batch (McCandlish et al., 2018)."""
    return 1 + noise_scale / batch
