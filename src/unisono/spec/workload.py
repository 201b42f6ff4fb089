"""What a model costs, in numbers: parameters, arithmetic, memory. Closed forms, without torch.

Arithmetic is that of matrix products and convolutions, a multiply-add counted as two operations; the rest is
bound by memory and not counted. Attention is counted in full, as is usual for MFU (Chowdhery et al., PaLM,
2022, appendix B), although the causal half is enough. Activations are the elements that plain autograd
keeps for the backward pass (compare Korthikanti et al., "Reducing activation recomputation", 2022), without
recomputation.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import NamedTuple, Protocol


class Product(NamedTuple):
    """A matrix product of one sample: `many` of (rows x inner) (inner x columns).

    read: elements of the left factor as they lie in memory, fewer than rows x inner for a convolution; 0: as many.
    batched: another sample adds more products rather than more rows, as in attention.
    """

    rows: int
    inner: int
    columns: int
    many: int = 1
    read: int = 0
    batched: bool = False

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.inner * self.columns * self.many


class Tables(NamedTuple):
    """Embedding tables that are looked up. elements: of all. touched: elements that one sample reads. given: elements
    that come out for one sample, which cross the network where the tables are dealt."""

    elements: int
    touched: int
    given: int


@dataclass(frozen=True, slots=True)
class WorkPart:
    """One indivisible part of a model, as `pp` deals it.

    parameters: elements. flops: of the forward pass of one sample. activations: elements of one sample kept
    for the backward pass. output: elements of one sample that pass to the next part. idle: parameters that a
    token does not meet, of experts that it is not sent to. For prices of what is no transformer: products, whose sum
    `flops` is; moved, elements of one sample that all other kernels read and write in the forward pass; kernels, as
    many as are started for it; tables.
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

    @property
    def backward_flops(self) -> int:
        """Each product has two gradients of its own size."""
        return 2 * self.flops


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

    def parameter_bytes(self, itemsize: int = 4) -> int:
        """Bytes of the parameters with `itemsize` bytes an element."""
        return self.parameters * itemsize

    def activation_bytes(self, itemsize: int = 4) -> int:
        """Bytes per sample kept for the backward pass with `itemsize` bytes an element."""
        return self.activations * itemsize


