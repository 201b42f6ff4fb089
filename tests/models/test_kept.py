"""What the planner says that our GPT keeps for the backward pass is what PyTorch keeps."""

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from unisono.comm.members import Shape
from unisono.comm.mesh import Mesh
from unisono.models.gpt import GPTConfig
from unisono.models.gpt.net import GPT
from unisono.models.init import initialise
from unisono.models.noise import Noise
from unisono.observe.span import Recorder
from unisono.parallel.attend import CONTEXT_WAYS
from unisono.plan import Plan
from unisono.planner.memory import of_row
from unisono.planner.stack import stack
from unisono.planner.work import activations
from unisono.planner.work.transformer import Transformer
from unisono.spec.layout import Places
from unisono_contrib.comm import threads

BATCH = 3
FIELDS: dict[str, tuple[Any, ...]] = {
    "positions": ("learned", "rotary"), "norm": ("layer", "rms"), "activation": ("gelu", "swiglu"),
    "n_kv_head": (None, 2, 1), "dropout": (0.0, 0.1),
}  # fmt: skip
VARIANTS: list[dict[str, Any]] = [
    dict(zip(FIELDS, values, strict=True)) for values in product(*FIELDS.values())
]


def pair(**fields: Any) -> tuple[GPT, Transformer]:
    config = GPTConfig(vocab=90, n_layer=1, n_head=4, d_model=64, context=48, d_ff=176, **fields)
    model = GPT(config)
    initialise(model, 0)
    return model, Transformer(
        config.n_layer, config.n_head, config.d_model, config.context, config.vocab, config.kv_heads, config.ff_width,
        noisy=config.dropout > 0, bias=config.bias, tied=config.tie_embeddings,
        learned=config.positions == "learned", gated=config.activation == "swiglu", rms=config.norm == "rms",
    )  # fmt: skip


