"""A plain multi-layer perceptron, in blocks of two layers."""

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.spec.model import DealtSize, Facts, PictureModel
from unisono.spec.training import Count
from unisono.spec.workload import Channels, Product, Workload, WorkPart

if TYPE_CHECKING:
    from torch import nn


class MLPConfig(PictureModel):
    """Blocks of two layers over all values of a sample in one row."""

    name: ClassVar[str] = "mlp"
    depth_key: ClassVar[str] = "model.hidden"

    kind: Literal["mlp"] = Field(default="mlp", description="mlp")
    hidden: tuple[Count, ...] = Field(
        default=(128, 128), min_length=1, description="mlp: inner width of each block of two layers"
    )

    @property
    def depth(self) -> int | None:
        return len(self.hidden)

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        if axis != "tp":
            return None
        return tuple(
            DealtSize("the hidden width", "model.hidden", size) for size in dict.fromkeys(self.hidden)
        )

    def workload(self, facts: Facts) -> Workload:
        classes, shape = self.targets(facts, "C22")
        return mlp(
            features=prod(shape), hidden=self.hidden, classes=classes, dropout=self.dropout, bias=self.bias
        )

    def build(self, facts: Facts) -> "nn.Module":
        from unisono_contrib.models.mlp.net import MLP

        return MLP(self, *self.targets(facts))


def mlp(
    *, features: int, hidden: Sequence[int], classes: int, dropout: float = 0.0, bias: bool = True
) -> Workload:
    """Blocks of two layers of the widths `hidden`."""
    parts = [WorkPart("stem", 0, 0, 0, features)]
    before = features
    for number, width in enumerate(hidden):
        weights = before * width + width * width
        # Of each layer its result, which the activation needs, and the activation, which the next layer
        # needs; the last activation belongs to the next part, unless a dropped copy and its mask take its
        # place.
        kept = 4 * width + (width if dropout > 0.0 else 0)
        parts.append(
            WorkPart(
                f"blocks.{number}", weights + (2 * width if bias else 0), 2 * weights, kept, width,
                products=(
                    Product(1, before, width, dealt="columns"),
                    Product(1, width, width, dealt="inner"),
                ),
                moved=4 * width + (3 * width if dropout > 0.0 else 0),
                kernels=5 if dropout > 0.0 else 4,
                channels=Channels(
                    units=width, parameters=weights + (width if bias else 0), activations=2 * width,
                    # Values of a sample want no gradient; the second activation keeps what was added up.
                    moved=2 * width, entered=before if number else 0, left=width, again=True,
                    widens=bias,
                ),
            )
        )  # fmt: skip
        before = width
    parts.append(
        WorkPart(
            "head", before * classes + (classes if bias else 0), 2 * before * classes, classes, classes,
            products=(Product(1, before, classes),), moved=4 * classes, kernels=3,
        )
    )  # fmt: skip
    return Workload(tuple(parts))
