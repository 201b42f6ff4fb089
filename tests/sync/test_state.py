"""What a policy keeps goes into checkpoints, and comes back under any layout."""

from pathlib import Path

import pytest
import torch

from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import save, tensor_names
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step

POLICIES = Path(__file__).with_name("keeping.py")

pytestmark = pytest.mark.timeout(120)


def started(ctx, text, plan):
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=9, global_batch=8, micro_batch=1, lr=1e-2),
    )
    resolved = resolve(recipe, plan, ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 60.0)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(ctx.rank))
    return run, feeds(resolved.recipe, resolved.plan, corpus, place.device)[0]


def saved(ctx, text, folder, plan):
    run, feed = started(ctx, text, plan)
    for step in range(3):
        train_step(run, feed.fetch(step, run.leaves))
    boxes = [*pieces_of(run), *kept_of(run)]
    save(Path(folder), 3, boxes, {"step": 3}, rank=ctx.rank, world=ctx.world, token="t")
    run.mesh.world.barrier()
    return sums(run)


def resumed(ctx, text, folder, plan):
    run, _ = started(ctx, text, plan)
    state = restore(run, Path(folder) / "checkpoints" / "step-000003")
    return [state["step"], sums(run), run.sync.loaded]


def sums(run):
    return {
        "steps": int(run.sync.steps),
        "boxes": [_box(s, run.sync.sums[f"{s.name}/sum"]) for s in run.sync.slots],
    }


def _box(slot, value):
    return slot.name, slot.shape, slot.start, value.tolist()


def whole(results):
    full = {}
    for name, shape, start, values in (box for result in results for box in result["boxes"]):
        part = torch.tensor(values)
        tensor = full.setdefault(name, torch.full(shape, torch.nan))
        if part.numel():
            tensor[tuple(slice(a, a + n) for a, n in zip(start, part.shape, strict=True))] = part
    return full


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("to be or not to be, that is the question. " * 40)
    return str(path)


@pytest.mark.parametrize(
    ("first", "then", "ranks"), [("dp=2", "shard=2", 2), ("shard=2", "tp=2", 2), ("tp=2", "dp=1", 1)]
)
def test_what_all_replicas_keep_alike_loads_under_any_layout(first, then, ranks, text, tmp_path, threads):
    more = {"text": text, "folder": str(tmp_path)}
    before = threads(saved, 2, plan=f"{first} sync={POLICIES}:Keeping", **more)
    after = threads(resumed, ranks, plan=f"{then} sync={POLICIES}:Keeping", **more)
    want, got = whole(before), whole([result for _, result, _ in after])
    assert want.keys() == got.keys()
    assert all(torch.equal(want[name], got[name]) for name in want)
    assert any(bool(tensor.any()) for tensor in got.values())
    assert [(step, result["steps"]) for step, result, _ in after] == [(3, 3)] * ranks
    assert all("steps" in loaded for _, _, loaded in after)


def test_a_replica_gets_its_own_back_and_a_new_one_begins_anew(text, tmp_path, threads):
    more = {"text": text, "folder": str(tmp_path)}
    plan = f"sync={POLICIES}:Apart"
    before = threads(saved, 2, plan=f"dp=2 {plan}", **more)
    assert [result["steps"] for result in before] == [3, 33]
    names = tensor_names(tmp_path / "checkpoints" / "step-000003")
    assert {"sync/0/steps", "sync/1/steps"} <= set(names)
    assert [result["steps"] for _, result, _ in threads(resumed, 2, plan=f"dp=2 {plan}", **more)] == [3, 33]
    four = threads(resumed, 4, plan=f"dp=4 {plan}", **more)
    assert [result["steps"] for _, result, _ in four] == [3, 33, 0, 0]
    assert [bool(loaded) for _, _, loaded in four] == [True, True, False, False]


def test_policies_that_keep_nothing_add_nothing(text, tmp_path, threads):
    class Nobody:
        rank, world, local_rank = 0, 1, 0

    run, _ = started(Nobody, text, "dp=1")
    assert kept_of(run) == []
