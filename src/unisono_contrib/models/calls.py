"""One call of an operator, as rules see it: its operands, and the axes of their dims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx import Node

from unisono_contrib.models.axes import Dims, GraphAxes

Results = list[Dims]


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator. args: by the names of its schema. dims: of a value, None for what is no tensor.
    summed: axes over which it adds up, filled by its rule."""

    node: Node
    args: Mapping[str, Any]
    axes: GraphAxes
    dims: Callable[[Any], Dims]
    shapes: list[tuple[int, ...]]
    summed: list[int] = field(default_factory=list)

    @property
    def name(self) -> str:
        """Such as `linear`."""
        return str(getattr(self.node.target, "overloadpacket", self.node.target)).rpartition(".")[2]

    @property
    def tensors(self) -> list[Node]:
        """Operands that are tensors."""
        return [n for n in self.node.all_input_nodes if is_tensor(n)]

    def whole(self, dims: Sequence[Sequence[int]]) -> None:
        """These have to be whole."""
        self.axes.bar(dims, f"{self.name} at {place_of(self.node)}")


def is_tensor(node: Any) -> bool:
    """Whether a node's value is a tensor."""
    return isinstance(node, Node) and isinstance(node.meta.get("val"), torch.Tensor)


def place_of(node: Node) -> str:
    """The module in which a node stands, as the user names it; else its line."""
    stack = node.meta.get("nn_module_stack") or {}
    name = next(reversed([path for path, _ in stack.values()]), "") if stack else ""
    return name or str(node.name)


def arguments(node: Node) -> dict[str, Any]:
    """A call's arguments by the names of its operator's schema."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(enumerate(node.args)) | dict(node.kwargs)  # type: ignore[arg-type]
    named = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    return named | {a.name: v for a, v in zip(schema.arguments, node.args, strict=False)} | dict(node.kwargs)


def at_of(dim: int, dims: Sequence[Any]) -> int:
    return dim % len(dims)
