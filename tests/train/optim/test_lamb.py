"""LARS, LAMB and LANS against the formulas of their papers, and over ranks that hold parts of matrices."""

import math

import pytest
import torch
from torch import nn

from tests.train.small import recipe, started
from unisono.config import TrainConfig, resolve
from unisono.models.plain import UserModel
from unisono.parallel.params import Slot
from unisono.spec.errors import ConfigProblems, UsageError
from unisono.spec.training import Optimiser, UpdateSizes
from unisono.train.build.stepped_by import stepped_by
from unisono.train.step.train_step import train_step
from unisono.train.step.update import make, state_of
from unisono_contrib.train.optim._trust import Trusting
from unisono_contrib.train.optim._trust_laws import scaled_within, trust_ratio
from unisono_contrib.train.optim.lamb import Lamb
from unisono_contrib.train.optim.lans import Lans
from unisono_contrib.train.optim.lars import Lars
from unisono_contrib.train.optim.onebit_lamb import OneBitLamb

DECAY, ADAM = 0.2, {"betas": (0.7, 0.9), "eps": 1e-3}
MEMBERS: list[Trusting] = [Lars(momentum=0.8, trust_coefficient=0.02), Lamb(**ADAM), Lans(**ADAM)]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def lars(w, g, kept, lr):
    """Algorithm 1 of You et al. 2017, with the learning rate outside of the velocity, as torch's SGD has it."""
    ratio = 0.02 * w.norm() / (g.norm() + DECAY * w.norm()) if w.norm() else 1.0
    kept["v"] = 0.8 * kept.get("v", 0.0) + ratio * (g + DECAY * w)
    return w - lr * kept["v"]


def moments(g, kept):
    kept["t"] = t = kept.get("t", 0) + 1
    kept["m"] = 0.7 * kept.get("m", 0.0) + 0.3 * g
    kept["v"] = 0.9 * kept.get("v", 0.0) + 0.1 * g * g
    return kept["m"] / (1 - 0.7**t), (kept["v"] / (1 - 0.9**t)).sqrt() + 1e-3


def lamb(w, g, kept, lr):
    """Algorithm 2 of You et al. 2020."""
    m, below = moments(g, kept)
    step = m / below + DECAY * w
    return w - lr * (w.norm() / step.norm() if w.norm() else 1.0) * step


def lans(w, g, kept, lr):
    """Algorithm 2 of Zheng et al. 2020."""
    g = g / g.norm()
    m, below = moments(g, kept)
    along = [m / below + DECAY * w, g / below + DECAY * w]
    ratios = [w.norm() / x.norm() if w.norm() else 1.0 for x in along]
    return w - lr * (0.7 * ratios[0] * along[0] + 0.3 * ratios[1] * along[1])


@pytest.mark.parametrize(("member", "formula"), list(zip(MEMBERS, (lars, lamb, lans), strict=True)))
@pytest.mark.parametrize("scale", [1.0, 0.0])
def test_steps_are_those_of_the_papers(member: Optimiser, formula, scale: float) -> None:
    """Of the rate that the groups say at the time, which no step changes; from zero too."""
    weight, kept = nn.Parameter(scale * randn(4, 3)), {}
    live, want = (
        member.bind([{"params": [weight], "weight_decay": DECAY}], 1.0, False),
        weight.detach().clone(),
    )
    for step in range(5):
        rate = live.param_groups[0]["lr"] = 0.05 * (step + 1)
        weight.grad = randn(4, 3, seed=step + 1)
        live.step()
        want = formula(want, weight.grad, kept, rate)
        torch.testing.assert_close(weight.detach(), want, rtol=1e-10, atol=1e-12)
        assert live.param_groups[0]["lr"] == rate
    assert bool(weight.any())


