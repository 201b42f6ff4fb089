"""One priced plan on a bad day: ranks that are slow, servers that are full, devices that fail."""

from collections.abc import Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from unisono.planner import failures, stragglers
from unisono.planner.failures import CHECKPOINT_BYTES, Goodput
from unisono.planner.quick import priced
from unisono.planner.simulate import Answer, lasting
from unisono.planner.waits import computing, paced, with_waits
from unisono.spec.errors import UsageError

Told = tuple[Mapping[str, Any], str]


def waiting(answer: Answer, of: stragglers.Law) -> Told:
    """What stragglers, which are part of the answer's price, add under the plan's policy, and would under others.

    Raises UsageError.
    """
    ask, price, rows = answer.question, answer.price, []
    plan, calm = ask.plan, with_waits(price.bare, replace(ask, stragglers=None)).step
    for sync in _policies(plan.sync, plan.dp):
        other = replace(ask, plan=replace(plan, sync=sync))
        rows.append((sync, paced(of, sync, plan.dp, plan.inner), with_waits(price.bare, other).step))
    told = []
    for sync, got, step in rows:
        told.append(
            {"sync": sync, "waiting": got.step - 1.0, "step_s": step, "counted": got.counted, "how": got.said}
        )
    keys = {
        "stragglers": {
            "law": of.name,
            "step_s": price.step,
            "waiting_s": price.straggling,
            "without_s": calm,
            "policies": told,
        }
    }
    lines = [
        f"stragglers {of.name}: of a step {price.straggling:.4g} s are waiting among {plan.world} ranks; without"
        f" stragglers it takes {calm:.4g} s"
    ]
    if len(rows) > 1:
        lines.append("  waiting alone, with other policies (each changes bytes, and what is learned, too)")
    for sync, got, _ in rows:
        counted = f"; {100 * got.counted:.0f} % of the samples count" if got.counted < 1.0 else ""
        lines.append(f"  {sync:<16}{100 * (got.step - 1.0):>7.1f} %  {got.said}{counted}")
    return keys, "\n".join(lines)


def _policies(own: str, replicas: int) -> list[str]:
    """The plan's own first. Four spares of a hundred, as Chen et al., 2016, found best."""
    if replicas == 1:
        return [own]
    spare = f"quorum:k={max(1, min(replicas - 1, round(0.96 * replicas)))}"
    others = ["every_step", spare, "delayed", "ssp:s=3", "local_sgd:h=8", "gossip", "async"]
    return [own, *(other for other in others if other != own)]


def served(answer: Answer, servers: float) -> Told:
    """Replicas against parameter servers, each with the network card of one device: gradients in, weights out."""
    ask = answer.question
    if not ask.cluster.links:
        raise UsageError(
            "one device has no network for a server", where="--servers", fix="a larger --cluster", code="C04"
        )
    outer = ask.cluster.links[-1]
    moved = ask.model.workload.parameters * 2.0 * ask.stack.reduce_bytes
    serve = moved / (servers * outer.bandwidth / outer.oversubscription * ask.stack.dp_bus)
    compute, replicas = computing(answer.price), ask.plan.dp
    counts = sorted({1 << n for n in range((4 * replicas).bit_length())} | {replicas})
    curve = stragglers.server(compute, serve, counts)
    full = stragglers.breaks_at(compute, serve)
    here = next(point for point in curve if point.workers == replicas)
    told = [{"replicas": c.workers, "steps_per_s": c.rate, "ideal": c.ideal, "busy": c.busy} for c in curve]
    keys = {
        "parameter_server": {
            "servers": servers, "serve_s": serve, "compute_s": compute, "full_at_replicas": full,
            "efficiency": here.rate / here.ideal, "curve": told,
        }
    }  # fmt: skip
    lines = [
        f"servers    {servers:g} with {outer.bandwidth / 1e9:g} GB/s each take {serve:.4g} s for one replica's step:"
        f" full at {full:.1f} replicas",
        f"  {'replicas':>10}{'steps/s':>11}{'without waiting':>17}{'servers busy':>14}",
    ]
    lines += [f"  {c.workers:>10}{c.rate:>11.4g}{c.ideal:>17.4g}{100 * c.busy:>12.0f} %" for c in curve]
    return keys, "\n".join(lines)


