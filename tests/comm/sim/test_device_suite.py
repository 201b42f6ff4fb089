"""On the simulated device plans compute what they compute on processors, miss no wait, and wait for it once a step."""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from unisono.config import LaunchConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.verify.prover import Proof, prove

pytestmark = pytest.mark.timeout(600)

SMALL = Recipe(
    seed=3,
    model=ModelConfig(n_layer=4, n_head=2, d_model=32, context=32, dropout=0.1),
    train=TrainConfig(steps=8, global_batch=8, micro_batch=2, lr=1e-2, warmup_steps=2, clip=0.5),
    launch=LaunchConfig(timeout=60.0),
)
TWO = [
    "dp=2", "dp=2 precision=bf16", "dp=2 precision=fp16", "dp=2 sync=canonical", "dp=2 codec=int8",
    "dp=2 codec=powersgd:r=2", "shard=2 zero=1", "shard=2 zero=2", "shard=2 zero=3", "shard=2 offload=optimizer",
    "shard=2 zero=3:prefetch=1", "dp=2 offload=params+activations", "dp=2 recompute=full", "tp=2", "cp=2",
    "cp=2 cp_kind=ulysses", "pp=2 micros=4", "pp=2 micros=4 schedule=gpipe", "pp=2 micros=4 schedule=interleaved:v=2",
    "pp=2 micros=4 schedule=zb1p", "pp=2 micros=4 schedule=zbv", "pp=2 micros=4 schedule=dualpipev",
]  # fmt: skip
FOUR = [
    "dp=2 tp=2", "dp=2 pp=2", "dp=2 shard=2", "shard=2 cp=2", "pp=4 micros=4", "pp=2 tp=2 micros=4",
    "pp=4 micros=4 schedule=zb1p", "pp=2 cp=2 micros=4 schedule=interleaved:v=2", "shard=2 pp=2", "shard=2 tp=2",
    "dp=4 sync=canonical", "shard=4 zero=3", "dp=2 tp=2 sync=canonical",
]  # fmt: skip
FREE = [
    "dp=2 sync=priority", "dp=2 sync=gossip", "dp=2 sync=adasum", "dp=2 sync=delayed", "dp=2 sync=local_sgd:h=2",
    "dp=2 sync=diloco:h=2", "dp=2 sync=lag", "dp=2 sync=slowmo", "dp=2 sync=noloco", "dp=2 sync=adaptive",
    "dp=2 sync=quorum:k=2", "shard=2 zero=3:wire=int8,prefetch=1", "dp=2 codec=topk:ratio=0.1+ef", "pp=2 micros=4 schedule=pipedream",
]  # fmt: skip
"""Of which no one device has the weights: held to what they are on processors."""


@pytest.fixture(scope="module")
def proven() -> Callable[[str], Proof]:
    """What comes of a plan: all of one list are proven at once."""
    seen: dict[str, Proof] = {}

    def of(plan: str) -> Proof:
        if plan not in seen:
            plans = next(plans for plans in (TWO, FOUR) if plan in plans)
            read = [Plan.parse(one) for one in plans]
            seen.update(zip(plans, prove(SMALL, read, steps=2, backend="sim", keep_going=True), strict=True))
        return seen[plan]

    return of


@pytest.mark.parametrize("plan", TWO)
def test_a_plan_computes_what_one_device_computes(plan, proven):
    assert proven(plan).passed, proven(plan)


def test_so_does_one_of_experts():
    model = ModelConfig(kind="moe", n_layer=2, n_head=2, d_model=32, context=32, n_experts=4)
    (proof,) = prove(
        SMALL.model_copy(update={"model": model}), [Plan.parse("shard=2 ep=2")], steps=2, backend="sim"
    )
    assert proof.passed, proof


@pytest.mark.slow
@pytest.mark.parametrize("plan", FOUR)
def test_so_does_one_of_four_ranks(plan, proven):
    assert proven(plan).passed, proven(plan)


