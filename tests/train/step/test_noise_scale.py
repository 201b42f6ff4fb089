"""The gradient noise scale: unbiased, and one figure whoever computes which micro-batch."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.train.small import recipe, started
from unisono.config import DataConfig, ModelConfig, resolve
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.train.state.checkpoint import save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono_contrib.config.sections.noise_scale import NoiseScaleConfig
from unisono_contrib.train.step.noise_scale import NoiseScale, estimate

OTHERS = {
    "mlp": {"model": ModelConfig(kind="mlp"), "data": DataConfig(source="digits")},
    "dlrm": {
        "model": ModelConfig(
            kind="dlrm", d_table=8, n_dense=4, bottom=(16,), top=(16,), tables=(200, 50), lookups=2
        ),
        "data": DataConfig(source="clicks:samples=200"),
    },
}


def measured(ctx: Any, folder: str, plan: str, model: str = "gpt", steps: int = 3, **train: Any) -> Any:
    whole = recipe(Path(folder), **train).model_copy(update=OTHERS.get(model, {}))
    whole = whole.model_copy(update={"noise_scale": NoiseScaleConfig(smoothing=0.5)})
    run, feed, _ = started(ctx, whole, "pp=1" if ctx.world == 1 else plan)
    reports = [train_step(run, feed.fetch(run.step, run.leaves)) for _ in range(steps)]
    kept = [float(x) for x in run.update.keeps.values()]
    return [*((r.loss, r.norm, r.says["noise_scale"]) for r in reports), tuple(kept)]


@pytest.mark.parametrize("leaves, size", [(2, 1), (4, 2), (8, 4)])
def test_neither_estimate_is_biased(leaves: int, size: int) -> None:
    """Of gradients of known mean and covariance: their averages over many steps are both, within five errors."""
    torch.manual_seed(leaves)
    tries, mean = 4000, torch.tensor([0.3, -0.2, 0.1], dtype=torch.float64)
    deviation = torch.tensor([1.0, 0.5, 2.0], dtype=torch.float64)
    samples = mean + deviation * torch.randn(tries, leaves, size, 3, dtype=torch.float64)
    parts = samples.mean(2) / leaves
    squares, norms = parts.square().sum((1, 2)), parts.sum(1).norm(dim=1)
    each = [estimate(s, n, leaves, size) for s, n in zip(squares.tolist(), norms.tolist(), strict=True)]
    for got, true in zip(
        torch.tensor(each).double().T, (deviation.square().sum(), mean.square().sum()), strict=True
    ):
        assert abs(got.mean() - true) < 5 * got.std() / tries**0.5


@pytest.mark.timeout(60)
def test_it_is_that_of_the_micro_batches_gradients(threads: Any, tmp_path: Path) -> None:
    """Against gradients that are kept one by one; both uses of the tied weight are one gradient."""

    def by_hand(ctx: Any) -> Any:
        whole = recipe(tmp_path).model_copy(update={"noise_scale": NoiseScaleConfig(smoothing=0.0)})
        run, feed, _ = started(ctx, whole, "dp=1")
        seen: list[dict[str, torch.Tensor]] = []
        owners = run.local.owners

        def keep(_: int) -> None:
            sums: dict[str, torch.Tensor] = {}
            for slot in run.local.slots:
                grad, name = slot.live.grad, owners.get(slot.name, slot.name)
                assert grad is not None
                sums[name] = sums[name] + grad if name in sums else grad.clone()
            seen.append(sums)

        assert owners, "a weight is tied"
        run.player.after_backward = keep  # type: ignore[attr-defined]
        report = train_step(run, feed.fetch(0, run.leaves))
        flat = torch.stack([torch.cat([x.flatten() for x in sums.values()]) for sums in seen])
        own = 4.0 * torch.diff(flat, dim=0, prepend=torch.zeros_like(flat[:1]))
        variance = own.var(0).sum()  # unbiased, of means over 2 samples
        noise, signal = 2.0 * variance, own.mean(0).square().sum() - variance / 4
        return report.says["noise_scale"], run.update.keeps, float(noise), float(signal)

    ((said, keeps, noise, signal),) = threads(by_hand, 1, group=False)
    assert float(keeps["noise"]) == pytest.approx(noise, rel=1e-9)
    assert float(keeps["signal"]) == pytest.approx(signal, rel=1e-9)
    assert said == (pytest.approx(noise / signal, rel=1e-9) if signal > 0 else None)


@pytest.mark.timeout(90)
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        ("gpt", "dp=2"), ("gpt", "dp=4"), ("gpt", "dp=2 sync=canonical"), ("mlp", "pp=2 schedule=1f1b"),
        ("gpt", "shard=2 zero=1"), ("gpt", "shard=2 zero=2"), ("gpt", "shard=2 zero=3"), ("gpt", "tp=2"),
        ("gpt", "shard=2 tp=2"), ("dlrm", "shard=2"),
    ],
)  # fmt: skip
def test_ranks_change_nothing(threads: Any, tmp_path: Path, model: str, plan: str) -> None:
    """A GPT has a tied weight; under tp its norms see some positions on each rank. A dlrm has sparse tables."""
    (alone,) = threads(measured, 1, group=False, folder=str(tmp_path), plan=plan, model=model)
    ends = threads(measured, Plan.parse(plan).world, folder=str(tmp_path), plan=plan, model=model)
    for end in ends:
        assert end == ends[0]
        for got, want in zip(end, alone, strict=True):
            assert got == tuple(x if x is None else pytest.approx(x, rel=1e-8) for x in want)


@pytest.mark.timeout(60)
def test_measuring_changes_no_weight_and_checkpoints_keep_it(threads: Any, tmp_path: Path) -> None:
    def both(ctx: Any) -> None:
        plain = recipe(tmp_path)
        whole = plain.model_copy(update={"noise_scale": NoiseScaleConfig()})
        (a, feed, _), (b, _, _) = started(ctx, plain, "dp=1"), started(ctx, whole, "dp=1")
        for run in (a, b):
            train_step(run, feed.fetch(0, run.leaves))
        for x, y in zip(a.local.slots, b.local.slots, strict=True):
            assert torch.equal(x.master, y.master), x.name
        names = {box.name: box.tensor.clone() for box in kept_of(b)}
        assert names["update/noise"] > 0.0 and "update/signal" in names and not kept_of(a)
        save(tmp_path, 1, [*pieces_of(b), *kept_of(b)], {"step": 1})
        c, _, _ = started(ctx, whole, "dp=1")
        restore(c, tmp_path / "checkpoints" / "step-000001")
        assert {box.name: float(box.tensor) for box in kept_of(c)} == {k: float(x) for k, x in names.items()}

    threads(both, 1, group=False)


def test_one_micro_batch_has_nothing_to_compare_with(threads: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="one micro-batch"):
        threads(measured, 1, group=False, folder=str(tmp_path), plan="dp=1", micro_batch=8)


@pytest.mark.parametrize(
    "plan",
    ["cp=2", "shard=2 zero=2:scatter=int8", "dp=2 codec=int8", "dp=2 sync=period:2", "pp=2 schedule=zb1p"],
)
def test_what_has_no_gradients_of_micro_batches_is_refused(tmp_path: Path, plan: str) -> None:
    whole = recipe(tmp_path).model_copy(update={"noise_scale": NoiseScaleConfig()})
    with pytest.raises((ConfigProblems, UsageError)) as raised:
        resolve(whole, plan, 2)
    assert "P44" in [problem.code for problem in getattr(raised.value, "problems", [raised.value])]


def test_noise_that_hides_the_signal_is_no_figure() -> None:
    scale = NoiseScale(0.5)
    scale.signal.fill_(-1.0)
    assert scale.value is None
