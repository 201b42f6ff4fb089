"""Many plans priced at once: all combinations of the other keys on one mesh, as arrays.

The formulas are those of `price` and `memory` themselves, fed with arrays, so that a plan of the screen costs what it
costs alone. The axes of the arrays: `bench`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from unisono.plan import Plan
from unisono.planner import replicas
from unisono.planner.cuts import rows_of
from unisono.planner.memory import MARGIN, Kept, learned, of_share, rows_seen, share_of
from unisono.planner.price import (
    covered,
    crossing,
    gathered,
    line,
    met,
    scattered,
    tied,
    update,
    work,
)
from unisono.planner.price_parts import Blocks, RowSeconds, owned
from unisono.planner.search_arrays import (
    Array,
    Axes,
    SearchShared,
    array,
    blocks_by,
    covers,
    held_by,
    kept_by,
    layout_of,
    like,
    share_by,
    totals_by,
)
from unisono.planner.states import WholeMatrixSteps, moments_of
from unisono.planner.transformers import row_seconds


@dataclass(frozen=True, slots=True)
class Screened:
    """Seconds of a step, bytes of the fullest rank, which plans exist and fit with the margin; of all axes."""

    step: Array
    memory: Array
    fits: Array


def screen(bench: SearchShared, mesh: Plan, axes: Axes) -> Screened:
    """All plans of one mesh. mesh: a plan with its sizes; the keys of the axes are not read."""
    ways = [like(mesh, zero=zero) for zero in axes.zeros]
    memory = _memory(bench, mesh, axes, ways)
    served = axes.served(mesh.pp, bench.model.n_layer)[None, None, :, None, :]
    fits = memory * (1.0 + MARGIN) <= bench.cluster.device.room
    return Screened(_steps(bench, mesh, axes, ways), memory, fits & served)


def least_memory(bench: SearchShared, mesh: Plan, axes: Axes) -> float:
    """Bytes that the fullest rank needs at least: model states, by the way that shares out most of them."""
    nothing = Kept(0.0, 0.0, 0.0, 0.0)
    best, least = like(mesh, zero=max(axes.zeros)), np.inf
    for schedule in axes.schedules:
        variant, most = like(best, schedule=schedule), 0.0
        for row in rows_seen(mesh.pp):
            share = share_of(bench.model, variant, row, bench.stack.balanced)
            got = of_share(bench.model, variant, bench.stack, share, nothing, 0.0)
            most = max(most, (got.params + got.grads + got.optim) * (1.0 + bench.stack.slack))
        least = min(least, most)
    return float(least)


def least_seconds(bench: SearchShared, mesh: Plan, axes: Axes) -> float:
    """Seconds that a step takes at least: kernels of a mean row, nothing computed again, nothing waited for."""
    plain = Axes(axes.zeros[:1], ("none",), axes.sizes, axes.kinds, axes.schedules[:1])
    hiding = [name for name in axes.schedules if covers(mesh, name)]
    if hiding:
        mesh = like(mesh, schedule=hiding[0])  # under which nothing that goes to experts may show
    totals = totals_by(bench, mesh, plain)
    both = np.broadcast_to(totals.ahead + totals.back, (1, 1, len(axes.sizes), len(axes.kinds)))
    micros = np.array([m for _, m in axes.sizes], float)[:, None]
    ends_ = np.broadcast_to(sum(totals.stem) + sum(totals.head), both.shape)[0, 0]
    work = micros * (both[0, 0] * bench.model.n_layer + ends_) / mesh.pp
    return float(work.min()) + bench.stack.step


def _memory(bench: SearchShared, mesh: Plan, axes: Axes, ways: Sequence[Plan]) -> Array:
    """Bytes of the fullest rank, of all axes."""
    kept = kept_by(bench, mesh, axes)
    rows = [(share_by(bench, mesh, axes, r), held_by(bench, mesh, axes, r)) for r in rows_seen(mesh.pp)]
    shape = axes.shape[1:]
    totals: list[Array] = []
    for plan in ways:
        each = [of_share(bench.model, plan, bench.stack, share, kept, held).total for share, held in rows]
        totals.append(np.maximum.reduce([np.broadcast_to(part, shape) for part in each]))
    return np.stack(totals)


def _works(bench: SearchShared, mesh: Plan, axes: Axes) -> Callable[[int, Blocks], RowSeconds]:
    """(place of a timetable, blocks) -> what its rows compute; of the same layout and blocks once."""
    memo: dict[tuple[object, int], RowSeconds] = {}

    def row_work(at: int, each: Blocks) -> RowSeconds:
        layout = layout_of(bench, mesh, axes.schedules[at])
        key = layout, id(each)  # which its caller keeps
        if key not in memo:
            pairs = [row_seconds(each, count, stem, head) for count, stem, head, _ in layout]
            memo[key] = work(pairs, [many for _, _, _, many in layout])
        return memo[key]

    return row_work


def _owning(bench: SearchShared, mesh: Plan, schedules: Sequence[str], steps: WholeMatrixSteps) -> Array:
    """Seconds in which owners step whole matrices, by schedule."""
    rows = [rows_of(bench.model, name, mesh.pp, bench.stack.balanced) for name in schedules]
    each = [steps.price(mesh, bench.cluster, bench.stack, blocks) for blocks in rows]
    return array([traffic.exposed + seconds for traffic, seconds in each])


def _steps(bench: SearchShared, mesh: Plan, axes: Axes, ways: Sequence[Plan]) -> Array:
    """Seconds of a step, of all axes."""
    works = _works(bench, mesh, axes)
    covering = {name: covers(mesh, name) for name in axes.schedules}
    names = {which: name for name, which in covering.items()}
    blocks = {which: blocks_by(bench, like(mesh, schedule=name), axes) for which, name in names.items()}
    first = learned(bench.model, share_by(bench, mesh, axes, 0))
    micros = array([m for _, m in axes.sizes], -1, 1)
    device, where = bench.cluster.device, (bench.cluster, bench.stack, first)

    def by_schedule(seconds: Callable[[Plan], float]) -> Array:
        """Return an array over (schedule, way, 1, 1, 1)."""
        columns = [np.broadcast_to(array(seconds(plan)), (len(covering),)) for plan in ways]
        return np.stack(columns, axis=-1)[:, :, None, None, None]

    def updating(plan: Plan) -> float:
        moments = moments_of(bench.model, plan, first.elements, first.layers)
        return update(moments, device, bench.stack, owned(plan, first))

    once = by_schedule(updating)
    if bench.model.steps is not None:
        owning = _owning(bench, mesh, axes.schedules, bench.model.steps)
        once = once + by_schedule(lambda plan: owning)
    once = once + by_schedule(lambda plan: tied(bench.model, plan, *where))
    handed = by_schedule(lambda plan: scattered(plan, *where)[1])
    back = by_schedule(lambda plan: gathered(plan, *where)[1])
    coded = mesh.dp > 1 and not replicas.plain(mesh)
    meeting = by_schedule(
        lambda plan: sum(took for axis, (_, took) in met(plan, *where).items() if not coded or axis != "dp")
    )
    elements = np.broadcast_to(array(crossing(mesh, first)), (len(covering),))
    step = np.empty(axes.shape)
    for at, name in enumerate(axes.schedules):
        each = blocks[covering[name]]
        whole = line(name, mesh.pp, micros, works(at, each), each.send)
        over = covered(name, mesh.pp, micros, whole, bench.stack.dp_hidden)
        shown = over.beside_backward(meeting[at]) + over.beside_forward(back[at])
        shown = shown + (micros - 1) * over.beside_each(handed[at])
        if coded:
            shown = shown + replicas.least(
                bench.model, mesh, bench.cluster, bench.stack, float(elements[at]), over
            )
        fixed = bench.stack.step + bench.stack.micro * micros
        step[..., at] = micros * whole.slowest + whole.idle + whole.messages + fixed + once[at] + shown
    return step
