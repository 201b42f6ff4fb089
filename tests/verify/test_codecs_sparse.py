"""Sparse and low-rank codecs end to end: beside every axis, four micro-batches a step, clipped, saved, gone on with."""

from collections import defaultdict
from pathlib import Path

import pytest
import torch

from tests.threads import prove
from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step

pytestmark = pytest.mark.timeout(600)

CODECS = (
    "int8",
    "topk:ratio=0.01+ef",
    "topk:ratio=0.05,kind=chunked,values=bf16+ef",
    "threshold:ratio=0.05,every=2+ef",
    "randomk:ratio=0.05+ef",
    "block:ratio=0.2+ef",
    "block:ratio=0.2,kind=rows+ef",
    "powersgd:r=4+ef",
    "chunktopk+ef:beta=0.95",
)
INSIDE = ("", "tp=2", "pp=2", "shard=2", "shard=2 zero=1", "cp=2", "tp=2 pp=2")


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
def test_they_are_within_their_bound_beside_every_axis(codec: str) -> None:
    model = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1)
    train = TrainConfig(steps=4, global_batch=8, micro_batch=1, lr=1e-2, clip=0.5, dtype="float64")
    plans = [Plan.parse(f"dp=2 {inside} codec={codec} precision=fp64") for inside in INSIDE]
    for proof in prove(Recipe(seed=3, model=model, train=train), plans, steps=3):
        assert proof.passed and proof.fidelity == "LOSSY", proof


def trained(ctx, text, plan, steps, *, first=0, folder=None, resume=None, **train):  # noqa: F811
    """Losses and copies of weights of one rank after some steps, and what it keeps."""
    live, feed = started(ctx, text, "gpt", plan, **train)
    if resume is not None:
        restore(live, Path(resume))
        assert live.step == first
    reports = [train_step(live, feed.fetch(step, live.leaves)) for step in range(first, first + steps)]
    kept = {key: x.clone() for key, x in live.sync.state().items()}
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(Path(folder), live.step, boxes, {"step": live.step}, rank=ctx.rank, world=ctx.world, token="t")
    return {
        "losses": [report.loss for report in reports],
        "norms": [report.norm for report in reports],
        "weights": {(s.name, s.start): s.master.detach().clone() for s in live.local.slots},
        "kept": kept,
    }


def assert_copies_agree(results) -> None:
    """All ranks that hold a box of a parameter hold the same bits."""
    held = defaultdict(list)
    for result in results:
        for key, weight in result["weights"].items():
            held[key].append(weight)
    for (name, start), copies in held.items():
        assert all(torch.equal(copy, copies[0]) for copy in copies), f"{name} at {start}"
    assert any(len(copies) > 1 for copies in held.values())


@pytest.mark.parametrize("codec", ["topk:ratio=0.01+ef", "powersgd:r=4+ef"])
def test_training_learns_and_all_copies_stay_alike(threads, text, codec) -> None:  # noqa: F811
    plain = threads(trained, 2, text=text, plan="dp=2", steps=6)
    found = threads(trained, 2, text=text, plan=f"dp=2 codec={codec}", steps=6)
    assert_copies_agree(found)
    assert found[0]["losses"][0] == plain[0]["losses"][0]
    assert found[0]["losses"][-1] < found[0]["losses"][0] - 0.05
    assert found[0]["norms"] == found[1]["norms"] != plain[0]["norms"]


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("inside", ["dp=3", "dp=2 tp=2", "dp=2 tp=2 pp=2", "dp=2 shard=2", "dp=2 cp=2"])
def test_all_copies_stay_alike_beside_other_axes(threads, text, codec, inside) -> None:  # noqa: F811
    ranks = Plan.parse(inside).world
    batch = {"global_batch": 12} if "3" in inside else {}
    assert_copies_agree(threads(trained, ranks, text=text, plan=f"{inside} codec={codec}", steps=4, **batch))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("inside", ["tp=2", "pp=2"])
def test_a_resumed_run_goes_on_exactly(threads, text, tmp_path, codec, inside) -> None:  # noqa: F811
    """On pp both uses of a tied weight have something left, each on its stage."""
    plan = f"dp=2 {inside} codec={codec}"
    whole = threads(trained, 4, text=text, plan=plan, steps=6)
    threads(trained, 4, text=text, plan=plan, steps=3, folder=str(tmp_path))
    found = threads(trained, 4, text=text, plan=plan, steps=3, first=3, resume=str(latest(tmp_path)))
    for mine, want in zip(found, whole, strict=True):
        assert mine["losses"] == want["losses"][3:]
        assert all(torch.equal(x, want["weights"][key]) for key, x in mine["weights"].items())
        assert all(torch.equal(x, want["kept"][key]) for key, x in mine["kept"].items())


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("dp", [1, 4])
def test_at_another_dp_nothing_that_is_left_gets_lost(threads, text, tmp_path, codec, dp) -> None:  # noqa: F811
    before = threads(trained, 2, text=text, plan=f"dp=2 codec={codec}", steps=3, folder=str(tmp_path))
    plan = f"dp={dp} codec={codec}" if dp > 1 else "dp=1"
    at = {"text": text, "plan": plan, "first": 3, "resume": str(latest(tmp_path))}
    if dp > 1:
        now = threads(trained, dp, steps=0, **at)
        for key in (key for key in before[0]["kept"] if key.endswith("/left")):
            was, found = (sum(result["kept"][key] for result in results) for results in (before, now))
            assert torch.allclose(was, found, rtol=1e-12, atol=1e-15)
        for key in (key for key in before[0]["kept"] if not key.endswith("/left")):
            assert all(torch.equal(result["kept"][key], before[0]["kept"][key]) for result in now)
    found = threads(trained, dp, steps=3, **at)
    if dp > 1:
        assert_copies_agree(found)
    assert found[0]["losses"][-1] < before[0]["losses"][0]
