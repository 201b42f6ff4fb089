"""How far a price may be off: the stack's own error on rows held out, and more the further a request is from these
rows."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import ceil, hypot, log2
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import owners
from unisono.planner.model_kinds import Model
from unisono.planner.source import Source
from unisono.planner.stack import FittedRange, FittedRows, Stack
from unisono.planner.timetables import chunks, of

_FAR = (
    "fits to the small or near rows of a set, judged on the large or far ones, as make accuracy prints them"
)
# Relative error added for each doubling (or halving) beyond what was fitted to.
OCTAVE: Annotated[float, Source("fitted", _FAR)] = 0.03
HALF = ("bf16", "fp16")
_H100 = "37 rows on H100, priced with what an A100 keeps up: mean 22 %"
# Relative error added on a device that no fitted row ran on.
DEVICE: Annotated[float, Source("fitted", _H100)] = 0.22
_APART = (
    "mean errors on rows that have a technique, of prices that no such row was fitted to: tp 9 % and pp 7 %, vTrain's"
    " 250; zero=3 13 and 15 %, llm-foundry's 83 as plain; zero-bubble timetables 5 %, held back; what no row has: as"
    " plain's worst set"
)
# Relative error added for each technique that no fitted row has.
APART: Annotated[dict[str, float], Source("fitted", _APART)] = {
    "tp": 0.09, "pp": 0.07, "zero=3": 0.15, "interleaved stages": 0.05, "zero-bubble timetables": 0.05,
    "cp": 0.25, "overlapped timetables": 0.25, "sync": 0.25, "codec": 0.25,
}  # fmt: skip
_BETWEEN = (
    "rows held back, all priced too fast: 55 % of ZeRO-3 on 48 nodes and more, by stacks that no row of zero=3 was"
    " fitted to; 17 % of FSDP on H100 by one that has such rows of one node"
)
# Relative error added for each doubling of the nodes that zero=3 deals weights over: where no fitted row has zero=3,
# and where one has it in a node.
BETWEEN: Annotated[tuple[float, float], Source("fitted", _BETWEEN)] = (0.10, 0.06)


@dataclass(frozen=True, slots=True)
class Trust:
    """error: expected mean relative error of a step's seconds. because: what makes it larger than the stack's own,
    the largest reason first. unheld: parts of the request that were never held to a measurement."""

    error: float
    because: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()


def trust(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Trust:
    """Return the expected error of a price. Independent errors add up as squares."""
    never = unheld(model, plan, cluster, stack)
    error, more = min(
        (
            (rows.error, sorted(_beyond(model, plan, cluster, stack.name, rows.seen), reverse=True))
            for rows in _families(stack)
        ),
        key=lambda candidate: (hypot(*(size for size, _ in candidate[1])), -candidate[0]),
    )  # the rows that are nearest
    return Trust(hypot(error, *(size for size, _ in more)), tuple(said for _, said in more), never)


def _families(stack: Stack) -> tuple[FittedRows, ...]:
    return stack.families or (FittedRows(stack.error, stack.seen),)


def _beyond(
    model: Model, plan: Plan, cluster: Cluster, name: str, rows: FittedRange | None
) -> Iterator[tuple[float, str]]:
    """Yield (relative error, reason) of each way in which a request lies outside of these rows. name: of the stack."""
    if rows is None:
        return
    for technique in techniques(plan):
        if technique not in rows.techniques:
            yield APART[technique], f"{technique}: in no row that {name} was fitted to"
    nodes = owners(plan)[0] * plan.tp / cluster.node
    if "zero=3" in techniques(plan) and nodes > 1:
        each = BETWEEN["zero=3" in rows.techniques]
        yield each * log2(nodes), f"zero=3 over {ceil(nodes)} nodes"
    here = cluster.device.name
    if here not in rows.devices:
        # Of one chip, what differs is its memory, which has a specification.
        kin = here.partition("-")[0] in {other.partition("-")[0] for other in rows.devices}
        yield OCTAVE if kin else DEVICE, f"fitted on {', '.join(rows.devices)}, not on {here}"
    sizes = [("devices", plan.world, rows.ranks)]
    sizes += [(what, value, getattr(rows, what)) for what, value in model.scales.items()]
    for what, value, (low, high) in sizes:
        octaves = log2(low / value) if value < low else log2(value / high) if value > high else 0.0
        if octaves:
            yield OCTAVE * octaves, f"{what} {value:,}, fitted to {low:,} to {high:,}"


def untried(plan: Plan, stack: Stack) -> tuple[str, ...]:
    """Return the plan's techniques that no row has which its stack was fitted to."""
    seen = stack.seen.techniques if stack.seen is not None else tuple(APART)
    return tuple(technique for technique in techniques(plan) if technique not in seen)


def techniques(plan: Plan) -> tuple[str, ...]:
    """Return the plan's techniques whose prices may be wrong by themselves."""
    schedule = of(plan.schedule)
    used = {
        "tp": plan.tp > 1,
        "cp": plan.cp > 1,
        "zero=3": plan.shard > 1 and plan.zero == 3,
        "pp": plan.pp > 1,
        "interleaved stages": plan.pp > 1 and chunks(plan.schedule) > 1 and not schedule.halves,
        "zero-bubble timetables": plan.pp > 1 and schedule.halves and not schedule.overlapped,
        "overlapped timetables": plan.pp > 1 and schedule.overlapped,
        "sync": plan.dp > 1 and plan.sync != Plan().sync,
        "codec": plan.dp > 1 and plan.codec != Plan().codec,
    }
    return tuple(name for name, is_there in used.items() if is_there)


def unheld(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[str, ...]:
    """Return what of a request was never held to a measurement, in words: its model, its software, its precision."""
    reasons: list[str] = []
    if not model.measured:
        reasons.append("no model of this kind")
    if cluster.cores:
        return tuple(reasons)
    if cluster.device.name == "cpu":
        reasons.append("this machine: these are another's cores, and unisono calibrate measures yours")
        return tuple(reasons)
    name = cluster.device.name
    if stack.autograd:
        reasons.append(
            f"no run of ours on {name}; stack {stack.name} takes the speeds that other programs reached"
        )
    if stack.seen and name.partition("-")[0] not in {other.partition("-")[0] for other in stack.seen.devices}:
        reasons.append(f"no run on {name}: what its products and attention keep up is carried over")
    values = {"cp": f"cp={plan.cp}", "overlapped timetables": f"schedule={plan.schedule}", "sync": f"sync={plan.sync}",
              "codec": f"codec={plan.codec}"}  # fmt: skip
    reasons += [f"no run with {values[technique]}" for technique in techniques(plan) if technique in values]
    if plan.precision not in HALF:
        reasons.append(f"{plan.precision} on {cluster.device.name}: all published rows are in half precision")
    return tuple(reasons)
