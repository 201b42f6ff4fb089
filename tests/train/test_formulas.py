"""What a plan and one device compute by the same code, asked of formulas that are written out here."""

import math
from dataclasses import replace
from fractions import Fraction
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.models.build import build
from unisono.models.init import initialise
from unisono.models.lora import adapt, merged
from unisono.models.moe import MoEConfig
from unisono.models.moe.routing import Router
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.training import LOSSES, METRICS, OPTIMISERS, RATES
from unisono.sync import Verdict
from unisono.train.data.blend import shared_out
from unisono.train.step.evaluate import evaluate
from unisono.train.step.grad_norm import clip
from unisono.train.step.train_step import train_step

SIZES = {"n_layer": 2, "n_head": 4, "d_model": 16, "context": 8, "vocab": 31}


def gpt(**keys) -> nn.Module:
    model = build(ModelConfig.model_validate({**SIZES, **keys}), Facts(), "cpu").double()
    initialise(model, 0)
    return model


# The update ------------------------------------------------------------------------------------------------

LAWS = {
    "constant": lambda done, lr, low: lr,
    "linear": lambda done, lr, low: lr * (1 - done) + low * done,
    "cosine": lambda done, lr, low: low + (lr - low) * math.cos(done * math.pi / 2) ** 2,
}


@given(st.sampled_from(sorted(LAWS)), st.integers(2, 60), st.integers(0, 20), st.floats(1e-5, 10.0))
def test_rates_of_all_steps(name: str, steps: int, warmup: int, lr: float) -> None:
    low = lr / 7
    member = RATES.find(name)(warmup_steps=warmup, **({} if name == "constant" else {"min_lr": low}))  # type: ignore[arg-type]
    for step in range(steps):
        want = lr * (step + 1) / warmup if step < warmup else 0.0
        if step >= warmup:
            last = steps - 1
            done = 1.0 if last == warmup == step and steps == 1 else (step - warmup) / max(1, last - warmup)
            want = LAWS[name](done, lr, low)
        assert member.at(step, steps, lr) == pytest.approx(want, rel=1e-9)


def sgd(w, g, memory, lr, decay):
    memory["v"] = 0.8 * memory.get("v", 0.0) + g + decay * w
    return w - lr * memory["v"]


def adagrad(w, g, memory, lr, decay):
    g = g + decay * w
    memory["s"] = memory.get("s", 0.0) + g * g
    return w - lr * g / (memory["s"].sqrt() + 1e-3)


def adamw(w, g, memory, lr, decay):
    memory["t"] = t = memory.get("t", 0) + 1
    memory["m"] = 0.7 * memory.get("m", 0.0) + 0.3 * g
    memory["v"] = 0.9 * memory.get("v", 0.0) + 0.1 * g * g
    m, v = memory["m"] / (1 - 0.7**t), memory["v"] / (1 - 0.9**t)
    return w - lr * decay * w - lr * m / (v.sqrt() + 1e-3)


ADAM = {"betas": (0.7, 0.9), "eps": 1e-3}


@pytest.mark.parametrize(
    ("name", "options", "formula"),
    [
        ("sgd", {"momentum": 0.8}, sgd),
        ("adagrad", {"eps": 1e-3}, adagrad),
        ("adamw", ADAM, adamw),
        ("onebit_adam", {**ADAM, "variance_steps": 9}, adamw),
        ("zeroone_adam", {**ADAM, "refreshes": 9}, adamw),
    ],
)
def test_updates_of_optimisers(name: str, options, formula) -> None:
    """Of the rate and the decay that the groups say, whatever the first rate was."""
    draw = torch.Generator().manual_seed(1)
    start, *grads = (torch.randn(4, 3, dtype=torch.float64, generator=draw) for _ in range(5))
    weight, memory = nn.Parameter(start.clone()), {}
    live = OPTIMISERS.find(name)(**options).bind([{"params": [weight], "weight_decay": 0.2}], 1.0, False)
    want = start
    for step, grad in enumerate(grads):
        rate = live.param_groups[0]["lr"] = 0.05 * (step + 1)
        weight.grad = grad.clone()
        live.step()
        want = formula(want, grad, memory, rate, 0.2)
        torch.testing.assert_close(weight.detach(), want, rtol=1e-6, atol=1e-7)