def stopping(answer: Answer, mtbf: float, rate: float, restart: float) -> Told:
    """A job that stops at failures. mtbf: of the whole job; rate: bytes/s of the storage, writing and reading."""
    model = answer.question.model
    size = model.workload.parameters * CHECKPOINT_BYTES * (1 + model.states)
    save = size / rate
    got = failures.fixed(save, mtbf, restart + save, answer.price.step)
    days = _days(answer, got)
    keys = _keys(got, days) | {
        "elastic": False, "checkpoint_gb": size / 1e9, "checkpoint_s": save, "interval_s": got.interval,
        "young_s": failures.young(save, mtbf), "daly_s": failures.daly(save, mtbf),
    }  # fmt: skip
    lines = [
        *_lines(got, answer, days),
        f"  a checkpoint of {size / 1e9:,.1f} GB takes {save:.3g} s; save every {lasting(got.interval)}"
        f" (Daly; Young says {lasting(failures.young(save, mtbf))}): {100 * got.saving:.2f} % of the time",
        f"  a failure every {lasting(mtbf)}; restarts and work done again: {100 * got.lost:.2f} % of the time",
    ]
    return {"failures": keys}, "\n".join(lines)


def elastic(answer: Answer, mtbf: float, repair: float, pause: float) -> Told:
    """A job that goes on. mtbf: as above. Raises UsageError for a plan without replicas."""
    ask = answer.question
    if ask.plan.dp == 1:
        raise UsageError(
            "--elastic with dp=1: no replica is left to go on", where="--elastic, plan.dp",
            fix="dp=2 or more, or without --elastic", code="P16",
        )  # fmt: skip
    memo: dict[int, float] = {}

    def speed(alive: int) -> float:
        """The same batch, its leaves dealt anew: the fullest replica has the ceiling of the mean."""
        micros = ceil(ask.micros * ask.plan.dp / alive)
        if micros not in memo:
            plan = replace(ask.plan, dp=alive, micros=micros)
            memo[micros] = priced(replace(ask, plan=plan, micros=micros)).step
        return answer.price.step / memo[micros]

    got = failures.elastic(ask.plan.dp, mtbf * ask.plan.dp, repair, pause, answer.price.step, speed)
    days = _days(answer, got)
    lines = [
        *_lines(got, answer, days),
        f"  a replica of {ask.plan.inner} devices is lost every {lasting(mtbf)} and back after {lasting(repair)};"
        f" the rest go on with the same batch after {lasting(pause)}",
        "  checkpoints, which only the loss of all replicas needs, are not counted",
    ]
    return {"failures": _keys(got, days) | {"elastic": True, "repair_s": repair}}, "\n".join(lines)


def _keys(got: Goodput, days: float | None) -> dict[str, Any]:
    return {
        "goodput": got.goodput, "mtbf_s": got.mtbf, "saving": got.saving, "lost": got.lost, "days": days,
        "failures_per_day": 86400.0 / got.mtbf,
    }  # fmt: skip


def _days(answer: Answer, got: Goodput) -> float | None:
    return answer.days / got.goodput if got.goodput else None


def _lines(got: Goodput, answer: Answer, days: float | None) -> list[str]:
    if days is None:
        return ["failures   the job never gets further: failures come before a checkpoint is written"]
    told = f"failures   goodput {100 * got.goodput:.2f} %"
    if answer.question.steps:
        slow = ", stragglers included" if answer.price.straggling else ""
        told += f": {days:.4g} days instead of {answer.days:.4g}{slow}, with {days * 86400 / got.mtbf:,.3g} failures"
    return [told]
