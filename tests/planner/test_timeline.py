"""What is simulated is what runs: the runtime's own timeline beside the event simulation, with artificial costs.

A stage that waits never waits less than it was told, nor does a message come sooner. So on any machine, however busy,
nothing may happen earlier than it was simulated; and if the machine is not too busy, little may happen much later.
"""

from pathlib import Path

import pytest

from tests.planner import artificial
from tests.planner.published import gpt
from tests.ranks import World
from unisono.observe import trace
from unisono.plan import Plan
from unisono.plan.grammar import known
from unisono.planner.clusters import cluster
from unisono.planner.devices import rows
from unisono.planner.pipeline_play import span
from unisono.planner.price import price
from unisono.planner.price_parts import Price
from unisono.planner.simulate import PlanRequest
from unisono.planner.stack import stack
from unisono.programs.check import check
from unisono.programs.pipeline import Placed
from unisono.programs.schedules import SCHEDULES
from unisono.report.placed import computed, from_zero
from unisono.spec.errors import UsageError
from unisono_contrib.planner.timeline import Timeline, timeline

TIMETABLES = "accumulate gpipe 1f1b interleaved:v=2 looped_bfs:v=2 zb1p zb2p zbv dualpipe dualpipev".split()

FORWARD, DELAY = [0.02, 0.03, 0.015, 0.025], 0.01
RANKS, MICROS, STEPS = 2, 4, 3
SLACK = 1.5  # so much longer may the shortest of all steps be, on a machine with other things to do


def measured(
    world: World, folder: Path, schedule: str, ranks: int, costs: list[float], *, micros: int = MICROS,
    delay: float = DELAY, steps: int = STEPS,
) -> list[list[Placed]]:  # fmt: skip
    """Each step's computations, the first at zero. costs: of a forward of each stage, as of each half of a backward."""
    world(
        artificial.play, ranks, folder=str(folder), schedule=schedule, micros=micros, forward=costs,
        backward=costs, weight=costs, delay=delay, steps=steps,
    )  # fmt: skip
    traces = [trace.read(folder / f"rank{rank}.json.gz") for rank in range(ranks)]
    return [
        from_zero(
            [p for t in traces for p in computed((s for s in t.spans if s.tags["step"] == step), t.rank)]
        )
        for step in range(steps)
    ]


@pytest.mark.parametrize("schedule", known("schedule"))
def test_the_runtime_keeps_to_the_simulated_timeline(world: World, tmp_path: Path, schedule: str) -> None:
    ranks = 1 if SCHEDULES.read(schedule).alone else RANKS
    timetable = SCHEDULES.read(schedule).timetable(ranks, MICROS)
    costs = FORWARD[: timetable.length]
    simulated = artificial.simulated(timetable, costs, costs, costs, DELAY)
    length = max(p.stop for p in simulated)
    nearest = float("inf")
    for attempt in range(10):
        steps = measured(world, tmp_path / str(attempt), schedule, ranks, costs)
        for placed in steps:
            rows = [tuple(p.action for p in placed if p.row == row) for row in range(ranks)]
            assert tuple(rows) == timetable.rows
            begun = {p.action: p.start for p in placed}
            # The clocks of two recorders agree within a few microseconds, not to the last one.
            assert all(begun[p.action] > p.start - 1e-4 for p in simulated)
        nearest = min([nearest, *(max(p.stop for p in placed) for placed in steps)])
        if nearest < SLACK * length:
            break
    assert nearest < SLACK * length


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("schedule", [name for name in TIMETABLES if name != "accumulate"])
def test_ranks_wait_as_long_as_is_priced_and_as_the_closed_form_says(
    world: World, tmp_path: Path, schedule: str, ranks: int
) -> None:
    """In shares of a row's time. The forms of overlapped pairs hold where pairs end together: here they are played one
    after the other, and wait at most so long."""
    micros, cost = 8, 0.05
    table = SCHEDULES.read(schedule).timetable(ranks, micros)
    costs = [cost] * table.length
    priced = artificial.waits(artificial.simulated(table, costs, costs, costs, 0.0), ranks)
    form = artificial.closed(schedule, ranks, micros, cost)
    nearest = 1.0
    for attempt in range(6):
        folder = tmp_path / str(attempt)
        steps = measured(world, folder, schedule, ranks, costs, micros=micros, delay=0.0, steps=2)
        nearest = min([nearest, *(artificial.waits(placed, ranks) for placed in steps)])
        if nearest - priced < 0.02:
            break
    assert nearest == pytest.approx(priced, abs=0.02)
    assert nearest < form + 0.02 and (table.overlapped or priced == pytest.approx(form, abs=1e-9))


