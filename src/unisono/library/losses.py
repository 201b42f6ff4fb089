"""Is this loss a mean over the samples at hand? Read from autograd's graph, once, before the first update.

Ranks have parts of a batch, and the mean of their losses is that of the whole batch only if each is a mean over its
samples. Between the loss and the model's outputs the graph says so: first come linear nodes (sums of terms, factors),
then a reduction over samples, whose kind and divisor it keeps, then nodes that treat each sample alone.

What carries no gradient is seen by `following`. A divisor that happens to be a multiple of the samples is not seen;
`unisono prove` sees it.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LINEAR = frozenset(
    "Add Sub Neg Mul Div View UnsafeView ReshapeAlias Reshape Squeeze Unsqueeze Expand Select Slice Stack Cat ToCopy "
    "Clone Alias Unbind Split Permute T Transpose AsStrided Mean Sum Nansum MaskedFill Where Index Dot".split()
)
BETWEEN_ALL = frozenset("Mm Addmm Mv Addmv Dot Cdist Pdist EuclideanDist Roll Flip Var Std".split())
OVER_A_DIM = frozenset(
    "LogSoftmax Softmax Logsumexp Sort Topk Max Min Cumsum LinalgVectorNorm Norm Mean Sum".split()
)
GATHERED = "_Gather"  # job.gather: behind it are the samples of the global batch
SUMMED = 2  # autograd's number for reduction="sum"

Node = Any


def kind_of(node: Node) -> str:
    """`MeanBackward1` is Mean."""
    return node.name().rpartition("Backward")[0].rpartition("::")[2]


@dataclass(frozen=True, slots=True)
class Reduction:
    """summed: it adds its terms up and does not divide. counted: what a mean divides by. leaves_vector: its result has
    dims."""

    summed: bool
    terms: int
    counted: float
    leaves_vector: bool


class Reading:
    """One walk through a graph. outputs: nodes at which the model's outputs were made. samples: at hand. weighed:
    whether the script has said what the loss counts.

    terms: numbers a sample in each mean that was met. unread: a custom autograd function between the loss and the
    samples, "" for none."""

    def __init__(self, outputs: Collection[Node], samples: int, ranks: int, weighed: bool) -> None:
        self.terms: list[float] = []
        self.unread = ""
        self._outputs, self._samples, self._ranks, self._weighed = set(outputs), samples, ranks, weighed
        self._reaches: dict[Node, bool] = {}
        self._told: set[Node] = set()

    def complaint(self, root: Node) -> str:
        """Why the loss that was made at `root` is no mean over samples, or ""."""
        return self.above(root, (), False) if self._outputs and self.reaches(root) else ""

    def reaches(self, node: Node) -> bool:
        """Whether the model's outputs lie behind this node. Iterative: a graph may be deep."""
        todo = [node]
        while todo:
            at = todo[-1]
            if at in self._reaches:
                todo.pop()
            elif at in self._outputs or kind_of(at) == GATHERED:
                self._reaches[at] = at in self._outputs
            else:
                behind = [n for n, _ in at.next_functions if n is not None]
                left = [n for n in behind if n not in self._reaches]
                if left:
                    todo += left
                else:
                    self._reaches[at] = any(self._reaches[n] for n in behind)
        return self._reaches[node]

    def _behind(self, node: Node) -> list[Node]:
        return [n for n, _ in node.next_functions if n is not None and self.reaches(n)]

    def above(self, node: Node, divisors: tuple[float, ...], vector: bool) -> str:
        """Complaint about what lies behind a node between the loss and a reduction over samples. divisors: of the way
        here. vector: whether a vector of numbers was multiplied by on it."""
        if node in self._outputs or node in self._told:
            return ""  # a model that makes its own loss, of which no output with samples is known
        self._told.add(node)
        kind, behind = kind_of(node), self._behind(node)
        reduced = self._reduction(node, kind)
        if reduced is not None:
            if vector and reduced.leaves_vector:
                return "means over samples, multiplied by numbers of the batch"
            return self._reduced(kind, reduced, divisors) or self._below(behind)
        if kind not in LINEAR:
            own = isinstance(node, torch.autograd.function.BackwardCFunction) or not kind
            self.unread = self.unread or (_custom(node) if own else "")
            return "" if own else f"{kind} of a mean over samples"
        if kind in ("Mul", "Div"):
            if len(behind) > 1:
                return f"{kind} of two means over samples"
            constant = _constant(node)
            vector = vector or _is_vector(node)
            if constant:
                divisors = (*divisors, constant if kind == "Div" else 1 / constant)
        return next((found for n in behind if (found := self.above(n, divisors, vector))), "")

    def _reduction(self, node: Node, kind: str) -> "Reduction | None":
        """What a node does if it goes over samples."""
        own = getattr(node, "_saved_reduction", None)
        if own in (1, SUMMED):
            target = getattr(node, "_saved_target", None)
            terms = self._samples if target is None else math.prod(target.shape)
            total = getattr(node, "_saved_total_weight", None)
            plain = target is None or (total is not None and self._same_for_all(node, target))
            counted = terms if plain or total is None else float(total)
            return Reduction(own == SUMMED, terms, counted, False)
        if kind not in ("Mean", "Sum") or own is not None:
            return None
        sizes, dims = _sizes(node), getattr(node, "_saved_dim", None)
        over = not dims or 0 in [_signed(d) % max(len(sizes), 1) for d in _listed(dims)]
        stacked = self._stacked(node)
        rows = bool(sizes) and sizes[0] % self._samples == 0 and (self._samples > 1 or sizes[0] == 1)
        if not (over and rows) or stacked:
            return None
        terms = math.prod(sizes)
        return Reduction(kind == "Sum", terms, terms, bool(dims) and len(sizes) > len(_listed(dims)))

    def _same_for_all(self, node: Node, target: Tensor) -> bool:
        """Whether each sample has as many targets that count, and each counts the same."""
        if target.numel() % self._samples:
            return False
        counts = (target.reshape(self._samples, -1) != _signed(node._saved_ignore_index)).sum(1).tolist()
        return len(set(counts)) == 1 and sum(counts) == float(node._saved_total_weight)

    def _stacked(self, node: Node) -> bool:
        """Whether it adds up a stack of numbers, each perhaps with a factor."""
        while len(behind := self._behind(node)) == 1 and kind_of(behind[0]) in (
            "Mul",
            "Div",
            "Neg",
            "Stack",
            "Cat",
        ):
            node = behind[0]
            if kind_of(node) in ("Stack", "Cat"):
                return True
        return kind_of(node) == "Stack"

    def _reduced(self, kind: str, reduced: "Reduction", divisors: tuple[float, ...]) -> str:
        here = self._samples
        if self._weighed:
            return ""
        if not reduced.summed:
            self.terms.append(reduced.terms / here)
            if reduced.counted == reduced.terms:
                return ""
            return f"{kind}: {reduced.counted:g} of {reduced.terms} targets count, the others are ignored or weighted"
        for divisor in divisors:
            number = round(divisor)
            if abs(divisor - number) < 1e-9 and number >= here and number % here == 0:
                if self._ranks > 1 and number == here * self._ranks:
                    return f"a sum divided by {number}, the samples of the global batch"
                return ""
        large = max(divisors, default=0)
        return (
            f"a sum divided by {large:g}, where {here} samples are here"
            if large > 1
            else "a sum over samples"
        )

    def _below(self, nodes: list[Node]) -> str:
        """Complaint about nodes between a reduction and the outputs that let samples meet."""
        todo, seen = list(nodes), set(nodes)
        while todo:
            node = todo.pop()
            if node in self._outputs:
                continue
            kind, behind = kind_of(node), self._behind(node)
            if kind in BETWEEN_ALL and (len(behind) > 1 or kind in ("Roll", "Flip", "Var", "Std", "Pdist")):
                return f"{kind} lets samples meet in it"
            if kind in OVER_A_DIM and self._over_samples(node):
                return f"{kind} over the samples, in it"
            for n in behind:
                if n not in seen:
                    seen.add(n)
                    todo.append(n)
        return ""

    def _over_samples(self, node: Node) -> bool:
        dims = getattr(node, "_saved_dim", None)
        if dims is None:
            return kind_of(node) in ("Mean", "Sum", "LinalgVectorNorm", "Norm") and len(_sizes(node)) > 0
        sizes = _sizes(node)
        return (
            bool(sizes)
            and sizes[0] == self._samples > 1
            and 0 in [_signed(d) % len(sizes) for d in _listed(dims)]
        )


