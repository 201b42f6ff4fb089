"""A diffusion transformer (Peebles and Xie, 2023) that learns a flow (Lipman et al., 2023) from noise to pictures."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from unisono.models.gpt import GPTConfig
from unisono.spec.errors import Problem, UsageError
from unisono.spec.model import DealtSize, Facts, PictureModel
from unisono.spec.training import Count, Depth, Share
from unisono.spec.workload import Product, Workload, WorkPart

if TYPE_CHECKING:
    from torch import nn

WAVES = 256  # sines and cosines of a time


class DiTConfig(PictureModel):
    """Transformer blocks over the patches of a noisy picture, modulated by its time and class (adaLN-Zero)."""

    name: ClassVar[str] = "dit"
    selective: ClassVar[bool] = True
    samples: ClassVar[str] = "flow"
    draws: ClassVar[bool] = True

    kind: Literal["dit"] = Field(default="dit", description="dit")
    n_layer: Depth = Field(
        default=4, description="blocks (gpt: transformer blocks, convnet: residual blocks)"
    )
    n_head: Count = Field(default=4, description="attention heads")
    d_model: Count = Field(default=128, description="width of the residual stream")
    d_ff: Count | None = Field(
        default=None, description="feed-forward width; 4 d_model, for swiglu 8/3 d_model when absent"
    )
    patch: Count = Field(default=2, description="dit: rows and columns of a patch")
    time: Literal["logit_normal", "uniform"] = Field(
        default="logit_normal", description="dit: how the time of a sample is drawn"
    )
    label_drop: Share = Field(
        default=0.1, description="dit: samples that are learnt without their class, for guided drawing"
    )

    @property
    def layers(self) -> GPTConfig:
        """The attention and feed-forward layers of a block, as a gpt's."""
        return GPTConfig(
            n_layer=self.n_layer, n_head=self.n_head, d_model=self.d_model, d_ff=self.d_ff, bias=self.bias,
            dropout=self.dropout,
        )  # fmt: skip

    @property
    def depth(self) -> int | None:
        return self.n_layer

    def problems(self) -> Iterator[Problem]:
        yield from self.layers.problems()
        if self.image and (self.image[1] % self.patch or self.image[2] % self.patch):
            yield _uneven(self.patch, self.image)

    def deals(self, axis: str) -> Sequence[DealtSize] | None:
        layers = self.layers.deals(axis)
        if layers is None:
            return None
        sizes = [size for size in layers if size.key != "model.context"]
        if self.image is None:  # the module knows how many patches there are
            return () if axis == "cp" else sizes
        rows, columns = (size // self.patch for size in self.image[1:])
        patches = DealtSize("the patches", "model.image, model.patch", rows * columns)
        return (patches, *sizes) if axis == "cp" else (*sizes, patches)

    def patches(self, facts: Facts, code: str = "C00") -> tuple[int, int, int]:
        """(patches of a picture, values of a patch, classes). Raises UsageError where the shape of a picture is open,
        C06 where patches do not fill it."""
        classes, shape = self.targets(facts, code)
        if len(shape) != 3 or shape[1] % self.patch or shape[2] % self.patch:
            problem = _uneven(self.patch, shape)
            raise UsageError(problem.what, where=problem.where, fix=problem.fix, code=problem.code)
        values = shape[0] * self.patch**2
        return prod(shape) // values, values, classes

    def workload(self, facts: Facts) -> Workload:
        patches, values, classes = self.patches(facts, "C22")
        return dit(self.layers, patches=patches, values=values, classes=classes)

    def build(self, facts: Facts) -> "nn.Module":
        from unisono_contrib.models.dit.net import DiT

        return DiT(self, *self.patches(facts))


def _uneven(patch: int, shape: Sequence[int]) -> Problem:
    what = f"patches of {patch} x {patch} do not fill a picture of shape {','.join(map(str, shape))}"
    return Problem("C06", what, "model.patch, model.image", "a patch that divides height and width")


def dit(layers: GPTConfig, *, patches: int, values: int, classes: int) -> Workload:
    """A diffusion transformer on `patches` patches of `values` values. layers: of a block."""
    D, F, T, heads = layers.d_model, layers.ff_width, patches, layers.n_head
    bias, drop = int(layers.bias), int(layers.dropout > 0.0)
    stem = _part(
        "stem", (Product(T, values, D), Product(1, WAVES, D), Product(1, D, D)),
        (values + T + WAVES + D + classes + 1 + 3 * bias) * D,
        activations=WAVES + 3 * D, output=T * D + D, moved=3 * T * D + 12 * D, kernels=12,
    )  # fmt: skip
    block = _part(
        "",
        (
            Product(1, D, 6 * D), Product(T, D, 3 * D), Product(T, D // heads, T, heads, batched=True),
            Product(T, T, D // heads, heads, batched=True), Product(T, D, D), Product(T, D, F), Product(T, F, D),
        ),
        10 * D * D + 2 * D * F + bias * (11 * D + F),
        # Of each half what comes in, with its mean and spread, what the norm gives, what the modulation gives, and what
        # the gate multiplies; queries, keys, values, what attention gives, the logarithm of each query's sum; both
        # sides of GELU; of a dropout its mask, and in attention the weights before and after; time and class, what is
        # made of them, and two scales plus one.
        activations=T * (12 * D + 2 * F + 4 + heads + drop * (2 * D + 3 * heads * T - heads)) + 9 * D,
        output=T * D + D, moved=T * (24 * D + 2 * F + 6 * drop * D), kernels=21 + 6 * drop,
    )  # fmt: skip
    head = _part(
        "head", (Product(1, D, 2 * D), Product(T, D, values)), 2 * D * D + D * values + 2 * bias * D,
        activations=T * (3 * D + values + 2) + 4 * D, output=T * values,
        moved=T * (7 * D + 6 * values), kernels=9,
    )  # fmt: skip
    return Workload((stem, *(replace(block, name=f"blocks.{n}") for n in range(layers.n_layer)), head))


def _part(
    name: str,
    products: tuple[Product, ...],
    parameters: int,
    *,
    activations: int,
    output: int,
    moved: int,
    kernels: int,
) -> WorkPart:
    flops = sum(product.flops for product in products)
    return WorkPart(
        name, parameters, flops, activations, output, products=products, moved=moved, kernels=kernels
    )
