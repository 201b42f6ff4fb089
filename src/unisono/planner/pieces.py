"""The workload piece by piece: what each kind of block has, computes, keeps and sends under a plan.

Nothing is computed in another way than for the price: a piece's figures are the same functions' of that piece alone,
and a test holds their sums to the price's own traffic.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

from unisono.plan import Plan
from unisono.planner import gathering, general, host, host_memory, memory, replicas
from unisono.planner import price as transformers
from unisono.planner.memory import ITEM, RowShare, kept_of, share_of
from unisono.planner.priced import shares_cores
from unisono.planner.simulate import Answer
from unisono.planner.timetables import ends
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec.workload import WorkPart

_MIB = 2.0**20


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """One kind of part, of which the model has `count`. inside: a piece of the one before, not one beside it.

    Of one (the mean, where they differ): parameters; active, those that a token meets; flops, of one sample's forward
    pass. Of one on one rank under the plan: kept, bytes of one micro-batch until its backward pass; sent, bytes in a
    step by axis.
    """

    name: str
    count: int
    parameters: float
    active: float
    flops: float
    kept: float
    sent: Mapping[str, float] = field(default_factory=dict)
    inside: bool = False


def pieces(answer: Answer) -> tuple[ModelPiece, ...]:
    """Of the model under the plan, in the order in which a sample meets them."""
    model = answer.question.model
    found = list(_parts(answer, model) if isinstance(model, Network) else _blocks(answer, model))
    plan, pp = answer.question.plan, answer.price.comm.get("pp")
    if plan.pp > 1 and pp is not None:
        found.append(ModelPiece("to other stages", plan.pp, 0.0, 0.0, 0.0, 0.0, {"pp": pp.bytes}))
    return tuple(found)


# --- transformers ----------------------------------------------------------------------------------------------------


def _blocks(answer: Answer, model: Transformer) -> Iterator[ModelPiece]:
    """Stem, blocks of each kind, head."""
    stem, *_, head = model.workload.parts
    yield _end(answer, model, stem, "embedding")
    for name, kind, count in _kinds(model):
        part = kind.workload.blocks[0]
        kept = _kept(answer, kind)
        yield replace(_piece(part, name, count), kept=kept, sent=_sent(answer, kind))
        some = kind.experts
        if some is not None:
            # What routed experts do is what is not done where a token takes none of them.
            none = replace(kind, experts=replace(some, top_k=0))
            yield ModelPiece(
                f"its {some.count} experts",
                count,
                parameters=kind.layer_experts,
                active=kind.layer_experts / some.count * some.top_k,
                flops=part.flops - none.workload.blocks[0].flops,
                kept=kept - _kept(answer, none),
                sent={axis: sent for axis, sent in _sent(answer, kind).items() if axis == "ep"},
                inside=True,
            )
    yield _end(answer, model, head, "head, tied to the embedding" if model.tied else "head")


def _kinds(model: Transformer) -> Iterator[tuple[str, Transformer, int]]:
    """(name, the same model with blocks of that kind alone, how many it has)."""
    if model.experts is None:
        yield "block", model, model.n_layer
        return
    sparse = model.experts.layers(0, model.n_layer)
    if sparse < model.n_layer:
        yield "dense block", replace(model, experts=None), model.n_layer - sparse
    if sparse:
        yield "sparse block", replace(model, experts=replace(model.experts, every=1, dense=0)), sparse


def _piece(part: WorkPart, name: str, count: int = 1) -> ModelPiece:
    return ModelPiece(name, count, part.parameters, part.parameters - part.idle, part.flops, 0.0)


def _end(answer: Answer, model: Transformer, part: WorkPart, name: str) -> ModelPiece:
    """Stem or head. A tied weight is the stem's, but for the gradient of the copy that another stage has."""
    ask = answer.question
    is_stem = name == "embedding"
    made = _piece(part, name)
    if not is_stem:
        less = model.workload.tied
        made = replace(made, parameters=made.parameters - less, active=made.active - less)
    if shares_cores(model, ask.cluster):
        kept = 0.0 if is_stem else host_memory.kept_by_head(model, ask.plan, ask.micro_batch)
    else:
        held = kept_of(model, _way(answer), ask.stack, ask.micro_batch)
        kept = held.stem if is_stem else held.head
    return replace(made, kept=kept, sent=_sent_by_end(answer, model, is_stem))


