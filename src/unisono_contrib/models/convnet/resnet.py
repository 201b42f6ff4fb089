"""Residual networks of bottleneck blocks in numbers (He et al., "Deep residual learning for image recognition", 2015).

Elementwise kernels are counted as PyTorch starts them, one by one; batch normalisation reads its input twice.
"""

from dataclasses import replace
from typing import NamedTuple

from unisono.spec.workload import Product, Workload, WorkPart, joined

# Blocks of the four stages (table 1).
RESNETS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


class _Maps(NamedTuple):
    """What goes from layer to layer for one sample."""

    channels: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        return self.channels * self.rows * self.columns

    def after(self, channels: int, stride: int) -> "_Maps":
        return _Maps(channels, -(-self.rows // stride), -(-self.columns // stride))


def _conv(x: _Maps, channels: int, width: int, stride: int = 1, relu: bool = True) -> WorkPart:
    """A convolution without bias, batch normalisation, and ReLU in place."""
    y, inner = x.after(channels, stride), width * width * x.channels
    product = Product(y.rows * y.columns, inner, channels, read=x.elements)
    # The norm needs its input; what ReLU gives is what it and the next convolution need.
    kept = y.elements * (2 if relu else 1)
    moved = y.elements * (5 if relu else 3)
    kernels = 4 if relu else 3  # the norm counts its batches by a kernel of its own
    return WorkPart(
        "", inner * channels + 2 * channels, product.flops, kept, y.elements, products=(product,),
        moved=moved, kernels=kernels,
    )  # fmt: skip


def resnet(
    depth: str, *, classes: int = 1000, image: tuple[int, int, int] = (3, 224, 224), width: int = 64
) -> Workload:
    """A residual network of bottleneck blocks, `RESNETS` by its layers; the stride is in the 3 x 3 convolution, as in
    torchvision. image: (colours, rows, columns). width: channels of the first stage. Raises KeyError."""
    first = _conv(_Maps(*image), width, 7, 2)
    x = _Maps(*image).after(width, 4)
    # 3 x 3 maximum with stride 2: the result, and an index of 8 bytes beside each
    most = WorkPart("", 0, 0, 3 * x.elements, x.elements, moved=first.output + 3 * x.elements, kernels=1)
    parts = [joined("stem", (first, most))]
    for stage, blocks in enumerate(RESNETS[depth]):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            parts.append(_bottleneck(f"blocks.{len(parts) - 1}", x, width << stage, stride))
            x = x.after(4 * width << stage, stride)
    channels = x.channels
    parts.append(
        WorkPart(
            "head", channels * classes + classes, 2 * channels * classes, channels + classes, classes,
            products=(Product(1, channels, classes),), moved=x.elements + channels + 4 * classes, kernels=4,
        )
    )  # fmt: skip
    return Workload(tuple(parts))


def _bottleneck(name: str, x: _Maps, width: int, stride: int) -> WorkPart:
    """1 x 1, 3 x 3 and 1 x 1 convolution; beside them one of 1 x 1 where shapes differ; the sum, and ReLU."""
    inner, y = x.after(width, 1), x.after(4 * width, stride)
    parts = [
        _conv(x, width, 1),
        _conv(inner, width, 3, stride),
        _conv(y._replace(channels=width), y.channels, 1, relu=False),
    ]
    if (x.channels, stride) != (y.channels, 1):
        beside = _conv(x, y.channels, 1, stride, relu=False)
        (product,) = beside.products  # a stride skips what it does not need
        parts.append(replace(beside, products=(product._replace(read=product.rows * product.inner),)))
    parts.append(WorkPart("", 0, 0, y.elements, y.elements, moved=5 * y.elements, kernels=2))
    return joined(name, parts)
