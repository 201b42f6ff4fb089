"""How far a price may be off: the stack's own error on rows held out, and more the further a question is from them."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import hypot, log2
from typing import Annotated

from unisono.plan import Plan
from unisono.planner.machines.cluster import Cluster, Source
from unisono.planner.priced import Model, shares_cores
from unisono.planner.stack import Stack
from unisono.planner.work.transformer import Transformer

_APART = (
    "fits to the small or near rows of a set, judged on the large or far ones, as make accuracy prints them"
)
# Relative error added for each doubling (or halving) beyond what was fitted to.
OCTAVE: Annotated[float, Source("fitted", _APART)] = 0.03
HALF = ("bf16", "fp16")
_H100 = (
    "the plain stack, whose products are an A100's: mean 15 % on three rows on H100, 10 % on A100; as squares"
)
# Relative error added on a device that no fitted row ran on.
DEVICE: Annotated[float, Source("fitted", _H100)] = 0.11


@dataclass(frozen=True, slots=True)
class Trust:
    """error: mean relative error that is to be expected of a step's seconds. because: what makes it more than the
    stack's own, as text, the largest first. unheld: what of the question was never held to a measurement."""

    error: float
    because: tuple[str, ...] = ()
    unheld: tuple[str, ...] = ()


def trust(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Trust:
    """Errors that have nothing to do with each other add up as squares do."""
    if shares_cores(model, cluster) and cluster.host is not None:
        return Trust(cluster.host.error)
    never = unheld(model, plan, cluster, stack)
    more = sorted(_beyond(model, plan, cluster, stack), reverse=True)
    return Trust(hypot(stack.error, *(size for size, _ in more)), tuple(said for _, said in more), never)


def _beyond(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> Iterator[tuple[float, str]]:
    """(relative error, why) of each way in which a question is outside of what the stack was fitted to."""
    if stack.seen is None:
        return
    name, seen = cluster.device.name, stack.seen.devices
    if name not in seen:
        # Of one chip, what differs is its memory, which has a specification.
        kin = name.partition("-")[0] in {other.partition("-")[0] for other in seen}
        yield OCTAVE if kin else DEVICE, f"fitted on {', '.join(seen)}, not on {name}"
    sizes = [("devices", plan.world, stack.seen.ranks)]
    if isinstance(model, Transformer):
        sizes += [("width", model.d_model, stack.seen.width), ("context", model.context, stack.seen.context)]
    for what, value, (low, high) in sizes:
        octaves = log2(low / value) if value < low else log2(value / high) if value > high else 0.0
        if octaves:
            yield OCTAVE * octaves, f"{what} {value:,}, fitted to {low:,} to {high:,}"


def unheld(model: Model, plan: Plan, cluster: Cluster, stack: Stack) -> tuple[str, ...]:
    """What of a question was never held to a measurement, in words: its kind of model, its software, its precision."""
    found: list[str] = []
    if not isinstance(model, Transformer) or model.experts is not None or model.latent is not None:
        found.append("no model of this kind")
    if cluster.host is not None:
        return tuple(found)
    if cluster.device.name == "cpu":
        found.append("this machine: these are another's cores, and unisono calibrate measures yours")
        return tuple(found)
    if stack.seen is None:
        found.append(
            f"no run of ours on {cluster.device.name}; stack {stack.name} takes the speeds that other programs reached"
        )
    if plan.precision not in HALF:
        found.append(f"{plan.precision} on {cluster.device.name}: all published rows are in half precision")
    return tuple(found)
