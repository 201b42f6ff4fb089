"""What one rank of ours sends inside a pass of a stage: on tp, cp, shard. An axis that meets there adds its calls."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from unisono.plan import Plan
from unisono.plan.grammar import member
from unisono.plan.grid import Grid
from unisono.planner.alike import Alike
from unisono.planner.machines.order import dealers, virtual_of
from unisono.planner.memory import BUCKET
from unisono.planner.work import grids, tables, virtual, wires
from unisono.planner.work.blocks import context_again, filled, own_context_calls, own_tensor_calls
from unisono.planner.work.channels import DealtPart
from unisono.planner.work.dealt import again_calls, layer_calls, leaf_calls, without_experts
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
    kinds: of the blocks, where they are not all played as the plan says: how many of each, and elements of one.
    channels: of the blocks whose channels `tp` deals. attends: whether it has positions, which cross tp and cp.
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
    kinds: tuple[tuple[Alike, float], ...] = ()
    channels: tuple[DealtPart, ...] = ()
    attends: bool = True

    def played(self, plan: Plan) -> tuple[Alike, ...]:
        """The blocks by how they are played, of a plan."""
        return tuple(one for one, _ in self.kinds) or (Alike(plan, self.blocks),)

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
    for dealt in own.channels:
        found += dealt.calls(plan, micro_batch, backward=backward)
    for alike, blocks in own.played(plan) if own.attends else ():
        made = _of_block(model, alike, micro_batch, backward)
        if alike.tp < plan.tp:  # the ranks of tp deal positions as those of cp do
            made = [call._replace(axis="cp+tp" if plan.cp > 1 else "tp") for call in made]
        found += [call._replace(times=blocks * call.times) for call in made]
    if own.attends and virtual_of(plan) > 1:
        ends = {"stem": own.stem, "head": own.head}
        found += virtual.end_calls(model, plan, micro_batch, backward, **ends)
    elif own.attends and isinstance(plan.tp, Grid):
        ends = {"stem": own.stem, "head": own.head}
        found += grids.end_calls(model, plan, micro_batch, backward, **ends)
    elif own.attends and plan.tp > 1:
        found += _of_ends(model, plan, own, micro_batch, backward)
    if plan.shard > 1:
        found += _dealt(plan, own, micros, backward)
    for looked_up in own.tables:
        found += tables.passing(looked_up, plan, micro_batch, item(plan), backward=backward)
    return [call for call in found if call.nbytes * call.times > 0]


def _of_block(model: Any, plan: Plan, micro_batch: int, backward: bool) -> list[Transfer]:
    """Of one block that is played as the plan says, beside its weights."""
    found: list[Transfer] = []
    if virtual_of(plan) > 1:
        found += virtual.block_calls(model, plan, micro_batch, backward)
        return [*found, *(virtual.again_calls(model, plan, micro_batch) if backward else ())]
    if isinstance(plan.tp, Grid):
        found += grids.block_calls(model, plan, micro_batch, backward)
        if backward and plan.recompute == "full":
            found += grids.block_calls(model, plan, micro_batch, backward=False, again=True)
    elif plan.tp > 1:
        tokens = micro_batch * model.context / plan.cp
        found += own_tensor_calls(model, plan, tokens, backward)
        if backward and plan.recompute == "full":
            found += own_tensor_calls(model, plan, tokens, backward=False, again=True)
    if plan.cp > 1:
        found += own_context_calls(model, plan, micro_batch, backward)
        found += context_again(model, plan, micro_batch) if backward else []
    if getattr(model, "experts", None):
        made = [*layer_calls(model, plan, micro_batch, backward)]
        if not backward:
            made += leaf_calls(model, plan, micro_batch)
        elif plan.recompute == "full":
            made += [*leaf_calls(model, plan, micro_batch), *again_calls(model, plan, micro_batch)]
        found += (call._replace(times=model.sparse_share * call.times) for call in made)
    return found


def _dealt(plan: Plan, own: StageElements, micros: int, backward: bool) -> Iterator[Transfer]:
    """Weights on shard, and their gradients. Those of stem and head stay gathered for a pass's way back."""
    wide, once, scatter = item(plan), 1.0 / micros, wires.scatter(plan)
    gathered, scattered = wires.gathered(plan, wide), wires.scattered(plan, wide)
    units, rim = pieces(plan, own)
    for zero, elements, many, stays in (*((*unit, False) for unit in units), (plan.zero, rim, 1.0, True)):
        if not backward or (zero == 3 and not stays):
            gathers = 1.0 if zero == 3 else once
            yield Transfer("shard", "all_gather", gathered * elements, many * gathers)
        if backward:
            scatters = once if zero == 1 and not leafwise(plan) else 1.0
            yield Transfer("shard", scatter, scattered * elements, many * scatters)


def in_one_piece(plan: Plan, nbytes: float, zeros: Iterable[int]) -> bool:
    """Whether `shard` moves all weights of a stage, of so many bytes, at once: as parallel.shard does. zeros: what it
    deals of the stage's blocks, where some are dealt otherwise than the plan says."""
    return plan.shard > 1 and all(zero == 1 for zero in (plan.zero, *zeros)) and nbytes <= BUCKET


def pieces(plan: Plan, own: StageElements) -> tuple[list[tuple[int, float, float]], float]:
    """(zero, elements, how many such) of what `shard` gathers at once of the blocks, and elements of the ends: a small
    stage under zero=1 is one piece."""
    whole = own.inside + own.rim
    if in_one_piece(plan, item(plan) * whole, (one.plan.zero for one, _ in own.kinds)):
        return [], whole
    zeros = [one.plan.zero for one, _ in own.kinds] or [plan.zero] * len(own.units)
    return [(zero, *unit) for zero, unit in zip(zeros, own.units, strict=True)], own.rim


def _of_ends(
    model: Transformer, plan: Plan, own: StageElements, micro_batch: int, backward: bool
) -> Iterator[Transfer]:
    """Of stem and head, on tp. What the stem gives is as wide as its tables are held."""
    wide, narrow, tokens = item(plan), ITEM[plan.precision], micro_batch * model.context / plan.cp
    op, other = ("reduce_scatter", "all_gather") if backward else ("all_gather", "reduce_scatter")
    whole = filled(model, plan, tokens) * model.d_model
    scattered = wires.carried(plan, wide) if backward else narrow
    yield Transfer("tp", op, whole * scattered, own.head).in_chunks(plan.chunks)
    yield Transfer("tp", other, whole * wires.carried(plan, wide), own.stem)
    if not backward and own.head:  # of the loss: the largest logit, then the sum and the target's
        yield Transfer("tp", "all_reduce", tokens * wide)
        yield Transfer("tp", "all_reduce", 2 * tokens * wide)


def summed(plan: Plan, elements: float, alone: float) -> list[tuple[str, float]]:
    """(axis, elements) of gradients of which each rank has a part of the sum, after a step's last pass. alone: of all
    elements, those that every rank of tp has. By virtual shards each pass has added up its own."""
    if virtual_of(plan) > 1:
        return []
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
