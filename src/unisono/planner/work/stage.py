"""What a rank does and holds, stage by stage: counted from model and plan, before any machine gives it seconds."""

from dataclasses import dataclass, fields
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class PassCounts:
    """One pass of one rank: FLOPs of matrix products and of attention; bytes of elementwise kernels, of logits, and of
    weights that are read; elements of dropout masks; operations that are started; FLOPs of convolutions."""

    product: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    logits: float = 0.0
    weights: float = 0.0
    noise: float = 0.0
    launch: float = 0.0
    convolution: float = 0.0

    def __add__(self, other: "PassCounts") -> "PassCounts":
        return PassCounts(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(PassCounts)))


class PassCall(NamedTuple):
    """A collective inside a pass: its axis, its operation, bytes of all ranks together, how often a pass makes it."""

    axis: str
    op: str
    nbytes: float
    times: float


@dataclass(frozen=True, slots=True)
class StageWork:
    """One stage and one micro-batch on one rank.

    ahead, back: what the forward and the backward pass compute.
    again: what the backward pass computes a second time, as the forward pass does.
    calls: collectives of the forward and of the backward pass.
    handed: bytes of its output, which go to the next stage.
    """

    ahead: PassCounts
    back: PassCounts
    again: PassCounts
    calls: tuple[tuple[PassCall, ...], tuple[PassCall, ...]]
    handed: float

    def pass_of(self, backward: bool) -> tuple[PassCounts, tuple[PassCall, ...]]:
        """(what the pass computes, without what it computes a second time; its collectives)."""
        return (self.back if backward else self.ahead), self.calls[backward]


@dataclass(frozen=True, slots=True)
class RowWork:
    """What a rank of one pipeline row holds. Bytes, of one micro-batch where they are of activations.

    elements, tensors: its parameters, before `shard` deals them.
    kept: activations from the forward to the backward pass.
    working: more of them while a backward pass begins.
    owed: what every further micro-batch keeps for the head, where the timetable lets it wait.
    unit: the weights that are gathered at once. rim: those of stem and head, which stay gathered.
    widest: its largest gradient.
    piece: what tp gathers at once.
    """

    elements: float
    tensors: float
    kept: float
    working: float
    owed: float
    unit: float
    rim: float
    widest: float
    piece: float = 0.0
