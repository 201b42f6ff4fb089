"""What a rank does and holds, pass by pass and stage by stage: counted from model, plan and the habits of the software,
before any machine gives it seconds."""

from dataclasses import dataclass, replace
from math import prod
from typing import Annotated, Any, NamedTuple, Protocol

from unisono.plan import Plan
from unisono.plan.grid import columns_of
from unisono.planner.machines.order import dealers
from unisono.planner.source import Source

ITEM: Annotated[dict[str, int], Source("specification", "bytes of the dtype")] = {
    "fp64": 8, "fp32": 4, "bf16": 2, "fp16": 2,
}  # fmt: skip


class Habits(Protocol):
    """How software plays a model, whatever it runs on; a stack has them (`stack.Stack` says each)."""

    @property
    def fused_attention(self) -> bool: ...
    @property
    def fused_loss(self) -> bool: ...
    @property
    def sequence_parallel(self) -> bool: ...
    @property
    def autograd(self) -> bool: ...
    @property
    def composed(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class OwnHabits:
    """Ours, on a CPU."""

    fused_attention: bool = True
    fused_loss: bool = True
    sequence_parallel: bool = True
    autograd: bool = True
    composed: bool = True


OURS = OwnHabits()


class MatrixProduct(NamedTuple):
    """`many` products (rows x inner) (inner x columns). read: elements of all left factors as they lie in memory, where
    they are fewer, as a convolution's are. times: how often they are made, in the mean over layers. eight: of numbers
    of eight bits."""

    rows: float
    inner: float
    columns: float
    many: float = 1.0
    read: float | None = None
    times: float = 1.0
    eight: bool = False

    @property
    def flops(self) -> float:
        return 2.0 * self.times * self.many * self.rows * self.inner * self.columns

    def in_chunks(self, count: int) -> "MatrixProduct":
        """As many of it as there are chunks, each with its share of the rows."""
        return self if count == 1 else self._replace(rows=self.rows / count, times=self.times * count)

    @property
    def gradients(self) -> "tuple[MatrixProduct, MatrixProduct]":
        """The products that give the gradients of both factors."""
        rows, inner, columns, many, read, times, eight = self
        to_left = MatrixProduct(rows, columns, inner, many, None, times, eight)
        return to_left, MatrixProduct(inner, rows, columns, many, read, times, eight)


class Transfer(NamedTuple):
    """One kind of collective or message. axis: whose ranks meet; `replica`: of a replica, `world`: of the run; `cut`:
    those that share one expert by its width; `row`, `column`: of a grid;
    `experts`, `expert`: that have the same parts of experts, or the same experts; `holders`: the same part of tables.
    nbytes: of the whole tensor that they add up, deal or bring together; of a message, the message; of an all-to-all,
    what one rank holds. times: a step, or a pass. later: others compute
    until it has come. behind: what software may hide it behind, of the pass that makes it: nothing, `backward` kernels,
    `scores` of attention, an `other` micro-batch. copies: ranks that each row of an all-to-all goes to. chunks: it is
    one of as many, of which one is on its way while another is multiplied."""

    axis: str
    op: str
    nbytes: float
    times: float = 1.0
    later: bool = False
    behind: str = ""
    copies: float = 0.0
    chunks: int = 1

    def in_chunks(self, count: int) -> "Transfer":
        """As many of it as there are chunks; what is dealt is then exchanged and added up by who receives it."""
        if count == 1:
            return self
        op = "all_to_all" if self.op == "reduce_scatter" else self.op
        return self._replace(op=op, nbytes=self.nbytes / count, times=self.times * count, chunks=count)

    @property
    def label(self) -> str:
        """The axis under which it is told: rows and columns are tp's."""
        return "tp" if self.axis in ("row", "column") else self.axis

    def ranks(self, plan: Plan) -> int:
        """How many meet."""
        if self.axis == "pp":
            return 2
        if self.axis in ("row", "column"):
            columns = columns_of(plan.tp)
            return columns if self.axis == "row" else plan.tp // columns
        if self.axis == "holders":
            return plan.shard * plan.cp * plan.tp // plan.ep
        if self.axis == "cut":
            return plan.tp // plan.ep
        if self.axis == "shard":  # ranks of cp deal out states with those of shard
            return dealers(plan)
        if "+" in self.axis:
            return prod(getattr(plan, axis) for axis in self.axis.split("+"))
        if self.axis in ("experts", "expert"):
            return _holders(plan) * (max(1, plan.tp // plan.ep) if self.axis == "expert" else 1)
        return plan.inner if self.axis == "replica" else getattr(plan, self.axis)

    def sent(self, ranks: int) -> float:
        """Bytes that one of the ranks sends in one of them, where links are kept busy both ways."""
        if self.op == "send":
            return self.nbytes
        return self.nbytes * (ranks - 1) / ranks * (2 if self.op == "all_reduce" else 1)


def _holders(plan: Plan) -> int:
    """Ranks that have the same parts of experts and add up their gradients, beside shards that scatter them."""
    inner, cut = plan.cp * plan.tp, max(1, plan.tp // plan.ep)
    over = inner % plan.ep > 0 or (plan.cp > 1 and plan.shard > 1)
    return (plan.shard if over else 1) * inner // (plan.ep * cut)


@dataclass(frozen=True, slots=True)
class PartPass:
    """One pass over one part of a model, of one micro-batch on one rank: what any machine is given.

    products: with weights. scores: of attention, where these are written. fused: FLOPs of attention, where not. moved:
    bytes that elementwise kernels read and write; masks: those of dropout's masks. kernels: how many are started.
    calls: what is sent.
    """

    products: tuple[MatrixProduct, ...] = ()
    scores: tuple[MatrixProduct, ...] = ()
    fused: float = 0.0
    moved: float = 0.0
    masks: float = 0.0
    kernels: float = 0.0
    calls: tuple[Transfer, ...] = ()

    def like(self, **changes: Any) -> "PartPass":
        return replace(self, **changes)
