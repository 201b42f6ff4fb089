"""Residual networks of bottleneck blocks in numbers (He et al., "Deep residual learning for image recognition", 2015).

Elementwise kernels are counted as PyTorch starts them, one by one; batch normalisation reads its input twice.
"""

from dataclasses import dataclass

from unisono.spec.workload import Product, Workload, WorkPart

# Blocks of the four stages (table 1).
RESNETS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


@dataclass(slots=True)
class _Layers:
    """Layers of one part, added up one after the other; `size` (rows, columns) and `channels` of what goes on."""

    channels: int
    size: tuple[int, int]
    parameters: int = 0
    activations: int = 0
    moved: int = 0
    kernels: int = 0
    products: tuple[Product, ...] = ()

    @property
    def elements(self) -> int:
        return self.channels * self.size[0] * self.size[1]

    def conv(self, channels: int, width: int, stride: int = 1, relu: bool = True) -> None:
        """A convolution without bias, batch normalisation, and ReLU in place."""
        read = self.elements
        inner = width * width * self.channels
        self.size = (-(-self.size[0] // stride), -(-self.size[1] // stride))
        self.channels = channels
        rows = self.size[0] * self.size[1]
        self.products += (Product(rows, inner, channels, read=read),)
        self.parameters += inner * channels + 2 * channels
        # The norm needs its input; what ReLU gives is what it and the next convolution need.
        self.activations += self.elements * (2 if relu else 1)
        self.moved += self.elements * (5 if relu else 3)
        self.kernels += 4 if relu else 3  # the norm counts its batches by a kernel of its own

    def part(self, name: str) -> WorkPart:
        return WorkPart(
            name, self.parameters, sum(p.flops for p in self.products), self.activations, self.elements,
            products=self.products, moved=self.moved, kernels=self.kernels,
        )  # fmt: skip


def resnet(
    depth: str, *, classes: int = 1000, image: tuple[int, int, int] = (3, 224, 224), width: int = 64
) -> Workload:
    """A residual network of bottleneck blocks, `RESNETS` by its layers; the stride is in the 3 x 3 convolution, as in
    torchvision. image: (colours, rows, columns). width: channels of the first stage. Raises KeyError."""
    stem = _Layers(image[0], (image[1], image[2]))
    stem.conv(width, 7, 2)
    before = stem.elements
    stem.size = (-(-stem.size[0] // 2), -(-stem.size[1] // 2))  # 3 x 3 maximum with stride 2
    stem.activations += 3 * stem.elements  # the result, and an index of 8 bytes beside each
    stem.moved += before + 3 * stem.elements
    stem.kernels += 1
    parts, channels, size = [stem.part("stem")], width, stem.size
    for stage, blocks in enumerate(RESNETS[depth]):
        for number in range(blocks):
            stride = 2 if stage and not number else 1
            block = _bottleneck(channels, size, width << stage, stride)
            channels, size = block.channels, block.size
            parts.append(block.part(f"blocks.{len(parts) - 1}"))
    spread = channels * size[0] * size[1]
    parts.append(
        WorkPart(
            "head", channels * classes + classes, 2 * channels * classes, channels + classes, classes,
            products=(Product(1, channels, classes),), moved=spread + channels + 4 * classes, kernels=4,
        )
    )  # fmt: skip
    return Workload(tuple(parts))


def _bottleneck(channels: int, size: tuple[int, int], width: int, stride: int) -> _Layers:
    """1 x 1, 3 x 3 and 1 x 1 convolution; beside them one of 1 x 1 where shapes differ; the sum, and ReLU."""
    block = _Layers(channels, size)
    block.conv(width, 1)
    block.conv(width, 3, stride)
    block.conv(4 * width, 1, relu=False)
    if (channels, stride) != (4 * width, 1):
        beside = _Layers(channels, size)
        beside.conv(4 * width, 1, stride, relu=False)
        block.parameters += beside.parameters
        block.activations += beside.activations
        block.moved += beside.moved
        block.kernels += beside.kernels
        # A stride skips what it does not need.
        block.products += tuple(p._replace(read=p.rows * p.inner) for p in beside.products)
    block.activations += block.elements
    block.moved += 5 * block.elements
    block.kernels += 2
    return block