def moved(ctx, text, plan, steps, batch, **more):  # noqa: F811
    """Verdicts of some steps of plain descent at a rate that does not change, and the weights."""
    plain = {
        "optimizer": "sgd",
        "momentum": 0.0,
        "weight_decay": 0.0,
        "clip": 0.0,
        "lr_schedule": "constant",
        "warmup_steps": 0,
        "global_batch": batch,
        **more,
    }
    run, feed = started(ctx, text, "gpt", plan, **plain)
    own = [slot.master for slot in run.local.slots if not slot.alias]
    begun = torch.cat([master.detach().flatten() for master in own])
    reports = [train_step(run, feed.fetch(step, run.leaves)) for step in range(steps)]
    ended = torch.cat([master.detach().flatten() for master in own])
    return [report.verdict for report in reports], ended - begun, [report.norm for report in reports]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("plan", ["dp=1", "dp=2"])
def test_a_period_makes_the_update_of_one_batch_as_large(threads, text, plan: str) -> None:  # noqa: F811
    """Without Adam or clipping, which would hide a factor; dropout goes by the sample's place in the run."""
    ranks = int(plan[-1])
    (_, want, norms), *_ = threads(moved, 1, text=text, plan="dp=1", steps=1, batch=24)
    verdicts, found, told = threads(moved, ranks, text=text, plan=f"{plan} sync=period:3", steps=3, batch=8)[
        0
    ]
    assert verdicts == [Verdict.HOLD, Verdict.HOLD, Verdict.APPLY]
    assert want.abs().max() > 1e-4
    torch.testing.assert_close(found, want, rtol=1e-9, atol=1e-12)
    assert told[-1] == pytest.approx(norms[0], rel=1e-9)


@pytest.mark.timeout(60)
def test_a_step_goes_against_the_mean_gradient_however_it_is_cut(threads, text) -> None:  # noqa: F811
    (_, whole, norms), *_ = threads(moved, 1, text=text, plan="dp=1", steps=1, batch=8, micro_batch=8)
    (_, parts, again), *_ = threads(moved, 1, text=text, plan="dp=1", steps=1, batch=8, micro_batch=2)
    torch.testing.assert_close(parts, whole, rtol=1e-9, atol=1e-12)
    assert norms == pytest.approx(again) and float(whole.norm()) == pytest.approx(1e-2 * norms[0], rel=1e-6)


@pytest.mark.parametrize("times", [0.5, 0.99, 1.01, 1.5, 1.99, 3.0, 1e6])
def test_a_gradient_that_is_longer_than_the_limit_has_its_length(times: float) -> None:
    limit = 0.25
    slots = [SimpleNamespace(master=nn.Parameter(torch.zeros(n, dtype=torch.float64))) for n in (5, 7)]
    whole = torch.randn(12, dtype=torch.float64)
    whole *= times * limit / whole.norm()
    for slot, part in zip(slots, whole.split((5, 7)), strict=True):
        slot.master.grad = part.clone()
    clip(slots, float(whole.norm()), limit)  # type: ignore[arg-type]
    found = torch.cat([slot.master.grad for slot in slots])
    torch.testing.assert_close(found, whole * min(1.0, 1 / times), rtol=1e-5, atol=0.0)


