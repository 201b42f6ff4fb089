"""The prediction of a run before it begins. Its report holds it beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.plan import Plan
from unisono.planner import clusters
from unisono.planner.error_bars import trust
from unisono.planner.machines.cluster import Cluster
from unisono.planner.model_kinds import Model, kind
from unisono.planner.offload import AXIS
from unisono.planner.price_parts import Price
from unisono.planner.pricing import closed, verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import Stack
from unisono.planner.stack import stack as stack_named
from unisono.spec.errors import UsageError

MIB = 2.0**20
FALLBACK = "laptop"  # what prices where nobody has measured


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a mean rank's step by part (see `parts_of`), MiB of the fullest rank with what its process holds
    before the first tensor, and where the prices come from; error: their mean relative error. links: (devices, bytes/s
    of one in one direction) of each level that connects them, the innermost first. ideal: seconds that the model's
    arithmetic would take at the device's peak, `peak` FLOP/s in the plan's precision."""

    cluster: str
    stack: str
    error: float | None
    parts: Mapping[str, float]
    mem_mib: float
    links: tuple[tuple[int, float], ...] = ()
    ideal: float = 0.0
    peak: float = 0.0

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def predict(
    model: Model, plan: Plan, cluster: Cluster, stack: Stack, *, micro_batch: int, micros: int
) -> Prediction:
    """The prediction for a resolved plan. Ranks beyond the cluster's devices share its last link. Raises UsageError for
    what has no price."""
    for problem in kind(model).problems(model, plan):
        raise UsageError(problem.what, where=problem.where, fix=problem.fix, code=problem.code)
    ask = PlanRequest(model, plan, roomy(cluster, plan.world), stack, micro_batch, micros)
    seconds = closed(ask)
    mem_mib = (verdict(ask).memory.total + cluster.device.reserved) / MIB
    error = trust(model, plan, ask.cluster, stack).error if ask.known else None
    links = tuple((link.size, link.bandwidth) for link in ask.cluster.links)
    peak = ask.cluster.device.flops(plan.precision)
    ideal = model.step_flops(ask.batch) / plan.world / peak
    return Prediction(cluster.name, stack.name, error, parts_of(seconds), mem_mib, links, ideal, peak)


def parts_of(price: Price) -> dict[str, float]:
    """A price in the parts that a run's clock can tell apart: `compute`, `comm AXIS` (exposed), `wait` (bubble, uneven
    stages, stragglers, and messages between stages, for which a rank waits alike), `optim`, `other`; in all the step.
    """
    messages = price.comm["pp"].exposed if "pp" in price.comm else 0.0
    comm = {f"comm {axis}": t.exposed for axis, t in price.comm.items() if axis not in ("pp", AXIS)}
    # What is put away comes and goes inside passes, and inside the update.
    optim = price.optimizer + (price.comm[AXIS].after if AXIS in price.comm else 0.0)
    waits = price.idle + price.uneven + messages + price.straggling
    other = price.fixed + price.loading
    parts = {"compute": price.step - sum(comm.values()) - waits - optim - other, **comm}
    return {**parts, "wait": waits, "optim": optim, "other": other}


def as_json(prediction: Prediction, calibrated: bool) -> dict[str, Any]:
    """The object of `prediction.json`. calibrated: the prices were measured on the machine that runs."""
    return {
        "schema_version": 1,
        "cluster": prediction.cluster,
        "stack": prediction.stack,
        "calibrated": calibrated,
        "error_pct": None if prediction.error is None else 100.0 * prediction.error,
        "step_s": prediction.step,
        "parts": dict(prediction.parts),
        "mem_mib": prediction.mem_mib,
        "ideal_s": prediction.ideal,
        "peak_flops": prediction.peak,
        "links": [list(link) for link in prediction.links],
    }


def here(environ: Mapping[str, str]) -> tuple[Cluster, Stack, bool]:
    """The cluster that prices runs on this machine, its stack, and whether it was measured here by
    `unisono calibrate`. Raises UsageError for a measured file that is wrong."""
    path = calibration(environ)
    is_calibrated = path.is_file()
    cluster = clusters.cluster(str(path) if is_calibrated else FALLBACK)
    return cluster, stack_named(cluster.stack), is_calibrated


def calibration(environ: Mapping[str, str]) -> Path:
    """Where this machine's own cluster file lies, if anyone has measured it: in the user's cache."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(base, "unisono", "cluster.toml")


def roomy(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with room for so many ranks, however few devices it has. Ranks of a measured CPU host stay on that
    one host and share its cores and its memory evenly."""
    if ranks <= cluster.devices or not cluster.links:
        return cluster
    last = replace(cluster.links[-1], size=ranks)
    wider = replace(cluster, devices=ranks, links=(*cluster.links[:-1], last))
    return _sharing_cores(wider, cluster.devices) if cluster.cores else wider


def of_ranks(cluster: Cluster, ranks: int) -> Cluster:
    """Return the cluster with one device for each of exactly so many ranks."""
    if not cluster.cores or ranks >= cluster.devices:
        return replace(roomy(cluster, ranks), devices=ranks)
    return _sharing_cores(replace(cluster, devices=ranks), cluster.devices)


def _sharing_cores(cluster: Cluster, before: int) -> Cluster:
    """Return a CPU host whose ranks share its memory, and its cores where there are more ranks than cores. before:
    number of ranks that the cluster's device was sized for."""
    ranks, device = cluster.devices, cluster.device
    pace = max(1.0, before / cluster.cores) / max(1.0, ranks / cluster.cores)
    shared = replace(
        device,
        peak={dtype: pace * rate for dtype, rate in device.peak.items()},
        bandwidth=pace * device.bandwidth,
        memory=device.memory * before / ranks,
    )
    return replace(cluster, device=shared, in_node=ranks, loader=replace(cluster.loader, devices=ranks))
