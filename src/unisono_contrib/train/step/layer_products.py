"""What goes into linear layers and gradients of what comes out, multiplied with themselves and added up over a step.

A layer y = x Wᵀ with rows x [R, in] and gradients of the mean loss g [R, out] has two means, as in K-FAC: of x xᵀ over
rows, [in, in], and of g gᵀ, [out, out], with g as large as the gradient of one target's loss: N g, where the loss is a
mean over N targets, and the mean over these (Eschenhagen et al., "Kronecker-factored approximate curvature for modern
neural network architectures", 2023, `expand`). So neither micro-batches nor replicas nor a scaled loss change them.

Each rank adds up rows that no other rank has. Where `tp` cuts a layer, one of the two is whole on every rank, and each
takes its share of rows; of the other, columns are exchanged for rows. Once an update the sums go to the matrix' owner.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from unisono.comm.group import Group
from unisono.parallel.experts import exchange_rows
from unisono.parallel.params import Slot
from unisono.parallel.parts import ends_of
from unisono.parallel.play import StagePlayer
from unisono.parallel.player import Leaf
from unisono.parallel.tensor import ColumnLinear, RowLinear
from unisono.programs.pipeline import Action
from unisono.train.step.run import Run
from unisono_contrib.train.step.owners import Owners

SIDES = ("left", "right")  # of a weight [out, in]: its rows, as outputs; its columns, as inputs
Edges = Callable[
    [Sequence[int]], Mapping[str, int]
]  # shape of a weight → the length of each side that has a mean


class PassedBy(torch.autograd.Function):
    """The output of a layer as it is, whose backward shows its gradient beside the layer's input."""

    @staticmethod
    def forward(ctx, y, x, show):  # type: ignore[override]
        ctx.save_for_backward(
            x
        )  # as the layer itself does, so that it may be computed again, or be offloaded
        ctx.show = show
        return y.view_as(y)

    @staticmethod
    def backward(ctx, grad):  # type: ignore[override]
        show, ctx.show = ctx.show, None  # a backward in halves may pass twice
        if show is not None:
            show(*ctx.saved_tensors, grad)
        return grad, None, None


@dataclass(frozen=True, slots=True)
class LayerRows:
    """Which rows of a layer this rank multiplies, and how it comes by all of their columns. cut: the side of the weight
    that `group` cuts; "": none. ends: where each rank's columns begin there, and their number."""

    group: Group
    cut: str = ""
    ends: tuple[int, ...] = ()

    def of(self, side: str, rows: Tensor) -> Tensor:
        """[R, columns] → [this rank's rows, all columns]. Every rank of the group calls it, or it hangs."""
        size, me = self.group.size, self.group.index
        places = ends_of(len(rows), size)
        mine = slice(places[me], places[me + 1])
        if side != self.cut:
            return rows[mine]
        count = mine.stop - mine.start
        widths = [b - a for a, b in pairwise(self.ends)]
        to = [(b - a) * rows.shape[1] for a, b in pairwise(places)]
        flat = exchange_rows(rows.reshape(-1), to, [count * width for width in widths], self.group)
        parts = zip(flat.split([count * width for width in widths]), widths, strict=True)
        return torch.cat([part.view(count, width) for part, width in parts], 1)


