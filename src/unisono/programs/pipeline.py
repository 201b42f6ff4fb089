"""Pipeline timetables: who computes which stage of which micro-batch, in which order; as plain data.

A timetable is played by processes, priced by `play_costs`, checked by `check` and drawn by `draw`: one value, several
interpreters, so what is simulated is what runs. Stage s computes from what stage s-1 made; `placement[s]` is the row
(the rank on the `pp` axis) that owns stage s, so a row may own several stages (interleaved, V-shaped).
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from operator import itemgetter
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "W", "U", "SEND_F", "RECV_F", "SEND_B", "RECV_B"]

COMPUTE: tuple[Kind, ...] = ("F", "B", "W")
RECEIVES: tuple[Kind, ...] = ("RECV_F", "RECV_B")
SENDS: tuple[Kind, ...] = ("SEND_F", "SEND_B")
MESSAGES = RECEIVES + SENDS


@dataclass(frozen=True, slots=True)
class Action:
    """One thing a row does.

    F: forward of (stage, micro). B: backward; where the timetable also has W, only towards the input. W: backward
    towards the weights. SEND_F, RECV_F: the stage's output to stage+1, its input from stage-1. SEND_B, RECV_B: the
    gradient of its input to stage-1, of its output from stage+1. U: update of a stage's weights, where it stands inside
    a row; `micro` is the last one whose gradient it has. `peer` is the row at the other end of a message,
    -1 for computation.
    """

    kind: Kind
    stage: int
    micro: int
    peer: int = -1

    def __str__(self) -> str:
        return f"{self.kind}{self.stage}.{self.micro}"


@dataclass(frozen=True)
class Timetable:
    """One row of actions per rank of the pipeline, in the order in which the rank takes them.

    `chains` says how many times the whole model is there (DualPipe: twice, once per direction): the stages are as many
    runs of equal length, one after the other in `placement`, each an own copy of the model that serves its own share of
    the micro-batches; nothing passes from the last stage of a chain to the first of the next. `overlapped` names the
    forwards that the rank computes at the same time as the backward (B, and W if apart) directly after them.
    """

    rows: tuple[tuple[Action, ...], ...]
    placement: tuple[int, ...]
    micros: int
    chains: int = 1
    overlapped: frozenset[Action] = frozenset()

    @property
    def stages(self) -> int:
        return len(self.placement)

    @property
    def length(self) -> int:
        """The stages that one micro-batch passes."""
        return len(self.placement) // self.chains

    def micros_of(self, stage: int) -> range:
        """The micro-batches that pass a stage: all, or its chain's consecutive share of them."""
        chain = stage // self.length
        return range(self.micros * chain // self.chains, self.micros * (chain + 1) // self.chains)

    def owned(self, row: int) -> tuple[int, ...]:
        """The stages of one row, ascending."""
        return tuple(stage for stage, owner in enumerate(self.placement) if owner == row)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether weight gradients have actions of their own."""
        return any(action.kind == "W" for row in self.rows for action in row)


class Placed(NamedTuple):
    """An action on the time axis; times in the unit of the costs."""

    row: int
    action: Action
    start: float
    stop: float


def needs(action: Action, length: int, split: bool = False) -> Iterator[tuple[Kind, int]]:
    """(kind, stage) of the computations, of the same micro-batch, that must be over before this computation.

    `length` is the timetable's: the stages of a chain.
    """
    kind, stage = action.kind, action.stage
    if kind == "F" and stage % length:
        yield "F", stage - 1
    if kind == "B":
        yield "F", stage
        if (stage + 1) % length:
            yield "B", stage + 1
    if kind == "W" and split:
        yield "B", stage


def lower(timetable: Timetable) -> Timetable:
    """The timetable with its messages: each send directly after its computation, each receive before its user.

    Stages that share a row hand over without a message. Between two rows messages are taken in the order in which
    they are sent (so transports need no tags): a receive is moved forward where an earlier message would otherwise
    stand in its way. Nothing that is already lowered is lowered twice.
    """
    if any(action.kind in MESSAGES for row in timetable.rows for action in row):
        return timetable
    channels = _channels(timetable)
    rows = []
    for index, row in enumerate(timetable.rows):
        lowered: list[Action] = []
        taken: set[Action] = set()
        for action in row:
            wanted = _incoming(timetable, action)
            if wanted is not None and wanted not in taken:
                channel = channels[wanted.peer, index]
                while channel and wanted not in taken:
                    lowered.append(channel.popleft())
                    taken.add(lowered[-1])
            lowered.append(action)
            sent = _outgoing(timetable, action)
            if sent is not None:
                lowered.append(sent)
        rows.append(tuple(lowered))
    return replace(timetable, rows=tuple(rows))


def with_messages(timetable: Timetable, action: Action) -> Iterator[Action]:
    """A computation between the receive that it needs and the send that follows, as they stand in a lowered row whose
    messages need no other order."""
    yield from filter(None, (_incoming(timetable, action), action, _outgoing(timetable, action)))


def part_of(timetable: Timetable, wanted: Callable[[Action], bool]) -> Timetable:
    """The wanted computations alone, in the order in which they were, with their own messages: forwards without
    backwards for evaluation, or one micro-batch."""
    rows = tuple(tuple(a for a in row if a.kind in COMPUTE and wanted(a)) for row in timetable.rows)
    return lower(replace(timetable, rows=rows, overlapped=frozenset()))


def peak_held(timetable: Timetable) -> tuple[int, ...]:
    """Per row, the most (stage, micro-batch) activations it holds at a time: from F until the last of B and W."""
    release = "W" if timetable.splits_backward else "B"
    peaks = []
    for row in timetable.rows:
        held = peak = 0
        for action in row:
            held += (action.kind == "F") - (action.kind == release)
            peak = max(peak, held)
        peaks.append(peak)
    return tuple(peaks)


Cost = float | Sequence[float]  # seconds of one micro-batch, for all stages or per stage


def play_costs(
    timetable: Timetable, forward: Cost = 1.0, backward: Cost = 1.0, send: float = 0.0, weight: Cost = 0.0,
    together: float | None = None,
) -> list[Placed]:  # fmt: skip
    """When each computation runs, given what it costs: an event simulation of the timetable.

    `forward`, `backward` and `weight` are the times of F, B and W; `send` is the time between a message's departure and
    its arrival, which occupies neither row. `together` is the time of an overlapped forward and backward: they begin
    when both can and what they make leaves when both are over; without it they are computed one after the other.
    Returns the computations in order of their start (the gaps are the bubbles). Raises ValueError if the timetable
    deadlocks.
    """
    times = play_rows(timetable, forward, backward, send, weight, together)
    placed = (
        Placed(index, action, *time)
        for index, (row, cost) in enumerate(zip(timetable.rows, times, strict=True))
        for action, time in zip((action for action in row if action.kind in COMPUTE), cost, strict=True)
    )
    # Rows are ascending in time already, and sorting is stable: this is the order of (start, row).
    return sorted(placed, key=itemgetter(2))


def play_rows(
    timetable: Timetable, forward: Cost, backward: Cost, send: float, weight: Cost, together: float | None
) -> list[list[tuple[float, float]]]:
    """(start, stop) of each computation of each row, for who asks for no more than how long it takes: as `play_costs`.

    Raises ValueError if the timetable deadlocks.
    """
    stages, owner, length = range(timetable.stages), timetable.placement, timetable.length
    each = {"F": forward, "B": backward, "W": weight}
    costs = {kind: _per_stage(cost, timetable.stages) for kind, cost in each.items()}
    over = {kind: [[math.inf] * timetable.micros for _ in stages] for kind in COMPUTE}
    awaited = {
        kind: [
            [
                (over[before][other], send if owner[stage] != owner[other] else 0.0)
                for before, other in needs(Action(kind, stage, 0), length, split=True)
            ]
            for stage in stages
        ]
        for kind in COMPUTE
    }
    rows = [[action for action in row if action.kind in COMPUTE] for row in timetable.rows]
    pairs = timetable.overlapped if together is not None else frozenset[Action]()
    clock = _Clock(costs, over, awaited, pairs, together or 0.0)
    times: list[list[tuple[float, float]]] = [[] for _ in rows]
    playing = [_play(row, row_cost, clock) for row, row_cost in zip(rows, times, strict=True)]
    before = -1
    while playing and sum(map(len, times)) > before:
        before = sum(map(len, times))
        # Forwards go down the rows and backwards up: looked at the one way and the other, each sweep plays more.
        playing = [row for row in reversed(playing) if next(row, False)]
    left = enumerate(zip(rows, times, strict=True))
    if stuck := [
        f"row {i} at {row[len(row_cost)]}" for i, (row, row_cost) in left if len(row_cost) < len(row)
    ]:
        raise ValueError(f"the timetable deadlocks: {', '.join(stuck)}")
    return times


@dataclass(frozen=True, slots=True)
class _Clock:
    """What rows share, each by kind and stage. costs: seconds. over: when each micro-batch is computed, infinity until
    then. awaited: (`over` of what comes before, how much later its result is here). pairs: forwards that are computed
    beside the backward after them, both in `together`."""

    costs: Mapping[str, Sequence[float]]
    over: Mapping[str, Sequence[list[float]]]
    awaited: Mapping[str, Sequence[Sequence[tuple[list[float], float]]]]
    pairs: frozenset[Action]
    together: float


def _play(row: Sequence[Action], times: list[tuple[float, float]], clock: _Clock) -> Iterator[bool]:
    """Plays a row's computations against the clock; yields where what comes next waits for other rows.

    An overlapped forward and backward are told one after the other, each with its share of the time, so that busy time
    adds up; but what they make leaves at the end of both.
    """
    costs, over, awaited, pairs = clock.costs, clock.over, clock.awaited, clock.pairs
    at, now, end = 0, 0.0, len(row)
    while at < end:
        action = row[at]
        kind, stage, micro, start = action.kind, action.stage, action.micro, now
        group = row[at : at + 3] if pairs and action in pairs else row[:0]
        for done, later in awaited[kind][stage]:
            ready = done[micro] + later
            if ready > start:  # quicker than `max`, and simulations of large searches wait for it
                start = ready
        for done, later in awaited[group[1].kind][group[1].stage] if group else ():
            start = max(start, done[group[1].micro] + later)
        if start == math.inf:
            yield True
        elif not group:
            over[kind][stage][micro] = now = start + costs[kind][stage]
            times.append((start, now))
            at += 1
        else:
            if len(group) > 2 and group[2] != Action("W", group[1].stage, group[1].micro):
                group = group[:2]
            spent = [costs[a.kind][a.stage] for a in group]
            share, now = clock.together / (sum(spent) or 1.0), start + clock.together
            for part, cost in zip(group, spent, strict=True):
                over[part.kind][part.stage][part.micro] = now
                times.append((start, start + cost * share))
                start += cost * share
            at += len(group)


def bubble(placed: Sequence[Placed], rows: int | None = None) -> float:
    """The part of all rows' time, from the first start to the last stop, in which nothing is computed: 0 to 1.

    For p stages of equal cost and m micro-batches GPipe and 1F1B have (p-1)/(m+p-1)
    (Huang et al. 2019; Narayanan et al. 2021). `rows` counts rows that computed nothing at all.
    """
    if not placed:
        return 0.0
    count = rows if rows is not None else len({p.row for p in placed})
    span = max(p.stop for p in placed) - min(p.start for p in placed)
    busy = sum(p.stop - p.start for p in placed)
    return max(0.0, 1.0 - busy / (count * span)) if span > 0 else 0.0


def _per_stage(cost: Cost, stages: int) -> Sequence[float]:
    if isinstance(cost, int | float):
        return [float(cost)] * stages
    if len(cost) != stages:
        raise ValueError(f"{len(cost)} costs for {stages} stages")
    return cost


def _incoming(timetable: Timetable, action: Action) -> Action | None:
    """The receive that a computation needs first, if its input comes from another row."""
    return _message(timetable, action, {"F": ("RECV_F", -1), "B": ("RECV_B", 1)})


def _outgoing(timetable: Timetable, action: Action) -> Action | None:
    """The send that follows a computation, if another row uses its result."""
    return _message(timetable, action, {"F": ("SEND_F", 1), "B": ("SEND_B", -1)})


def _message(timetable: Timetable, action: Action, ways: Mapping[Kind, tuple[Kind, int]]) -> Action | None:
    """ways: kind of a computation to the kind of its message, and on which side of its stage the other end is."""
    if action.kind not in ways:
        return None
    kind, side = ways[action.kind]
    other = action.stage + side
    if (
        max(action.stage, other) % timetable.length == 0
    ):  # the first stage of a chain, or the end of the last one
        return None
    here, peer = timetable.placement[action.stage], timetable.placement[other]
    return None if peer == here else Action(kind, action.stage, action.micro, peer)


def arrives_as(sent: Action, row: int) -> Action:
    """The receive, at the other end, of what `row` sends."""
    if sent.kind == "SEND_F":
        return Action("RECV_F", sent.stage + 1, sent.micro, row)
    return Action("RECV_B", sent.stage - 1, sent.micro, row)


def _channels(timetable: Timetable) -> dict[tuple[int, int], deque[Action]]:
    """Per (sending row, receiving row): the receives, in the order of the sends."""
    channels: dict[tuple[int, int], deque[Action]] = {}
    for index, row in enumerate(timetable.rows):
        for action in row:
            sent = _outgoing(timetable, action)
            if sent is not None:
                channels.setdefault((index, sent.peer), deque()).append(arrives_as(sent, index))
    return channels
