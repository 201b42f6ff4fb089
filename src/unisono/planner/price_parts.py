"""The parts of a price: passes, rows, traffic, and the step that they add up to."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from unisono.plan import Plan
from unisono.planner.machines.chip import PassSeconds, Traffic
from unisono.planner.machines.order import owners
from unisono.planner.memory import RowShare


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step by part. The parts add up to `step`.

    arithmetic: matrix products. kernels: all other kernels. recompute: kernels that run a second time. host: waiting
    for the host to start kernels. idle: the timetable's bubble. uneven: work of the busiest row beyond the mean
    row's. comm: exposed communication by axis. optimizer, fixed: once a step. straggling: waiting for slow ranks.
    loading: waiting for data.

    Two more are no parts. busiest: seconds in which the busiest row computes. attention: share of `arithmetic`, where
    it is known.
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
        """The price without stragglers and without waiting for data."""
        step = self.step - self.straggling - self.loading
        return replace(self, step=step, straggling=0.0, loading=0.0)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Seconds of one micro-batch in one block, in the stem and in the head. To compute them takes the shape of every
    kernel, so they are the expensive part of a price.

    ahead, back: the passes of a block. more: the part of `back` that is computed a second time. stem, head: (forward,
    backward). products: seconds of the head's products, both ways. rims: traffic of stem and head by axis; their
    seconds include it.
    """

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
    """Wall-clock seconds of `Kernels`. Numbers, or arrays."""

    ahead: float
    back: float
    stem: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Seconds of one micro-batch in one block, in stem and head, with the exposed communication of weights and
    activations.

    send: one message between two rows. shard, rims: exposed seconds on `shard`, of a block and of the two ends.
    """

    forward: float
    backward: float
    stem: tuple[float, float]
    head: tuple[float, float]
    send: float
    shard: float = 0.0
    rims: float = 0.0


@dataclass(frozen=True, slots=True)
class Rows:
    """Seconds of one micro-batch on each row of the pipeline, forward and backward (recomputation included).

    stem, head: their part of the rows that have them. send: one message between two rows, which keeps both busy.
    more: extra seconds of each row's messages, where links between rows differ.
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
    """What the passes of a step take. `rows` are seconds of one micro-batch; all other fields are of the whole step
    and the mean row.

    handed: mean bytes of a message between rows. first: parameters whose gradients meet once a step. every: the
    subset that each micro-batch has gradients of. owned: elements that one rank updates. inside: traffic by axis.
    arithmetic, device, again: seconds of products, of all kernels, and of recomputed kernels. attention: share of
    `arithmetic`.
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
    """The blocks that are played the same way.

    plan: the plan that plays every block so. part: their share of all blocks. kernels, blocks: their seconds.
    """

    plan: Plan
    part: float
    kernels: Kernels
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Detail:
    """Seconds of rows, of stem and head, and of each kind of block that they are made of."""

    rows: Rows
    kernels: Kernels
    blocks: Blocks
    kinds: tuple[KindOfBlock, ...]

    def mean(self, value: Callable[[KindOfBlock], float]) -> float:
        """Return the mean over all blocks of a value of their kind."""
        return sum(kind.part * value(kind) for kind in self.kinds)

    def both(self, part: str) -> float:
        """Return one field of both passes over a mean block, recomputation included: `both("device")`."""
        return self.mean(lambda kind: getattr(kind.kernels.ahead, part) + getattr(kind.kernels.back, part))

    def again(self, part: str) -> float:
        """Return one field of the recomputed kernels of a mean block."""
        return self.mean(lambda kind: getattr(kind.kernels.more, part))

    def once(self, part: str) -> float:
        """Return one field of both passes over a mean block, without recomputation."""
        return self.both(part) - self.again(part)


@dataclass(frozen=True, slots=True)
class RowSeconds:
    """Seconds of one micro-batch over all rows of a pipeline. Numbers, or arrays.

    slowest: both passes of the slowest row. ahead, cover: the shortest forward pass, the shortest backward pass.
    forward, backward: sums over all rows.
    """

    slowest: float
    ahead: float
    cover: float
    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class PipelineSeconds:
    """Seconds of a pipeline. Numbers, or arrays.

    slowest: both passes of the slowest row, for one micro-batch. ahead, cover: a forward pass, which can hide
    gathered weights, and a backward pass, which can hide gradients. messages: the sum of waits for messages.
    """

    slowest: float
    mean: float
    ahead: float
    cover: float
    idle: float
    messages: float


def owned(plan: Plan, share: RowShare) -> float:
    """Return the number of elements that one rank updates."""
    return ((share.blocks + share.ends) / owners(plan)[0] + share.routed / max(1, share.ranks)) / share.copies