def _kept(answer: Answer, model: Transformer) -> float:
    """Bytes of one block and micro-batch on one rank."""
    ask = answer.question
    if shares_cores(model, ask.cluster):
        return host_memory.kept_by_block(model, _way(answer), ask.micro_batch)
    return kept_of(model, _way(answer), ask.stack, ask.micro_batch).block


def _way(answer: Answer) -> Plan:
    """The plan, with what recompute=auto comes to."""
    return answer.played


def _sent(answer: Answer, model: Transformer) -> dict[str, float]:
    """Bytes that a rank sends for one of its blocks in a step."""
    ask, plan = answer.question, answer.question.plan
    if shares_cores(model, ask.cluster):
        moved = host.sent_inside(model, _way(answer), ask.micro_batch, ask.micros, 1.0, (False, False))
        return _there(
            plan,
            moved | {"dp": host.sent_after(plan, host_memory.block_of(model, plan.tp) / host_memory.ITEM)},
        )
    plan = _way(answer)
    each = transformers.detail(model, plan, ask.cluster, ask.stack, ask.micro_batch)
    inside = transformers.inside_blocks(
        model, plan, ask.cluster, ask.stack, each, ask.micro_batch, ask.micros
    )
    mean = model.n_layer / plan.pp
    found = {axis: traffic.bytes / mean for axis, traffic in inside.items()}
    if gathering.deals(plan):  # there the ends' weights are, too
        (own, _), _ = gathering.total(model, plan, ask.cluster, ask.stack)
        found["shard"] = ask.micros * own
    row = share_of(model, plan, 0, ask.stack.balanced)
    one = replace(row, blocks=row.blocks / row.layers, routed=row.routed / row.layers, ends=0.0)
    return _there(plan, _joined(found, _met(answer, model, one)))


def _sent_by_end(answer: Answer, model: Transformer, is_stem: bool) -> dict[str, float]:
    """Bytes of a rank that has stem or head, for it."""
    ask, plan = answer.question, answer.question.plan
    stems, heads = ends(plan.schedule, plan.pp)
    both = set(stems) & set(heads)
    elements = memory.end_elements(model, plan, is_stem, not is_stem)
    if both and not is_stem:
        elements = memory.end_elements(model, plan, True, True) - memory.end_elements(
            model, plan, True, False
        )
    if shares_cores(model, ask.cluster):
        moved = host.sent_inside(
            model, _way(answer), ask.micro_batch, ask.micros, 0.0, (is_stem, not is_stem)
        )
        if plan.pp == 1:  # what is counted for either end is of both, which are gathered together
            moved["shard"] *= elements / memory.end_elements(model, plan, True, True)
        return _there(plan, moved | {"dp": host.sent_after(plan, elements)})
    row = share_of(model, plan, 0, ask.stack.balanced)
    found = _met(answer, model, replace(row, blocks=0.0, routed=0.0, ends=elements))
    if gathering.deals(plan):
        stem, head = gathering.ends(model, plan, ask.cluster, ask.stack)
        own = ask.micros * sum(sent for sent, _ in (stem if is_stem else head))
        found = _joined(found, {"shard": own})
    return _there(plan, found)


def _met(answer: Answer, model: Transformer, share: RowShare) -> dict[str, float]:
    """Bytes of the gradients of a share."""
    ask, over = answer.question, replicas.Cover(0.0, 0.0, 0.0)
    met = transformers.replicated(model, ask.plan, ask.cluster, ask.stack, share, over, ask.micros)
    return {axis: traffic.bytes for axis, traffic in met.items()}


def _joined(some: Mapping[str, float], more: Mapping[str, float]) -> dict[str, float]:
    return {axis: some.get(axis, 0.0) + more.get(axis, 0.0) for axis in {**some, **more}}


def _there(plan: Plan, sent: Mapping[str, float]) -> dict[str, float]:
    """What crosses axes that the plan has, and the host link."""
    order = [axis for axis in transformers.AXES if axis in sent]
    return {axis: sent[axis] for axis in order if axis == "host" or getattr(plan, axis) > 1}


# --- networks of parts -----------------------------------------------------------------------------------------------