@pytest.mark.parametrize("member", MEMBERS[:2])
def test_with_a_ratio_of_one_a_step_is_that_of_the_plain_optimiser(member: Trusting) -> None:
    off = member.model_copy(update={"trust_clip": (1.0, 1.0)})
    weights = [nn.Parameter(randn(4, 3)) for _ in range(2)]
    lives = [
        m.bind([{"params": [w], "weight_decay": DECAY}], 0.05, False)
        for m, w in zip((off, member.plain()), weights, strict=True)
    ]
    for step in range(5):
        for live, weight in zip(lives, weights, strict=True):
            weight.grad = randn(4, 3, seed=step + 1)
            live.step()
        torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-14)


def test_a_lamb_step_is_as_long_as_its_weights_times_the_rate_however_large_the_gradient() -> None:
    for member in MEMBERS[1:]:
        for size in (1e-6, 1.0, 1e6):
            weight = nn.Parameter(randn(6, 4))
            live = member.bind([{"params": [weight], "weight_decay": 0.0}], 0.01, False)
            before, weight.grad = weight.detach().clone(), size * randn(6, 4, seed=1)
            live.step()
            assert float((weight.detach() - before).norm() / before.norm()) == pytest.approx(0.01, rel=1e-9)


@pytest.mark.parametrize("member", MEMBERS)
def test_laws_hold_float32_steps(member: Optimiser) -> None:
    weight = nn.Parameter(randn(32, 8, dtype=torch.float32))
    live = member.bind([{"params": [weight], "weight_decay": 0.1}], 0.05, False)
    live.state[weight] = member.state(weight)
    for step in range(4):
        before = weight.detach().double()
        held = {key: value.double().clone() for key, value in live.state[weight].items()}
        weight.grad = randn(32, 8, seed=step + 1, dtype=torch.float32)
        live.step()
        law = member.law(
            UpdateSizes(0.05, 0.1, step, 16 * 2.0**-24), before, held, weight.grad.double(),
            torch.zeros(32, 8, dtype=torch.float64),
        )  # fmt: skip
        assert law.keys() == {"param", *held}
        for key, (value, error) in law.items():
            seen = weight if key == "param" else live.state[weight][key]
            assert bool(((seen.double() - value).abs() <= error).all()), key
            assert key == "step" or float(error.max()) < 1e-3 * float(value.abs().max())


@pytest.mark.parametrize("size", [1e-9, 1e-3, 0.3, 3.0])
@pytest.mark.parametrize("clip", [None, (0.5, 2.0)])
def test_an_error_moves_a_scaled_step_no_further_than_its_bound(size: float, clip) -> None:
    for seed in range(20):
        x, error = randn(5, 4), size * randn(5, 4, seed=seed + 1)
        value, bound = scaled_within(x + error, error.abs(), 2.0, clip, 2.0**-48)
        right = trust_ratio(2.0, float(x.norm()), clip) * x
        assert bool(((right - value).abs() <= bound).all())


def onebit_lamb(w, g, kept, lr, learns):
    """Algorithm 2 of Li et al. 2021, with its ratios corrected for their start as moments are, and no element further
    than Adam's can come."""
    m, below = moments(g, kept)
    if learns:
        kept["frozen"], kept["learnt"] = kept["v"], kept["t"]
    below_frozen = (kept["frozen"] / (1 - 0.9 ** kept["learnt"])).sqrt() + 1e-3
    reach = 0.3 / math.sqrt(0.1 * (1 - 0.49 / 0.9))
    step = (m / below_frozen).clamp(-reach, reach) + DECAY * w
    if learns:
        ratio = w.norm() / step.norm()
        kept["c"] = 0.9 * kept.get("c", 0.0) + 0.1 * ratio
    else:
        last = kept.get("f", 1.0)
        kept["f"] = float((below_frozen / below).max().clamp(0.9 * last, 1.1 * last).clamp(0.5, 4.0))
        ratio = kept["c"] / (1 - 0.9 ** kept["learnt"]) * kept["f"]
    return w - lr * ratio * step