@pytest.mark.parametrize("schedule", TIMETABLES)
def test_a_simulated_step_computes_all_that_is_priced(schedule: str) -> None:
    ask, got = asked(schedule)
    step = timeline(ask, got)
    each = rows(ask)
    busy = sum(p.stop - p.start for p in step.placed)
    assert check(step.timetable) == []
    passes = sum(p.action.kind != "W" for p in step.placed)  # each keeps its row for a message
    if not step.timetable.overlapped:  # else both of a pair are shown for as long as the pair takes
        computed = ask.micros * (sum(each.forward) + sum(each.backward))
        assert busy == pytest.approx(computed + passes * each.send, rel=1e-9)
    played = span(ask.plan.schedule, ask.model.n_layer, ask.micros, each)
    if played is not None and not step.timetable.splits_backward:  # else of the slowest row's own
        assert played_until(step) == pytest.approx(played)
    assert length(step) - played_until(step) == pytest.approx(
        got.comm["dp"].exposed + got.optimizer + got.fixed
    )


def played_until(step: Timeline) -> float:
    """Seconds until the last row has ended its last computation."""
    return max(p.stop for p in step.placed)


def length(step: Timeline) -> float:
    """Seconds of the whole step."""
    return played_until(step) + sum(seconds for _, seconds in step.after)


@pytest.mark.parametrize("schedule", ["zb1p", "zb2p"])
def test_an_order_is_drawn_and_priced_as_it_is_played(schedule: str) -> None:
    """Computed again, a backward towards the inputs takes twice a forward; a run knows nothing of that beforehand."""
    ask, got = asked(f"{schedule} recompute=full")
    assert timeline(ask, got).timetable == SCHEDULES.read(schedule).timetable(ask.plan.pp, ask.micros)


def test_timetables_rank_as_their_papers_say() -> None:
    took = {schedule: length(timeline(*asked(schedule))) for schedule in TIMETABLES}
    assert took["zbv"] < took["zb1p"] < took["1f1b"]
    assert took["1f1b"] == pytest.approx(took["gpipe"]) and took["gpipe"] < took["accumulate"]
    assert took["interleaved:v=2"] < took["1f1b"]


def test_a_timetable_that_nobody_could_look_at_is_refused() -> None:
    ask, got = asked("1f1b", micros=100_000)
    with pytest.raises(UsageError, match="too long"):
        timeline(ask, got)


def asked(schedule: str, micros: int = 16) -> tuple[PlanRequest, Price]:
    where = cluster("dgx-a100:1")
    plan = Plan.parse(f"dp=2 pp=4 schedule={schedule} precision=bf16")
    ask = PlanRequest(gpt(16, 16, 1024, 1024), plan, where, stack("megatron-2022"), 1, micros)
    return ask, price(ask.model, plan, where, ask.stack, micro_batch=1, micros=micros)


@pytest.mark.parametrize(
    "mesh",
    ["dp=4", "shard=4 zero=1", "shard=4 zero=2", "dp=2 shard=2", "cp=4", "dp=2 cp=2", "tp=2 cp=2 shard=2"],
)
def test_without_a_pipeline_a_simulated_step_is_as_long_as_its_price(mesh: str) -> None:
    """Nothing that is priced is left out of the picture."""
    where, plan = cluster("dgx-a100:1"), Plan.parse(f"{mesh} precision=bf16")
    ask = PlanRequest(gpt(16, 16, 1024, 1024), plan, where, stack("megatron-2022"), 1, 8)
    got = price(ask.model, plan, where, ask.stack, micro_batch=1, micros=8)
    assert length(timeline(ask, got)) == pytest.approx(got.step, rel=1e-9)
