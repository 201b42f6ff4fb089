"""From what `calibrate` measured to a host: paces by least squares, curves of collectives, what a call costs beside.

numpy is imported here.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np

from unisono.measure.file import FittedHost
from unisono.plan import Plan
from unisono.planner.host import crowded, price_on_host
from unisono.planner.host_memory import memory_on_host, moved
from unisono.planner.kinds import Model, declared, kind
from unisono.planner.machines.cluster import Cluster, Device
from unisono.planner.machines.host import Curve, Host, Pace
from unisono.planner.price import Price
from unisono.planner.work.stage import PassCounts, RowWork, StageWork
from unisono.spec.model import Facts, restored


@dataclass(frozen=True, slots=True)
class Played:
    """One model's measured step: seconds by part (medians), micro-batches of a step, their size, and the plan."""

    model: Model
    micro_batch: int
    micros: int
    parts: Mapping[str, float]
    plan: Plan
    peak: float = 0.0  # bytes of the fullest rank
    active: int = 1  # ranks that computed at the same time

    @property
    def first(self) -> tuple[StageWork, RowWork]:
        """What the first stage does, and what its row has."""
        sizes = self.model, self.plan, self.micro_batch, self.micros
        return kind(self.model).stages(*sizes)[0], kind(self.model).row_works(*sizes)[0]


def model_of(sizes: Mapping[str, Any], dropout: float = 0.0) -> Model:
    """The model that a measured recipe has."""
    return declared(restored({**sizes, "dropout": dropout}), Facts())


def host(
    cores: int, alone: Sequence[Played], doubled: Sequence[Played], lines: Mapping[str, Curve],
    met: Sequence[Played],
) -> FittedHost:  # fmt: skip
    """All of it, each part with those before it. met: steps of ranks under one axis."""
    found = Host(cores, *paces(alone), update(alone), rest(alone), curves=lines)
    found = replace(found, crowd=crowd(doubled, found))
    beside, copies = calls(found, met)
    found = replace(found, calls=beside, copies=copies)
    found = _strained(found, met)
    found = replace(found, calls={**found.calls, **_sums(found, met)})
    found = replace(found, calls={**found.calls, **waking(found, met)})
    found = replace(found, memory=memory(found, met))
    errors: dict[str, list[float]] = {"passes alone": [], "steps together": [], "memory": []}
    for row in alone:
        for part, pace in (("forward", found.forward), ("backward", found.backward)):
            errors["passes alone"].append(row.micros * pace.of(_work(row, part)) / row.parts[part] - 1.0)
    for row in met:
        errors["steps together"].append(_priced(found, row).step / row.parts["step"] - 1.0)
        if row.peak:
            _, own = memory_on_host(
                row.model, row.plan, found, micro_batch=row.micro_batch, micros=row.micros
            )
            errors["memory"].append(own.total / row.peak - 1.0)
    mean = statistics.fmean(map(abs, errors["steps together"])) if met else found.error
    return FittedHost(replace(found, error=mean), errors)


def _priced(host: Host, row: Played) -> Price:
    where = Cluster("here", Device("core", {"fp32": 1.0}, 1.0, 1.0), row.plan.world, (), host=host)
    return price_on_host(row.model, row.plan, where, micro_batch=row.micro_batch, micros=row.micros)


def _strained(host: Host, rows: Sequence[Played]) -> Host:
    """Everything as much longer as steps of several ranks took, by their median, than the parts that were measured in
    quiet add up to."""
    more = statistics.median(row.parts["step"] / _priced(host, row).step for row in rows if row.plan.pp == 1)

    def longer(pace: Pace) -> Pace:
        return Pace(**{f.name: getattr(pace, f.name) * more for f in fields(Pace)})

    fixed, tensor, element = host.update
    return replace(
        host, forward=longer(host.forward), backward=longer(host.backward), step=host.step * more,
        update=(fixed * more, tensor * more, element * more),
        curves={key: Curve(c.nbytes, tuple(s * more for s in c.seconds)) for key, c in host.curves.items()},
        calls={axis: seconds * more for axis, seconds in host.calls.items()},
        copies={axis: seconds * more for axis, seconds in host.copies.items()},
    )  # fmt: skip


