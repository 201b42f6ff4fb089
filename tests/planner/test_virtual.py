"""What ranks that compute by virtual shards are said to multiply, to start and to keep is what they do; what they send
stands in test_one_count."""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.planner.rehearsed import corpus, model, recipe
from unisono.config import resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.planner.alive import fullest
from unisono.planner.clusters import cluster
from unisono.planner.pricing import closed, price, verdict
from unisono.planner.request import PlanRequest
from unisono.planner.stack import stack
from unisono.planner.work import activations
from unisono.planner.work.stage import OURS
from unisono.train.build.build import build, feeds, place_of
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads
from unisono_contrib.planner.work import virtual

SHARDS = "sync=canonical:shards=4"
# What starts no kernel: a tensor's memory seen otherwise, or none that is written.
_VIEWS = {
    "view", "_unsafe_view", "t", "transpose", "expand", "slice", "select", "unsqueeze", "squeeze", "split", "alias",
    "permute", "as_strided", "detach", "unbind", "_reshape_alias", "split_with_sizes", "unflatten", "empty",
    "empty_like", "new_empty", "empty_strided",
}  # fmt: skip


class Kernels(TorchDispatchMode):
    """Counts operations of the blocks, and the shapes of their products, of both ways."""

    def __init__(self) -> None:
        super().__init__()
        self.way = ""
        self.started = Counter[str]()
        self.products = Counter[tuple[str, int, int, int, int]]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if self.way and name not in _VIEWS:
            self.started[self.way] += 1
            if name in ("mm", "addmm", "bmm"):
                left, right = args[-2:]
                many = left.shape[0] if name == "bmm" else 1
                self.products[self.way, many, *left.shape[-2:], right.shape[-1]] += 1
        return func(*args, **(kwargs or {}))


def _told(module: torch.nn.Module, seen: Kernels) -> None:
    """Tell of a block's passes."""
    forward: Callable[..., Any] = module.forward

    def told(*args: Any, **given: Any) -> Any:
        seen.way = "F"
        made = forward(*args, **given)
        seen.way = ""
        return made

    module.forward = told  # type: ignore[method-assign]
    module.register_full_backward_pre_hook(lambda *_: setattr(seen, "way", "B"))
    module.register_full_backward_hook(lambda *_: setattr(seen, "way", ""))


def played(name: str, text: str, samples: int, watch: Callable[[Any, Any], Any]) -> list[Any]:
    """What `watch(run, leaves)` gives on each rank."""
    plan = Plan.parse(text)
    resolved = resolve(recipe(name, samples), text, plan.world)

    def live(rank: int) -> Any:
        place, recorder = place_of(rank, plan.world, rank, "gloo", 60.0), Recorder(rank)
        run = build(resolved.recipe, resolved.plan, place, corpus(name), recorder)
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus(name), place.device)
        return watch(run, feed.fetch(0, run.leaves))

    return threads.run(plan.world, live, timeout=120.0)


def counted(run: Any, leaves: Any) -> Kernels:
    seen = Kernels()
    for stage in run.local.stages.values():
        for block in stage.blocks.values():
            _told(block, seen)
    with seen:
        train_step(run, leaves)
    many = len(leaves) * sum(len(stage.blocks) for stage in run.local.stages.values())
    counts: list[Any] = [seen.started, seen.products]
    for found in counts:
        assert all(number % many == 0 for number in found.values())  # blocks and micro-batches are alike
        for key in found:
            found[key] //= many
    return seen


