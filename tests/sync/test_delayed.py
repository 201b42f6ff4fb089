"""sync=delayed: the update of a step is made some steps later, and the run is that of one device which does the same."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.threads import prove as prove_on_threads
from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.sync import Verdict
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono.train.step.update import set_rate

pytestmark = pytest.mark.timeout(120)


def trained(ctx, text, plan, steps=9, folder=None, resume=None, **train) -> dict[str, Any]:  # noqa: F811
    live, feed = started(ctx, text, "gpt", plan, **train)
    if resume is not None:
        restore(live, resume)
    weights, reports = [], []
    for step in range(live.step, live.step + steps):
        reports.append(train_step(live, feed.fetch(step, live.leaves)))
        weights.append(torch.cat([slot.master.detach().flatten().double() for slot in live.local.slots]))
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(folder, live.step, boxes, {"step": live.step}, rank=ctx.rank, world=ctx.world, token="t")
    updates = {int(state["step"]) for state in live.update.optimizer.state.values()}
    return {"weights": weights, "reports": reports, "updates": updates}


def close(some: torch.Tensor, others: torch.Tensor) -> bool:
    return ((some - others).norm() / others.norm()).item() < 1e-9


def by_hand(ctx, text, lag, steps=9) -> list[torch.Tensor]:  # noqa: F811
    """One device, in plain words: gradients of old weights, each applied once, at its own step's rate."""
    live, feed = started(ctx, text, "gpt", "dp=1", lr_schedule="linear", clip=0.0)
    slots, weights = list(live.local.slots), []
    waiting: list[dict[str, torch.Tensor | None]] = []
    made = 0
    for step in range(steps):
        leaves = feed.fetch(step, live.leaves)
        live.player.play(live.row, leaves, live.sync.weigh(sum(x.targets.numel() for x in leaves)), live.seed)
        live.gradients.close()
        waiting.append({s.name: None if s.master.grad is None else s.master.grad.clone() for s in slots})
        live.gradients.forget()
        while len(waiting) > (0 if step == steps - 1 else lag):
            for slot in slots:
                slot.master.grad = waiting[0][slot.name]
            waiting.pop(0)
            set_rate(live.update.optimizer, live.update.rate(made))
            live.update.optimizer.step()
            live.gradients.forget()
            made += 1
        weights.append(torch.cat([slot.master.detach().flatten().double() for slot in slots]))
    return weights


@pytest.mark.parametrize("lag", [1, 3])
def test_each_gradient_makes_one_update_of_its_own_rate_later(threads, text, lag: int) -> None:  # noqa: F811
    (right,) = threads(by_hand, 1, text=text, lag=lag)
    plan = f"sync=delayed:lag={lag}"
    for ranks in (1, 2):
        ends = threads(trained, ranks, text=text, plan=f"dp={ranks} {plan}", lr_schedule="linear", clip=0.0)
        for end in ends:
            assert all(close(a, b) for a, b in zip(end["weights"], right, strict=True))
            assert [r.verdict for r in end["reports"]] == [Verdict.LATER] * lag + [Verdict.APPLY] * (9 - lag)
            assert end["updates"] == {9}  # none is lost at the end
    assert not close(right[0], right[-1])


@pytest.mark.parametrize("plan", ["dp=2 tp=2", "dp=2 pp=2", "dp=2 shard=2"])
def test_any_layout_makes_the_updates_of_one_device(threads, text, plan: str) -> None:  # noqa: F811
    (one,) = threads(trained, 1, text=text, plan="dp=1 sync=delayed:lag=2")
    for end in threads(trained, Plan.parse(plan).world, text=text, plan=f"{plan} sync=delayed:lag=2"):
        for mine, theirs in zip(end["reports"], one["reports"], strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-9)
            assert mine.norm == pytest.approx(theirs.norm, rel=1e-8)


def test_no_lag_is_lock_step_to_the_last_bit(threads, text) -> None:  # noqa: F811
    mine = threads(trained, 2, text=text, plan="dp=2 sync=delayed:lag=0")
    right = threads(trained, 2, text=text, plan="dp=2 sync=every_step")
    assert torch.equal(mine[0]["weights"][-1], right[0]["weights"][-1])


