"""Untouched models of transformers under plans, beside a loop with that library and torch alone on one process: the
same losses, gradients and weights for three steps, from the same weights."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.hf.families import plain, theirs, to_ours, to_theirs, written
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.train.build import build as building
from unisono.train.build.build import place_of
from unisono.train.data.load import load
from unisono.verify.play import record_of, start, watched_step
from unisono.verify.record import Record

STEPS, BATCH, LR = 3, 4, 1e-3
TEXT = "to be, or not to be, that is the question: whether 'tis nobler in the mind to suffer. "
PLANS = ("tp=2", "pp=2", "shard=4", "dp=2 tp=2", "cp=2")
FIVE = ("llama", "gpt2", "qwen3", "mistral", "mixtral")
QUICK = {("llama", "dp=2 tp=2"), ("gpt2", "tp=2 pp=2"), ("mixtral", "shard=2 ep=2")}
TABLE = (
    *((family, plan, 1e-9) for family in FIVE for plan in PLANS),
    *(("mixtral", plan, 1e-9) for plan in ("shard=2 ep=2", "tp=2 ep=2", "cp=2 ep=2", "shard=2 tp=2 ep=2", "shard=2 tp=2 ep=4")),
    *(("qwen2", plan, 1e-9) for plan in ("tp=2", "cp=2 cp_kind=ulysses")),
    ("gpt2", "tp=2 pp=2", 1e-9),
    ("mistral", "cp=2 cp_kind=ulysses", 1e-9),
    ("llama", "shard=2 tp=2 pp=2 schedule=zb1p", 1e-9),
    # their norms multiply in float32, whatever the weights are, and add their gradients up in it
    *((family, plan, 1e-6) for family in ("gemma2", "gemma3_text") for plan in ("tp=2", "pp=2", "cp=2", "shard=4")),
    *((family, plan, 1e-9) for family in ("bert", "vit") for plan in ("dp=2", "shard=4", "pp=2")),
)  # fmt: skip


@pytest.fixture
def double():
    before = torch.get_default_dtype()
    yield
    torch.set_default_dtype(before)


def _recipe(family: str, folder: Path) -> Recipe:
    (folder / "text.txt").write_text(TEXT * 8)
    data = (
        DataConfig(source="digits") if family == "vit" else DataConfig(source=f"text:{folder / 'text.txt'}")
    )
    train = TrainConfig(
        steps=STEPS, global_batch=BATCH, micro_batch=1, dtype="float64", lr=LR, min_lr=LR, warmup_steps=0,
        weight_decay=0.0, clip=0.0, betas=(0.9, 0.95), eps=1e-8,
    )  # fmt: skip
    return Recipe(seed=7, model=ModelConfig(kind=f"hf:{written(family, folder)}"), data=data, train=train)


def _routed(ctx, recipe: Recipe, plan: str) -> list[list[torch.Tensor]]:
    """Of each router of this rank's stages, the logits of its leaves in the first step."""
    resolved = resolve(recipe, plan, ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run, feed = start(resolved, place, load(recipe.data, recipe.model))
    gates = [
        m for stage in run.local.stages.values() for n, m in stage.named_modules() if n.endswith("mlp.gate")
    ]
    seen: list[list[torch.Tensor]] = [[] for _ in gates]
    for gate, kept in zip(gates, seen, strict=True):
        gate.register_forward_hook(lambda module, args, result, kept=kept: kept.append(result[0].detach()))
    watched_step(run, feed, range(1))
    run.mesh.world.barrier()
    return seen


def _played(ctx, recipe: Recipe, plan: str, folder: Path) -> None:
    resolved = resolve(recipe, plan, ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    run, feed = start(resolved, place, load(recipe.data, recipe.model))
    for step in range(STEPS):
        watched_step(run, feed, range(step, step + 1)).write(record_of(folder, step))
    run.mesh.world.barrier()


@pytest.mark.parametrize(
    ("family", "plan", "bound"),
    [pytest.param(*row, marks=() if row[:2] in QUICK else pytest.mark.slow) for row in TABLE],
)
def test_three_steps_are_those_of_the_library_alone(
    family: str, plan: str, bound: float, tmp_path, threads, monkeypatch, double
) -> None:
    recipe = _recipe(family, tmp_path)
    corpus = load(recipe.data, recipe.model)
    model = theirs(tmp_path)
    state = {name: x.clone() for name, x in model.state_dict().items()}

    def values(ours, seed, device):
        whole = to_ours(ours.names, state)
        return lambda name: whole[name]

    monkeypatch.setattr(building, "initial_values", values)
    alone = resolve(recipe, "dp=1 precision=fp64", 1)
    one = building.feeds(alone.recipe, alone.plan, corpus, torch.device("cpu"))[0]
    leaves = [one.fetch(step, range(BATCH)) for step in range(STEPS)]
    batches = [
        tuple(torch.cat([getattr(x, part) for x in step]) for part in ("inputs", "targets"))
        for step in leaves
    ]
    right = plain(model, batches, LR)

    ranks = resolve(recipe, f"{plan} precision=fp64", None).plan.world
    threads(_played, ranks, recipe=recipe, plan=f"{plan} precision=fp64", folder=tmp_path)
    names: Any = building.build_model(recipe.model, building.facts_of(corpus)).names
    for step, (loss, grads, weights) in enumerate(right):
        record = Record(record_of(tmp_path, step))
        said = next(note.loss for note in record.notes if note.last)
        assert said == pytest.approx(loss, abs=1e-6), step
        for kind, wanted in (("raw", grads), ("model", weights)):
            ours: Any = {name: record.whole(f"{kind}/{name}") for name in names.shapes}
            found = to_theirs(names, ours)
            assert set(found) == set(wanted)
            for name, x in found.items():
                torch.testing.assert_close(x, wanted[name], rtol=0.0, atol=bound, msg=f"{step} {kind} {name}")


@pytest.mark.parametrize(
    "plan", ["shard=2 ep=2", *(pytest.param(p, marks=pytest.mark.slow) for p in ("tp=2 ep=2", "cp=2 ep=2"))]
)
def test_routers_loss_over_the_global_batch_is_the_librarys(
    plan, tmp_path, threads, monkeypatch, double
) -> None:
    """The loss itself couples all layers and samples, so it is not trained; of what routers say it is the same."""
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    recipe = _recipe("mixtral", tmp_path)
    corpus, model = load(recipe.data, recipe.model), theirs(tmp_path)
    state = model.state_dict()

    def values(ours, seed, device):
        whole = to_ours(ours.names, state)
        return lambda name: whole[name]

    monkeypatch.setattr(building, "initial_values", values)
    alone = resolve(recipe, "dp=1 precision=fp64", 1)
    one = building.feeds(alone.recipe, alone.plan, corpus, torch.device("cpu"))[0]
    inputs = torch.cat([leaf.inputs for leaf in one.fetch(0, range(BATCH))])
    right = model(inputs, output_router_logits=True, use_cache=False).aux_loss
    ranks = threads(_routed, 2, recipe=recipe, plan=f"{plan} precision=fp64")
    layers: Any = tuple(torch.cat([x for rank in ranks for x in rank[layer]]) for layer in range(2))
    assert [len(x) for x in layers] == [BATCH * 16] * 2
    torch.testing.assert_close(load_balancing_loss_func(layers, 4, 2), right, rtol=0.0, atol=1e-6)
