"""A pretrained model on a file of chats, with a loss over the answers: adapters or all weights learn the same under every
plan."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.make_chats import chats
from tests.models.hf.families import theirs, written
from unisono.config import Recipe, resolve
from unisono.plan import Plan

pytest.importorskip("transformers")


def losses(ctx: Any, text: str, plan: str) -> list[float]:
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, feeds, place_of
    from unisono.train.data.load import load
    from unisono.train.step.train_step import train_step

    got = resolve(Recipe.model_validate_json(text), f"{plan} precision=fp64", ctx.world)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    corpus = load(got.recipe.data, got.recipe.model)
    run = build(got.recipe, got.plan, place, corpus, Recorder(ctx.rank))
    feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
    found = [train_step(run, feed.fetch(run.step, run.leaves)).loss for _ in range(3)]
    feed.close()
    return found


def recipe(folder: Path, **train: Any) -> str:
    """A Llama of transformers on chats of unequal lengths."""
    model = theirs(written("llama", folder / "config", max_position_embeddings=96))
    model.save_pretrained(folder / "theirs")
    lines = "".join(json.dumps(chat) + "\n" for chat in chats(200))
    (folder / "chats.jsonl").write_text(lines)
    keys = {
        "steps": 3,
        "global_batch": 6,
        "micro_batch": 1,
        "warmup_steps": 0,
        "lr": 0.02,
        "dtype": "float64",
        **train,
    }
    fields = {
        "model": {"kind": f"hf:{folder / 'theirs'}"},
        "data": {"source": f"jsonl:{folder / 'chats.jsonl'}"},
        "train": keys,
    }
    return Recipe.model_validate_json(json.dumps(fields)).model_dump_json()


def held_to_one_device(folder: Path, threads: Any, plans: tuple[str, ...], **train: Any) -> None:
    text = recipe(folder, **train)
    want = threads(losses, 1, text=text, plan="dp=1")[0]
    assert want[-1] < want[0], "something is learnt"
    for plan in plans:
        for found in threads(losses, Plan.parse(plan).world, text=text, plan=plan):
            assert found == pytest.approx(want, rel=1e-12), plan


@pytest.mark.slow
def test_adapters_on_chats(tmp_path: Path, threads: Any) -> None:
    held_to_one_device(tmp_path, threads, ("tp=2 pp=2",), lora_rank=4)


@pytest.mark.slow
@pytest.mark.parametrize("train", [{"lora_rank": 4}, {}], ids=["adapters", "all weights"])
def test_same_losses(train: dict[str, Any], tmp_path: Path, threads: Any) -> None:
    held_to_one_device(tmp_path, threads, ("dp=3", "tp=2 pp=2", "shard=3"), **train)