# Data ------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 10_000), min_size=1, max_size=9).filter(lambda w: 1000 * min(w) >= sum(w)))
def test_shares_are_those_of_the_largest_remainders(weights: list[int]) -> None:
    """Hamilton's rule in whole fractions; of equal remainders either may have it."""
    exact = [Fraction(1000 * weight, sum(weights)) for weight in weights]
    floors = [share.numerator // share.denominator for share in exact]
    left = 1000 - sum(floors)
    counts = shared_out(weights)
    assert sum(counts) == 1000 and {n - low for n, low in zip(counts, floors, strict=True)} <= {0, 1}
    more = [share - low for share, low, n in zip(exact, floors, counts, strict=True) if n > low]
    less = [share - low for share, low, n in zip(exact, floors, counts, strict=True) if n == low]
    assert len(more) == left and (not more or not less or float(min(more)) >= float(max(less)) - 1e-9)


# Losses and metrics ----------------------------------------------------------------------------------------


@given(st.floats(0.0, 0.9))
def test_a_smoothed_target_gives_its_share_to_all_classes(smoothing: float) -> None:
    draw = torch.Generator().manual_seed(2)
    logits = torch.randn(3, 4, 7, dtype=torch.float64, generator=draw)
    targets = torch.randint(7, (3, 4), generator=draw)
    targets[1, 2] = -100
    chance = logits.log_softmax(-1)
    wanted = torch.zeros(3, 4, 7, dtype=torch.float64) + smoothing / 7
    wanted.scatter_add_(-1, targets.clamp(min=0)[..., None], torch.full((3, 4, 1), 1 - smoothing).double())
    want = -(wanted * chance).sum(-1)[targets >= 0].sum()
    found = LOSSES.find("cross_entropy")(smoothing=smoothing).bind()(logits, targets)  # type: ignore[call-arg]
    torch.testing.assert_close(found, want)


def test_metrics_of_a_validation() -> None:
    logits = torch.tensor([[[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]], [[0.0, 0.0, 9.0], [1.0, 0.0, 0.0]]])
    accuracy, perplexity = METRICS.find("accuracy")(), METRICS.find("perplexity")()
    right = accuracy.count(logits, torch.tensor([[1, 2], [2, -100]]))
    assert int(right) == 2 and accuracy.value(2 / 3, 5.0) == 2 / 3
    assert perplexity.value(0.1, math.log(40.0)) == pytest.approx(40.0)


def validated(ctx, text):  # noqa: F811
    """The loss of two batches that have few and many targets that count, and what the model's logits say."""
    run, feed = started(ctx, text, "gpt", "dp=1")
    (stage,) = run.local.stages.values()
    batches, total, count = [], 0.0, 0
    for step, every in enumerate((2, 5)):
        leaves = feed.fetch(step, run.leaves)
        masked = [leaf.targets.clone() for leaf in leaves]
        for targets in masked:
            targets[:, ::every] = -100
        counted = sum(int((targets >= 0).sum()) for targets in masked)
        scale = sum(targets.numel() for targets in masked) / counted
        batches.append(
            [replace(leaf, targets=t, scale=scale) for leaf, t in zip(leaves, masked, strict=True)]
        )
        count += counted
        stage.train(False)
        with torch.no_grad():
            for leaf, targets in zip(leaves, masked, strict=True):
                logits = stage.whole(stage(leaf.inputs, None))
                total += float(F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum"))
    return evaluate(run, batches)[0], total / count


def test_a_validation_is_a_mean_over_all_targets_that_count(threads, text) -> None:  # noqa: F811
    ((found, want),) = threads(validated, 1, text=text)
    assert found == pytest.approx(want, rel=1e-9)


# Models ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [1, 3, 4])
@pytest.mark.parametrize("tied", [True, False])
def test_an_adapter_adds_alpha_over_rank_of_its_product(rank: int, tied: bool) -> None:
    """In the model as in what is merged; of a table as of a layer."""
    alpha, targets = 6.0, ("proj",) if tied else ("proj", "tok")
    model = gpt(tie_embeddings=tied)
    adapt(model, rank, alpha, targets)
    layer, x = model.blocks[1].attn.proj, torch.randn(5, 16, dtype=torch.float64)  # type: ignore[index,union-attr]
    a, b = (nn.init.normal_(part.weight.double()) for part in (layer.lora_A, layer.lora_B))  # type: ignore[union-attr]
    layer.double()
    layer.lora_A.weight.data, layer.lora_B.weight.data = a, b  # type: ignore[union-attr]
    base = layer.base_layer  # type: ignore[union-attr]
    want = x @ base.weight.T + base.bias + (x @ a.T @ b.T) * (alpha / rank)
    torch.testing.assert_close(layer(x), want)  # type: ignore[operator]
    torch.testing.assert_close(x @ merged(base.weight, a, b, layer.scale).T + base.bias, want)  # type: ignore[union-attr]
    if not tied:
        table, words = model.stem.tok.double(), torch.tensor([3, 0, 30])  # type: ignore[union-attr]
        narrow, back = table.lora_embedding_A.weight, table.lora_embedding_B.weight
        nn.init.normal_(narrow)
        want = table.base_layer.weight[words] + narrow[words] @ back.T * (alpha / rank)
        torch.testing.assert_close(table(words), want)


def learnt(ctx, text, **train):  # noqa: F811
    run, _ = started(ctx, text, "gpt", "dp=1", **train)
    (stage,) = run.local.stages.values()
    return [module.scale for module in stage.modules() if hasattr(module, "lora_A")]


@pytest.mark.parametrize(("more", "scale"), [({}, 2.0), ({"lora_alpha": 12.0}, 3.0)])
def test_alpha_is_twice_the_rank_where_none_is_given(threads, text, more, scale: float) -> None:  # noqa: F811
    (scales,) = threads(learnt, 1, text=text, lora_rank=4, **more)
    assert len(scales) == 8 and set(scales) == {scale}


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_queries_share_keys_and_values_in_their_order_and_turn_by_their_position(kv: int) -> None:
    """Query head h looks at key head h // (heads / key heads); of each head the pair (k, k + half) turns as one complex
    number by position · theta^(-k / half)."""
    model = gpt(n_kv_head=kv, positions="rotary", rope_theta=50.0, bias=False)
    attention, x = model.blocks[0].attn, torch.randn(2, 8, 16, dtype=torch.float64)  # type: ignore[index,union-attr]
    group, width, half = 4 // kv, 4, 2
    rows = attention.qkv.weight.view(kv, group + 2, width, 16)  # type: ignore[union-attr,operator]
    speed = 50.0 ** (-torch.arange(half).double() / half)
    turn = torch.polar(torch.ones(8, half).double(), torch.arange(8.0).double()[:, None] * speed)

    def turned(y):
        z = torch.complex(y[..., :half], y[..., half:]) * turn
        return torch.cat([z.real, z.imag], -1)

    heads = []
    for head in range(4):
        q, k, v = (x @ rows[head // group, at].T for at in (head % group, -2, -1))
        score = turned(q) @ turned(k).transpose(-1, -2) / math.sqrt(width)
        score = score.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        heads.append(score.softmax(-1) @ v)
    want = torch.cat(heads, -1) @ attention.proj.weight.T  # type: ignore[union-attr]
    torch.testing.assert_close(attention(x, None), want, rtol=1e-6, atol=1e-6)  # type: ignore[operator]


def test_weights_are_drawn_with_the_spread_of_their_rule() -> None:
    """A layer's within one over the root of its inputs, evenly and on both sides; a table's normally."""
    model = nn.Sequential(nn.Conv2d(3, 40, 5), nn.Linear(75, 40), nn.Embedding(40, 75), nn.LayerNorm(9))
    initialise(model, 1)
    conv, linear, table, norm = model
    for layer in (conv, linear):
        w = layer.weight.detach().flatten() * 75**0.5  # type: ignore[union-attr,operator]
        assert -1.0 <= w.min() < -0.98 and 0.98 < w.max() <= 1.0 and abs(w.mean()) < 0.04
        assert w.square().mean() == pytest.approx(1 / 3, rel=0.04) and not layer.bias.any()  # type: ignore[union-attr,operator]
    table.weight.requires_grad_(False)  # type: ignore[union-attr]
    assert table.weight.std() == pytest.approx(1.0, rel=0.05) and abs(table.weight.mean()) < 0.06  # type: ignore[union-attr,operator]
    again = [p.clone() for p in (*conv.parameters(), *linear.parameters())]
    for seed, same in ((1, True), (2, False)):
        initialise(model, seed)
        assert torch.equal(again[0], conv.weight) is same and torch.equal(again[2], linear.weight) is same
    assert (norm.weight == 1).all() and not norm.bias.any()  # type: ignore[union-attr,operator]


@pytest.mark.parametrize("gate", ["softmax", "sigmoid"])
@pytest.mark.parametrize(
    ("router", "renormalize", "top_k"),
    [("topk", True, 2), ("topk", False, 2), ("topk", True, 1), ("switch", True, 1)],
)
def test_what_a_router_gives_the_chosen(gate: str, router: str, renormalize: bool, top_k: int) -> None:
    """The best scores of a token; one alone, or without `renormalize`, as it is, several as shares of their sum."""
    config = MoEConfig.model_validate(
        {**SIZES, "kind": "moe", "n_experts": 5, "top_k": top_k, "router": router, "renormalize": renormalize, "gate": gate}
    )  # fmt: skip
    live = Router(config).double()
    nn.init.normal_(live.weight)
    x = torch.randn(2, 8, 16, dtype=torch.float64)
    z = x @ live.weight.T
    score = z.exp() / z.exp().sum(-1, keepdim=True) if gate == "softmax" else 1 / (1 + (-z).exp())
    best, at = score.topk(top_k)
    want = best / best.sum(-1, keepdim=True) if top_k > 1 and renormalize else best
    choice = live(x, None)
    assert torch.equal(choice.expert, at) and choice.kept.all()
    torch.testing.assert_close(choice.weight, want)


def test_both_uses_of_a_tied_weight_make_its_gradient() -> None:
    tied, apart = gpt(tie_embeddings=True), gpt(tie_embeddings=False)
    apart.load_state_dict(tied.state_dict())
    tokens = torch.randint(0, 31, (2, 8))
    for model in (tied, apart):
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
    uses = apart.stem.tok.weight.grad, apart.head.out.weight.grad  # type: ignore[union-attr]
    assert all(use.abs().max() > 1e-4 for use in uses)  # type: ignore[union-attr]
    torch.testing.assert_close(tied.stem.tok.weight.grad, uses[0] + uses[1])  # type: ignore[union-attr,operator]