# Of the last rank of cp, whose queries see most keys; without biases products are no sums.
@pytest.mark.parametrize(
    "text", [SHARDS, f"tp=2 {SHARDS}", f"cp=2 {SHARDS}", f"cp=2 tp=4 {SHARDS}", f"cp=4 {SHARDS}"]
)
def test_products_and_kernels_are_those_that_are_started(text: str) -> None:
    sizes: Any = model("untied")
    plan, samples = Plan.parse(text), 24  # one micro-batch is the whole batch
    usual, seen = (played("untied", one, samples, counted)[-1] for one in ("sync=canonical", text))
    for way, backward in (("F", False), ("B", True)):
        more = virtual.kernels(sizes, plan, OURS, backward)
        assert seen.started[way] - usual.started[way] == more, way
    said = Counter[tuple[str, int, int, int, int]]()
    for one in (*virtual.products(sizes, plan, samples), *virtual.scores(sizes, plan, samples)):
        for way, some in (("F", (one,)), ("B", one.gradients)):
            for p in some:
                said[way, round(p.many), round(p.rows), round(p.inner), round(p.columns)] += round(p.times)
    assert _unordered(said) == _unordered(seen.products)


def _unordered(products: Counter[tuple[str, int, int, int, int]]) -> Counter[Any]:
    """A product of a matrix's transpose may be made as the transpose of one."""
    found = Counter[Any]()
    for (way, many, rows, inner, columns), times in products.items():
        found[way, many, inner, *sorted((rows, columns))] += times
    return found


def kept_bytes(run: Any, leaves: Any) -> int:
    """Bytes of all tensors that autograd keeps, parameters not counted."""
    own = {slot.live.untyped_storage().data_ptr() for slot in run.local.slots}
    alive: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        train_step(run, leaves)
    return sum(tensor.untyped_storage().nbytes() for tensor in alive.values())


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("untied", f"tp=2 {SHARDS}"),
        ("untied", f"tp=4 cp=2 {SHARDS}"),
        ("tied", f"cp=2 {SHARDS}"),
        ("llama", "cp=2 sync=canonical:shards=2"),
        ("untied", f"tp=2 {SHARDS} precision=bf16"),
        ("untied", f"cp=2 {SHARDS} recompute=selective"),
    ],
)
def test_a_rank_keeps_what_is_said(name: str, text: str) -> None:
    sizes: Any = model(name)
    plan, samples = Plan.parse(text), 24
    item, shards = (2 if plan.precision == "bf16" else 4), virtual.virtual_of(plan)
    own: dict[str, Any] = {
        "micro_batch": samples,
        "tp": plan.tp,
        "cp": plan.cp,
        "itemsize": item,
        "shards": shards,
    }
    block = activations.block_bytes(sizes, **own, recompute=plan.recompute, composed=True)
    ends = activations.stem_bytes(sizes, **own) + activations.head_bytes(sizes, **own, composed=True)
    said = sizes.n_layer * block + ends
    assert said == pytest.approx(played(name, text, samples, kept_bytes)[-1], rel=0.03)


def ask(text: str, where: str = "dgx-a100:1") -> PlanRequest:
    plan = Plan.parse(f"{text} precision=bf16")
    return PlanRequest(model("llama"), plan, cluster(where), stack("plain"), 4, 4)


def test_shards_cost_seconds_and_bytes() -> None:
    """More and smaller products, weights' gradients over cp in every micro-batch, sums that are gathered."""
    step = partial(lambda text: closed(ask(text)))
    usual, shards, more = (
        step(f"cp=2 tp=2 dp=2 sync=canonical{count}") for count in ("", ":shards=2", ":shards=4")
    )
    assert usual.step < shards.step < more.step
    assert usual.comm["cp"].bytes < shards.comm["cp"].bytes
    assert usual.comm["tp"].bytes < shards.comm["tp"].bytes
    question = ask("cp=2 tp=2 dp=2 sync=canonical:shards=2")
    assert price(question).step == pytest.approx(closed(question).step, rel=0.05)
    plain, same = (verdict(ask(f"dp=8 sync=canonical{count}")).memory for count in ("", ":shards=2"))
    assert plain.params == same.params and plain.activations < same.activations


def test_ranks_of_cp_deal_no_states() -> None:
    """Gradients are added up before, so shard deals alone what it deals."""
    sizes: Any = model("llama")
    with_cp, without = (
        fullest(sizes, Plan.parse(f"shard=2 {more}sync=canonical:shards=2"), micro_batch=4, micros=2)[1].optim
        for more in ("cp=2 ", "")
    )
    assert with_cp == without