def test_onebit_lamb_freezes_its_ratios_and_follows_what_the_second_moment_would_be() -> None:
    member = OneBitLamb(**ADAM, variance_steps=3)
    weight, kept = nn.Parameter(randn(4, 3)), {}
    live, want = (
        member.bind([{"params": [weight], "weight_decay": DECAY}], 0.05, False),
        weight.detach().clone(),
    )
    live.state[weight] = member.state(weight)
    factors = []
    for step in range(9):
        weight.grad = (0.2 if step > 4 else 1.0) * randn(4, 3, seed=step + 1)
        before = {key: value.double().clone() for key, value in live.state[weight].items()}
        sizes = UpdateSizes(0.05, DECAY, step, 2.0**-48)
        law = member.law(sizes, weight.detach().clone(), before, weight.grad, torch.zeros(4, 3))
        live.step()
        want = onebit_lamb(want, weight.grad, kept, 0.05, step < 3)
        torch.testing.assert_close(weight.detach(), want, rtol=1e-10, atol=1e-12)
        for key, (value, error) in law.items():
            seen = weight.detach() if key == "param" else live.state[weight][key]
            assert bool(((seen.double() - value).abs() <= error).all()), (step, key)
        factors.append(float(live.state[weight]["trust_last_factor"]))
    assert factors[:3] == [0.0] * 3 and len(set(factors[3:])) == 6


def test_biases_and_norms_are_stepped_without_a_ratio_unless_that_is_asked_for() -> None:
    for member in (*MEMBERS, OneBitLamb(**ADAM)):
        assert member.for_parameter("blocks.0.mlp.up.weight", (8, 4)) is member
        plain = member.for_parameter("blocks.0.mlp.up.bias", (8,))
        assert type(plain) is type(member.plain()) and dict(plain).items() <= dict(member).items()
        every = member.model_copy(update={"adapt_vectors": True})
        assert every.for_parameter("blocks.0.mlp.up.bias", (8,)) is every


def test_of_any_model_it_is_known_which_parameters_are_whose() -> None:
    whole = UserModel(nn.Linear(3, 2))
    assert stepped_by(TrainConfig(optimizer="lamb"), whole) == [
        "optimizer: lamb steps 1 tensors of 6 weights, adamw steps 1 tensors of 2 weights"
    ]


PLANS = ["dp=1 micros=4", "shard=2 zero=1", "shard=2 offload=optimizer", "pp=2 micros=4", "shard=2", "tp=2"]
NAMES = ["lars", "lamb", "lans", "onebit_lamb"]


def keys_of(name: str) -> dict[str, object]:
    return {"optimizer": name, **({"variance_steps": 1} if name == "onebit_lamb" else {})}


def parts(ctx, told, plan: str, steps: int = 3):
    """Of each parameter here, where its box begins and what is in it, with the optimiser's state; and how often ranks
    have met for norms."""
    run, feed, _ = started(ctx, told, plan)
    optimizer = run.update.optimizer
    norms = next(live.norms for live in optimizer.parts if hasattr(live, "norms"))  # type: ignore[attr-defined]
    met, meet = [], norms.meet
    norms.meet = lambda *columns: (met.append(columns), meet(*columns))
    for step in range(steps):
        train_step(run, feed.fetch(step, run.leaves))
    return len(met), [
        (s.name, s.start, {"param": s.master.detach().clone(), **state_of(optimizer, s.master)})
        for s in run.local.slots
    ]


def boxed(whole: torch.Tensor, start, part: torch.Tensor) -> torch.Tensor:
    """What lies there of a whole tensor; a number of the optimiser's state is itself."""
    return whole[tuple(slice(at, at + size) for at, size in zip(start, part.shape, strict=False))]


