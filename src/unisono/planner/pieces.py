"""The workload piece by piece: what each kind of block has, computes and keeps."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from unisono.planner import general
from unisono.planner.memory import ITEM, kept_of
from unisono.planner.simulate import Answer, Question
from unisono.planner.tell import Column, Row, Told, size, table
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer
from unisono.spec import words
from unisono.spec.workload import WorkPart

_COLUMNS = (
    Column("the model, part by part", "part"), Column("how many", "count"),
    Column("parameters", "parameters", words.count), Column("FLOPs a sample", "flops_per_sample", words.count),
    Column("kept", "kept_bytes", size),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ModelPiece:
    """One kind of part, of which the model has `count`. inside: a piece of the one before, not one beside it.

    Of one (the mean, where they differ): parameters; active, those that a token meets; flops, of one sample's forward
    pass; kept, bytes of one micro-batch on one rank until its backward pass, where nothing is computed again.
    """

    name: str
    count: int
    parameters: float
    active: float
    flops: float
    kept: float
    inside: bool = False

    @property
    def row(self) -> Row:
        return {
            "part": self.name, "count": self.count, "inside": self.inside, "parameters": self.parameters,
            "active_parameters": self.active, "flops_per_sample": self.flops, "kept_bytes": self.kept,
        }  # fmt: skip


def pieces(answer: Answer) -> tuple[ModelPiece, ...]:
    """Of the model under the plan, in the order in which a sample meets them."""
    ask = answer.question
    return tuple(_parts(ask, ask.model) if isinstance(ask.model, Network) else _blocks(ask, ask.model))


def told(answer: Answer) -> Told:
    """The key `blocks` of `simulate --json`, and the table of `--blocks`."""
    rows = [one.row for one in pieces(answer)]
    shown = [{**row, "part": ("  of it " if row["inside"] else "") + row["part"]} for row in rows]
    work = answer.question.model.workload
    whole = {"part": "the whole model", "parameters": work.parameters, "flops_per_sample": work.flops}
    note = (
        "  of one such part: a forward pass, and what a rank keeps of a micro-batch until its backward pass"
    )
    return {"blocks": rows}, "\n".join([*table(_COLUMNS, [*shown, whole]), note])


def _blocks(ask: Question, model: Transformer) -> Iterator[ModelPiece]:
    """Stem, blocks of each kind, head. A tied weight is the stem's."""
    stem, *_, head = model.workload.parts
    held = kept_of(model, ask.plan, ask.stack, ask.micro_batch)
    yield _piece(stem, "embedding", held.stem)
    for name, kind, count in _kinds(model):
        part, kept = kind.workload.blocks[0], _kept(ask, kind)
        yield _piece(part, name, kept, count)
        some = kind.experts
        if some is not None:
            # What routed experts do is what is not done where a token takes none of them.
            none = replace(kind, experts=replace(some, top_k=0))
            yield ModelPiece(
                f"{some.count} experts",
                count,
                parameters=kind.layer_experts,
                active=kind.layer_experts / some.count * some.top_k,
                flops=part.flops - none.workload.blocks[0].flops,
                kept=kept - _kept(ask, none),
                inside=True,
            )
    name = "head, tied to the embedding" if model.tied else "head"
    yield _piece(head, name, held.head, less=model.workload.tied)


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


def _kept(ask: Question, model: Transformer) -> float:
    return kept_of(model, ask.plan, ask.stack, ask.micro_batch).block


def _piece(part: WorkPart, name: str, kept: float, count: int = 1, less: float = 0.0) -> ModelPiece:
    return ModelPiece(
        name, count, part.parameters - less, part.parameters - part.idle - less, part.flops, kept
    )


def _parts(ask: Question, network: Network) -> Iterator[ModelPiece]:
    """Stem, groups of neighbours that hand on as much, head."""
    stem, *blocks, head = network.workload.parts
    yield _group(ask, [stem])
    for _, alike in groupby(blocks, key=lambda part: part.output):
        yield _group(ask, list(alike))
    yield _group(ask, [head])


def _group(ask: Question, parts: Sequence[WorkPart]) -> ModelPiece:
    """The mean of some parts."""
    many, item = len(parts), ITEM[ask.plan.precision] * ask.micro_batch
    return ModelPiece(
        _named(parts),
        many,
        sum(part.parameters for part in parts) / many,
        sum(part.parameters - part.idle for part in parts) / many,
        sum(part.flops for part in parts) / many,
        item * sum(general.kept_by(part, ask.plan) for part in parts) / many,
    )


def _named(parts: Sequence[WorkPart]) -> str:
    """`blocks.0 to 2`, or the names of the first and the last."""
    first, last = parts[0].name, parts[-1].name
    if first == last:
        return first
    same, dot, number = last.rpartition(".")
    return f"{first} to {number}" if dot and first.rpartition(".")[0] == same else f"{first} to {last}"
