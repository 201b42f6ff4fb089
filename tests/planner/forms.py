"""Published forms and rates of timetables beside those of the timetables that are played.

Costs of the bubble rates (Qi et al., 2024, arXiv 2401.10241, table 5) are in units of one stage's F, one set for all rows
and columns: fitted by least squares on twelve numbers, 1F1B, 1F1B-I, ZB-H1 and ZB-H2 of the three given rows. How F+B is
divided between the two hardly matters there, and the division nearest to equal is taken. That 1F1B-I has 3 stages a
rank, and the part of the activations that W keeps (only ZB-2p feels it), are fitted on their columns too. ZB-1p and ZB-2p
are ours by our own heuristic, not the paper's. The row of 64 micro-batches is low in 1F1B, whose every round trip waits
for messages: slower ones in that row would explain it.
"""

from collections.abc import Callable
from dataclasses import dataclass

from tests.planner.costs import Costs, fitted, played, slowest
from tests.planner.published import table
from unisono.programs.pipeline import Timetable, peak_held
from unisono.programs.schedules import SCHEDULES
from unisono_contrib.programs.zero_bubble import handcrafted

COSTS = Costs(forward=1.0, backward=0.966, weight=0.5, send=0.0326)
CHUNKS, KEPT = 3, 0.37
COLUMNS = ("b_1f1b", "b_1f1b_i", "b_zbh1", "b_zbh2", "b_zb1p", "b_zb2p")


def bubble_rate(timetable: Timetable, costs: Costs, together: float | None = None) -> float:
    """(cost - m(F+B+W)) / cost, cost being the slowest row's span: the bubble rate of the zero-bubble papers."""
    span = slowest(played(timetable, costs, together))
    return 1.0 - timetable.micros * costs.whole / span if span > 0 else 0.0


def bubble_rates(
    ranks: int, micros: int, costs: Costs, chunks: int = 1, kept: float = 1.0
) -> dict[str, float]:
    """A row of the zero-bubble paper's table 5, by its columns' names; schedules that refuse these numbers raise UsageError.

    `costs` are the profiled times of one of `ranks` stages. `chunks` is the v of 1F1B-I, the most that the layers
    allow (one layer each); `kept` the part of a micro-batch's activations that W still needs after B, which decides
    how many W the automatic schedules may owe. Cost is the slowest stage's own span: there the paper's updates are
    checked after the fact, so no stage waits for another's end.
    """
    timetables = {
        "b_1f1b": SCHEDULES.read("1f1b").timetable(ranks, micros),
        "b_1f1b_i": SCHEDULES.read(f"interleaved:v={chunks}").timetable(ranks, micros),
        "b_zbh1": handcrafted(ranks, micros, 1),
        "b_zbh2": handcrafted(ranks, micros, 2),
        "b_zb1p": fitted(ranks, micros, 1, costs, kept),
        "b_zb2p": fitted(ranks, micros, 2, costs, kept),
    }
    return {name: bubble_rate(timetable, costs) for name, timetable in timetables.items()}


def rates() -> list[tuple[int, str, float, float]]:
    """(micro-batches, column, ours, theirs) of every given rate."""
    rows = []
    for row in table("zerobubble_bubble_rates.csv"):
        micros = int(row["num_microbatches"])
        ours = bubble_rates(int(row["stages"]), micros, COSTS, chunks=CHUNKS, kept=KEPT)
        rows += [(micros, column, ours[column], float(row[column])) for column in COLUMNS]
    return rows


@dataclass(frozen=True, slots=True)
class Form:
    """One line of the table of forms: `waits` and `held` of p ranks, m micro-batches, v stages a rank, in the costs of
    a rank; `copies` of the weights that a rank has of its share. equal: the form holds for F = B = W alone. limit: what is
    held is a limit, which is kept."""

    schedule: str
    waits: Callable[[int, int, int, Costs], float]
    held: Callable[[int, int, int], float]
    copies: float = 1.0
    equal: bool = False
    limit: bool = False


# By the names of the table; B there includes W in the forms of one backward pass. DualPipeV's p counts its 2p stages,
# half as long, on p ranks: so its two copies of a stage's weights are one of a rank's.
FORMS = {
    "GPipe": Form("gpipe", lambda p, m, v, c: (p - 1) / m * (m * c.whole), lambda p, m, v: m),
    "1F1B": Form("1f1b", lambda p, m, v, c: (p - 1) * c.whole, lambda p, m, v: p),
    "interleaved 1F1B": Form(
        "interleaved:v=3", lambda p, m, v, c: (p - 1) * c.whole / v, lambda p, m, v: p * (1 + (p - 1) / (p * v))
    ),
    "ZB1P": Form(
        "zb1p", lambda p, m, v, c: (p - 1) * (c.forward + (c.backward + c.weight) - 2 * c.weight),
        lambda p, m, v: p,
    ),
    "ZB2P": Form("zb2p", lambda p, m, v, c: 0.0, lambda p, m, v: 2 * p, equal=True, limit=True),
    "ZB-V": Form("zbv", lambda p, m, v, c: 0.0, lambda p, m, v: p, equal=True),
    "DualPipe": Form(
        "dualpipe", lambda p, m, v, c: (p / 2 - 1) * (c.whole + (c.backward + c.weight) - 3 * c.weight),
        lambda p, m, v: p + 1, copies=2.0, equal=True,
    ),
    "DualPipeV": Form(
        "dualpipev", lambda p, m, v, c: (p - 1) * (c.whole + (c.backward + c.weight) - 3 * c.weight) / 2,
        lambda p, m, v: (2 * p + 1) / 2, equal=True,
    ),
}  # fmt: skip
# Forms of timetables that a plan cannot name.
NOT_NAMED = ("V-Half", "V-Min")


def closed(name: str) -> list[tuple[float, float]]:
    """(played, the form's): seconds in which the slowest row waits, micro-batches held, copies of the weights."""
    form, pairs = FORMS[name], []
    for p in (2, 4, 8):
        m = 3 * p
        for costs in (Costs(1, 1, 1),) if form.equal else (Costs(1, 1, 1), Costs(2, 3, 1)):
            timetable = SCHEDULES.read(form.schedule).timetable(p, m)
            v = timetable.length // p
            pairs.append((_waits(name, timetable, costs), form.waits(p, m, v, costs)))
            held, said = max(peak_held(timetable)) / v, form.held(p, m, v)
            pairs.append((max(held, said) if form.limit else held, said))
            pairs.append((float(timetable.chains), form.copies))
    return pairs


def _waits(name: str, timetable: Timetable, costs: Costs) -> float:
    """Where weights come apart, a rank's own span counts, as the zero-bubble papers count it."""
    share = timetable.length / len(timetable.rows)
    placed = played(timetable, costs, costs.whole / share if name.startswith("Dual") else None)
    span = slowest(placed) if timetable.splits_backward else max(p.stop for p in placed)
    return span - timetable.micros * costs.whole
