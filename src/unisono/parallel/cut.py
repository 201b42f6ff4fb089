"""Cut a model into pipeline stages of about equal cost."""

from collections.abc import Callable, Sequence
from contextlib import suppress

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.func import functional_call

from unisono.models.noise import Noise
from unisono.parallel.precision import HALF, computing
from unisono.programs.balance import balance

Carry = Tensor | tuple[Tensor, ...]  # what one block hands to the next: one tensor, or several


def matrix_cost(module: nn.Module) -> float:
    """Multiplications per position, by the number of matrix elements; tables that are only looked up are free. What is
    no plain layer says itself how many elements a position meets, as `met`."""
    plain = (nn.Linear, nn.Conv2d)
    return float(
        sum(m.weight.numel() if isinstance(m, plain) else getattr(m, "met", 0) for m in module.modules())  # type: ignore[operator]
    )


class Stage(nn.Module):
    """Some consecutive blocks under their logical names, with the stem if first and the head if last."""

    def __init__(self, model: nn.Module, blocks: range, index: int, count: int) -> None:
        super().__init__()
        self.first, self.last = index == 0, index == count - 1
        if self.first:
            self.stem = model.stem
        self.blocks = nn.ModuleDict({str(i): model.blocks[i] for i in blocks})  # type: ignore[index]
        if self.last:
            self.head = model.head
        self.loss: Callable[[Tensor, Tensor], Tensor] = model.loss  # type: ignore[assignment]
        self.whole: Callable[[Tensor], Tensor] = lambda logits: logits  # of all classes, where tp deals them
        # Of inputs or targets those of this rank, where cp deals them.
        self.dealt: Callable[[Tensor], Tensor] = lambda x: x
        # Is told the inputs of the micro-batch whose loss is next, where something else computes on them here.
        self.beside: Callable[[Tensor, Noise | None], None] = lambda inputs, noise: None

    def forward(self, x: Carry, noise: Noise | None = None) -> Carry:
        """Inputs or what the previous stage carries here → what is carried on, or logits on the last stage."""
        if self.first:
            x = self.stem(self.dealt(x), noise)  # type: ignore[arg-type,operator]
        for block in self.blocks.values():
            x = block(x, noise)
        return self.head(x) if self.last else x  # pyright: ignore[reportCallIssue]


def tensors_of(carry: Carry) -> tuple[Tensor, ...]:
    """The tensors of a carry, in order."""
    return carry if isinstance(carry, tuple) else (carry,)


def carry_of(tensors: tuple[Tensor, ...]) -> Carry:
    """The carry that has these tensors."""
    first, *more = tensors
    return tensors if more else first


def distinct(tensors: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """(each tensor once, where each of `tensors` stands among them). One that is handed on twice, as a skip connection
    is by its encoder, crosses a boundary once, and its gradients are added up in the order of one device."""
    once = {id(x): x for x in tensors}
    at = {key: i for i, key in enumerate(once)}
    return tuple(once.values()), tuple(at[id(x)] for x in tensors)


Costs = Callable[[], tuple[Sequence[float], float, float]]  # of (each block, the stem, the head)


def cut(model: nn.Module, stages: int, costs: Costs | None = None) -> list[range]:
    """The blocks of each stage, balanced by cost: by that of matrix products where no other is given."""
    if costs is not None:
        return balance(*costs(), stages)
    each = [matrix_cost(block) for block in model.blocks]  # type: ignore[union-attr]
    return balance(each, matrix_cost(model.stem), matrix_cost(model.head), stages)  # type: ignore[arg-type]


def block_number(name: str) -> int | None:
    """The block of a logical name: 3 for `blocks.3.attn`; None for stem and head."""
    part, _, rest = name.partition(".")
    return int(rest.partition(".")[0]) if part == "blocks" and rest else None


def stage_of(name: str, cuts: Sequence[range]) -> int:
    """The stage that holds the parameter with this logical name, such as `blocks.3.attn.proj.weight`."""
    number = block_number(name)
    if number is not None:
        return next(stage for stage, blocks in enumerate(cuts) if number in blocks)
    return 0 if name.partition(".")[0] == "stem" else len(cuts) - 1


def boundaries(
    model: nn.Module, cuts: Sequence[range], inputs: Tensor, precision: str = "fp32", device: str = "cpu"
) -> list[tuple[Tensor, ...]]:
    """What stage s sends to stage s + 1, as meta tensors; found by a forward pass on the meta device.

    inputs: a meta tensor of one micro-batch. precision: a plan's; device: "cpu", where the pass is to be: some tensors
    that blocks hand on are narrower in half precision, and which ones they are depends on both.
    """
    if precision in HALF and len(cuts) > 1:
        # Not of code that asks for numbers, or for shapes that follow from them, as experts' do.
        with suppress(RuntimeError):
            return _cast(model, cuts, inputs, precision, device)
    return _handed_on(model, cuts, inputs)


def _cast(
    model: nn.Module, cuts: Sequence[range], inputs: Tensor, precision: str, device: str
) -> list[tuple[Tensor, ...]]:
    """As `_handed_on`, in the dtypes that autocast has there. Of tensors on the meta device it knows nothing; these
    pretend to be on `device`. Raises RuntimeError where the pass needs numbers."""
    with FakeTensorMode():
        known = {f"model.{name}": x for name, x in (*model.named_parameters(), *model.named_buffers())}
        fakes = {name: torch.empty(x.shape, dtype=x.dtype, device=device) for name, x in known.items()}
        fake = torch.empty(inputs.shape, dtype=inputs.dtype, device=device)
        with computing(precision, torch.device(device)):
            carries = functional_call(_HandedOn(model, cuts), fakes, (fake,))
    return [tuple(torch.empty(x.shape, dtype=x.dtype, device="meta") for x in carry) for carry in carries]


class _HandedOn(nn.Module):
    """A forward pass that returns what stages hand on, as `functional_call` takes it."""

    def __init__(self, model: nn.Module, cuts: Sequence[range]) -> None:
        super().__init__()
        self.model, self.cuts = model, cuts

    def forward(self, inputs: Tensor) -> list[tuple[Tensor, ...]]:
        return _handed_on(self.model, self.cuts, inputs)


@torch.no_grad()
def _handed_on(model: nn.Module, cuts: Sequence[range], inputs: Tensor) -> list[tuple[Tensor, ...]]:
    carries = []
    x: Carry = model.stem(inputs, None)  # type: ignore[operator]
    for blocks in cuts[:-1]:
        for i in blocks:
            x = model.blocks[i](x, None)  # type: ignore[index,operator]
        carries.append(tensors_of(x))
    return carries
