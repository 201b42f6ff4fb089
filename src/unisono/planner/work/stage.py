"""Units of work that any machine is given: products, calls, passes. They are counted from model, plan and the habits
of the software."""

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
    """How a software plays a model on any device. A stack has these fields (`stack.Stack` describes each)."""

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
    """Habits of our own software on a CPU."""

    fused_attention: bool = True
    fused_loss: bool = True
    sequence_parallel: bool = True
    autograd: bool = True
    composed: bool = True


OURS = OwnHabits()


class MatrixProduct(NamedTuple):
    """`many` products of (rows x inner) with (inner x columns).

    read: elements of all left factors in memory, where they are fewer than rows x inner, as a convolution's are.
    times: how often they run, in the mean over layers. eight: in eight-bit numbers.
    """

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
        """Split the product into `count` products, each with an equal share of the rows."""
        return self if count == 1 else self._replace(rows=self.rows / count, times=self.times * count)

    @property
    def gradients(self) -> "tuple[MatrixProduct, MatrixProduct]":
        """The two products that give the gradients of both factors."""
        rows, inner, columns, many, read, times, eight = self
        to_left = MatrixProduct(rows, columns, inner, many, None, times, eight)
        return to_left, MatrixProduct(inner, rows, columns, many, read, times, eight)


class Transfer(NamedTuple):
    """One kind of collective or message.

    axis: the ranks that meet. Beside the plan's axes: `replica` (one replica), `world`, `cut` (ranks that share one
    expert by its width), `row` and `column` (of a grid), `experts` and `expert` (ranks with the same parts of
    experts, or the same experts), `holders` (ranks with the same part of tables).

    nbytes: of the whole tensor that is summed, sharded or gathered; of a message, the message; of an all-to-all, the
    part of one rank. times: per pass, or per step. later: ranks compute until it arrives. behind: what can hide it:
    "" (nothing), `backward` kernels, `scores` of attention, an `other` micro-batch. copies: ranks that each row of an
    all-to-all goes to. chunks: number of pieces it is sent in, while another piece is multiplied.
    """

    axis: str
    op: str
    nbytes: float
    times: float = 1.0
    later: bool = False
    behind: str = ""
    copies: float = 0.0
    chunks: int = 1

    def in_chunks(self, count: int) -> "Transfer":
        """Split the call into `count` calls. A reduce-scatter becomes an exchange, which the receiver adds up."""
        if count == 1:
            return self
        op = "all_to_all" if self.op == "reduce_scatter" else self.op
        return self._replace(op=op, nbytes=self.nbytes / count, times=self.times * count, chunks=count)

    @property
    def label(self) -> str:
        """The axis under which it is reported: rows and columns belong to `tp`."""
        return "tp" if self.axis in ("row", "column") else self.axis

    def ranks(self, plan: Plan) -> int:
        """Return the number of ranks that meet."""
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
        """Return bytes that one of the ranks sends in one call, where links are busy both ways."""
        if self.op == "send":
            return self.nbytes
        return self.nbytes * (ranks - 1) / ranks * (2 if self.op == "all_reduce" else 1)


def _holders(plan: Plan) -> int:
    """Return the number of ranks that hold the same parts of experts and add up their gradients, beside shards that
    scatter them."""
    inner, cut = plan.cp * plan.tp, max(1, plan.tp // plan.ep)
    over = inner % plan.ep > 0 or (plan.cp > 1 and plan.shard > 1)
    return (plan.shard if over else 1) * inner // (plan.ep * cut)


@dataclass(frozen=True, slots=True)
class PartPass:
    """One pass over one part of a model, for one micro-batch on one rank.

    products: with weights. scores: of attention, where scores are written. fused: FLOPs of attention, where they are
    not. moved: bytes that elementwise kernels read and write. masks: bytes of dropout masks. kernels: number of
    kernels started. calls: collectives and messages.
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