@pytest.mark.timeout(120)
@pytest.mark.parametrize("name", NAMES)
def test_every_cut_makes_the_steps_of_one_device_and_meets_once_a_pass(threads, tmp_path, name: str) -> None:
    """Tied embeddings, of which two stages hold a copy each, and a clipped gradient."""
    told = recipe(tmp_path, clip=0.5, lr=0.02, **keys_of(name))
    told = told.model_copy(update={"model": told.model.model_copy(update={"tie_embeddings": True})})
    ((_, alone),) = threads(lambda ctx: parts(ctx, told, "dp=1 precision=fp64"), 1)
    want = {
        key: state for key, _, state in alone if len(state) > 1
    }  # the other use of the embedding has none
    for plan in PLANS if name == "lamb" else PLANS[-3:]:
        ranks = math.prod(int(word[-1]) for word in plan.split() if word[:2] in ("dp", "sh", "tp", "pp"))
        for met, held in threads(lambda ctx, plan=plan: parts(ctx, told, f"{plan} precision=fp64"), ranks):
            assert met == 3 * (2 if name == "lans" else 1), plan
            for key, start, state in held:
                for word, x in state.items():
                    right = want.get(key, want["stem.tok.weight"])[word]
                    torch.testing.assert_close(x, boxed(right, start, x), rtol=1e-8, atol=1e-10)


@pytest.mark.timeout(60)
def test_canonical_sums_make_the_same_bits_under_shards_and_stages(threads, tmp_path) -> None:
    told = recipe(tmp_path, optimizer="lamb", lr=0.02, dtype="float32")
    ((_, alone),) = threads(lambda ctx: parts(ctx, told, "dp=1 sync=canonical"), 1)
    want = {key: state["param"] for key, _, state in alone}
    for plan in ("shard=2", "pp=2", "dp=2"):
        for _, held in threads(lambda ctx, plan=plan: parts(ctx, told, f"{plan} sync=canonical"), 2):
            assert all(torch.equal(s["param"], boxed(want[key], at, s["param"])) for key, at, s in held), plan


@pytest.mark.parametrize(
    ("plan", "more", "word"),
    [
        ("pp=2 micros=4 schedule=pipedream", {"clip": 0.0}, "norms over all stages"),
        ("dp=2 precision=bf16:stochastic", {"dtype": "float32"}, "has none"),
        ("dp=2", {"trust_clip": (2.0, 1.0)}, "its least ratio 2 is above its greatest 1"),
    ],
)
def test_what_it_cannot_be_played_with_is_refused_by_name(tmp_path, plan: str, more, word: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(recipe(tmp_path, optimizer="lamb", **more), plan, 2)
    assert word in str(caught.value)


def test_a_part_of_a_matrix_that_nobody_adds_up_is_refused() -> None:
    part = nn.Parameter(randn(4, 4, dtype=torch.float32))
    slots = [Slot("blocks.0.w", part, part, (8, 4), (4, 0))]
    with pytest.raises(UsageError, match="lamb needs the whole of"):
        make(TrainConfig(optimizer="lamb"), slots, torch.device("cpu"))
    rows = [Slot("tables.0", part, part, (4, 4), (0, 0), lazy=True)]
    with pytest.raises(UsageError, match="rows are stepped when they are read"):
        make(TrainConfig(optimizer="lamb"), rows, torch.device("cpu"))


@pytest.mark.timeout(60)
def test_offloaded_states_come_in_parts_and_ranks_meet_once_a_pass(threads, tmp_path, monkeypatch) -> None:
    """A part for each parameter, of which stages have different numbers."""
    told = recipe(tmp_path, **keys_of("lans"))
    plan = "pp=2 micros=4 precision=fp64"
    plain = threads(lambda ctx: parts(ctx, told, plan), 2)
    monkeypatch.setattr("unisono.parallel.offload.streaming.AT_ONCE", 1)
    for (met, held), (_, want) in zip(
        threads(lambda ctx: parts(ctx, told, f"{plan} offload=optimizer"), 2), plain, strict=True
    ):
        assert met == 6
        for (_, _, state), (_, _, right) in zip(held, want, strict=True):
            assert all(torch.equal(state[key], right[key]) for key in right)
