"""What tables are said to send is what ranks call."""

from typing import Any

import pytest

from unisono.comm.imagined import imagined
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.planner.kinds import declared
from unisono.planner.work.calls import calls
from unisono.spec.model import Facts
from unisono.train.build.build import build, feeds, place_of
from unisono.train.build.rehearsal import rehearse
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step

ROWS = (40, 30, 7, 9)


def recipe(cut: str) -> Recipe:
    model = {"d_table": 6, "n_dense": 4, "bottom": (8,), "top": (8, 8), "tables": ROWS, "lookups": 3}
    return Recipe(
        model=ModelConfig(kind="dlrm", table_sharding=cut, **model),
        data=DataConfig(source="clicks:samples=400"),
        train=TrainConfig(global_batch=48, micro_batch=3),
    )


def listed(cut: str, plan: str) -> dict[tuple[str, str], tuple[float, float]]:
    """(axis, operation) → (how often, bytes)."""
    resolved = resolve(recipe(cut), plan, None)
    found: dict[tuple[str, str], tuple[float, float]] = {}
    model, batch = declared(resolved.recipe.model, Facts()), resolved.batch
    for call in calls(model, resolved.plan, batch.micro_batch, batch.micros, 0, near=False):
        times, nbytes = found.get((call.axis, call.op), (0.0, 0.0))
        found[call.axis, call.op] = times + call.times, nbytes + call.nbytes * call.times
    return found


@pytest.mark.parametrize("plan", ["shard=4 ep=2", "shard=2 ep=2 dp=2 pp=2", "shard=4 ep=4"])
@pytest.mark.parametrize("cut", ["table", "row", "column"])
def test_what_crosses_ep_in_a_step_is_listed(cut: str, plan: str) -> None:
    told = recipe(cut)
    resolved = resolve(told, plan, None)
    with imagined(0, resolved.plan.world) as made:
        seen = rehearse(resolved.recipe, resolved.plan, load(told.data, told.model), 0, made)
    own, said = ({k: v for k, v in some.items() if k[0] == "ep"} for some in (seen.sums(), listed(cut, plan)))
    assert own == said and own


def _sent(ctx: RankContext, told: Recipe, plan: str) -> Any:
    """Bytes that a rank of a step sends, without what its run's beginning did."""
    resolved = resolve(told, plan, ctx.world)
    corpus, recorder = load(resolved.recipe.data, resolved.recipe.model), Recorder(ctx.rank)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, recorder)
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    recorder.lap()
    train_step(run, feed.fetch(0, run.leaves))
    return dict(recorder.lap().nbytes)


def test_tables_are_in_no_bucket_and_rows_are_no_more_than_is_said(threads: Any) -> None:
    sent = threads(_sent, 2, told=recipe("table"), plan="dp=2")[0]
    said = listed("table", "dp=2")
    dense = sum(p.parameters for p in declared(recipe("table").model, Facts()).workload.parts[1:])  # type: ignore[union-attr]
    assert said["dp", "all_reduce"] == (1.0, 4.0 * dense)
    assert 4 * dense <= sent["dp", "all_reduce"] <= 4 * dense + 8  # filled up to an even length
    assert 0 < sent["dp", "all_gather"] <= said["dp", "all_gather"][1] / 2
    whole = 4 * 6 * sum(ROWS)
    assert sent["dp", "all_gather"] < 2 * whole