@dataclass(slots=True)
class LayerSums:
    """Of one layer and step on this rank: sums of products by side, and the number of rows. share: None where all rows
    that pass are this rank's alone."""

    parameter: nn.Parameter
    sizes: Mapping[str, int]
    share: LayerRows | None
    sums: dict[str, Tensor] = field(default_factory=dict)
    rows: int = 0

    @torch.no_grad()
    def add(self, x: Tensor, grad: Tensor) -> None:
        """x [..., in], grad [..., out]: as large as those of one target's loss."""
        passed, mine = {"left": grad, "right": x}, 0
        for side in self.sizes:
            rows = passed[side].flatten(0, -2).to(self.parameter.dtype)
            rows = rows if self.share is None else self.share.of(side, rows)
            product, mine = rows.mT @ rows, len(rows)
            self.sums[side] = self.sums[side].add_(product) if side in self.sums else product
        self.rows += mine

    def packed(self) -> Tensor:
        """The number of rows and the upper triangles of all sums, which are symmetric, in one vector."""
        parts = [self.parameter.new_tensor([self.rows])]
        for side, size in self.sizes.items():
            total = self.sums.get(side)
            total = self.parameter.new_zeros(size, size) if total is None else total
            parts.append(total[*torch.triu_indices(size, size, device=total.device)])
        return torch.cat(parts)

    @property
    def length(self) -> int:
        """Of what is packed."""
        return 1 + sum(size * (size + 1) // 2 for size in self.sizes.values())

    def unpacked(self, flat: Tensor, targets: float) -> dict[str, Tensor]:
        """Means by side, of sums over all ranks; none where no row has passed anywhere."""
        rows, means = float(flat[0]), dict[str, Tensor]()
        triangles = flat[1:].split([size * (size + 1) // 2 for size in self.sizes.values()])
        for (side, size), triangle in zip(self.sizes.items(), triangles, strict=True):
            mean = flat.new_zeros(size, size)
            at = torch.triu_indices(size, size, device=flat.device)
            mean[at[0], at[1]] = triangle
            mean[at[1], at[0]] = triangle
            means[side] = mean / (targets if side == "left" else max(rows, 1.0))
        return means if rows else {}


class LayerProducts:
    """The products of all layers of this rank. targets: over which the loss of the step is a mean; 0 where this step's
    are not taken."""

    def __init__(self, layers: Mapping[nn.Parameter, LayerSums]) -> None:
        self.layers, self.targets = layers, 0.0

    def begin(self, targets: float) -> None:
        """A step begins: what is left of one that made no update is forgotten."""
        self.targets = targets
        self._forget()

    def _forget(self) -> None:
        for layer in self.layers.values():
            layer.sums, layer.rows = {}, 0

    def gather(
        self, params: Sequence[nn.Parameter], owners: Owners | None
    ) -> dict[nn.Parameter, dict[str, Tensor]]:
        """Means by side of those layers that are owned here. Every member of the owners' group calls it in the same
        step, with the same parameters, or it hangs."""
        if not self.targets or not params:
            return {}
        packed = {p: self.layers[p].packed() for p in params}
        self._forget()
        if owners is not None:
            packed = _added_up(packed, owners)
        return {p: self.layers[p].unpacked(flat, self.targets) for p, flat in packed.items()}


def _added_up(packed: Mapping[nn.Parameter, Tensor], owners: Owners) -> dict[nn.Parameter, Tensor]:
    """The sums over the group, each with its owner alone."""
    size, me = owners.group.size, owners.group.index
    of = {place: [p for p in packed if owners.matrices[p].owner == place] for place in range(size)}
    to = [sum(packed[p].numel() for p in of[place]) for place in range(size)]
    flat = torch.cat([packed[p] for place in range(size) for p in of[place]])
    parts = exchange_rows(flat, to, [to[me]] * size, owners.group).view(size, to[me])
    total = parts.sum(0)
    lengths = [packed[p].numel() for p in of[me]]
    return dict(zip(of[me], total.split(lengths), strict=True)) if lengths else {}


class ListeningPlayer(StagePlayer):
    """Plays as the one that it is made from, and listens to layers in steps that take their products."""

    def __init__(self, inner: StagePlayer, heard: "Callable[[float], Any]", due: Callable[[], bool]) -> None:
        """heard(targets): a context in which layers are listened to. due(): whether this step's products are taken."""
        vars(self).update(vars(inner))
        self.heard, self.due = heard, due

    def play(self, row: Sequence[Action], leaves: Sequence[Leaf], weight: float, seed: int | None) -> Tensor:
        backwards = any(action.kind == "B" for action in row)
        if not backwards:
            return super().play(row, leaves, weight, seed)
        with self.heard(1.0 / (weight * leaves[0].scale) if self.due() else 0.0):
            return super().play(row, leaves, weight, seed)


def listen(run: Run, stepped: Sequence[nn.Parameter], edges: Edges, every: int) -> LayerProducts:
    """Have a live run multiply what passes its layers, in each step of which `every` divides the number. stepped: the
    weights of layers. Every rank of a stage calls it, or it hangs."""
    slots = {slot.name: slot for slot in run.local.slots if any(slot.master is p for p in stepped)}
    modules: dict[str, nn.Module] = {}
    for stage in run.local.stages.values():
        modules |= {f"{name}.weight": module for name, module in stage.named_modules()}
    layers = {}
    for name, slot in slots.items():
        layers[slot.master] = LayerSums(slot.master, edges(slot.shape), _share(modules[name], slot, run))
    products = LayerProducts(layers)
    pairs = [(modules[name], layers[slot.master]) for name, slot in slots.items()]
    factor = run.update.scaler.factor

    @contextmanager
    def heard(targets: float) -> Iterator[None]:
        products.begin(targets)
        size = targets if factor is None else targets / factor
        undo = [_tap(module, _showing(layer, size)) for module, layer in pairs] if targets else []
        try:
            yield
        finally:
            for stop in undo:
                stop()

    if not isinstance(run.player, StagePlayer):
        raise TypeError("layers are listened to by the player of the stages, before all others")
    run.player = ListeningPlayer(run.player, heard, lambda: run.step % every == 0)
    return products


def _share(module: nn.Module, slot: Slot, run: Run) -> LayerRows | None:
    tp = run.mesh.tp
    if tp.size == 1 or "tp" in slot.sum_over:
        return None  # of several ranks each sees rows of its own
    if not isinstance(module, ColumnLinear | RowLinear):
        return LayerRows(tp)
    size = module.cuts["weight"].size
    sizes = tp.all_gather(torch.tensor([size], device=slot.master.device)).tolist()
    return LayerRows(tp, SIDES[module.cuts["weight"].dim], (0, *accumulate(sizes)))


def _showing(layer: LayerSums, size: "float | Tensor") -> Callable[[Tensor, Tensor], None]:
    """What is shown a layer's input and the gradient of its output. size: by which the latter is multiplied."""
    return lambda x, grad: layer.add(x, grad.to(layer.parameter.dtype) * size)


def _tap(module: nn.Module, show: Callable[[Tensor, Tensor], None]) -> Callable[[], None]:
    """Show what passes a layer; call the result to stop. Of a layer that `tp` cuts, it is what its product reads."""
    if isinstance(module, ColumnLinear | RowLinear):
        product = module.product

        def tapped(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return _passed(product(x, weight, bias), x, show)

        module.product = tapped
        return lambda: setattr(module, "product", product)
    hook = module.register_forward_hook(
        lambda _, args, kwargs, y: _passed(y, args[0] if args else kwargs["input"], show), with_kwargs=True
    )
    return hook.remove


def _passed(y: Tensor, x: Tensor, show: Callable[[Tensor, Tensor], None]) -> Tensor:
    return cast("Tensor", PassedBy.apply(y, x.detach(), show)) if y.requires_grad else y
