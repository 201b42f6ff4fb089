"""What a technique sends, keeps and computes in one step, as numbers that depend on model and plan alone."""

from collections.abc import Sequence
from dataclasses import dataclass

Durations = Sequence[Sequence[float]]
"""[replicas][steps]: how long each step of each replica takes by itself, in any unit."""


@dataclass(frozen=True, slots=True)
class Call:
    """One kind of collective or message of a step. nbytes: payload bytes that one rank sends in one of them. link:
    those that cross the busiest link one way, where these are others; None: as many as a rank sends."""

    axis: str
    op: str
    nbytes: int
    times: float = 1
    link: int | None = None


@dataclass(frozen=True, slots=True)
class Work:
    """Of one rank in one step. calls: what it sends. kept: bytes that stay from step to step beside weights, gradients
    and optimiser state. flops, moved: operations and bytes of memory that it costs beside the model's own."""

    calls: tuple[Call, ...] = ()
    kept: int = 0
    flops: int = 0
    moved: int = 0

    @property
    def sent(self) -> float:
        """Bytes of all calls."""
        return sum(call.nbytes * call.times for call in self.calls)