def _parts(answer: Answer, network: Network) -> Iterator[ModelPiece]:
    """Stem, groups of neighbours that hand on as much, head."""
    stem, *blocks, head = network.workload.parts
    yield _group(answer, [stem])
    for _, alike in groupby(blocks, key=lambda part: part.output):
        yield _group(answer, list(alike))
    yield _group(answer, [head])


def _group(answer: Answer, parts: Sequence[WorkPart]) -> ModelPiece:
    """The mean of some parts."""
    ask, plan, many = answer.question, _way(answer), len(parts)
    sizes = {"micro_batch": ask.micro_batch, "micros": ask.micros}
    sent: dict[str, float] = {}
    for part in parts:
        own = general.sent_by(part, plan, ask.cluster, ask.stack, **sizes)
        sent = _joined(sent, {axis: moved / many for axis, moved in own.items()})
    item = ITEM[plan.precision] * ask.micro_batch
    return ModelPiece(
        _named(parts),
        many,
        sum(part.parameters for part in parts) / many,
        sum(part.parameters - part.idle for part in parts) / many,
        sum(part.flops for part in parts) / many,
        item * sum(general.kept_by(part, plan) for part in parts) / many,
        _there(plan, sent),
    )


def _named(parts: Sequence[WorkPart]) -> str:
    """`blocks.0 to 2`, or the names of the first and the last."""
    first, last = parts[0].name, parts[-1].name
    if first == last:
        return first
    same, dot, number = last.rpartition(".")
    return f"{first} to {number}" if dot and first.rpartition(".")[0] == same else f"{first} to {last}"


# --- as told ---------------------------------------------------------------------------------------------------------


def as_json(answer: Answer) -> Mapping[str, Any]:
    """The key `blocks` of `simulate --json`."""
    return {
        "blocks": [
            {
                "part": one.name, "count": one.count, "inside": one.inside, "parameters": one.parameters,
                "active_parameters": one.active, "flops_per_sample": one.flops, "kept_bytes": one.kept,
                "sent_bytes": dict(one.sent),
            }
            for one in pieces(answer)
        ]
    }  # fmt: skip


def as_text(answer: Answer) -> str:
    """A table of the page, and what its columns are."""
    ask, every = answer.question, pieces(answer)
    head, rows = table(every, ask.model.context)
    work = ask.model.workload
    rows.append(["the whole model", "", _si(work.parameters), _si(work.flops / ask.model.context)])
    wide = [max(len(row[at]) for row in [head, *rows] if at < len(row)) for at in range(len(head))]
    lines = [
        "  ".join(
            f"{cell:<{w}}" if not at else f"{cell:>{w}}"
            for at, (cell, w) in enumerate(zip(row, wide, strict=False))
        )
        for row in [head, *rows]
    ]
    unit = "token" if ask.model.context > 1 else "sample"
    note = [
        f"  of one of each, in the mean: parameters, FLOPs of a {unit}'s forward pass; on a rank that has it, MiB that",
        f"  a micro-batch of {ask.micro_batch} keeps until its backward pass, and GB sent in a step by axis",
    ]
    return "\n".join(["the model, part by part", *(f"  {line}".rstrip() for line in lines), *note])


def table(every: Sequence[ModelPiece], tokens: int) -> tuple[list[str], list[list[str]]]:
    """(head, rows) in words. tokens: of a sample."""
    axes = [axis for axis in transformers.AXES if any(one.sent.get(axis) for one in every)]
    head = ["", "how many", "parameters", f"FLOPs/{'token' if tokens > 1 else 'sample'}", "MiB kept"]
    head += [f"GB on {axis}" for axis in axes]
    rows = []
    for one in every:
        sent = [f"{one.sent[axis] / 1e9:.3g}" if one.sent.get(axis) else "" for axis in axes]
        made = [_si(one.parameters), _si(one.flops / tokens), f"{one.kept / _MIB:,.4g}"]
        if one.name == "to other stages":
            made = ["", "", ""]
        rows.append([("  " if one.inside else "") + one.name, f"{one.count}", *made, *sent])
    return head, rows


def _si(value: float) -> str:
    """`1.81 G`."""
    for unit, name in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if value >= unit:
            return f"{value / unit:.3g}{name}"
    return f"{value:.3g}"
