"""fp16: an overflow anywhere is one everywhere, costs one play of the step, and leaves no trace in the weights."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small import recipe, started
from unisono.plan import Plan
from unisono.spec.errors import UserCodeError
from unisono.train.step.scaling import LEAST, DynamicScale, scaler_of


def steps(ctx: Any, folder: str, plan: str, count: int = 3, break_on: int = -1) -> dict[str, Any]:
    """Some steps; break_on: the rank whose first backward makes an infinity, on one parameter."""
    from unisono.train.state.run_state import pieces_of
    from unisono.train.step.train_step import train

    run, feed, _ = started(ctx, recipe(Path(folder), dtype="float32"), plan)
    if ctx.rank == break_on:
        hit = run.local.slots[0].live
        broken: list[Any] = [hit.register_hook(lambda grad: (broken.pop().remove(), grad * float("inf"))[1])]
    reports = list(train(run, feed, count))
    pieces = {piece.name: piece.tensor.detach().clone() for piece in pieces_of(run) if piece.saved}
    told = [report.says for report in reports]
    return {"step": run.step, "losses": [r.loss for r in reports], "told": told, "pieces": pieces}


def scales(found: list[dict[str, Any]]) -> list[Any]:
    assert all(rank["told"] == found[0]["told"] for rank in found)
    return [(told["loss_scale"], told["overflows"]) for told in found[0]["told"]]


@pytest.fixture
def folder(tmp_path: Path) -> str:
    return str(tmp_path)


def same(found: list[dict[str, Any]], right: list[dict[str, Any]]) -> None:
    for got, want in zip(found, right, strict=True):
        assert got["step"] == want["step"] and got["losses"] == want["losses"]
        assert all(torch.equal(got["pieces"][name], tensor) for name, tensor in want["pieces"].items())


@pytest.mark.parametrize("plan", ["dp=1", "shard=2 zero=1", "dp=2 pp=2", "shard=2 tp=2"])
def test_a_scale_that_was_too_large_leaves_no_trace(threads: Any, folder: str, plan: str) -> None:
    ranks = Plan.parse(plan).world

    def play(scale: float) -> list[dict[str, Any]]:
        text = f"{plan} precision=fp16:scale={int(scale)}"
        return threads(steps, ranks, group=ranks > 1, folder=folder, plan=text, count=2)

    large = play(1 << 24)
    (first, count), *_ = scales(large)
    assert count > 0 and first == 2.0 ** (24 - count)
    right = play(first)
    assert scales(right) == [(first, 0)] * 2
    same(large, right)


@pytest.mark.parametrize("plan", ["dp=2", "pp=2", "tp=2", "dp=2 sync=canonical"])
@pytest.mark.parametrize("rank", [0, 1])
def test_an_overflow_on_one_rank_is_one_on_all(threads: Any, folder: str, plan: str, rank: int) -> None:
    given = {"folder": folder, "count": 2}
    found = threads(steps, 2, plan=f"{plan} precision=fp16:scale=1024", break_on=rank, **given)
    assert scales(found) == [(512, 1)] * 2
    same(found, threads(steps, 2, plan=f"{plan} precision=fp16:scale=512", **given))


def goes_on(ctx: Any, folder: str, plan: str) -> Any:
    from unisono.train.state.checkpoint import save
    from unisono.train.state.run_state import kept_of, pieces_of, restore
    from unisono.train.step.train_step import train

    told = recipe(Path(folder), dtype="float32")
    run, feed, _ = started(ctx, told, plan)
    list(train(run, feed, 2))
    where = save(
        Path(folder) / "run", 2, [*pieces_of(run), *kept_of(run)], {"step": 2}, rank=ctx.rank, world=ctx.world,
        token="t",
    )  # fmt: skip
    ends = [report.says for report in train(run, feed, 4)]
    again, feed, _ = started(ctx, told, plan)
    restore(again, where)
    begun = again.update.scaler.says()
    return begun, ends, [report.says for report in train(again, feed, 4)]


def test_the_scale_is_in_checkpoints(threads: Any, folder: str) -> None:
    for begun, ends, after in threads(
        goes_on, 2, folder=folder, plan="dp=2 precision=fp16:scale=1024,window=3"
    ):
        assert begun == {"loss_scale": 1024, "overflows": 0}
        assert [told["loss_scale"] for told in ends] == [2048, 2048]  # the third calm step doubles it
        assert after == ends


def test_a_scale_grows_and_falls_between_its_bounds() -> None:
    scale = scaler_of("fp16", Plan.parse("precision=fp16:scale=4,window=2").arithmetic, torch.device("cpu"))
    assert isinstance(scale, DynamicScale)
    seen = []
    for finite in (True, True, True, False, True, True, False, False, False, False, False):
        seen.append((scale.overflowed(finite), scale.says()["loss_scale"]))
    assert [again for again, _ in seen] == [False] * 3 + [True] + [False] * 2 + [True] * 3 + [False] * 2
    assert [s for _, s in seen] == [4, 8, 8, 4, 4, 8, 4, 2, LEAST, LEAST, LEAST]


def ends_badly(ctx: Any, folder: str, plan: str) -> Any:
    from unisono.train.step.train_step import train
    from unisono.train.watch.locate_nan import locate_nan

    run, feed, _ = started(ctx, recipe(Path(folder), dtype="float32"), plan)
    with torch.no_grad():
        run.local.slots[0].master.fill_(float("nan"))
    *_, last = train(run, feed, 3)
    return run.step, last, locate_nan(run, feed.fetch(0, run.leaves), last, ctx.rank, "")


def test_a_scale_at_its_least_ends_the_run_and_says_so(threads: Any, folder: str) -> None:
    ((step, last, error),) = threads(
        ends_badly, 1, group=False, folder=folder, plan="precision=fp16:scale=16"
    )
    assert (step, last.finite, last.says) == (0, False, {"loss_scale": 1.0, "overflows": 5})
    assert isinstance(error, UserCodeError) and error.code == "N01"
    assert "scale of the loss has fallen to its least, 1" in error.what and "precision=bf16" in error.fix


def test_metrics_have_the_scale(tmp_path: Path) -> None:
    from unisono.observe.span import Recorder
    from unisono.spec.sink import SINKS, RunFacts, StepRecord

    facts = RunFacts(tmp_path, 0, 1, "here", "gloo", {}, 0, 1, Recorder())
    sink = SINKS.read("metrics").open(facts)
    sink.observe([StepRecord(1, 2.0, 0.1, 1.0, 8, 0.5, {}, {}, 1.0, {"loss_scale": 512.0, "overflows": 1})])
    sink.close()
    line = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert (line["loss_scale"], line["overflows"]) == (512.0, 1)
