"""A recommender (Naumov et al., "Deep learning recommendation model", 2019): priced, not yet played."""

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import UsageError
from unisono.spec.model import DealtSize, Facts, ModelConfig
from unisono.spec.training import Count
from unisono.spec.workload import Product, Tables, Workload, WorkPart


class DLRMConfig(ModelConfig):
    """Embedding tables beside layers on continuous features, and layers on their products."""

    name: ClassVar[str] = "dlrm"
    reads: ClassVar[str] = "clicks"
    played: ClassVar[bool] = False

    kind: Literal["dlrm"] = Field(default="dlrm", description="dlrm")
    tables: tuple[Count, ...] = Field(default=(), description="dlrm: rows of each embedding table")
    d_table: Count = Field(default=64, description="dlrm: width of an embedding")
    lookups: Count = Field(default=1, description="dlrm: rows that a sample reads from each table")
    n_dense: Count = Field(default=13, description="dlrm: continuous features of a sample")
    bottom: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the continuous features, before the last of d_table"
    )
    top: tuple[Count, ...] = Field(
        default=(512, 256), description="dlrm: layers on the interactions, before the last of 1"
    )

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        return () if axis == "ep" else None  # tables of any number of rows

    @property
    def record(self) -> tuple[int, int]:
        return self.n_dense, self.lookups * len(self.tables)

    def workload(self, facts: Facts) -> Workload:
        if not self.tables:
            what = "a dlrm has embedding tables, and their rows are not given"
            raise UsageError(what, where="model.tables", fix="--model.tables 1000000,200000", code="C22")
        return dlrm(
            tables=self.tables, width=self.d_table, lookups=self.lookups, dense=self.n_dense,
            bottom=self.bottom, top=self.top,
        )  # fmt: skip


def dlrm(
    *, tables: Sequence[int], width: int, lookups: int, dense: int, bottom: Sequence[int], top: Sequence[int]
) -> Workload:
    """A recommender (Naumov et al., "Deep learning recommendation model", 2019).

    tables: rows of each; width: of an embedding; lookups: rows that a sample reads of each table, summed. dense:
    continuous features, through `bottom` and a layer of `width`. Then the dot products of all pairs, through `top` and
    a layer of one.
    """
    given = len(tables) * width
    stem = WorkPart(
        "tables", sum(tables) * width, 0, given, given + dense,
        # Rows are read, sums written, and an index of 8 bytes for each row.
        moved=len(tables) * lookups * (width + 2) + given, kernels=len(tables),
        tables=Tables(sum(tables) * width, len(tables) * lookups * width, given),
    )  # fmt: skip
    first = _perceptron("bottom", dense, (*bottom, width), carried=given)
    count = len(tables) + 1
    pairs = count * (count - 1) // 2
    cross = WorkPart(
        "interaction", 0, 2 * count * count * width, count * width + pairs + width, pairs + width,
        products=(Product(count, width, count, batched=True),),
        moved=2 * count * width + 2 * (pairs + width) + count * count, kernels=3,
    )  # fmt: skip
    last = _perceptron("top", pairs + width, top)
    before = top[-1] if top else pairs + width
    head = WorkPart(
        "head", before + 1, 2 * before, 2, 1, products=(Product(1, before, 1),), moved=8, kernels=3
    )
    return Workload((stem, first, cross, last, head))


def _perceptron(name: str, features: int, widths: Sequence[int], carried: int = 0) -> WorkPart:
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
