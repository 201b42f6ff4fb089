"""One priced plan on a bad day: ranks that are slow under this and other policies, and servers that are full."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import inf

from unisono.planner import stragglers
from unisono.planner.simulate import Answer
from unisono.planner.tell import Column, Told, figure, lines, share, table
from unisono.planner.waits import computing, with_waits
from unisono.spec.errors import UsageError
from unisono.spec.words import seconds

_POLICIES = (
    Column("waiting alone", "sync"), Column("", "waiting", share), Column("samples", "counted", share),
    Column("", "how"),
)  # fmt: skip
_CURVE = (
    Column("replicas", "replicas"), Column("steps/s", "steps_per_s", figure),
    Column("without waiting", "ideal", figure), Column("servers busy", "busy", share),
)  # fmt: skip


def waiting(answer: Answer, of: stragglers.Law) -> Told:
    """What stragglers, which are part of the answer's price, add under the plan's policy, and would under others.

    Raises UsageError.
    """
    ask, price, plan, rows = answer.question, answer.price, answer.question.plan, []
    calm = with_waits(price.bare, replace(ask, stragglers=None)).step
    for sync in stragglers.compared(plan.sync, plan.dp):
        step = with_waits(price.bare, replace(ask, plan=replace(plan, sync=sync))).step
        got = stragglers.pace(of, sync, plan.dp, plan.inner)
        rows.append(
            {"sync": sync, "waiting": got.step - 1.0, "step_s": step, "counted": got.counted, "how": got.said}
        )
    facts = {
        "law": of.name, "step_s": price.step, "waiting_s": price.straggling, "without_s": calm, "policies": rows,
    }  # fmt: skip
    head = (
        f"{of.name}: {seconds(price.straggling)} of a step are waiting among {plan.world} ranks; without stragglers it"
        f" takes {seconds(calm)}"
    )
    return {"stragglers": facts}, "\n".join([*lines([("stragglers", head)]), *table(_POLICIES, rows)])


@dataclass(frozen=True, slots=True)
class Server:
    """A parameter server beside `workers`. rate: their steps a second in all. ideal: the same if it took no time.
    busy: share of the time in which the server is."""

    workers: int
    rate: float
    ideal: float
    busy: float


def server(compute: float, serve: float, workers: Sequence[int]) -> tuple[Server, ...]:
    """The throughput curve: a worker computes for `compute` seconds, then has the server for `serve`.

    A closed queue with one server, solved exactly by mean value analysis (Reiser and Lavenberg, 1980) for exponential
    times; constant times wait less. The server is full at (compute + serve) / serve workers.
    """
    found, queue = [], 0.0
    for count in range(1, max(workers) + 1):
        here = serve * (1.0 + queue)
        rate = count / (compute + here)
        queue = rate * here
        if count in workers:
            found.append(Server(count, rate, count / (compute + serve), min(1.0, rate * serve)))
    return tuple(found)


def breaks_at(compute: float, serve: float) -> float:
    """Workers beyond which a server of `serve` seconds a step is the limit (Denning and Buzen, 1978)."""
    return (compute + serve) / serve if serve > 0.0 else inf


def served(answer: Answer, servers: float) -> Told:
    """Replicas against parameter servers, each with the network card of one device: gradients in, weights out."""
    ask = answer.question
    if not ask.cluster.links:
        what = "one device has no network for a server"
        raise UsageError(what, where="--servers", fix="a larger --cluster", code="C04")
    outer, replicas = ask.cluster.links[-1], ask.plan.dp
    moved = ask.model.workload.parameters * 2.0 * ask.stack.reduce_bytes
    serve = moved / (servers * outer.bandwidth / outer.oversubscription * ask.stack.dp_bus)
    compute = computing(answer.price)
    curve = server(compute, serve, sorted({1 << n for n in range((4 * replicas).bit_length())} | {replicas}))
    here = next(point for point in curve if point.workers == replicas)
    rows = [{"replicas": c.workers, "steps_per_s": c.rate, "ideal": c.ideal, "busy": c.busy} for c in curve]
    full = breaks_at(compute, serve)
    facts = {
        "servers": servers, "serve_s": serve, "compute_s": compute, "full_at_replicas": full,
        "efficiency": here.rate / here.ideal, "curve": rows,
    }  # fmt: skip
    head = (
        f"{servers:g} with {outer.bandwidth / 1e9:g} GB/s each take {seconds(serve)} for one replica's step: full at"
        f" {full:.1f} replicas"
    )
    return {"parameter_server": facts}, "\n".join([*lines([("servers", head)]), *table(_CURVE, rows)])