def _sums(host: Host, rows: Sequence[Played]) -> dict[str, float]:
    """Seconds that a bucket on dp takes beside itself where replicas are pipelines."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.plan.dp > 1 and row.plan.pp > 1:
            more = row.parts["comm_exposed"] - _priced(host, row).comm["dp"].exposed
            key = crowded("dp", row.plan.world > host.cores)
            found.setdefault(key, []).append(max(0.0, more))
    return {key: statistics.median(each) for key, each in found.items()}


def _work(row: Played, part: str) -> PassCounts:
    """What one pass of a whole model on one rank computes."""
    return row.first[0].pass_of(part == "backward")[0]


def paces(rows: Sequence[Played]) -> tuple[Pace, Pace]:
    """(forward, backward) from steps of ranks that computed alone."""
    return _pace(rows, "forward"), _pace(rows, "backward")


def update(rows: Sequence[Played]) -> tuple[float, float, float]:
    """Seconds of an optimiser step: fixed, per tensor, per element."""
    lines = [[1.0, row.first[1].tensors, float(row.model.workload.parameters)] for row in rows]
    fixed, tensor, element = _positive(lines, [row.parts["optim"] for row in rows])
    return fixed, tensor, element


def rest(rows: Sequence[Played]) -> float:
    """Seconds of a step outside its passes and its update."""
    known = ("forward", "backward", "optim", "comm_exposed", "wait")
    return statistics.median(row.parts["step"] - sum(row.parts[part] for part in known) for row in rows)


def curves(ranks: int, alone: Sequence[Sequence[Any]], inside: Sequence[Sequence[Any]]) -> dict[str, Curve]:
    """Seconds of collectives over `ranks` ranks by bytes in all. alone: (operation, bytes in all, seconds) with nothing
    else to do. inside: (operation, bytes that a rank sent, seconds) as steps waited for them, which counts where it is
    known, since there the ranks come at different times and caches are cold. What was not measured has no curve."""
    whole = {"all_reduce": ranks / (2 * (ranks - 1)), "all_gather": ranks / (ranks - 1),
             "reduce_scatter": ranks / (ranks - 1)}  # fmt: skip
    found: dict[str, Curve] = {}
    for op in ("all_reduce", "shared_sum", "all_gather", "reduce_scatter", "message"):
        points = {float(size): seconds for name, size, seconds in alone if name == op}
        seen = {size * whole[op]: seconds for name, size, seconds in inside if name == op and op in whole}
        if op in ("all_gather", "reduce_scatter") and seen:
            points = _joined(points, seen)
        elif seen:  # small sums of losses and norms; how gradients meet is no such wait
            points = {size: seconds for size, seconds in points.items() if size > 2 * max(seen)} | seen
        line = sorted(points.items())
        if line:
            found[f"{op}:{ranks}"] = Curve(
                tuple(size for size, _ in line), tuple(_rising([seconds for _, seconds in line]))
            )
    return found


def _rising(seconds: Sequence[float]) -> list[float]:
    """The nearest numbers that never fall, on a logarithmic scale, since a larger message is not faster: neighbours
    that say so share their mean (Ayer et al., "pool adjacent violators", 1955)."""
    pools: list[tuple[float, int]] = []
    for value in seconds:
        mean, count = float(np.log(value)), 1
        while pools and pools[-1][0] > mean:
            before, many = pools.pop()
            mean, count = (mean * count + before * many) / (count + many), count + many
        pools.append((mean, count))
    return [float(np.exp(mean)) for mean, count in pools for _ in range(count)]


def _joined(alone: Mapping[float, float], seen: Mapping[float, float]) -> dict[float, float]:
    """What was seen inside steps, and beyond its sizes what was measured alone, times what steps add there."""
    inside = Curve(tuple(sorted(seen)), tuple(seen[size] for size in sorted(seen)))
    apart = Curve(tuple(sorted(alone)), tuple(alone[size] for size in sorted(alone)))
    low, high = min(seen), max(seen)
    found = dict(seen)
    for size in alone:
        edge = low if size < low else high
        if not low / 2 <= size <= high * 2:
            found[size] = alone[size] * inside.at(edge) / apart.at(edge)
    return found


def calls(host: Host, rows: Sequence[Played]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds that one collective of an axis costs beside itself, and for each of its bytes, from steps under plans of
    that axis alone."""
    lines: dict[str, list[list[float]]] = {}
    shares: dict[str, list[float]] = {}
    for row in rows:
        if row.plan.dp > 1 or row.plan.pp > 1:
            continue
        axis = crowded("shard" if row.plan.shard > 1 else "tp", row.plan.world > host.cores)
        more, count, nbytes, slow = 0.0, 0.0, 0.0, host.slow(row.plan.world)
        for backward in (False, True):
            part = "backward" if backward else "forward"
            pace = host.backward if backward else host.forward
            more += row.parts[part] - row.micros * slow * pace.of(_work(row, part))
            made = row.first[0].calls[backward]
            count += row.micros * sum(call.times for call in made)
            nbytes += row.micros * sum(call.times * call.nbytes for call in made)
        whole = slow / row.parts["step"]  # an error counts as a share of the step
        lines.setdefault(axis, []).append([count * whole, nbytes * whole])
        shares.setdefault(axis, []).append(more / row.parts["step"])
    found = {axis: _least(lines[axis], shares[axis]) for axis in lines}
    return {axis: each[0] for axis, each in found.items()}, {axis: each[1] for axis, each in found.items()}


