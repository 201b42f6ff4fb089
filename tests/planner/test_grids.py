"""What ranks of `tp=RxC` are said to compute and to keep is what they do; what they send stands in test_one_count."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.planner.rehearsed import corpus, model, recipe
from unisono.config import resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.planner.clusters import cluster
from unisono.planner.model_kinds import kind
from unisono.planner.pricing import closed, verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.work.blocks import block
from unisono.planner.work.stage import OURS
from unisono.train.build.build import build, feeds, place_of
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads
from unisono_contrib.planner.work.grid_kept import block_bytes, head_bytes, stem_bytes

SAMPLES = 24  # one micro-batch is the whole batch


def kept(name: str, text: str) -> list[int]:
    """Bytes of all tensors that autograd keeps in a step of each rank, parameters not counted."""
    plan = Plan.parse(text)
    resolved = resolve(recipe(name, SAMPLES), text, plan.world)

    def live(rank: int) -> int:
        place, recorder = place_of(rank, plan.world, rank, "gloo", 60.0), Recorder(rank)
        run = build(resolved.recipe, resolved.plan, place, corpus(name), recorder)
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus(name), place.device)
        own = {slot.master.untyped_storage().data_ptr() for slot in run.local.slots}
        alive: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.untyped_storage().data_ptr() not in own:
                alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
            return tensor

        given = feed.fetch(0, run.leaves)
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            train_step(run, given)
        return sum(tensor.untyped_storage().nbytes() for tensor in alive.values())

    return threads.run(plan.world, live, timeout=120.0)


@pytest.mark.parametrize(
    ("name", "text"),
    [("llama", "tp=2x2"), ("tied", "tp=2x2"), ("untied", "tp=2x3"), ("untied", "tp=2x2 precision=bf16")],
)
def test_a_rank_of_a_grid_keeps_what_is_said(name: str, text: str) -> None:
    sizes: Any = model(name)
    plan = Plan.parse(text)
    item = 2 if plan.precision == "bf16" else 4
    own: dict[str, Any] = {"micro_batch": SAMPLES, "tp": plan.tp, "itemsize": item}
    said = sizes.n_layer * block_bytes(sizes, **own) + stem_bytes(sizes, **own) + head_bytes(sizes, **own)
    # Vectors and tables as they were gathered do not grow with the batch, and are not counted.
    for got in kept(name, text):
        assert said == pytest.approx(got, rel=0.04)


@pytest.mark.parametrize("text", ["tp=2x2", "tp=2x3", "tp=4x2"])
def test_a_grid_makes_the_products_of_one_row(text: str) -> None:
    """As much arithmetic, at other shapes."""
    sizes: Any = model("llama")
    plan = Plan.parse(text)
    row = replace(plan, tp=int(plan.tp))
    for backward in (False, True):
        made, usual = (block(sizes, one, OURS, 8, backward=backward) for one in (plan, row))
        flops = [sum(product.flops for product in one.products) for one in (made, usual)]
        assert flops[0] == pytest.approx(flops[1]) and made.kernels > usual.kernels


def test_a_grid_has_a_price_on_devices() -> None:
    """Where weights are larger than activations a grid sends more; it keeps less, as no input is kept whole."""
    sizes: Any = model("llama")
    on, where, found = stack("plain"), cluster("dgx-a100:1"), {}
    for text in ("tp=4", "tp=2x2"):
        plan = Plan.parse(f"{text} precision=bf16")
        found[text] = PlanRequest(sizes, plan, where, on, 4, 1)
        assert not kind(sizes).problems(sizes, plan)
    row, grid = (closed(ask) for ask in found.values())
    assert grid.step > row.step and grid.comm["tp"].bytes > row.comm["tp"].bytes
    memories = [verdict(ask).memory for ask in found.values()]
    assert memories[1].params < memories[0].params


def test_what_no_grid_plays_has_no_price_and_says_so() -> None:
    plan, sizes = Plan.parse("tp=2x2"), model("experts")
    assert [one.code for one in kind(sizes).problems(sizes, plan)] == ["P12"]
