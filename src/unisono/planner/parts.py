"""What a price is made of: passes, rows, traffic, and the step that they add up to."""

from dataclasses import dataclass, field

from unisono.planner.block import Pass


@dataclass(frozen=True, slots=True)
class Traffic:
    """One axis: bytes that a rank sends in a step, seconds that they take, seconds of them that nothing hides."""

    bytes: float = 0.0
    seconds: float = 0.0
    exposed: float = 0.0


@dataclass(frozen=True, slots=True)
class Price:
    """Seconds of a step, taken apart. The parts add up to `step`.

    arithmetic: matrix products. kernels: what else the device computes. host: waiting for kernels to be started.
    idle: the timetable's bubble. uneven: what the busiest row computes beyond the mean. comm: by axis. optimizer,
    fixed: per step. Not a part: busiest, seconds in which the busiest row computes; again, blocks of each row that
    recompute=auto computes again.
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
    again: float = 0.0

    @property
    def exposed(self) -> float:
        return sum(traffic.exposed for traffic in self.comm.values())


@dataclass(frozen=True, slots=True)
class Kernels:
    """Passes over one block, `again` the backward one of a block that recompute=auto computes again, and seconds of
    stem and head, (forward, backward), for one micro-batch: what needs the shapes of kernels, the dear part of a price.
    """

    ahead: Pass
    back: Pass
    again: Pass
    stem: tuple[float, float]
    head: tuple[float, float]

    @property
    def totals(self) -> "Totals":
        return Totals(self.ahead.total, self.back.total, self.again.total, self.stem, self.head)


@dataclass(frozen=True, slots=True)
class Totals:
    """What the clock shows of them; numbers, or arrays."""

    ahead: float
    back: float
    again: float
    stem: tuple[float, float]
    head: tuple[float, float]


@dataclass(frozen=True, slots=True)
class Blocks:
    """Seconds of one micro-batch in one block, with what shows of weights and activations on their way; stem and head;
    one message between two rows. The last three: what shows on shard in forward and backward, also of a block that is
    computed again, and on the host link."""

    forward: float
    backward: float
    again: float
    stem: tuple[float, float]
    head: tuple[float, float]
    send: float
    shard: float = 0.0
    shard_again: float = 0.0
    host: float = 0.0


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
class Detail:
    """Rows, and what they come from. share: of all blocks, those that recompute=auto computes again."""

    rows: Rows
    kernels: Kernels
    blocks: Blocks
    share: float


@dataclass(frozen=True, slots=True)
class Line:
    """Seconds of the pipeline as it is combined from its rows; numbers, or arrays.

    slowest: the dearest row's micro-batch. cover: what can hide gradients. messages: all that a row waits for.
    """

    slowest: float
    mean: float
    cover: float
    idle: float
    messages: float
