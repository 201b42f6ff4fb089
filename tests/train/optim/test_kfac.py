"""K-FAC against its identity with gradient descent, plain torch, its law, and one device."""

from typing import Any

import pytest
import torch
from torch import nn

from tests.train.optim.test_curved import PLANS, outcome, randn
from tests.train.small import recipe, started
from unisono.config import TrainConfig, resolve
from unisono.models.noise import Noise
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.training import UpdateSizes
from unisono.train.build.stepped_by import stepped_by
from unisono.train.state.checkpoint import load, save
from unisono.train.state.run_state import pieces_of
from unisono.train.step.train_step import train_step
from unisono_contrib.train.optim._kfac_steps import KfacSteps
from unisono_contrib.train.optim.kfac import KFac
from unisono_contrib.train.step.layer_products import LayerProducts


class Given(LayerProducts):
    """Means that a test says."""

    def __init__(self) -> None:
        super().__init__({})
        self.means: dict[str, torch.Tensor] = {}

    def gather(self, params: Any, owners: Any) -> Any:
        return {p: dict(self.means) for p in params} if self.means else {}


def live_of(member: KFac, weight: nn.Parameter, lr: float = 0.05, decay: float = 0.1) -> tuple[Any, Given]:
    live, products = member.bind([{"params": [weight], "weight_decay": decay}], lr, False), Given()
    assert isinstance(live, KfacSteps)
    live.state[weight], live.products = member.state(weight), products
    return live, products


@pytest.mark.parametrize("seen", [False, True])
def test_means_of_one_without_damping_are_gradient_descent(seen: bool) -> None:
    weight, want = nn.Parameter(randn(6, 4)), randn(6, 4)
    live, products = live_of(KFac(kfac_damping=1e-14, kfac_momentum=0.0, kfac_rms=False), weight)
    if seen:
        products.means = {
            "left": torch.eye(6, dtype=torch.float64),
            "right": torch.eye(4, dtype=torch.float64),
        }
    for step in range(4):
        weight.grad = randn(6, 4, seed=step + 1)
        live.step()
        want = want * (1 - 0.05 * 0.1) - 0.05 * randn(6, 4, seed=step + 1)
    assert torch.allclose(weight, want, rtol=0, atol=1e-12)


def test_a_law_holds_the_steps_in_float32() -> None:
    weight, member = nn.Parameter(randn(12, 8).float()), KFac(curvature_interval=2)
    live, products = live_of(member, weight)
    for step in range(5):
        before = weight.detach().double()
        held = {key: value.double().clone() for key, value in live.state[weight].items()}
        x, y = randn(30, 8, seed=9 * step + 7).float(), randn(30, 12, seed=9 * step + 8).float()
        products.means = {"left": y.mT @ y / 30, "right": x.mT @ x / 30}
        weight.grad = randn(12, 8, seed=step + 1).float()
        live.step()
        after = live.state[weight]
        observed = {side: (after[side].double(), torch.zeros_like(held[side])) for side in ("left", "right")}
        sizes = UpdateSizes(0.05, 0.1, step, 16 * 2.0**-24, observed)
        law = member.law(sizes, before, held, weight.grad.double(), torch.zeros(12, 8, dtype=torch.float64))
        assert set(law) == {*held, "param"}
        for key, (value, error) in law.items():
            seen = weight if key == "param" else after[key]
            assert bool(((seen.double() - value).abs() <= error).all()), (step, key)


def test_the_steps_are_those_of_plain_torch(threads, tmp_path) -> None:
    """Every formula once more, of a whole batch at once: two steps, the second with running means."""
    told = recipe(
        tmp_path, optimizer="kfac", curvature_interval=1, kfac_rms=False, clip=0.0, weight_decay=0.0
    )

    def body(ctx: Any) -> None:
        run, feed, _ = started(ctx, told, "dp=1 precision=fp64")
        slots = {slot.name: slot.master for slot in run.local.slots}
        names = [name for name, p in slots.items() if p.dim() == 2 and name.startswith("blocks.")]
        (stage,) = run.local.stages.values()
        momentum, means = {name: torch.zeros_like(slots[name]) for name in names}, {}
        for step in range(2):
            leaves = feed.fetch(step, run.leaves)
            grads, products = whole_batch(stage, names, leaves, run.seed)
            want = {}
            for name in names:
                keep = min(0.95, 1 - 1 / (step + 1))
                old = means.get(name, products[name])
                means[name] = tuple(
                    keep * a + (1 - keep) * b for a, b in zip(old, products[name], strict=True)
                )
                momentum[name] = 0.9 * momentum[name] + 0.1 * grads[name]
                left, right = (
                    torch.linalg.inv(m + 0.3 * m.diagonal().mean() * torch.eye(len(m), dtype=m.dtype))
                    for m in means[name]
                )
                want[name] = slots[name].detach() - run.update.rate(step) * left @ momentum[name] @ right
            train_step(run, leaves)
            for name in names:
                assert torch.allclose(slots[name], want[name], rtol=1e-9, atol=1e-10), (step, name)

    threads(body, 1)