class ModelSizes(Protocol):
    """The fields of `[model]` that decide a built-in model's workload."""

    @property
    def kind(self) -> str: ...
    @property
    def n_layer(self) -> int: ...
    @property
    def n_head(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def d_model(self) -> int: ...
    @property
    def ff_width(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def dropout(self) -> float: ...
    @property
    def bias(self) -> bool: ...
    @property
    def tie_embeddings(self) -> bool: ...
    @property
    def positions(self) -> str: ...
    @property
    def activation(self) -> str: ...
    @property
    def norm(self) -> str: ...
    @property
    def hidden(self) -> tuple[int, ...]: ...
    @property
    def channels(self) -> int: ...


def of(
    model: ModelSizes,
    *,
    vocab: int | None = None,
    classes: int | None = None,
    image: tuple[int, int, int] | None = None,
) -> Workload:
    """The workload of a built-in model. vocab, classes, image: what the data says, as the model is built
    with.

    Raises ValueError for a kind of model without a closed form, or where a size is missing.
    """
    if model.kind == "gpt" and vocab is not None:
        return gpt(
            n_layer=model.n_layer,
            n_head=model.n_head,
            kv_heads=model.kv_heads,
            d_model=model.d_model,
            d_ff=model.ff_width,
            context=model.context,
            vocab=vocab,
            dropout=model.dropout,
            bias=model.bias,
            tie_embeddings=model.tie_embeddings,
            learned_positions=model.positions == "learned",
            gated=model.activation == "swiglu",
            rms=model.norm == "rms",
        )
    if model.kind == "mlp" and classes is not None and image is not None:
        features = image[0] * image[1] * image[2]
        return mlp(
            features=features, hidden=model.hidden, classes=classes, dropout=model.dropout, bias=model.bias
        )
    if model.kind == "convnet" and classes is not None and image is not None:
        return convnet(
            image=image,
            channels=model.channels,
            n_layer=model.n_layer,
            classes=classes,
            dropout=model.dropout,
            bias=model.bias,
        )
    raise ValueError(f"no closed form for a model of kind {model.kind!r} with these sizes")


def gpt(
    *,
    n_layer: int,
    n_head: int,
    d_model: int,
    context: int,
    vocab: int,
    kv_heads: int | None = None,
    d_ff: int | None = None,
    dropout: float = 0.0,
    bias: bool = True,
    tie_embeddings: bool = True,
    learned_positions: bool = True,
    gated: bool = False,
    rms: bool = False,
) -> Workload:
    """A decoder-only transformer on samples of `context` tokens.

    kv_heads: key/value heads (default n_head). d_ff: feed-forward width (default 4 d_model). gated: three
    feed-forward matrices (SwiGLU). rms: norms without mean and bias.
    """
    D, T, V, F = d_model, context, vocab, d_ff or 4 * d_model
    groups, width = kv_heads or n_head, d_model // n_head
    norm, statistics = D * (2 if bias and not rms else 1), 1 if rms else 2
    qkv = (n_head + 2 * groups) * width
    ups = 2 if gated else 1
    weights = D * qkv + D * D + (ups + 1) * D * F
    biases = qkv + D + ups * F + D if bias else 0
    products = 2 * T * weights + 4 * T * T * D
    noisy = dropout > 0.0
    block = WorkPart(
        name="block",
        parameters=weights + biases + 2 * norm,
        flops=products,
        activations=_gpt_block_activations(
            T,
            D,
            F,
            n_head,
            groups,
            rotary=not learned_positions,
            gated=gated,
            noisy=noisy,
            statistics=statistics,
        ),
        output=T * D,
    )
    embedded = V * D + (T * D if learned_positions else 0)
    stem = WorkPart("stem", embedded, 0, T * D if noisy else 0, T * D)
    # The norm's input and output, its statistics, and the log-probabilities of the loss.
    head = WorkPart("head", norm + V * D, 2 * T * D * V, 2 * T * D + statistics * T + T * V, T * V)
    return Workload((stem, *_numbered(block, n_layer), head), tied=V * D if tie_embeddings else 0)


def _gpt_block_activations(
    T: int,
    D: int,
    F: int,
    heads: int,
    groups: int,
    *,
    rotary: bool,
    gated: bool,
    noisy: bool,
    statistics: int,
) -> int:
    q, kv = T * D, T * D // heads * groups
    if groups != heads:
        kept = 3 * q  # queries, and keys and values repeated for each query head
    else:
        kept = q + 2 * kv + (q + kv if rotary else 0)  # one tensor, and the turned copies
    if noisy:
        kept += 3 * heads * T * T  # weights, mask, dropped weights
    else:
        kept += heads * T  # the fused kernel: one logarithm a row
    kept += 2 * q if rotary else q  # what attention gives, and its copy where heads have to move
    norms = 2 * (2 * T * D + statistics * T)  # input, output
    hidden = (4 if gated else 2) * T * F
    masks = 2 * T * D if noisy else 0
    return norms + kept + hidden + masks


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
                products=(Product(1, before, width), Product(1, width, width)),
                moved=4 * width + (3 * width if dropout > 0.0 else 0),
                kernels=5 if dropout > 0.0 else 4,
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


def conv_stages(n_layer: int, channels: int) -> tuple[tuple[int, int, int], ...]:
    """(channels before, after, stride) of each block: up to three stages, each twice as wide at half the size."""
    stage = [number * min(3, n_layer) // n_layer for number in range(n_layer)]
    width = [channels << s for s in stage]
    return tuple(
        (width[max(n - 1, 0)], width[n], 2 if n and stage[n] != stage[n - 1] else 1) for n in range(n_layer)
    )


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
        kept += 2 * gcd(before, 8) + 2 * gcd(after, 8)
        products = [
            Product(size, 9 * before, after, read=wide),
            Product(size, 9 * after, after, read=after * size),
        ]
        if (before, stride) != (after, 1):
            products.append(Product(size, before, after))
        parts.append(
            WorkPart(
                f"blocks.{number}", weights + 2 * before + 2 * after, 2 * size * weights, kept, after * size,
                products=tuple(products),
                # A norm reads twice and writes, ReLU reads and writes; the sum reads two and writes.
                moved=5 * wide + 5 * after * size + 3 * after * size,
                kernels=5 + len(products),
            )
        )  # fmt: skip
    width = channels if not n_layer else conv_stages(n_layer, channels)[-1][1]
    kept = 2 * width * size + 2 * gcd(width, 8) + width + classes
    parts.append(
        WorkPart(
            "head", 2 * width + width * classes + (classes if bias else 0), 2 * width * classes, kept, classes,
            products=(Product(1, width, classes),), moved=6 * width * size + 4 * classes, kernels=6,
        )
    )  # fmt: skip
    return Workload(tuple(parts))


def _numbered(block: WorkPart, count: int) -> tuple[WorkPart, ...]:
    return tuple(
        WorkPart(f"blocks.{n}", block.parameters, block.flops, block.activations, block.output)
        for n in range(count)
    )