def way_of(root: Node, most: int = 4096) -> tuple[str, dict[Node, str]]:
    """Of a graph: its operations, in one order; and the names of autograd functions of the script's own."""
    todo, seen, kinds, own = [root], {root}, [], {}
    while todo and len(kinds) < most:
        node = todo.pop()
        kinds.append(kind_of(node))
        if isinstance(node, torch.autograd.function.BackwardCFunction) and (name := _custom(node)):
            own[node] = name
        for behind, _ in node.next_functions:
            if behind is not None and behind not in seen:
                seen.add(behind)
                todo.append(behind)
    return " ".join(kinds), own


def _custom(node: Node) -> str:
    """The name of a function of the user's own."""
    made = getattr(node, "_forward_cls", None)
    if made is None or made.__module__.startswith(("torch.", "unisono.", "unisono_contrib.")):
        return ""
    return made.__name__


def _signed(dim: int) -> int:
    return dim - (1 << 64) if dim >= 1 << 63 else dim


def _listed(dims: Any) -> list[int]:
    return list(dims) if isinstance(dims, (tuple, list)) else [dims]


def _sizes(node: Node) -> tuple[int, ...]:
    """The shape of what a node was given."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is not None:
        return tuple(sizes)
    known = getattr(node, "_saved_result", None)
    known = getattr(node, "_saved_self", None) if known is None else known
    return tuple(known.shape) if isinstance(known, Tensor) else ()


def _other_side(node: Node) -> Any:
    """What a product or quotient keeps of the side that has no gradient."""
    other = getattr(node, "_saved_other", None)
    return getattr(node, "_saved_self", None) if other is None else other


def _constant(node: Node) -> float | None:
    """The number by which a product or quotient takes its side with a gradient, if it is one number."""
    other = _other_side(node)
    if isinstance(other, (int, float)):
        return float(other)
    return float(other) if isinstance(other, Tensor) and other.numel() == 1 else None


def _is_vector(node: Node) -> bool:
    other = _other_side(node)
    return isinstance(other, Tensor) and other.numel() > 1
