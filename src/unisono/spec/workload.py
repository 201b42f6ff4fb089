"""What a model costs, in numbers: parameters, arithmetic, memory. Closed forms, without torch.

Arithmetic is that of matrix products and convolutions, a multiply-add counted as two operations; the rest is
bound by memory and not counted. Attention is counted in full, as is usual for MFU (Chowdhery et al., PaLM,
2022, appendix B), although the causal half is enough. Activations are the elements that plain autograd
keeps for the backward pass (compare Korthikanti et al., "Reducing activation recomputation", 2022), without
recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple


class Product(NamedTuple):
    """A matrix product of one sample: `many` of (rows x inner) (inner x columns).

    read: elements of the left factor of a convolution as they lie in memory, mostly fewer than rows x inner; 0: of no
    convolution, as many.
    batched: another sample adds more products rather than more rows, as in attention.
    dealt: what `tp` deals of it, its "columns" or its "inner" size, by the units of its part; "": nothing.
    """

    rows: int
    inner: int
    columns: int
    many: int = 1
    read: int = 0
    batched: bool = False
    dealt: Literal["", "columns", "inner"] = ""

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.many


class Tables(NamedTuple):
    """Embedding tables that are looked up. elements: of all. touched: elements that one sample reads. results: elements
    that come out for one sample, which cross the network where the tables are dealt. count: how many, all of one width;
    0: nobody has said. indices: of one sample. cut: how they are dealt, by "table", "row" or "column"."""

    elements: int
    touched: int
    results: int
    count: int = 0
    indices: int = 0
    cut: str = "table"


class Channels(NamedTuple):
    """What `tp` deals of a part: all that lies between a product with dealt columns and one with a dealt inner size.

    units: how many it deals, each whole. parameters, activations, moved: of the part's own, those that are dealt.
    entered: elements of one sample, whole on every rank, of which each has a part of the gradient; 0 where nobody asks
    for it. left: elements of one sample that are added up on their way out. again: whether `recompute=full` comes to
    that sum again, as something behind it is kept. widens: under autocast what is entered is fp32, as a norm or a bias
    made it.
    """

    units: int
    parameters: int
    activations: int
    moved: int
    entered: int
    left: int
    again: bool
    widens: bool = False


@dataclass(frozen=True, slots=True)
class WorkPart:
    """One indivisible part of a model, as `pp` deals it.

    parameters: elements. flops: of the forward pass of one sample. activations: elements of one sample kept
    for the backward pass. output: elements of one sample that pass to the next part. idle: parameters that a
    token does not meet, of experts that it is not sent to. For prices of what is no transformer: products, whose sum
    `flops` is; moved, elements of one sample that all other kernels read and write in the forward pass; kernels, as
    many as are started for it; tables; channels, where `tp` deals some.
    """

    name: str
    parameters: int
    flops: int
    activations: int
    output: int
    idle: int = 0
    products: tuple[Product, ...] = ()
    moved: int = 0
    kernels: int = 0
    tables: Tables | None = None
    channels: Channels | None = None

    @property
    def backward_flops(self) -> int:
        """Each product has two gradients of its own size."""
        return 2 * self.flops


def joined(name: str, parts: Sequence[WorkPart]) -> WorkPart:
    """Parts one after the other as one."""
    return WorkPart(
        name,
        sum(p.parameters for p in parts),
        sum(p.flops for p in parts),
        sum(p.activations for p in parts),
        parts[-1].output if parts else 0,
        products=tuple(product for p in parts for product in p.products),
        moved=sum(p.moved for p in parts),
        kernels=sum(p.kernels for p in parts),
    )


@dataclass(frozen=True, slots=True)
class Workload:
    """A model's parts from stem to head. tied: parameters that two parts name but that exist once."""

    parts: tuple[WorkPart, ...]
    tied: int = 0

    @property
    def blocks(self) -> tuple[WorkPart, ...]:
        """The parts between stem and head."""
        return self.parts[1:-1]

    @property
    def parameters(self) -> int:
        """Elements of the whole model, a tied weight once."""
        return sum(part.parameters for part in self.parts) - self.tied

    @property
    def active(self) -> int:
        """Elements that one token meets, a tied weight once."""
        return self.parameters - sum(part.idle for part in self.parts)

    @property
    def flops(self) -> int:
        """Forward pass of one sample."""
        return sum(part.flops for part in self.parts)

    @property
    def step_flops(self) -> int:
        """Forward and backward pass of one sample."""
        return sum(part.flops + part.backward_flops for part in self.parts)

    @property
    def activations(self) -> int:
        """Elements of one sample that the whole model keeps for the backward pass."""
        return sum(part.activations for part in self.parts)