def test_gradients_on_their_way_are_in_checkpoints_of_any_layout(threads, text, tmp_path) -> None:  # noqa: F811
    plan = "sync=delayed:lag=2"
    whole = threads(trained, 2, text=text, plan=f"dp=2 {plan}")
    threads(trained, 2, text=text, plan=f"dp=2 {plan}", steps=6, folder=tmp_path / "two")
    folder = latest(tmp_path / "two")
    same = threads(trained, 2, text=text, plan=f"dp=2 {plan}", steps=3, resume=folder)
    assert torch.equal(same[0]["weights"][-1], whole[0]["weights"][-1])
    for other, ranks in (("dp=1", 1), ("dp=2 pp=2", 4), ("dp=1 tp=2", 2)):
        ends = threads(trained, ranks, text=text, plan=f"{other} {plan}", steps=3, resume=folder)
        wanted = [report.loss for report in whole[0]["reports"][6:]]
        assert [r.loss for r in ends[0]["reports"]] == pytest.approx(wanted, rel=1e-9)
        if ranks == 1:
            assert close(ends[0]["weights"][-1], whole[0]["weights"][-1])
    # The uses of a tied weight, which stages keep each by itself, come together again.
    threads(trained, 2, text=text, plan=f"pp=2 {plan}", steps=6, folder=tmp_path / "cut")
    (end,) = threads(trained, 1, text=text, plan=f"dp=1 {plan}", steps=3, resume=latest(tmp_path / "cut"))
    assert close(end["weights"][-1], whole[0]["weights"][-1])


def test_a_run_that_was_ended_and_goes_on_begins_with_nothing_on_its_way(threads, text, tmp_path) -> None:  # noqa: F811
    threads(trained, 1, text=text, plan="dp=1 sync=delayed", steps=9, folder=tmp_path)
    (end,) = threads(trained, 1, text=text, plan="dp=1 sync=delayed", steps=2, resume=latest(tmp_path))
    assert [r.verdict for r in end["reports"]] == [Verdict.LATER, Verdict.APPLY] and end["updates"] == {10}


def hidden(ctx, text) -> float:  # noqa: F811
    """Seconds of a traced run in which its gradients travelled beside other work."""
    live, feed = started(ctx, text, "gpt", "dp=2 collective=engine sync=delayed:lag=2")
    recorder = live.sync.dp.recorder
    recorder.keep = True
    for step in range(4):
        train_step(live, feed.fetch(step, live.leaves))
    return recorder.totals().get("comm_hidden", 0.0)


def test_what_travels_beside_other_work_is_counted(world, text) -> None:  # noqa: F811
    assert all(seconds > 0 for seconds in world(hidden, 2, text=text))


def spoiled(ctx, text) -> dict[str, Any]:  # noqa: F811
    """Step 3 has a gradient on one replica that is not a number, and is left out."""
    live, feed = started(ctx, text, "gpt", "dp=2 sync=delayed:lag=2")
    verdicts = []
    for step in range(9):
        leaves = feed.fetch(step, live.leaves)
        if step == 3 and ctx.rank == 1:
            leaves = [replace(leaf, scale=float("nan")) for leaf in leaves]
        report = train_step(live, leaves)
        if report.bad:
            live.step += 1
        verdicts.append((report.verdict.value, bool(report.bad)))
    weights = torch.cat([slot.master.detach().flatten() for slot in live.local.slots])
    return {"verdicts": verdicts, "weights": weights}


def test_a_bad_step_is_left_out_with_the_gradient_that_was_due_in_it(threads, text) -> None:  # noqa: F811
    ends = threads(spoiled, 2, text=text)
    said = ["later", "later", "apply", "discard", "later", *["apply"] * 4]
    for end in ends:
        assert [verdict for verdict, _ in end["verdicts"]] == said
        assert end["weights"].isfinite().all() and torch.equal(end["weights"], ends[0]["weights"])


def test_what_has_no_meaning_is_refused() -> None:
    recipe = Recipe(model=ModelConfig(n_layer=2), train=TrainConfig(global_batch=8))
    for plan, word in (
        ("dp=2 precision=fp16", "scale"),
        ("dp=2 codec=topk:ratio=0.1+ef", "kept"),
        ("dp=2 pp=2 schedule=pipedream", "updates of its own"),
    ):
        told = Plan.parse(f"{plan} sync=delayed").check(recipe)
        assert any(word in problem.what and "delayed" in problem.what for problem in told), (plan, told)
    assert Plan.parse("dp=2 sync=delayed:lag=2").check(recipe) == []


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 sync=delayed",
        pytest.param("dp=2 sync=delayed:lag=2", marks=pytest.mark.slow),
        pytest.param("dp=2 tp=2 sync=delayed", marks=pytest.mark.slow),
        pytest.param("dp=2 pp=2 sync=delayed:lag=2", marks=pytest.mark.slow),
        pytest.param("dp=2 shard=2 sync=delayed", marks=pytest.mark.slow),
    ],
)
def test_it_is_proven_beside_one_device_with_the_same_lag(plan: str, text) -> None:  # noqa: F811
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=5, global_batch=8, micro_batch=1, lr=1e-2, dtype="float64", clip=0.5),
    )
    (proof,) = prove_on_threads(recipe, [Plan.parse(f"{plan} precision=fp64")], steps=2)
    assert proof.passed, proof.first_divergence
    assert not proof.bit_identical and proof.max_rel_err["param"] > 0