def saved(model: nn.Module, run: Callable[[], Any], bf16: bool) -> int:
    """Bytes of all tensors that autograd keeps, parameters not counted."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            alive.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    cast = torch.autocast("cpu", torch.bfloat16) if bf16 else nullcontext()
    with cast, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        run()
    return sum(tensor.untyped_storage().nbytes() for tensor in alive.values())


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
def test_a_block_keeps_what_is_said(bf16: bool) -> None:
    for fields in VARIANTS:
        a_block(fields, bf16)


def a_block(fields: dict[str, Any], bf16: bool) -> None:
    model, sizes = pair(**fields)
    noise = Noise(0, torch.arange(BATCH))
    x = torch.randn(BATCH, 48, 64, requires_grad=True)
    got = saved(model, lambda: model.blocks[0](x, noise), bf16)
    said = activations.block_bytes(sizes, micro_batch=BATCH, itemsize=2 if bf16 else 4, composed=True)
    # Tables of angles and the causal mask do not grow with the batch, and are not counted.
    assert said == pytest.approx(got, rel=0.02), fields


@pytest.mark.parametrize("kind", ["ring", "gather", "ulysses"])
def test_a_block_of_a_rank_of_cp_keeps_what_is_said(kind: str) -> None:
    shared: list[dict[str, Any]] = [{}, {"dropout": 0.1}, {"positions": "rotary"}]
    shared += [{"n_kv_head": 2, "dropout": 0.1}, {"positions": "rotary", "n_kv_head": 2}]
    for fields in shared:
        a_block_of_cp(kind, fields)


def a_block_of_cp(kind: str, fields: dict[str, Any]) -> None:
    way = CONTEXT_WAYS.read(kind)

    def live(rank: int) -> int:
        model, _ = pair(**fields)
        group = Mesh(Shape(cp=2), rank, Recorder(rank), timedelta(seconds=60)).cp
        attention: Any = model.blocks[0].attn
        if way.by_heads:
            attention.core.drop.places[1] = Places.whole(4).dealt(rank, 2)
        attention.core = way.bind(attention.core, group, 48)
        x = torch.randn(BATCH, 24, 64, requires_grad=True)
        return saved(model, lambda: model.blocks[0](x, Noise(0, torch.arange(BATCH))), False)

    _, sizes = pair(**fields)
    said = activations.block_bytes(sizes, micro_batch=BATCH, cp=2, composed=True, cp_kind=kind)
    assert threads.run(2, live) == [pytest.approx(said, rel=0.02)] * 2


@pytest.mark.parametrize("bf16", [False, True], ids=["fp32", "bf16"])
@pytest.mark.parametrize("fields", [{}, {"dropout": 0.1}, {"norm": "rms"}], ids=["plain", "dropout", "rms"])
def test_the_ends_keep_what_is_said(fields: dict[str, Any], bf16: bool) -> None:
    model, sizes = pair(**fields)
    item = 2 if bf16 else 4
    tokens = torch.randint(0, 90, (BATCH, 48))
    stem = saved(model, lambda: model.stem(tokens, Noise(0, torch.arange(BATCH))), bf16)
    assert activations.stem_bytes(sizes, micro_batch=BATCH, itemsize=item) == pytest.approx(stem, rel=0.01)
    x = torch.randn(BATCH, 48, 64, requires_grad=True)
    head = saved(model, lambda: model.loss(model.head(x), tokens), bf16)
    said = activations.head_bytes(sizes, micro_batch=BATCH, itemsize=item, composed=True)
    assert said == pytest.approx(head, rel=0.01)


def test_recomputation_keeps_the_input() -> None:
    _, sizes = pair()
    assert (
        activations.block_bytes(sizes, micro_batch=BATCH, recompute="full", itemsize=2) == BATCH * 48 * 64 * 4
    )


def test_tensor_parallelism_deals_out_all_but_gathered_inputs() -> None:
    _, sizes = pair(activation="swiglu", dropout=0.1)
    one, two = (activations.block_bytes(sizes, micro_batch=BATCH, tp=tp) for tp in (1, 2))
    whole = BATCH * 48 * 64 * 4
    # Of one rank: two inputs, of two: three, each whole.
    assert two - 3 * whole == pytest.approx((one - 2 * whole) / 2)


def highest(events: list[Any]) -> int:
    """Bytes above the beginning, at the peak of what the profiler saw allocated and freed."""
    now = best = 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        best = max(best, now)
    return best


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "fields",
    [
        {"vocab": 256, "n_layer": 4},
        {"vocab": 8192, "n_layer": 2},
        {"vocab": 256, "n_layer": 3, "dropout": 0.1},
        {"vocab": 512, "n_layer": 4, "positions": "rotary", "norm": "rms", "activation": "swiglu", "n_kv_head": 2},
    ],
    ids=["narrow", "many words", "dropout", "llama"],
)  # fmt: skip
def test_the_peak_of_a_step(fields: dict[str, Any], precision: str) -> None:
    """Weights, gradients, optimiser, activations and loss, on one process, beside what was allocated."""
    config = GPTConfig(**{"n_head": 4, "d_model": 128, "context": 64} | fields)
    model = GPT(config)
    initialise(model, 0)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    noise = Noise(0, torch.arange(8)) if config.dropout else None

    def step() -> None:
        for _ in range(2):
            x = torch.randint(0, config.vocab, (8, config.context))
            cast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else nullcontext()
            with cast:
                loss = model.loss(model(x, noise), x)
            loss.backward()
            del loss
        optimizer.step()
        optimizer.zero_grad()

    step()
    activity = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activity, profile_memory=True) as profile:
        step()
    before = 3 * 4 * sum(p.numel() for p in model.parameters())  # weights and two moments
    measured = before + highest(profile.profiler.kineto_results.events())  # type: ignore[union-attr]
    sizes = Transformer(
        config.n_layer, config.n_head, config.d_model, config.context, config.vocab, config.kv_heads, config.ff_width,
        noisy=config.dropout > 0, learned=config.positions == "learned", gated=config.activation == "swiglu",
        rms=config.norm == "rms",
    )  # fmt: skip
    said = of_row(
        sizes, Plan.parse(f"precision={precision}"), stack("plain-cpu"), micro_batch=8, micros=2, row=0
    )
    assert said.allocated == pytest.approx(measured, rel=0.05)
