"""One call of an operation of torch, as a rule sees it that says what it makes of traces (`trace_rules`)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from unisono.library.traces import SampleTrace, Shape

Found = SampleTrace | None | Sequence[SampleTrace | None]


@dataclass(frozen=True, slots=True)
class TorchCall:
    """name: of the operation, such as `mul`, without the underscore of those in place. given: arguments by name. of:
    the trace of a tensor. outs: what it returned. weighed: whether the script said what its loss counts."""

    name: str
    given: dict[str, Any]
    of: Callable[[Any], SampleTrace | None]
    outs: list[Tensor]
    weighed: bool = False

    @property
    def out(self) -> Shape:
        return self.outs[0].shape

    def tensors(self, *names: str) -> list[tuple[SampleTrace, int]]:
        """Traces of tensors among the arguments, or of those with these names, with their numbers of dims."""
        values = [self.given.get(name) for name in names] if names else list(self.given.values())
        flat = [x for value in values for x in (value if isinstance(value, (list, tuple)) else [value])]
        return [(trace, x.dim()) for x in flat if isinstance(x, Tensor) and (trace := self.of(x)) is not None]


def listed(dims: Any, count: int) -> list[int]:
    """Dims as an argument gives them, counted from the front; all if it gives none."""
    if dims is None or (isinstance(dims, (list, tuple)) and not dims):
        return list(range(count))
    return [d % max(count, 1) for d in (dims if isinstance(dims, (list, tuple)) else [dims])]