def whole_batch(stage: Any, names: list[str], leaves: Any, seed: int) -> tuple[dict, dict]:
    """(gradients, (mean of outputs' gradients, mean of inputs)) by name, all samples at once, by torch's own hooks."""
    inputs, targets = (torch.cat([getattr(leaf, key) for leaf in leaves]) for key in ("inputs", "targets"))
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names}
    hooks = []
    for name in names:
        layer = stage.get_submodule(name.removesuffix(".weight"))
        hooks.append(
            layer.register_forward_hook(lambda _, x, y, at=seen[name]: at.extend((x[0].detach(), y)))
        )
    noise = Noise(seed, torch.cat([leaf.samples for leaf in leaves]))
    loss = stage.loss(stage(inputs, noise), targets)
    for hook in hooks:
        hook.remove()
    weights = [stage.get_parameter(name) for name in names]
    every = torch.autograd.grad(loss, [seen[name][1] for name in names] + weights)
    count, products = targets.numel(), {}
    for name, g in zip(names, every, strict=False):
        rows, outs = seen[name][0].flatten(0, -2), g.flatten(0, -2)
        products[name] = outs.mT @ outs / count, rows.mT @ rows / len(rows)
    return {name: g / count for name, g in zip(names, every[len(names) :], strict=True)}, products


def test_any_way_to_spread_a_model_makes_the_steps_of_one_device(threads, tmp_path) -> None:
    told = recipe(tmp_path, optimizer="kfac", clip=1.0, curvature_interval=2, kfac_factor_interval=2)
    ((alone, count, states),) = threads(lambda ctx: outcome(ctx, told, "dp=1 precision=fp64"), 1)
    assert count == 3 * 8 and len(states) == 8
    for plan in (*PLANS, "tp=2 recompute=full", "pp=2 micros=4 schedule=zb1p", "cp=2", "dp=2 tp=2"):
        ranks = threads(
            lambda ctx, plan=plan: outcome(ctx, told, f"{plan} precision=fp64"), Plan.parse(plan).world
        )
        assert sum(rank[1] for rank in ranks) == count, plan
        assert sorted(name for rank in ranks for name in rank[2]) == sorted(states), plan
        for weights, _, _ in ranks:
            for key, (x, start) in weights.items():
                whole = alone[key][0][tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))]
                assert torch.allclose(x, whole, rtol=1e-6, atol=1e-8), (plan, key)


REFUSED = {
    "dp=2 sync=canonical": "prescribes an order of sums",
    "dp=2 sync=diloco:h=2": "by more or less than the samples of one step",
    "pp=2 micros=4 schedule=dualpipe": "holds a layer twice",
    "pp=2 micros=4 schedule=pipedream": "schedule=pipedream|pipedream",
    "tp=2:chunks=2": "multiplies a layer in chunks",
    "dp=2 offload=optimizer": "state lies with owners",
}


@pytest.mark.parametrize("plan", REFUSED)
def test_plans_under_which_layers_are_not_observed_are_refused(tmp_path, plan: str) -> None:
    told = recipe(tmp_path, optimizer="kfac")
    with pytest.raises((ConfigProblems, UsageError), match=REFUSED[plan]):
        resolve(told, f"{plan} precision=fp64", 2)


@pytest.mark.parametrize("key", ["guard", "compile"])
def test_keys_under_which_layers_see_a_micro_batch_twice_are_refused(tmp_path, key: str) -> None:
    with pytest.raises((ConfigProblems, UsageError), match=f"train.{key}"):
        resolve(
            recipe(tmp_path, optimizer="kfac", **{key: True if key == "compile" else 2}),
            "dp=2 precision=fp64",
            2,
        )


def test_routers_are_adamw_s_and_a_matrix_of_no_linear_layer_is_refused() -> None:
    member = KFac()
    assert member.for_parameter("blocks.0.mlp.up.weight", (8, 4)).name == "kfac"
    for name, shape in (
        ("blocks.0.mlp.router.weight", (4, 8)),
        ("head.out.weight", (9, 8)),
        ("blocks.0.up.bias", (8,)),
    ):
        assert member.for_parameter(name, shape).name == "adamw"

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 4))

    model = nn.Module()
    model.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), Scaled())])
    with pytest.raises(UsageError, match=r"blocks\.0\.1\.weight is not the weight of one"):
        stepped_by(TrainConfig(optimizer="kfac"), model)


def test_a_run_goes_on_from_its_means_under_another_cut(threads, tmp_path) -> None:
    told = recipe(tmp_path, optimizer="kfac", clip=1.0, curvature_interval=2)

    def steps(ctx: Any, plan: str, first: int, last: int) -> dict[str, tuple[torch.Tensor, tuple[int, ...]]]:
        run, feed, _ = started(ctx, told, f"{plan} precision=fp64")
        if first:
            load(tmp_path / "checkpoints" / f"step-{first:06d}", pieces_of(run))
            run.step = first
        for step in range(first, last):
            train_step(run, feed.fetch(step, run.leaves))
        if last == 2:
            save(tmp_path, last, pieces_of(run), {}, rank=ctx.rank, world=ctx.world, token="t")
        return {slot.name: (slot.master.detach().clone(), slot.start) for slot in run.local.slots}

    (alone,) = threads(lambda ctx: steps(ctx, "dp=1", 0, 4), 1)
    threads(lambda ctx: steps(ctx, "dp=2", 0, 2), 2)
    for rank in threads(lambda ctx: steps(ctx, "tp=2", 2, 4), 2):
        for key, (x, start) in rank.items():
            whole = alone[key][0][tuple(slice(a, a + n) for a, n in zip(start, x.shape, strict=True))]
            assert torch.allclose(x, whole, rtol=1e-7, atol=1e-9), key
