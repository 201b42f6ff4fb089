"""Products of blocks in eight bits."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.threads import prove
from tests.train.small import recipe, started
from unisono.comm import device
from unisono.comm.device import check_float8
from unisono.plan import Plan
from unisono.plan.fidelity import beside_like, fidelity_of
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity
from unisono_contrib.parallel.float8 import AHEAD, BACK, Float8Product, multiplied, product, quantized
from unisono_contrib.verify.float8 import UNIT, Seen, bound_of, odd_products

HALF = torch.bfloat16


@settings(deadline=None, max_examples=25)
@given(rows=st.integers(1, 20), inner=st.integers(1, 40), seed=st.integers(0, 9), back=st.booleans())
def test_every_entry_of_a_product_is_in_its_bound(rows: int, inner: int, seed: int, back: bool) -> None:
    draw, kind = torch.Generator().manual_seed(seed), BACK if back else AHEAD
    a = torch.randn(rows, inner, generator=draw) * torch.rand(rows, 1, generator=draw) ** 6
    b = torch.randn(7, inner, generator=draw) * torch.rand(1, inner, generator=draw) ** 5
    right, off = bound_of(a, b, kind)
    assert ((multiplied(a, b, kind, HALF).double() - right).abs() <= off).all()


@pytest.mark.parametrize("kind", [AHEAD, BACK])
def test_what_an_element_is_rounded_to_does_not_depend_on_its_row(kind: torch.dtype) -> None:
    x = torch.randn(64, 96, generator=torch.Generator().manual_seed(2))
    q, scale = quantized(x, kind)
    alone, other = quantized(x[:, :40].contiguous(), kind)
    whole, part, normal = (
        (q.float() * scale)[:, :40],
        alone.float() * other,
        torch.finfo(kind).smallest_normal,
    )
    assert torch.where(x[:, :40].abs() >= normal * scale, whole == part, True).all()
    assert ((whole - part).abs() <= 2 * 2.0**-10 * scale).logical_or(whole == part).all()
    assert ((q.float() * scale - x).abs() <= UNIT[kind] * x.abs() + 2.0**-10 * scale).all()
    assert torch.equal(torch.frexp(scale).mantissa, torch.full_like(scale, 0.5))


def test_no_row_overflows_and_zeros_and_infinities_stay_what_they_are() -> None:
    for top in (448.0, 448.5, 57344.0, 1e-30, 3e38, 1.0):
        for kind in (AHEAD, BACK):
            q, scale = quantized(torch.tensor([[top, -top / 3]]), kind)
            assert abs(q.float() * scale - torch.tensor([[top, -top / 3]])).max() <= top / 8
    assert not multiplied(torch.zeros(3, 5), torch.ones(2, 5), AHEAD, HALF).any()
    for bad in (float("inf"), float("nan")):
        x = torch.ones(2, 5)
        x[1, 2] = bad
        y = multiplied(x, torch.ones(3, 5), AHEAD, HALF)
        assert y[0].isfinite().all() and y[1].isnan().all()


def test_it_takes_the_ways_of_a_device_without_one() -> None:
    """On the meta device kernels want sides of sixteen, as they do on a GPU."""
    x, weight = torch.empty(3, 7, 20, device="meta"), torch.empty(9, 20, device="meta")
    y: Any = Float8Product.apply(x.requires_grad_(), weight.requires_grad_(), None, HALF)
    y.backward(torch.empty_like(y))
    assert y.shape == (3, 7, 9) and y.dtype == HALF
    assert x.grad is not None and weight.grad is not None and weight.grad.dtype == weight.dtype


def test_a_device_that_cannot_says_what_can(monkeypatch: pytest.MonkeyPatch) -> None:
    old = SimpleNamespace(get_device_capability=lambda _: (8, 0), get_device_name=lambda _: "NVIDIA A100")
    monkeypatch.setattr(device.torch, "cuda", old)
    with pytest.raises(UsageError, match="NVIDIA A100 multiplies no numbers of eight bits") as refused:
        check_float8(torch.device("cuda", 0))
    assert refused.value.code == "P26" and "H100" in str(refused.value.fix)
    old.get_device_capability = lambda _: (9, 0)
    check_float8(torch.device("cuda", 0))
    check_float8(torch.device("cpu"))


def layers(ctx: Any, folder: str, plan: str) -> Any:
    run, feed, _ = started(ctx, recipe(Path(folder), dtype="float32"), plan)
    calls: list[str] = []
    for stage in run.local.stages.values():
        for name, module in stage.named_modules():
            if "forward" in vars(module) or getattr(module, "product", None) is product:
                calls.append(name)
    losses = run.player.play(run.row, feed.fetch(0, run.leaves), 1.0, run.seed)
    return calls, losses.sum().item()


@pytest.mark.parametrize(("plan", "ranks"), [("dp=1", 1), ("tp=2", 2), ("pp=2", 2)])
def test_linear_layers_of_blocks_and_no_others(threads: Any, tmp_path: Path, plan: str, ranks: int) -> None:
    every: set[str] = set()
    for calls, _ in threads(
        layers, ranks, group=ranks > 1, folder=str(tmp_path), plan=f"{plan} precision=bf16:fp8"
    ):
        every |= set(calls)
    parts = ("attn.qkv", "attn.proj", "mlp.up", "mlp.down")
    assert every == {f"blocks.{n}.{part}" for n in range(2) for part in parts}


def test_cut_layers_lose_what_whole_ones_do(threads: Any, tmp_path: Path) -> None:
    ((_, one),) = threads(layers, 1, group=False, folder=str(tmp_path), plan="precision=bf16:fp8")
    for _, loss in threads(layers, 2, folder=str(tmp_path), plan="tp=2 precision=bf16:fp8"):
        assert loss == pytest.approx(one, rel=1e-3)


def test_a_product_that_is_off_is_found() -> None:
    module = nn.Linear(12, 8)
    x, grad = torch.randn(5, 12, requires_grad=True), torch.randn(5, 8)
    with torch.autocast("cpu", dtype=HALF):
        y = product(x, module.weight, module.bias)
    y.backward(grad.to(HALF))
    assert x.grad is not None
    seen = Seen(module, x.detach(), y.detach(), grad.to(HALF), x.grad, "one")
    assert list(odd_products(seen)) == []
    seen.to_x = x.grad * 1.5
    assert "gradient of the input" in next(odd_products(seen))


@pytest.mark.parametrize("more", ["tp=2x2", "tp=2:chunks=2", "tp=2 sync=canonical:shards=2"])
def test_what_multiplies_otherwise_is_refused(tmp_path: Path, more: str) -> None:
    problems = Plan.parse(f"dp=2 {more} precision=bf16:fp8").check(recipe(tmp_path))
    assert any(one.code == "P16" and "eight bits" in one.what for one in problems)


def test_it_goes_with_either_way_of_keeping_parameters() -> None:
    for text in ("bf16:params,fp8", "bf16:stochastic,fp8"):
        plan = Plan.parse(f"pp=2 precision={text}")
        assert plan.arithmetic.fp8 and plan.arithmetic.narrow and fidelity_of(plan) is Fidelity.LOSSY
    assert beside_like(Plan.parse("pp=2 precision=bf16:fp8")) is Fidelity.EXACT


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_in_eight_bits_are_proven(tmp_path: Path) -> None:
    plans = ["pp=2", "dp=2 shard=2 zero=2", "shard=2 pp=2 recompute=full", "shard=2 pp=2 sync=canonical"]
    told = recipe(tmp_path, global_batch=4, micro_batch=1, dtype="float32")
    for proof in prove(told, [Plan.parse(f"{text} precision=bf16:fp8") for text in plans], steps=2):
        assert proof.passed and proof.verdict == "proven" and proof.fidelity == "LOSSY", proof
        assert proof.bit_identical == (beside_like(Plan.parse(proof.plan)) is Fidelity.EXACT), proof
