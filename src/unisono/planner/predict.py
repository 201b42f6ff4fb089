"""What a run is expected to take, told before it begins, so that its report can hold it beside what was measured."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.machines.cluster import Cluster
from unisono.planner.price import Price
from unisono.planner.priced import Model, price, verdict
from unisono.planner.stack import Stack, stack
from unisono.planner.trust import trust

MIB = 2.0**20
FALLBACK = "laptop"  # what prices where nobody has measured


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds of a mean rank's step by part (see `parts_of`), MiB of the fullest rank with what its process holds
    before the first tensor, and where the prices come from; error: their mean relative error."""

    cluster: str
    stack: str
    error: float
    parts: Mapping[str, float]
    mem_mib: float

    @property
    def step(self) -> float:
        return sum(self.parts.values())


def predict(
    model: Model, plan: Plan, where: Cluster, made: Stack, *, micro_batch: int, micros: int
) -> Prediction:
    """The prediction for a resolved plan. More ranks than `where` has devices share its widest link all the same."""
    where = roomy(where, plan.world)
    got = price(model, plan, where, made, micro_batch=micro_batch, micros=micros)
    memory = verdict(model, plan, made, where, micro_batch=micro_batch, micros=micros).memory
    held = (memory.total + where.device.reserved) / MIB
    error = trust(model, plan, where, made).error
    return Prediction(where.name, made.name, error, parts_of(got), held)


def parts_of(got: Price) -> dict[str, float]:
    """A price in the parts that a run's clock can tell apart: `compute`, `comm AXIS` (exposed), `wait` (bubble, uneven
    stages, stragglers, and messages between stages, for which a rank waits alike), `optim`, `other`; in all the step.
    """
    messages = got.comm["pp"].exposed if "pp" in got.comm else 0.0
    comm = {f"comm {axis}": traffic.exposed for axis, traffic in got.comm.items() if axis != "pp"}
    waits = got.idle + got.uneven + messages + got.straggling
    other = got.fixed + got.loading
    told = {"compute": got.step - sum(comm.values()) - waits - got.optimizer - other, **comm}
    return {**told, "wait": waits, "optim": got.optimizer, "other": other}


def as_json(told: Prediction, calibrated: bool) -> dict[str, Any]:
    """The object of `prediction.json`. calibrated: the prices were measured on the machine that runs."""
    return {
        "schema_version": 1,
        "cluster": told.cluster,
        "stack": told.stack,
        "calibrated": calibrated,
        "error_pct": 100.0 * told.error,
        "step_s": told.step,
        "parts": dict(told.parts),
        "mem_mib": told.mem_mib,
    }


def here(environ: Mapping[str, str]) -> tuple[Cluster, Stack, bool]:
    """The cluster that prices runs on this machine, its stack, and whether it was measured here by
    `unisono calibrate`. Raises UsageError for a measured file that is wrong."""
    path = calibration(environ)
    measured = path.is_file()
    found = cluster(str(path) if measured else FALLBACK)
    return found, stack(found.stack), measured


def calibration(environ: Mapping[str, str]) -> Path:
    """Where this machine's own cluster file lies, if anyone has measured it: in the user's cache."""
    base = environ.get("XDG_CACHE_HOME") or Path(environ.get("HOME") or Path.home(), ".cache")
    return Path(base, "unisono", "cluster.toml")


def roomy(where: Cluster, ranks: int) -> Cluster:
    """The cluster with room for so many ranks, however few devices it has."""
    if ranks <= where.devices or not where.links:
        return where
    last = replace(where.links[-1], size=ranks)
    return replace(where, devices=ranks, links=(*where.links[:-1], last))
