"""The operations of all ranks of a plan, checked without playing them: does each have its partners, and does it end?

What a rank calls depends on its stage and its plan alone, so a world of thousands has few kinds of ranks. Of each row
of the pipeline some are run by themselves (`train.rehearsal`): one, and for each axis the rank at the axis's other end.
Then it is checked that

1. the timetable computes every micro-batch once, in an order that ends (`programs.check`);
2. ranks of one row call the same operations in the same order, and those of one group the same bytes: then no two of
   them can wait for each other, whatever the groups are;
3. between rows every message is received, with the bytes that were sent, every collective is called by all its rows,
   and no row waits for ever. Sends are buffered; a receive waits where its result is used.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass

from unisono.comm.imagined import Made, imagined
from unisono.comm.members import AXES, Shape, ordered
from unisono.config import Resolved
from unisono.programs.check import check
from unisono.train.build.rehearsal import Rehearsed, rehearse
from unisono.train.data.dataset import Corpus
from unisono.train.step.join import timetable_of

MESSAGES = ("send", "recv", "arrived")


@dataclass(frozen=True, slots=True)
class StaticProof:
    """What came of one plan. looked_at: ranks that were run by themselves. calls: of all ranks in one step. problems:
    in words; none if every operation has its partners and the step ends. notes: what was left out."""

    plan: str
    ranks: int
    looked_at: tuple[int, ...]
    calls: int
    problems: tuple[str, ...]
    notes: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        return not self.problems

    def as_dict(self) -> dict[str, object]:
        """The object of --json."""
        return {**asdict(self), "pass": self.passed}


def prove(resolved: Resolved, corpus: Corpus, look: Callable[[int], Rehearsed] | None = None) -> StaticProof:
    """Check one resolved plan. look(rank): what that rank does; by itself it is run."""
    plan = resolved.plan
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    members = ordered(shape, filter(None, resolved.recipe.launch.order.split(",")))

    def alone(rank: int) -> Rehearsed:
        with imagined(rank, plan.world) as calls:
            return rehearse(resolved.recipe, plan, corpus, rank, calls)

    def rank_at(at: Mapping[str, int]) -> int:
        return members.ranks[shape.rank(at)]

    look = look or alone
    problems = [f"timetable: {text}" for text in check(timetable_of(plan))]
    rows: list[Rehearsed] = []
    looked: list[int] = []
    for row in range(plan.pp):
        base = dict.fromkeys(AXES, 0) | {"pp": row}
        rows.append(look(rank_at(base)))
        looked.append(rank_at(base))
        for axis in AXES:
            if axis != "pp" and getattr(shape, axis) > 1:
                other = rank_at(base | {axis: getattr(shape, axis) - 1})
                looked.append(other)
                problems += _unlike(rank_at(base), rows[-1], other, look(other))
    row_of = {rank: shape.coordinates(place)["pp"] for place, rank in enumerate(members.ranks)}
    problems += between([seen.calls for seen in rows], row_of)
    count = sum(len([call for call in seen.calls if call.op != "arrived"]) for seen in rows)
    notes = tuple(dict.fromkeys(text for seen in rows for text in seen.notes))
    return StaticProof(
        str(plan), plan.world, tuple(looked), count * plan.world // plan.pp, tuple(problems), notes
    )


def _unlike(rank: int, rehearsed: Rehearsed, other_rank: int, other: Rehearsed) -> Iterator[str]:
    """Where two ranks of one row part, as text; the first place alone."""
    for number, (a, b) in enumerate(zip(rehearsed.calls, other.calls, strict=False)):
        what = [f"{call.op} on {call.axis}" for call in (a, b)]
        if what[0] != what[1]:
            yield f"call {number + 1}: rank {rank} calls {what[0]} where rank {other_rank} calls {what[1]}"
            return
        if a.ranks == b.ranks and a.op not in MESSAGES and a.nbytes != b.nbytes:
            yield (
                f"call {number + 1}, {what[0]}: rank {rank} brings {a.nbytes} bytes, rank {other_rank} {b.nbytes}"
            )
            return
    if len(rehearsed.calls) != len(other.calls):
        counts = f"{len(rehearsed.calls)} calls, rank {other_rank} {len(other.calls)}"
        yield f"rank {rank} makes {counts}"


def between(rows: Sequence[Sequence[Made]], row_of: Mapping[int, int]) -> Iterator[str]:
    """Yield as text which calls of all rows have no partner, or wait for ever. rows: the calls of one rank of each row.
    row_of: of every rank."""
    at = [0] * len(rows)
    sent: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)
    received: dict[tuple[str, int, int], deque[int]] = defaultdict(deque)
    shared = {ranks: frozenset(row_of[r] for r in ranks) for row in rows for ranks in {c.ranks for c in row}}
    wrong: list[str] = []

    def ready(row: int, call: Made) -> bool:
        """Whether the row may go past its call; what it does for others is done."""
        if call.op == "send":
            sent[call.group, row, row_of[call.peer]].append(call.nbytes)
        elif call.op == "recv":
            received[call.group, row_of[call.peer], row].append(call.nbytes)
        elif call.op == "arrived":
            wire = (call.group, row_of[call.peer], row)
            if not sent[wire]:
                return False
            came, room = sent[wire].popleft(), received[wire].popleft()
            if came != room:
                wrong.append(f"row {wire[1]} sends row {row} {came} bytes, which has room for {room}")
        elif len(shared[call.ranks]) > 1:
            others = [
                rows[other][at[other]] if at[other] < len(rows[other]) else None
                for other in shared[call.ranks]
            ]
            if any(
                other_call is None or (other_call.group, other_call.op) != (call.group, call.op)
                for other_call in others
            ):
                return False
            if len({other_call.nbytes for other_call in others if other_call}) > 1:
                wrong.append(
                    f"{call.op} on {call.axis}: rows bring {sorted({o.nbytes for o in others if o})} bytes"
                )
            for other in shared[call.ranks] - {row}:
                at[other] += 1
        return True

    moved = True
    while moved and not wrong:
        moved = False
        for row, calls in enumerate(rows):
            while at[row] < len(calls) and not wrong and ready(row, calls[at[row]]):
                at[row] += 1
                moved = True
    yield from wrong
    for row, calls in enumerate(rows):
        if at[row] < len(calls) and not wrong:
            call = calls[at[row]]
            peer = f" of rank {call.peer}" if call.peer >= 0 else ""
            word = "what comes" if call.op == "arrived" else call.op
            yield f"row {row} waits for ever at its call {at[row] + 1}: {word}{peer} on {call.axis}"
    left = Counter({wire: len(queue) for wire, queue in sent.items() if queue})
    if not wrong and all(at[row] == len(calls) for row, calls in enumerate(rows)):
        yield from (f"row {b} never takes {n} messages of row {a}" for (_, a, b), n in left.items())
