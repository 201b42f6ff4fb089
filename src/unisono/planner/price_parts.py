"""What a price is made of: passes, rows, traffic, and the step that they add up to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from unisono.plan import Plan
from unisono.planner.machines.chip import PassSeconds, Traffic
from unisono.planner.machines.order import owners
from unisono.planner.memory import RowShare


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step, taken apart. The parts add up to `step`.

    arithmetic: matrix products. kernels: what else the device computes. recompute: what it computes a second time.
    host: waiting for kernels to be started. idle: the timetable's bubble. uneven: what the busiest row computes beyond
    the mean. comm: by axis. optimizer, fixed: per step. straggling: waiting for ranks that are slow today;
    loading: for data. Not a part: busiest, seconds in which the busiest row computes; attention, of arithmetic, where
    that is known.
    """

    step: float
    arithmetic: float
    kernels: float
    host: float
    idle: float
    uneven: float
    busiest: float
    optimizer: float
    fixed: float
    comm: dict[str, Traffic] = field(default_factory=dict)
    recompute: float = 0.0
    attention: float = 0.0
    straggling: float = 0.0
    loading: float = 0.0

    @property
    def exposed(self) -> float:
        return sum(traffic.exposed for traffic in self.comm.values())

    @property
    def bare(self) -> "Price":
        """Of a good day: without stragglers, and with all data there in time."""
        step = self.step - self.straggling - self.loading
        return replace(self, step=step, straggling=0.0, loading=0.0)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Passes over one block, `more` what the backward one computes a second time, and seconds of stem and head,
    (forward, backward), for one micro-batch: what needs the shapes of kernels, the dear part of a price. products: of
    the head's seconds, both ways. rims: what both send, by axis, where that counts: it is in their seconds."""

    ahead: PassSeconds
    back: PassSeconds
    more: PassSeconds
    stem: tuple[float, float]
    head: tuple[float, float]
    products: float = 0.0
    rims: Mapping[str, Traffic] = field(default_factory=dict)

    @property
    def totals(self) -> "Totals":
        return Totals(self.ahead.total, self.back.total, self.stem, self.head)


@dataclass(frozen=True, slots=True)
class Totals:
    """What the clock shows of them; numbers, or arrays."""

    ahead: float
    back: float
    stem: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Seconds of one micro-batch in one block, with what shows of weights and activations on their way; stem and head,
    with theirs; one message between two rows. shard, rims: what shows on shard of a block, and of stem and head."""

    forward: float
    backward: float
    stem: tuple[float, float]
    head: tuple[float, float]
    send: float
    shard: float = 0.0
    rims: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Seconds of one micro-batch on each row of the pipeline: forward, backward (with what it computes again). stem,
    head: what is of them in the rows that have them. send: of one message between two rows, which keeps both of them.
    more: what a message of each row takes beyond that, where links between rows differ.
    """

    forward: tuple[float, ...]
    backward: tuple[float, ...]
    stem: tuple[float, float] = (0.0, 0.0)
    head: tuple[float, float] = (0.0, 0.0)
    send: float = 0.0
    more: tuple[float, ...] = ()

    def message(self, row: int) -> float:
        """Seconds of one message of a row."""
        return self.send + (self.more[row] if self.more else 0.0)


@dataclass(frozen=True, slots=True)
class Passes:
    """What the passes of a step take on a row: rows, of one micro-batch; the others of the whole step and the mean row.

    handed: bytes of a message between rows, in the mean. first: what has gradients that meet in a step; every: of
    these, what each micro-batch has some of. owned: elements that one rank updates. inside: traffic by axis.
    arithmetic, device, again: seconds of products, of all kernels, of those that are computed a second time; attention,
    of arithmetic.
    """

    rows: Rows
    handed: float
    first: RowShare
    every: RowShare
    owned: float
    inside: dict[str, Traffic]
    arithmetic: float
    device: float
    again: float
    attention: float = 0.0


@dataclass(frozen=True, slots=True)
class KindOfBlock:
    """Of blocks that are played alike: the plan that plays all so, their part of all blocks, kernels and seconds."""

    plan: Plan
    part: float
    kernels: Kernels
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Detail:
    """Rows, the kernels and seconds of stem and head, and the kinds of blocks that they come from."""

    rows: Rows
    kernels: Kernels
    blocks: Blocks
    kinds: tuple[KindOfBlock, ...]

    def mean(self, value: Callable[[KindOfBlock], float]) -> float:
        """Of a block."""
        return sum(kind.part * value(kind) for kind in self.kinds)

    def both(self, part: str) -> float:
        """A part of both passes over a block, with what the backward one computes a second time."""
        return self.mean(lambda kind: getattr(kind.kernels.ahead, part) + getattr(kind.kernels.back, part))

    def again(self, part: str) -> float:
        """Of what it computes a second time."""
        return self.mean(lambda kind: getattr(kind.kernels.more, part))

    def once(self, part: str) -> float:
        """The same without that."""
        return self.both(part) - self.again(part)


@dataclass(frozen=True, slots=True)
class RowSeconds:
    """Seconds of one micro-batch on the rows of a pipeline; numbers, or arrays. slowest: both passes of the dearest
    row. ahead, cover: the shortest forward pass, and backward pass. forward, backward: of all rows together."""

    slowest: float
    ahead: float
    cover: float
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class PipelineSeconds:
    """Seconds of the pipeline as it is combined from its rows; numbers, or arrays.

    slowest: the dearest row's micro-batch. ahead, cover: a forward pass, which can hide weights, and a backward pass,
    which can hide gradients. messages: all that a row waits for.
    """

    slowest: float
    mean: float
    ahead: float
    cover: float
    idle: float
    messages: float


def owned(plan: Plan, share: RowShare) -> float:
    """Elements that one rank updates."""
    return ((share.blocks + share.ends) / owners(plan)[0] + share.routed / max(1, share.ranks)) / share.copies
