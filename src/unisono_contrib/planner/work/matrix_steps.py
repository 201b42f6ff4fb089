"""What optimisers of whole matrices keep, send and compute (`Optimiser.gathers`), on the rank that has most to do.

Each matrix has one owner among the ranks of a pipeline stage that hold parts or copies of it. Owners are those of a
run: `programs.owners` assigns them by the optimiser's own costs. Parts are taken to be equally large.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate
from math import prod
from typing import Annotated, Any, NamedTuple

from unisono.plan import Plan
from unisono.plan.blocks import away_of
from unisono.plan.grammar import member
from unisono.planner.collectives import exchange
from unisono.planner.machines.chip import Traffic, chip
from unisono.planner.machines.cluster import Cluster
from unisono.planner.machines.order import dealers, of_many, stride
from unisono.planner.source import Source
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.stage import ITEM
from unisono.planner.work.transformer import Transformer
from unisono.spec.training import MatrixWork, Optimiser
from unisono_contrib.programs.owners import assign

_EIGEN = "benchmarks/eigen.py: 0.3 to 0.8 on a busy CPU, 128 to 1024 rows; nobody has measured GPUs"
# Share of the rate of products in float64 that an eigendecomposition reaches.
EIGEN_RATE: Annotated[float, Source("measured here", _EIGEN)] = 0.4


class MatrixShape(NamedTuple):
    """A weight of two dims in a block. name: by which the optimiser knows that it is one of a block. rows, columns: as
    torch stores it. cut: the dim that `tp` splits, None where each of its ranks has all of it."""

    name: str
    rows: int
    columns: int
    cut: int | None


@dataclass(frozen=True, slots=True)
class OwnedMatrix:
    """A matrix whose step one rank computes. work: see `Optimiser.matrix_work`."""

    elements: int
    cut: bool
    work: MatrixWork


@dataclass(frozen=True, slots=True)
class OwnersLoad:
    """One update of a stage. narrow: whether two bytes an element travel. sent: bytes, in the mean of its ranks.
    gathered, scattered: bytes that come to the owner who gets most, and that leave the one who sends most. products,
    decompositions: operations of the one who has most. kept: numbers of state on the rank that keeps most. elements,
    kept_of_parts: of the matrices on one rank of tp, and numbers of their state if ranks keep that of their parts.
    """

    ranks: int
    narrow: bool
    sent: float
    gathered: float
    scattered: float
    products: float
    decompositions: float
    kept: float
    elements: float
    kept_of_parts: float


@dataclass(frozen=True, eq=False)
class MatrixSteps:
    """How an optimiser steps a model. blocks: matrices of each block whose steps have owners. rest: numbers that are
    kept of each other weight. with_owner: state of a matrix lies with its owner; else each rank keeps that of its
    parts. Two are equal if they are one, so that they are looked up quickly."""

    blocks: tuple[tuple[OwnedMatrix, ...], ...]
    rest: int
    with_owner: bool

    def moments(self, plan: Plan, elements: float, layers: float, first: int = 0) -> float:
        """Numbers that the optimiser keeps of each weight, in the mean of the fullest rank's. elements: that learn on
        a rank before `shard` splits them. layers: blocks among them, from block `first` on. Elements and layers may be
        arrays."""
        if not isinstance(layers, int | float):
            return _each(partial(self.moments, plan), elements, layers)
        if not elements:
            return float(self.rest)
        load = self.load(plan, layers, first)
        kept = load.kept * dealers(plan) if self.with_owner else load.kept_of_parts
        return (kept + self.rest * max(0.0, elements - load.elements)) / elements

    def price(
        self, plan: Plan, cluster: Cluster, stack: Stack, rows: Sequence[float]
    ) -> tuple[Traffic, float]:
        """What the owners' exchange takes, and seconds in which owners compute: of the dearest of the pipeline's rows,
        which have so many blocks."""
        firsts = accumulate(map(round, rows), initial=0)
        each = [
            self._of_row(plan, cluster, stack, *row) for row in dict.fromkeys(zip(rows, firsts, strict=False))
        ]
        return max(each, key=lambda row: row[0].exposed + row[1])

    def row(self, layers: float, first: int = 0) -> tuple[OwnedMatrix, ...]:
        """The matrices of so many blocks."""
        return tuple(matrix for block in self.blocks[first : first + round(layers)] for matrix in block)

    def load(self, plan: Plan, layers: float, first: int = 0) -> OwnersLoad:
        """An update of a stage of so many blocks under a plan. Replicas share its work where they step together, and
        where no state comes to a rank in turns of its own."""
        policy = member("sync", plan.sync)
        together = (policy is None or policy.equal) and not away_of(plan).optimizer
        ranks = plan.dp if together else 1, plan.shard, plan.cp, int(plan.tp)
        return _load(self, round(layers), first, ranks, dealers(plan), max(4, ITEM[plan.precision]))

    def _of_row(
        self, plan: Plan, cluster: Cluster, stack: Stack, layers: float, first: int
    ) -> tuple[Traffic, float]:
        load, wide = self.load(plan, layers, first), "fp64" if plan.precision == "fp64" else "fp32"
        on = chip(cluster.device, stack, "bf16" if load.narrow else wide, 4)
        seconds = load.products / (on.rate * on.efficiency)
        seconds += load.decompositions / (cluster.device.flops("fp64") * on.efficiency * EIGEN_RATE)
        if load.ranks == 1:
            return Traffic(), seconds
        near = min(stride(plan, axis, cluster.order) for axis in of_many(plan, cluster.order) if axis != "pp")
        net = exchange(cluster, near, load.ranks, stack.dp_bus)
        # Its bytes are what a rank sends; an exchange is priced by what it has, its own part included.
        whole = load.ranks / (load.ranks - 1)
        took = net.all_to_all(whole * load.gathered) + net.all_to_all(whole * load.scattered)
        return Traffic(load.sent, took, took, took), seconds


def _each(of: Callable[[Any, Any], float], elements: Any, layers: Any) -> Any:
    import numpy as np

    both = np.broadcast_arrays(elements, layers)
    values = [of(float(at), float(many)) for at, many in zip(*(x.ravel() for x in both), strict=True)]
    return np.reshape(values, both[0].shape)


@lru_cache(maxsize=4096)
def _load(
    steps: MatrixSteps, layers: int, first: int, ranks: tuple[int, int, int, int], parts: int, wide: int
) -> OwnersLoad:
    """Of blocks from `first` on. ranks: of dp, shard, cp, tp, in whose order owners are numbered. parts: of a matrix
    over `shard` and `cp`. wide: bytes of an element of masters."""
    size, (_, _, cp, tp), matrices = prod(ranks), ranks, steps.row(layers, first)
    sums = [[0.0] * 5 for _ in range(min(size, max(1, len(matrices))))]  # others own nothing
    owners = assign([matrix.work.cost for matrix in matrices], len(sums))
    narrow = any(matrix.work.narrow for matrix in matrices)
    moved, item = 0.0, 2 if narrow else wide
    for matrix, owner in zip(matrices, owners, strict=True):
        part = matrix.elements / parts / (tp if matrix.cut else 1)
        # Of ranks with the same part the first sends it.
        copies = (parts == 1 and (owner // tp) % cp > 0) or (not matrix.cut and owner % tp > 0)
        comes, leaves = matrix.elements - (0.0 if copies else part), (size - 1) * part
        comes += (size - 1) * matrix.work.observed
        moved += comes + leaves
        work = matrix.work
        for place, more in enumerate((comes, leaves, work.products, work.decompositions, work.kept)):
            sums[owner][place] += more
    comes, leaves, products, decompositions, kept = (max(each) for each in zip(*sums, strict=True))
    if size == 1:
        moved = comes = leaves = 0.0
    here = [tp if matrix.cut else 1 for matrix in matrices]
    elements = sum(matrix.elements / cut for matrix, cut in zip(matrices, here, strict=True))
    of_parts = sum(matrix.work.kept / cut for matrix, cut in zip(matrices, here, strict=True))
    sent = item * moved / size, item * comes, item * leaves
    return OwnersLoad(size, narrow, *sent, products, decompositions, kept, elements, of_parts)


def steps_of(optimiser: Optimiser, model: Transformer | Network) -> MatrixSteps:
    """How an optimiser steps a model."""
    shapes = shapes_of(model) if isinstance(model, Transformer) else _linear_layers(model)
    known: dict[MatrixShape, tuple[OwnedMatrix, ...]] = {}
    for shape in (shape for block in shapes for shape in block):
        size = shape.rows, shape.columns
        if shape not in known:
            stepping = optimiser.for_parameter(shape.name, size)
            owned = OwnedMatrix(prod(size), shape.cut is not None, stepping.matrix_work(size))
            known[shape] = (owned,) if stepping.gathers else ()
    blocks = tuple(tuple(matrix for shape in block for matrix in known[shape]) for block in shapes)
    return MatrixSteps(blocks, optimiser.for_parameter("stem.weight", (1,)).kept, optimiser.with_owner)


def shapes_of(model: Transformer) -> list[list[MatrixShape]]:
    """The matrices of each block of a transformer that learn: weights, or the adapters beside them."""
    blocks = ([*_attention(model), *_feed_forward(model, layer)] for layer in range(model.n_layer))
    if not model.lora:
        return list(blocks)
    return [[part for shape in block for part in _adapters(shape, model.lora)] for block in blocks]


def _attention(model: Transformer) -> list[MatrixShape]:
    heads, D = model.n_head * model.head_width, model.d_model
    if model.apart and model.latent is None:
        apart = [("q", heads), ("k", model.kv_width), ("v", model.kv_width)]
        each = [MatrixShape(f"blocks.{name}.weight", rows, D, 0) for name, rows in apart]
        return [*each, MatrixShape("blocks.proj.weight", D, heads, 1)]
    return [
        MatrixShape(f"blocks.{i}.weight", columns, inner, 0 if of_columns else 1 if of_inner else None)
        for i, (inner, columns, of_inner, of_columns) in enumerate(model.attention_products)
    ]


def _feed_forward(model: Transformer, layer: int) -> list[MatrixShape]:
    """Of one block. Weights of routed experts are stacks of three dims."""
    e, D = model.experts, model.d_model
    sparse = e is not None and e.sparse(layer)
    width = e.shared_width if e is not None and sparse else model.d_ff
    up = [
        MatrixShape(f"blocks.{name}.weight", width, D, 0)
        for name in ("up", "gate")[: 2 if model.gated else 1]
    ]
    dense = [*up, MatrixShape("blocks.down.weight", D, width, 1)] if width else []
    if e is None or not sparse or model.lora:  # no adapter stands beside a router
        return dense
    return [*dense, MatrixShape("blocks.router.weight", e.count, D, None)]


def _adapters(shape: MatrixShape, rank: int) -> list[MatrixShape]:
    """The two factors beside a weight: one has its columns, one its rows."""
    down = MatrixShape(f"{shape.name}.a", rank, shape.columns, 1 if shape.cut == 1 else None)
    return [down, MatrixShape(f"{shape.name}.b", shape.rows, rank, 0 if shape.cut == 0 else None)]


def _linear_layers(model: Network) -> list[list[MatrixShape]]:
    """The weights of each part between stem and head whose products say no `read`, as those of convolutions do."""
    cuts = {"columns": 0, "inner": 1}
    return [
        [
            MatrixShape("blocks.weight", product.columns, product.inner, cuts.get(product.dealt))
            for product in part.products
            if not (product.batched or product.read)
        ]
        for part in model.workload.blocks
    ]
