"""AdaScale: the gain is FairScale's, an S of 1 is the base schedule, and ranks change nothing."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small import recipe, started
from unisono.config import resolve
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono_contrib.train.step.adascale import GRID, gain

HOW = {"optimizer": "adascale", "lr_schedule": "linear", "warmup_steps": 2, "steps": 12, "clip": 0.0}
SMOOTHING = 0.5


def trained(ctx: Any, folder: str, plan: str, steps: int = 4, **train: Any) -> Any:
    run, feed, _ = started(ctx, recipe(Path(folder), **HOW, **train), plan)
    seen, observe = [], run.update.observe

    def note(numbers: Any) -> None:
        seen.append((numbers.squares, numbers.norm))
        assert observe is not None
        observe(numbers)

    if observe is not None:
        run.update.observe = note
    reports = [train_step(run, feed.fetch(run.step, run.leaves)) for _ in range(steps)]
    weights = {slot.name: slot.master.detach().clone() for slot in run.local.slots}
    return [(r.lr, r.says.get("adascale_gain")) for r in reports], weights, seen


@pytest.mark.timeout(60)
def test_fairscale_adascale_gain(threads: Any, tmp_path: Path) -> None:
    """Gain, rate and place in the schedule by FairScale's formula, written down from norms of gradients alone."""
    how = {"adascale_smoothing": SMOOTHING, "lr": 0.1, "momentum": 0.0}
    ((said, _, seen),) = threads(trained, 1, group=False, folder=str(tmp_path), plan="dp=1", **how)
    parts, scale, steps = 4, 4.0, 12
    variance = signal = progress = 0.0
    for (lr, r), (squares, norm) in zip(said, seen, strict=True):
        local, total = parts * squares, norm**2
        new = (local - total) * scale / (parts - 1)
        variance = SMOOTHING * variance + (1 - SMOOTHING) * new
        signal = SMOOTHING * signal + (1 - SMOOTHING) * (total - new / scale)
        var, sqr = max(variance, 0.0), max(signal, 0.0)
        want = min(scale, max(1.0, (var + sqr) / (var / scale + sqr)))
        assert r == pytest.approx(want, abs=0.5 / GRID)
        at = int(progress)
        base = 0.1 * (at + 1) / 2 if at < 2 else 0.01 + 0.09 * (1 - (at - 2) / (steps - 1 - 2))
        assert lr == pytest.approx(r * base, rel=1e-12)
        progress += r
    assert progress > 5.0, "steps are worth more than one each"


@pytest.mark.parametrize("variance, signal, want", [(1.0, 0.0, 8.0), (0.0, 1.0, 1.0), (-1.0, 2.0, 1.0), (1.0, -2.0, 8.0),
                                                    (0.0, 0.0, 1.0), (-1.0, -1.0, 1.0), (1.0, 1.0, 16.0 / 9.0)])  # fmt: skip
def test_the_gain_lies_between_one_and_the_ratio(variance: float, signal: float, want: float) -> None:
    assert gain(variance, signal, 8.0) == pytest.approx(want, abs=0.5 / GRID)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("inner", ["sgd", "adamw"])
def test_a_batch_of_the_same_size_is_the_base_schedule(threads: Any, tmp_path: Path, inner: str) -> None:
    """To the bit, with any gradient."""
    of = {"n": 1, "group": False, "folder": str(tmp_path), "plan": "dp=1"}
    count = of.pop("n")
    ((ours, weights, _),) = threads(trained, count, adascale_batch=8, adascale_inner=inner, **of)

    def plain(ctx: Any) -> Any:
        run, feed, _ = started(ctx, recipe(tmp_path, **{**HOW, "optimizer": inner}), "dp=1")
        reports = [train_step(run, feed.fetch(run.step, run.leaves)) for _ in range(4)]
        return [r.lr for r in reports], {slot.name: slot.master.detach().clone() for slot in run.local.slots}

    ((rates, plainly),) = threads(plain, 1, group=False)
    assert [lr for lr, _ in ours] == rates and all(r == 1.0 for _, r in ours)
    assert all(torch.equal(x, plainly[name]) for name, x in weights.items())


@pytest.mark.timeout(90)
@pytest.mark.parametrize("plan", ["dp=2", "dp=4"])
def test_ranks_change_nothing(threads: Any, tmp_path: Path, plan: str) -> None:
    (alone,) = threads(trained, 1, group=False, folder=str(tmp_path), plan="dp=1")
    ends = threads(trained, int(plan[3]), folder=str(tmp_path), plan=plan)
    for said, weights, _ in ends:
        assert said == alone[0], "rates to the bit"
        for name, x in weights.items():
            assert torch.allclose(x, alone[1][name], rtol=1e-10, atol=1e-13), name


@pytest.mark.timeout(60)
def test_a_run_goes_on_where_it_was(threads: Any, tmp_path: Path) -> None:
    def both(ctx: Any) -> None:
        whole = recipe(tmp_path, **HOW)
        (a, feed, _), (b, _, _) = started(ctx, whole, "dp=1"), started(ctx, whole, "dp=1")
        for _ in range(2):
            train_step(a, feed.fetch(a.step, a.leaves))
        save(tmp_path, 2, [*pieces_of(a), *kept_of(a)], {"step": 2})
        restore(b, tmp_path / "checkpoints" / "step-000002")
        after = [train_step(run, feed.fetch(2, run.leaves)) for run in (a, b)]
        assert after[0] == after[1] and after[0].says["adascale_steps"] > 3.0

    threads(both, 1, group=False)


@pytest.mark.parametrize(
    "keys, plan, code",
    [
        ({"adascale_batch": 16}, "dp=1", "C06"),
        ({"micro_batch": 8, "adascale_batch": 4}, "dp=1", "C06"),
        ({"lr_scaling": "linear", "lr_base_batch": 2}, "dp=1", "C06"),
        ({"guard": 1}, "dp=1", "P44"),
    ],
)
def test_what_contradicts_itself_is_refused(
    threads: Any, tmp_path: Path, keys: dict[str, Any], plan: str, code: str
) -> None:
    with pytest.raises(UsageError) as raised:
        threads(trained, 1, group=False, folder=str(tmp_path), plan=plan, **keys)
    assert raised.value.code == code


@pytest.mark.parametrize("plan", ["cp=2", "dp=2 sync=canonical", "dp=2 codec=int8"])
def test_plans_without_gradients_of_micro_batches_are_refused(tmp_path: Path, plan: str) -> None:
    with pytest.raises((ConfigProblems, UsageError)) as raised:
        resolve(recipe(tmp_path, **HOW), plan, 2)
    assert "P44" in [problem.code for problem in getattr(raised.value, "problems", [raised.value])]