def waking(host: Host, rows: Sequence[Played]) -> dict[str, float]:
    """Seconds of a core's work that a message between stages takes at either end, where every rank has a core and where
    it has not: with which the prices of pipelined plans are the least wrong in all, of what makes one of them right, by
    bisection. So steps of many messages, which tell it best, count the most."""
    groups: dict[str, list[Played]] = {}
    for row in rows:
        if row.plan.pp > 1 and row.plan.dp == 1:
            groups.setdefault(crowded("pp", row.plan.world > host.cores), []).append(row)

    def step(row: Played, key: str, seconds: float) -> float:
        return _priced(replace(host, calls={**host.calls, key: seconds}), row).step

    found: dict[str, float] = {}
    for key, each in groups.items():
        tried = []
        for row in each:
            low, high = 0.0, 0.05
            for _ in range(30):
                middle = (low + high) / 2
                low, high = (middle, high) if step(row, key, middle) < row.parts["step"] else (low, middle)
            tried.append(low)
        found[key] = min(
            tried, key=lambda one: sum(abs(step(row, key, one) / row.parts["step"] - 1.0) for row in each)
        )
    return found


def memory(host: Host, rows: Sequence[Played]) -> dict[str, tuple[float, float, float]]:
    """What ranks have beside what they need, by axis: from the peaks of models of several sizes."""
    bare = replace(host, memory={})
    lines: dict[str, list[list[float]]] = {}
    more: dict[str, list[float]] = {}
    for row in rows:
        _, own = memory_on_host(row.model, row.plan, bare, micro_batch=row.micro_batch, micros=row.micros)
        axes = moved(row.plan, row.first[1])
        if len(axes) == 1 and row.peak > own.total:
            [(axis, piece)] = axes.items()
            lines.setdefault(axis, []).append([1.0, own.activations + own.communication, piece])
            more.setdefault(axis, []).append(row.peak - own.total)
    found = {axis: _positive(lines[axis], more[axis]) for axis in lines}
    return {axis: (fixed, share, pieces) for axis, (fixed, share, pieces) in found.items()}


def crowd(rows: Sequence[Played], host: Host) -> float:
    """How much longer, beyond its share of a core, work takes while every core has two ranks."""
    ratios = []
    for row in rows:
        for part, pace in (("forward", host.forward), ("backward", host.backward)):
            share = row.active / host.cores
            ratios.append(row.parts[part] / (row.micros * share * pace.of(_work(row, part))))
    return max(1.0, statistics.median(ratios))


def _pace(rows: Sequence[Played], part: str) -> Pace:
    names = [f.name for f in fields(Pace)]
    lines, seconds = [], []
    for row in rows:
        work = _work(row, part)
        lines.append([getattr(work, name) for name in names])
        seconds.append(row.parts[part] / row.micros)
    return Pace(**dict(zip(names, _positive(lines, seconds), strict=True)))


def _positive(lines: Sequence[Sequence[float]], seconds: Sequence[float]) -> list[float]:
    """Least squares of the relative error with no coefficient below 0."""
    each = [[value / took for value in line] for line, took in zip(lines, seconds, strict=True)]
    return _least(each, [1.0] * len(each))


def _least(lines: Sequence[Sequence[float]], goals: Sequence[float]) -> list[float]:
    """Least squares with no coefficient below 0 (Lawson and Hanson, 1974, by taking out what would be negative and, at
    the end, trying it again)."""
    matrix, goal = np.array(lines), np.array(goals)
    scale = np.abs(matrix).max(axis=0)
    used = scale > 0
    matrix = matrix / np.where(used, scale, 1.0)
    best = np.zeros(matrix.shape[1])
    for _ in range(3 * matrix.shape[1]):
        answer = np.zeros_like(best)
        answer[used] = np.linalg.lstsq(matrix[:, used], goal, rcond=None)[0]
        if (answer >= 0).all():
            best = answer
            gradient = matrix.T @ (goal - matrix @ answer)
            more = (~used) & (scale > 0) & (gradient > 1e-9)
            if not more.any():
                break
            used = used | (gradient == np.where(more, gradient, -np.inf).max())
        else:
            used = used & (answer != answer.min())
    return [float(c) for c in best / np.where(scale > 0, scale, 1.0)]
