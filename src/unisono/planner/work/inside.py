"""What one rank of ours sends inside a pass of a stage: on tp, cp, shard. An axis that meets there adds its calls."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.planner.work import tables, wires
from unisono.planner.work.blocks import context_again, filled, own_context_calls, own_tensor_calls
from unisono.planner.work.dealt import again_calls, layer_calls, without_experts
from unisono.planner.work.stage import ITEM, Transfer
from unisono.planner.work.transformer import Transformer
from unisono.spec.workload import Tables


@dataclass(frozen=True, slots=True)
class StageElements:
    """What a rank of one stage holds, before `shard` deals it.

    blocks: how many. units: (elements, how many such) of what `shard` gathers at once between the ends; inside: of all
    of them. rim: elements of stem and head.
    alone: of these elements, those that every rank of tp has.
    stem, head: whether they are here.
    ahead, back: elements of a sample as it goes to the next stage, and its gradient to the one before.
    tables: that are looked up; those whose gradients travel by themselves are in no other field.
    """

    blocks: float
    units: tuple[tuple[float, float], ...]
    rim: float
    alone: float
    stem: bool
    head: bool
    ahead: float
    back: float
    tables: tuple[Tables, ...] = ()

    @property
    def inside(self) -> float:
        return sum(elements * many for elements, many in self.units)


def leafwise(plan: Plan) -> bool:
    """Whether the policy wants the gradient of each micro-batch by itself."""
    policy = member("sync", plan.sync)
    return policy is not None and policy.leafwise


def of_pass(
    model: Any, plan: Plan, own: StageElements, micro_batch: int, micros: int, *, backward: bool
) -> list[Transfer]:  # fmt: skip
    """Collectives inside one pass of a stage; those of a step count as one of `micros` in each pass."""
    found: list[Transfer] = []
    if plan.tp > 1:
        found += _dealt_layers(model, plan, own, micro_batch, backward)
    if plan.cp > 1:
        made = own_context_calls(model, plan, micro_batch, backward)
        made += context_again(model, plan, micro_batch) if backward else []
        found += [call._replace(times=own.blocks * call.times) for call in made]
    if getattr(model, "experts", None):
        found += _sparse_layers(model, plan, own, micro_batch, backward)
    if plan.shard > 1:
        wide, once = item(plan), 1.0 / micros
        gathered, scattered, scatter = (
            wires.gathered(plan, wide),
            wires.scattered(plan, wide),
            wires.scatter(plan),
        )
        if not backward:
            gathers = 1.0 if plan.zero == 3 else once
            found += [
                Transfer("shard", "all_gather", gathered * unit, many * gathers) for unit, many in own.units
            ]
            found.append(Transfer("shard", "all_gather", gathered * own.rim, gathers))
        else:
            scatters = once if plan.zero == 1 and not leafwise(plan) else 1.0
            if plan.zero == 3:
                found += [Transfer("shard", "all_gather", gathered * unit, many) for unit, many in own.units]
            found += [
                Transfer("shard", scatter, scattered * unit, many * scatters) for unit, many in own.units
            ]
            found.append(Transfer("shard", scatter, scattered * own.rim, scatters))
    for looked_up in own.tables:
        found += tables.passing(looked_up, plan, micro_batch, item(plan), backward=backward)
    return [call for call in found if call.nbytes * call.times > 0]


def _sparse_layers(
    model: Transformer, plan: Plan, own: StageElements, micro_batch: int, backward: bool
) -> Iterator[Transfer]:
    """Tokens on their way to experts and back."""
    made = [*layer_calls(model, plan, micro_batch, backward)]
    if backward and plan.recompute == "full":
        made += again_calls(model, plan, micro_batch)
    yield from (call._replace(times=own.blocks * model.sparse_share * call.times) for call in made)


def _dealt_layers(
    model: Transformer, plan: Plan, own: StageElements, micro_batch: int, backward: bool
) -> Iterator[Transfer]:
    """On tp."""
    wide, narrow, tokens = item(plan), ITEM[plan.precision], micro_batch * model.context / plan.cp
    op, other = ("reduce_scatter", "all_gather") if backward else ("all_gather", "reduce_scatter")
    made = own_tensor_calls(model, plan, tokens, backward)
    if backward and plan.recompute == "full":
        made += own_tensor_calls(model, plan, tokens, backward=False, again=True)
    yield from (call._replace(times=own.blocks * call.times) for call in made)
    for way, size, there in ((op, wide if backward else narrow, own.head), (other, wide, own.stem)):
        yield Transfer("tp", way, filled(model, plan, tokens) * model.d_model * size, there)
    if not backward and own.head:  # of the loss: the largest logit, then the sum and the target's
        yield Transfer("tp", "all_reduce", tokens * wide)
        yield Transfer("tp", "all_reduce", 2 * tokens * wide)


def dealers(plan: Plan) -> int:
    """Ranks that deal out parameters and their states: those of shard, and with them those of cp."""
    return plan.shard * plan.cp if plan.shard > 1 else 1


def summed(plan: Plan, elements: float, alone: float) -> list[tuple[str, float]]:
    """(axis, elements) of gradients of which each rank has a part of the sum, after a step's last pass. alone: of all
    elements, those that every rank of tp has."""
    seen = plan.cp if plan.shard == 1 else 1
    whole = "+".join(axis for axis, ranks in (("cp", seen), ("tp", plan.tp)) if ranks > 1)
    parts = [("cp", elements - alone)] if seen > 1 else []
    return [pair for pair in (*parts, (whole, alone if plan.tp > 1 else 0.0)) if pair[1]]


def item(plan: Plan) -> float:
    """Bytes of a weight, a gradient, an activation between stages: under autocast they stay fp32."""
    return float(max(4, ITEM[plan.precision]))


def with_step(
    model: Any, plan: Plan, own: StageElements, micro_batch: int, micros: int, *, backward: bool
) -> tuple[Transfer, ...]:
    """The same with what tp's ranks all have, whose gradients they add up after a step's last pass."""
    found = of_pass(model, plan, own, micro_batch, micros, backward=backward)
    if not backward:
        return tuple(found)
    elements, routed = without_experts(model, plan, own.blocks, own.inside + own.rim, item(plan))
    for axis, some in summed(plan, elements, own.alone):
        found.append(Transfer(axis, "all_reduce", item(plan) * some / dealers(plan), 1.0 / micros))
    found += (call._replace(times=1.0 / micros) for call, _ in routed if call.ranks(plan) > 1)
    return tuple(found)
