"""A recommender (Naumov et al., "Deep learning recommendation model", 2019)."""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field

from unisono.plan.grammar import choice, member
from unisono.spec.errors import Problem, UsageError
from unisono.spec.model import DealtSize, Facts, ModelConfig
from unisono.spec.training import Count
from unisono.spec.workload import Product, Tables, Workload, WorkPart, joined

if TYPE_CHECKING:
    from torch import nn


class DLRMConfig(ModelConfig):
    """Embedding tables beside layers on continuous features, and layers on their products."""

    name: ClassVar[str] = "dlrm"
    reads: ClassVar[str] = "clicks"

    kind: Literal["dlrm"] = Field(default="dlrm", description="dlrm")
    tables: tuple[Count, ...] = Field(
        default=(), description="dlrm: rows of each embedding table; from the data when absent"
    )
    d_table: Count = Field(default=64, description="dlrm: width of an embedding")
    lookups: Count = Field(default=1, description="dlrm: rows that a sample reads from each table")
    n_dense: Count = Field(default=13, description="dlrm: continuous features of a sample")
    bottom: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the continuous features, before the last of d_table"
    )
    top: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the interactions, before the last of 1"
    )
    table_sharding: Literal["table", "row", "column"] = Field(
        default="table",
        description="dlrm: how ep shards the tables: whole ones | rows of each | columns of each",
    )

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        return () if axis == "ep" else None  # tables of any number of rows

    def refuses(self, plan: Any) -> Iterator[Problem]:
        have = {"table": len(self.tables), "row": min(self.tables, default=0), "column": self.d_table}
        most = have[self.table_sharding]
        if plan.ep > most > 0:
            what = f"ep={plan.ep} has only {most} {self.table_sharding}s to split"
            yield Problem("P12", what, "plan.ep, model.tables, model.table_sharding", f"ep={most} or less")
        if choice(plan.offload).name == "params":
            what = f"offload={plan.offload}: rows of tables are stepped where they lie, as sparse as they are looked up"
            yield Problem("P22", what, "plan.offload, model.kind", "offload=optimizer, or activations")
        policy, schedule = member("sync", plan.sync), member("schedule", plan.schedule)
        if plan.ep > 1 and getattr(policy, "leafwise", False):
            what = f"sync={plan.sync} wants the gradient of each micro-batch by itself, and with ep={plan.ep} a rank"
            yield Problem(
                "P16", f"{what} looks up rows for several", "plan.sync, plan.ep", "ep=1, or sync=every_step"
            )
        if not getattr(schedule, "flushed", True):
            what = f"schedule={plan.schedule} updates within a step, and gradients of tables are summed once a step"
            yield Problem("P13", what, "plan.schedule, model.kind", "schedule=1f1b")
        if plan.ep > 1 and getattr(schedule, "chains", 1) > 1:
            what = (
                f"schedule={plan.schedule} holds the model twice, and ep={plan.ep} splits the tables of one"
            )
            yield Problem("P13", what, "plan.schedule, plan.ep", "ep=1, or schedule=1f1b")

    @property
    def depth(self) -> int | None:
        return 1 + len(self.top)  # the interaction with the layers below, and each layer above

    @property
    def record(self) -> tuple[int, int]:
        return self.n_dense, self.lookups * len(self.tables)

    def rows(self, facts: Facts) -> tuple[int, ...]:
        """Rows of each table. Raises UsageError C22 where neither recipe nor data says them."""
        if rows := self.tables or facts.rows:
            return rows
        what = "a dlrm has embedding tables, and their rows are not given"
        raise UsageError(what, where="model.tables", fix="--model.tables 1000000,200000", code="C22")

    def workload(self, facts: Facts) -> Workload:
        return dlrm(
            tables=self.rows(facts), width=self.d_table, lookups=self.lookups, dense=self.n_dense,
            bottom=self.bottom, top=self.top, cut=self.table_sharding,
        )  # fmt: skip

    def build(self, facts: Facts) -> "nn.Module":
        from unisono_contrib.models.dlrm.net import DLRM

        return DLRM(self, self.rows(facts))


def dlrm(
    *,
    tables: Sequence[int],
    width: int,
    lookups: int,
    dense: int,
    bottom: Sequence[int],
    top: Sequence[int],
    cut: str = "table",
) -> Workload:
    """A recommender (Naumov et al., "Deep learning recommendation model", 2019).

    tables: rows of each; width: of an embedding; lookups: rows that a sample reads of each table, summed. dense:
    continuous features, through `bottom` and a layer of `width`. Then the dot products of all pairs, through `top` and
    a layer of one. cut: how the tables are dealt.
    """
    results = len(tables) * width
    stem = WorkPart(
        "tables", sum(tables) * width, 0, results, results + dense,
        # Rows are read, sums written, and an index of 8 bytes for each row.
        moved=len(tables) * lookups * (width + 2) + results, kernels=len(tables),
        tables=Tables(
            sum(tables) * width, len(tables) * lookups * width, results, len(tables), len(tables) * lookups, cut
        ),
    )  # fmt: skip
    first = _perceptron("bottom", dense, *bottom, width, carried=results)
    count = len(tables) + 1
    pairs = count * (count - 1) // 2
    cross = WorkPart(
        "interaction", 0, 2 * count * count * width, count * width + pairs + width, pairs + width,
        products=(Product(count, width, count, batched=True),),
        moved=2 * count * width + 2 * (pairs + width) + count * count, kernels=3,
    )  # fmt: skip
    above = (pairs + width, *top)
    last = [_perceptron(f"top.{i}", *pair) for i, pair in enumerate(pairwise(above))]
    before = above[-1]
    head = WorkPart(
        "head", before + 1, 2 * before, 2, 2, products=(Product(1, before, 1),), moved=8, kernels=3
    )
    return Workload((stem, joined("interaction", (first, cross)), *last, head))


def _perceptron(name: str, features: int, *widths: int, carried: int = 0) -> WorkPart:
    """Layers with ReLU after each; carried: elements that pass by to the next part."""
    sizes = (features, *widths)
    products = tuple(Product(1, a, b) for a, b in zip(sizes, widths, strict=False))
    return WorkPart(
        name,
        sum(p.inner * p.columns + p.columns for p in products),
        sum(p.flops for p in products),
        sum(widths),  # what ReLU gives is what it needs
        sizes[-1] + carried,
        products=products,
        moved=2 * sum(widths),
        kernels=2 * len(widths),
    )