def trained(ctx: Any, recipe: str, plans: list[str]) -> dict[str, Any]:
    """Per plan: losses of five steps, races, and the lines at which the host waited in the last step."""
    from unisono.comm.device import synchronize, tally
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, connect, feeds, place_of
    from unisono.train.data.load import load
    from unisono.train.step.train_step import train

    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    connect(place, ctx.store)
    seen = {}
    for plan in plans:
        got = resolve(Recipe.model_validate_json(recipe), plan, ctx.world)
        corpus = load(got.recipe.data, got.recipe.model)
        run = build(got.recipe, got.plan, place, corpus, Recorder())
        feed, _ = feeds(got.recipe, got.plan, corpus, place.device)
        losses, waits = list[float](), [Counter[str]()]
        for _, step in zip(range(5), train(run, feed, got.recipe.train.steps), strict=False):
            losses.append(step.loss)
            waits = [*waits[-1:], Counter(tally(place.device).waits if ctx.backend != "gloo" else {})]
        feed.close()
        synchronize(place.device)  # what is under way at the end of a run that goes no further
        races = [str(race) for race in tally(place.device).races] if ctx.backend != "gloo" else []
        seen[plan] = {"losses": losses, "races": races, "waits": waits[-1] - waits[-2]}
    return seen


def on_two(nursery: Any, plans: list[str], backend: str) -> dict[str, Any]:
    train = SMALL.train.model_copy(update={"clip": 0.0})  # pipedream cannot clip
    recipe = SMALL.model_copy(update={"train": train}).model_dump_json(exclude_unset=True)
    argument = {
        "module": __name__,
        "file": __file__,
        "function": "trained",
        "group": False,
        "kwargs": {"recipe": recipe, "plans": plans},
    }
    outcome = nursery.run(argument, 2, timeout=300.0, backend=backend)
    assert outcome.error is None, outcome.error.trace
    return outcome.results[0]["value"]


def test_it_computes_what_processors_compute(nursery):
    """And no wait is missing, and a step that has come to rest waits for the device once at most."""
    plans = [*FREE, "dp=2", "shard=2 zero=3", "tp=2", "pp=2 micros=4", "cp=2"]
    here, there = on_two(nursery, plans, "sim"), on_two(nursery, plans, "gloo")
    for plan in plans:
        assert here[plan]["losses"] == pytest.approx(there[plan]["losses"], rel=2e-5), plan
        assert not here[plan]["races"], plan
    exact = [plan for plan in plans if plan not in FREE or "_sgd" in plan or "diloco" in plan]
    assert {plan: here[plan]["waits"] for plan in exact if sum(here[plan]["waits"].values()) > 1} == {}


def meeting(ctx: Any) -> dict[str, Any]:
    """What a group's operations come to on the device, read at once."""
    import torch

    from unisono.comm.mesh import Mesh, Shape
    from unisono.observe.span import Recorder
    from unisono.train.build.build import connect, place_of

    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    connect(place, ctx.store)
    group = Mesh(Shape(dp=2), ctx.rank, Recorder(), place.timeout).dp
    x = torch.full((4,), 1.0 + ctx.rank, device=place.device)
    return {
        "all_reduce": group.all_reduce(x.clone()).tolist(),
        "all_gather": group.all_gather(x[:1]).tolist(),
        "reduce_scatter": group.reduce_scatter(x).tolist(),
        "broadcast": group.broadcast(x.clone(), 1).tolist(),
    }


def test_tensors_meet_on_the_device(nursery):
    argument = {"module": __name__, "file": __file__, "function": "meeting", "group": False, "kwargs": {}}
    outcome = nursery.run(argument, 2, timeout=60.0, backend="sim")
    assert outcome.error is None, outcome.error.trace
    assert outcome.results[0]["value"] == {
        "all_reduce": [3.0] * 4, "all_gather": [1.0, 2.0], "reduce_scatter": [3.0] * 2, "broadcast": [2.0] * 4
    }  # fmt: skip


def losses(tmp_path: Path, *flags: str) -> list[float]:
    words = ["train", "--json", "--quiet", "--launch.backend", "sim", "--out.report", "false", *flags]
    done = subprocess.run(
        [sys.executable, "-m", "unisono", *words], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    lines = (tmp_path / json.loads(done.stdout)["run_dir"] / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines]


SIZES = [
    "--model.n_layer",
    "2",
    "--model.d_model",
    "32",
    "--model.context",
    "32",
    "--train.global_batch",
    "4",
]


def test_a_checkpoint_holds_what_was_computed(tmp_path):
    plan = [
        "--plan",
        "dp=2 offload=optimizer",
        "--train.steps",
        "4",
        "--train.save_every",
        "2",
        "--name",
        "whole",
    ]
    whole = losses(tmp_path, *SIZES, *plan)
    (run,) = (
        path for path in (tmp_path / "runs" / "whole").iterdir() if not path.is_symlink() and path.is_dir()
    )
    again = losses(tmp_path, "--resume", str(run / "checkpoints" / "step-000002"))
    assert again[-2:] == whole[-2:]
