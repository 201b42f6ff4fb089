"""A user's plain module as a chain of units of its graph: what the rest of the house knows of it.

How a graph is traced and cut lies in the sister package (`models/cutting.py` there).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from unisono.models.chain import Chain
from unisono.models.noise import Noise
from unisono.models.weights import Shape, Weights
from unisono.spec.frames import is_foreign
from unisono.spec.layout import Anatomy


def unfolded(held: Tensor, dim: int, outer: int, width: int) -> Tensor:
    """A weight whose units lie one after the other, each with its places of all `outer` pieces, as the user has it:
    piece after piece."""
    return held.unflatten(dim, (-1, outer, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)


def folded(tensor: Tensor, dim: int, outer: int, width: int) -> Tensor:
    """The other way round: what the user has → what is held."""
    return tensor.unflatten(dim, (outer, -1, width)).transpose(dim, dim + 1).flatten(dim, dim + 2)


class FoldedWeights(Weights):
    """Weights as the user's module names and orders them, given in the order in which units hold them. folds: by names
    there, (dim, pieces, width of a unit)."""

    def __init__(self, weights: Weights, folds: Mapping[str, tuple[int, ...]]) -> None:
        self.where, self.shapes = weights.where, weights.shapes
        self._weights, self._folds = weights, folds

    def box(self, name: str, start: Shape, shape: Shape) -> Tensor:
        if name not in self._folds:
            return self._weights.box(name, start, shape)
        dim, outer, width = self._folds[name]
        full = self.shapes[name][dim]
        wide = self._weights.box(
            name, (*start[:dim], 0, *start[dim + 1 :]), (*shape[:dim], full, *shape[dim + 1 :])
        )
        places = folded(torch.arange(full), 0, outer, width)
        return wide.index_select(dim, places[start[dim] : start[dim] + shape[dim]])


class GraphUnit(GraphModule):
    """A stretch of a graph that runs: `unit(carry, noise)`. met: multiplications of a sample. additions: on its longest
    way. held: the user's values of buffers, by their names here. written: names of those that a step changes."""

    met: float
    additions: int
    held: dict[str, Tensor]
    written: tuple[str, ...]

    def users_line(self, written: str) -> str:
        """Which line of the user's this line of `forward`, as `torch.fx` wrote it, stands for: `file:line in function`,
        "" if that is not known."""
        name = written.partition(" = ")[0].strip()
        return next((line_of(node) for node in self.graph.nodes if node.name == name), "")

    def refill(self) -> None:
        """Give the buffers their values, once they have memory."""
        for name, value in self.held.items():
            module, _, leaf = name.rpartition(".")
            self.get_submodule(module).get_buffer(leaf).copy_(value)


def line_of(node: Node) -> str:
    """The user's line that made a node: `file:line in forward`."""
    place = ""
    lines = (node.meta.get("stack_trace") or "").splitlines()
    for line in lines:
        words_ = line.strip().split('"')
        if line.strip().startswith("File") and len(words_) > 2 and not is_foreign(words_[1]):
            number, _, function = words_[2].removeprefix(", line ").partition(", in ")
            place = f"{words_[1]}:{number} in {function}"
    return place


class Through(nn.Module):
    """Hands on what it is given: the stem and the head of a chain whose blocks are everything."""

    def forward(self, x: Any, noise: Noise | None = None) -> Any:
        return x


class OwnName(NamedTuple):
    """Where a tensor of a unit comes from. name: in the user's module. folded: of one whose rows or columns are held
    unit by unit, (dim, pieces, width of a unit) as `unit.unfolded` takes them; () for one held as it is."""

    name: str
    folded: tuple[int, ...] = ()


class InferredChain(Chain):
    """A plain module, cut along its graph. cut_names: names here, of parameters and of buffers that a step changes →
    what they are in the user's module. beside: names of its state that are none of these, such as a mask or a weight
    that nothing uses. says: what was inferred, in lines. scores: shape of what it returns for a sample, or of each."""

    def __init__(
        self,
        units: Sequence[GraphUnit],
        anatomy: Anatomy,
        loss: Callable[[Any, Tensor], Tensor],
        cut_names: Mapping[str, OwnName],
        beside: Sequence[str],
        says: Sequence[str],
        scores: Sequence[tuple[int, ...]] | tuple[int, ...],
    ) -> None:
        super().__init__(Through(), nn.ModuleList(units), Through(), anatomy)
        self.loss, self.cut_names, self.beside = loss, cut_names, tuple(beside)
        self.says, self.scores = tuple(says), scores

    def emptied(self) -> Mapping[str, Tensor]:
        """The initial values, by name; the chain keeps their shapes, on the meta device."""
        values = {name: p.detach() for name, p in self.named_parameters(remove_duplicate=False)}
        self.to("meta")
        return values

    def forward(self, inputs: Tensor, noise: Noise | None = None) -> Any:
        x: Any = inputs
        for block in self.blocks:
            x = block(x, noise)
        return x
