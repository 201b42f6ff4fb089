"""Networks that are no transformers, in numbers: residual networks, recommenders, and what all of them share.

Elementwise kernels are counted as PyTorch starts them, one by one; batch normalisation reads its input twice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from unisono.planner.work.sample import UNSAID, Sample
from unisono.spec.workload import Product, Tables, Workload, WorkPart

# Blocks of the four stages (He et al., "Deep residual learning for image recognition", 2015, table 1).
RESNETS = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}


@dataclass(frozen=True, slots=True)
class Network:
    """A workload that is dealt by dp, shard and pp alone. tokens: what one sample counts for. states: numbers that the
    optimiser keeps of each parameter, 2 of Adam, 1 of a velocity. by_weights: pp deals equal weights to its rows, as
    `train` does, rather than equal arithmetic. sample: its bytes, 0 where nobody has said."""

    workload: Workload
    tokens: int = 1
    states: int = 2
    by_weights: bool = False
    sample: Sample = UNSAID

    @property
    def n_layer(self) -> int:
        """Parts that pp deals out."""
        return len(self.workload.blocks)

    @property
    def context(self) -> int:
        """Tokens of one sample."""
        return self.tokens

    @property
    def n_head(self) -> int:
        """Nothing that tp could deal out."""
        return 1

    @property
    def kv_heads(self) -> int:
        return 1

    def step_flops(self, batch: int) -> float:
        """Matrix arithmetic of one step on `batch` samples."""
        return float(batch) * self.workload.step_flops


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
