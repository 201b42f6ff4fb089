"""What a codec keeps: beside a second copy of the model, among other members, and after a step that did not count."""

from datetime import timedelta

import pytest
import torch

from tests.codecs.test_training import alike, trained
from tests.sync.test_drive import drawn
from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.codecs import CODECS
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.sync.every_step import EveryStepSync
from unisono.train.state.checkpoint import latest
from unisono.train.step.join import join
from unisono.train.step.train_step import train_step

pytestmark = pytest.mark.timeout(120)


def sums(results) -> dict[str, torch.Tensor]:
    """What is left of each parameter, over all ranks."""
    found: dict[str, torch.Tensor] = {}
    for result in results:
        for key, x in result["own"].items():
            found[key] = found.get(key, 0) + x
    return found


def test_each_copy_of_a_stage_keeps_and_gets_back_its_own(text, tmp_path, threads) -> None:  # noqa: F811
    """DualPipe: row 0 and row 1 both hold each stage, and see other micro-batches."""
    plan = "dp=2 pp=2 schedule=dualpipe micros=4 codec=powersgd:r=2+ef"
    whole = threads(trained, 4, text=text, plan=plan, steps=4)
    was = threads(trained, 4, text=text, plan=plan, steps=2, folder=str(tmp_path))
    here = str(latest(tmp_path))
    then = threads(trained, 4, text=text, plan=plan, steps=2, first=2, resume=here)
    for one, other in zip(then, whole, strict=True):
        assert alike(one["weights"], other["weights"]) and alike(one["state"], other["state"])
    alone = "dp=2 micros=4 codec=powersgd:r=2+ef"  # the model once: what both copies left comes together
    now = threads(trained, 2, text=text, plan=alone, steps=0, first=2, resume=here)
    before, after = sums(was), sums(now)
    for key, x in before.items():
        torch.testing.assert_close(after[key], x, rtol=1e-9, atol=1e-12)
    threads(trained, 2, text=text, plan=alone, steps=1, first=2, resume=here, folder=str(tmp_path / "more"))
    single = threads(
        trained, 2, text=text, plan=alone, steps=0, first=3, resume=str(latest(tmp_path / "more"))
    )
    both = threads(trained, 4, text=text, plan=plan, steps=0, first=3, resume=str(latest(tmp_path / "more")))
    kept = sums(both)
    for key, x in sums(single).items():
        torch.testing.assert_close(kept.get(key, torch.zeros_like(x)), x, rtol=1e-9, atol=1e-12)


def come_and_gone(ctx, text, plan):  # noqa: F811
    """Two steps of both, one of rank 0 alone, then both again: what each keeps before and after each change."""
    run, feed = started(ctx, text, "gpt", plan)
    for _ in range(2):
        train_step(run, feed.fetch(run.step, run.leaves))
    seen, everybody = [{key: x.clone() for key, x in run.sync.state().items()}], run.mesh.members
    one = everybody.now([0])
    if ctx.rank == 0:
        run = join(run, one)
        train_step(run, feed.fetch(run.step, run.leaves))
        seen.append({key: x.clone() for key, x in run.sync.state().items()})
        ctx.store.set("gone", "")
    ctx.store.get("gone")
    run = join(run, one.now(everybody.ranks))
    seen.append({key: x.clone() for key, x in run.sync.state().items()})
    run.step = 3
    for _ in range(2):
        train_step(run, feed.fetch(run.step, run.leaves))
    weights = {slot.name: slot.master.detach().clone() for slot in run.local.slots}
    return {
        "seen": seen,
        "steps": int(run.sync.state().get("steps", 0)),
        "at": run.mesh.at,
        "weights": weights,
    }


@pytest.mark.parametrize("codec", ["topk:ratio=0.05+ef", "randomk:ratio=0.1+ef", "powersgd:r=2+ef"])
def test_members_that_come_and_go_take_nothing_along(codec, text, threads) -> None:  # noqa: F811
    first, second = threads(come_and_gone, 2, text=text, plan=f"dp=2 codec={codec}")
    left = [key for key in first["seen"][0] if key.endswith("/left")]
    assert any(first["seen"][0][key].any() for key in left)
    for result in (first, second):
        for state in result["seen"][1:]:
            assert all(torch.equal(state[key], result["seen"][0][key]) for key in left)
    others = [key for key in first["seen"][-1] if not key.endswith("/left")]
    assert all(torch.equal(first["seen"][-1][key], second["seen"][-1][key]) for key in others)
    assert first["steps"] == second["steps"]


@pytest.mark.parametrize("codec", ["topk:ratio=0.5,dense=0+ef", "powersgd:r=1"])
def test_what_a_step_that_was_not_finite_spoiled_goes_into_no_checkpoint(codec) -> None:
    dp = Mesh(Shape(dp=1), 0, Recorder(0), timedelta(seconds=30)).dp
    p = torch.nn.Parameter(torch.zeros(8, 8).double())
    sync = EveryStepSync(dp, CODECS.read(codec).bind())
    drive = sync._drive = type(sync._drive)(sync._drive.coder, dp, {"p": p})
    sync.kept = drive.kept
    bucket = Bucket([p])
    for step, bad in enumerate((0.0, torch.nan)):
        bucket.flat.copy_(drawn(0, step, 64) + bad)
        drive.begin(bucket)
        drive.finish()
        if bucket.flat.isfinite().all():
            sync.after_update(step)
            assert sync.state()
        else:
            sync.undone()
    with pytest.raises(RuntimeError, match="go on from the last checkpoint"):
        sync.state()
