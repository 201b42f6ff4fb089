"""A residual convolutional network: ours with group norms, and the residual networks of 2015 for prices."""

from collections.abc import Iterator, Sequence
from math import gcd
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.model import DealtSize, Facts, PictureModel
from unisono.spec.training import Count, Depth
from unisono.spec.workload import Channels, Product, Workload, WorkPart
from unisono_contrib.models.convnet.resnet import resnet

if TYPE_CHECKING:
    from torch import nn

_IMAGENET = Facts(classes=1000, sample_shape=(3, 224, 224))


class ConvNetConfig(PictureModel):
    """Residual blocks of two convolutions, in up to three stages of halving resolution."""

    name: ClassVar[str] = "convnet"

    kind: Literal["convnet"] = Field(default="convnet", description="convnet")
    n_layer: Depth = Field(
        default=4, description="blocks (gpt: transformer blocks, convnet: residual blocks)"
    )
    channels: Count = Field(default=32, description="convnet: channels of the first stage")
    resnet: Literal["50", "101", "152"] | None = Field(
        default=None, description="convnet: the residual network of so many layers instead; priced only"
    )

    @property
    def depth(self) -> int | None:
        return None if self.resnet else self.n_layer

    @property
    def by_weights(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return not self.resnet

    def problems(self) -> Iterator[Problem]:
        if self.resnet:
            what = f"model.resnet {self.resnet} is priced by simulate, not yet trained in this version"
            fix = "leave resnet out, for the residual network of n_layer blocks"
            yield Problem("C10", what, "model.resnet", fix)

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        if axis != "tp" or self.resnet:
            return None
        what = "the groups of channels that norms have"
        return (DealtSize(what, "model.channels", norm_groups(self.channels)),)

    def sized(self, facts: Facts) -> Facts:
        return super().sized(_IMAGENET if self.resnet else facts)

    def workload(self, facts: Facts) -> Workload:
        classes, shape = self.targets(facts, "C22")
        image = (shape[0], shape[1], shape[2])
        if self.resnet:
            return resnet(self.resnet, classes=classes, image=image)
        return convnet(
            image=image, channels=self.channels, n_layer=self.n_layer, classes=classes, dropout=self.dropout,
            bias=self.bias,
        )  # fmt: skip

    def build(self, facts: Facts) -> "nn.Module":
        from unisono_contrib.models.convnet.net import ConvNet

        return ConvNet(self, *self.targets(facts))


def norm_groups(channels: int) -> int:
    """Groups of a norm over so many channels: 8 if that divides them."""
    return gcd(channels, 8)


def conv_stages(n_layer: int, channels: int) -> tuple[tuple[int, int, int], ...]:
    """(channels before, after, stride) of each block: up to three stages, each twice as wide at half the size."""
    stage = [number * min(3, n_layer) // n_layer for number in range(n_layer)]
    width = [channels << s for s in stage]
    return tuple(
        (width[max(n - 1, 0)], width[n], 2 if n and stage[n] != stage[n - 1] else 1) for n in range(n_layer)
    )


def _between(before: int, after: int, elements: tuple[int, int], drops: bool) -> Channels:
    """What is dealt of a block: channels between its convolutions, by groups. elements: going in, and going out. drops:
    whether there is dropout."""
    wide, inner = elements
    groups = norm_groups(after)
    return Channels(
        units=groups, parameters=9 * before * after + 9 * after * after + 2 * after,
        activations=(4 if drops else 2) * inner + 2 * groups, moved=5 * inner,
        # A sum with what went past keeps nothing, so recomputation ends before it.
        entered=wide, left=inner, again=False, widens=True,
    )  # fmt: skip


def convnet(
    *,
    image: tuple[int, int, int],
    channels: int,
    n_layer: int,
    classes: int,
    dropout: float = 0.0,
    bias: bool = True,
) -> Workload:
    """Residual blocks of two 3 x 3 convolutions with group norms; image: (colours, rows, columns)."""
    colours, rows, columns = image
    size = rows * columns
    weights = 9 * colours * channels
    stem = Product(size, 9 * colours, channels, read=colours * size)
    parts = [WorkPart("stem", weights, 2 * size * weights, 0, channels * size, products=(stem,), kernels=1)]
    for number, (before, after, stride) in enumerate(conv_stages(n_layer, channels)):
        wide = before * size  # elements going in
        rows, columns = -(-rows // stride), -(-columns // stride)
        size = rows * columns
        weights = (
            9 * before * after + 9 * after * after + (before * after if (before, stride) != (after, 1) else 0)
        )
        # norm's input and ReLU's result; the same after the first convolution; mask and dropped copy if any
        kept = 2 * wide + 2 * after * size + (2 * after * size if dropout > 0.0 else 0)
        kept += 2 * norm_groups(before) + 2 * norm_groups(after)
        products = [
            Product(size, 9 * before, after, read=wide, dealt="columns"),
            Product(size, 9 * after, after, read=after * size, dealt="inner"),
        ]
        if (before, stride) != (after, 1):
            products.append(Product(size, before, after, read=before * size))
        parts.append(
            WorkPart(
                f"blocks.{number}", weights + 2 * before + 2 * after, 2 * size * weights, kept, after * size,
                products=tuple(products),
                # A norm reads twice and writes, ReLU reads and writes; the sum reads two and writes.
                moved=5 * wide + 5 * after * size + 3 * after * size,
                kernels=5 + len(products),
                channels=_between(before, after, (wide, after * size), dropout > 0.0),
            )
        )  # fmt: skip
    width = channels if not n_layer else conv_stages(n_layer, channels)[-1][1]
    kept = 2 * width * size + 2 * norm_groups(width) + width + classes
    parts.append(
        WorkPart(
            "head", 2 * width + width * classes + (classes if bias else 0), 2 * width * classes, kept, classes,
            products=(Product(1, width, classes),), moved=6 * width * size + 4 * classes, kernels=6,
        )
    )  # fmt: skip
    return Workload(tuple(parts))
