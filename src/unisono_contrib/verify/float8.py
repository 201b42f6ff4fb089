"""Products in eight bits beside the same products in float64, on one device: every one of a micro-batch, forward and
backward.

A plan with `precision=bf16:fp8` is held to one device that rounds alike; so what both round wrongly has to show here.
An entry of a product a bᵀ adds up K terms. Each factor is off by at most u of itself, u = 2^-4 in e4m3 and 2^-3 in
e5m2, or by half of the smallest number that its row's scale leaves. So the entry is off by no more than

    sum |a| |b| (u_a + u_b + u_a u_b)  +  what is too small to be rounded well  +  2^-8 of the entry

which holds for every entry, not for most: roundings are bounded by these, and sums in fp32 add less than the last term.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import Resolved
from unisono.parallel.play import StagePlayer
from unisono.train.build.build import Place
from unisono.train.data.dataset import Corpus
from unisono.verify.play import start
from unisono_contrib.parallel.float8 import AHEAD, BACK, LEAST

UNIT = {AHEAD: 2.0**-4 + 2.0**-8, BACK: 2.0**-3 + 2.0**-8}  # half of an ulp, relative, after one of bf16
_SMALL = {AHEAD: 2.0**-10, BACK: 2.0**-17}  # half of the smallest number, where a row's scale is 1
_OUT = 2.0**-8 + 2.0**-12  # the result in bf16, and sums in fp32
CAUSE = "rounding_float8"


@dataclass(slots=True)
class Seen:
    """What one linear layer multiplied: input, output, their gradients."""

    module: Any
    x: Tensor | None = None
    y: Tensor | None = None
    to_y: Tensor | None = None
    to_x: Tensor | None = None
    name: str = ""

    def forward(self, _: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> None:
        """A hook."""
        self.x, self.y = inputs[0].detach().flatten(0, -2), out.detach().flatten(0, -2)

    def backward(self, _: nn.Module, to_x: Any, to_y: Any) -> None:
        """A hook."""
        self.to_y = to_y[0].detach().flatten(0, -2)
        self.to_x = None if to_x[0] is None else to_x[0].detach().flatten(0, -2)


def bound_of(a: Tensor, b: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(a bᵀ, how far each entry may be off), float64, a in `kind` and b in e4m3."""
    (a, a_off), (b, b_off) = _rounded(a, kind), _rounded(b, AHEAD)
    right = a @ b.T
    off = a.abs() @ b_off.T + a_off @ b.abs().T + a_off @ b_off.T
    return right, off + _OUT * (right.abs() + off)


def _rounded(x: Tensor, kind: torch.dtype) -> tuple[Tensor, Tensor]:
    """(x as products read it, how far each of its entries may be off)."""
    wide = x.double()
    scale = 2 * wide.abs().amax(1, keepdim=True).clamp(min=LEAST) / torch.finfo(kind).max
    return wide, UNIT[kind] * wide.abs() + _SMALL[kind] * scale


def odd_products(seen: Seen) -> Iterator[str]:
    """What is wrong with the three products of a layer, in words."""
    module, x, y, to_y = seen.module, seen.x, seen.y, seen.to_y
    if x is None or y is None or to_y is None:
        return
    weight = module.weight.detach()
    bias = weight.new_zeros(len(weight)) if module.bias is None else module.bias.detach()
    products = [("output", y, x, weight, AHEAD)]
    if seen.to_x is not None:
        products.append(("gradient of the input", seen.to_x, to_y, weight.T, BACK))
    if module.weight.grad is not None:
        products.append(("gradient of the weight", module.weight.grad, to_y.T, x.T, BACK))
    for what, got, a, b, kind in products:
        right, off = bound_of(a, b, kind)
        if got is y:
            right, off = right + bias.double(), off + 2 * _OUT * bias.double().abs()
        over = (got.double() - right).abs() > off * (1 + 1e-9) + torch.finfo(torch.float32).tiny
        over |= ~torch.isfinite(got)
        if bool(over.any()):
            wrong = f"{int(over.sum())} of {over.numel()} entries of the {what}"
            yield f"{seen.name}: {wrong} are further off than eight bits round"


def unlawful_products(resolved: Resolved, place: Place, corpus: Corpus) -> dict[str, Any]:
    """What of a proof's result changes, as `judge_reference` gives it; nothing where all products are in bound."""
    run, feed = start(resolved, place, corpus)
    (stage,) = run.local.stages.values()
    every = []
    for number, block in stage.blocks.items():
        for name, module in block.named_modules(prefix=f"blocks.{number}"):
            if isinstance(module, nn.Linear) and "forward" in vars(module):
                seen = Seen(module, name=name)
                module.register_forward_hook(seen.forward)
                module.register_full_backward_hook(seen.backward)
                every.append(seen)
    if not isinstance(run.player, StagePlayer):
        raise TypeError("a run that was just built plays with its stages")
    run.player.after_backward = lambda _: None
    leaf = feed.fetch(0, run.leaves)[0]
    row = [action for action in run.row if action.micro == 0]
    run.player.play(row, [leaf], run.sync.weigh(leaf.targets.numel()), run.seed)
    feed.close()
    first = next((text for seen in every for text in odd_products(seen)), None)
    linear = any(
        isinstance(module, nn.Linear) for block in stage.blocks.values() for module in block.modules()
    )
    if first is None and (every or not linear):  # blocks of convolutions multiply as under bf16
        return {}
    first = first or "no product of a block is in eight bits"
    return {"first": f"one device itself: {first}", "cause": CAUSE, "explanation": first}
