"""Moments in the place of gradients: alike on all replicas, fed back, kept when a run is saved; gradients that cross
whole are plain sums."""

import pytest
import torch

from tests.codecs.meeting import Meeting, drawn
from tests.codecs.test_training import alike, replicas_agree, trained
from tests.threads import prove
from tests.train.step.test_gradients import text  # noqa: F401
from unisono.codecs import BucketMemory, Coder, Exchange, Sum
from unisono.codecs._moments import MOMENT, MomentCoder
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.train.state.checkpoint import latest
from unisono_contrib.train.optim.onebit_adam import OneBitAdam
from unisono_contrib.train.optim.zeroone_adam import ZeroOneAdam

pytestmark = pytest.mark.timeout(240)

DECAY = 0.9
SHAPES = [(40, 32), (16, 64)]
NUMEL = 40 * 32 + 16 * 64


class Moments(Meeting):
    """A meeting whose coders are given moments. whole: first steps whose gradients cross as they are."""

    def over(self, whole: int) -> "Moments":
        self.made = 0
        self.coders = [
            MomentCoder(c, DECAY, lambda step: min(step, whole), lambda: self.made) for c in self.coders
        ]
        for memory in self.memories:
            memory.kept = {**memory.kept, MOMENT: torch.zeros(self.numel, dtype=self.dtype)}
        return self

    def step(self, grads):
        total = super().step(grads)
        self.made += 1
        return total

    def moments(self) -> list[torch.Tensor]:
        return [memory[MOMENT] for memory in self.memories]


def added(grads: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack(grads).sum(0)


def test_what_is_returned_makes_the_moment_that_all_replicas_have() -> None:
    meeting, moment = Moments("sign+ef", SHAPES, replicas=3).over(2), torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        moment = DECAY * moment + (1 - DECAY) * meeting.step(drawn(NUMEL, *range(3 * step, 3 * step + 3)))
        first, *others = meeting.moments()
        assert all(torch.equal(first, other) for other in others) and first.any()
        torch.testing.assert_close(3 * first, moment, rtol=1e-9, atol=1e-12)


def test_with_nothing_lost_it_is_the_plain_sum_in_every_step() -> None:
    meeting = Moments("plain", SHAPES).over(1)
    for step in range(5):
        grads = drawn(NUMEL, 2 * step, 2 * step + 1)
        torch.testing.assert_close(meeting.step(grads), added(grads), rtol=1e-9, atol=1e-12)


def test_whole_gradients_cross_by_one_sum_and_leave_the_codec_alone() -> None:
    meeting = Moments("sign+ef", SHAPES).over(2)
    for step in range(2):
        grads = drawn(NUMEL, 2 * step, 2 * step + 1)
        assert torch.equal(meeting.step(grads), added(grads))
        assert meeting.requests[-1] == [("Sum", 8 * NUMEL)]
        assert not any(memory["left"].any() for memory in meeting.memories)
    grads = drawn(NUMEL, 8, 9)
    assert not torch.equal(meeting.step(grads), added(grads))
    assert "Sum" not in dict(meeting.requests[-1]) and all(m["left"].any() for m in meeting.memories)


class Noted(Coder):
    """A plain sum that notes which step it is told."""

    counts = True

    def __init__(self) -> None:
        self.told: list[int] = []

    def exchange(self, grad, shapes, memory: BucketMemory) -> Exchange:
        self.told.append(memory.step)
        return (yield Sum(grad))


def test_a_codec_counts_the_steps_that_it_plays_itself() -> None:
    meeting, inner, member = Moments("plain", [(4, 4)], replicas=1), Noted(), ZeroOneAdam(refreshes=2)
    meeting.coders = [inner]
    meeting.over(0)
    meeting.coders[0].whole_steps = member.whole_steps  # type: ignore[attr-defined]
    for step in range(12):
        meeting.step(drawn(16, step))
    assert inner.told == list(range(6))  # of 12 steps, 0, 1, 2, 4, 6 and 10 are whole


def test_what_one_bit_loses_of_a_moment_comes_later() -> None:
    """All gradients that were returned, and all that are missing yet, add up: the error does not grow with the steps."""

    def missing(steps: int) -> float:
        meeting, off = Moments("sign+ef", SHAPES).over(1), torch.zeros(NUMEL, dtype=torch.float64)
        for step in range(steps):
            grads = drawn(NUMEL, 2 * step, 2 * step + 1)
            off += added(grads) - meeting.step(grads)
        return off.norm().item()

    assert missing(80) < 2.0 * missing(20)


OPTIMISERS = {
    "onebit_adam": {"optimizer": "onebit_adam", "variance_steps": 1, "clip": 0.0},
    "zeroone_adam": {"optimizer": "zeroone_adam", "refreshes": 1, "clip": 0.0},
}


@pytest.mark.parametrize("name", OPTIMISERS)
def test_it_learns_and_replicas_stay_alike(name, text, threads) -> None:  # noqa: F811
    train = OPTIMISERS[name]
    plain = threads(trained, 2, text=text, plan="dp=2", steps=5, **train)
    found = threads(trained, 2, text=text, plan="dp=2 codec=sign+ef", steps=5, **train)
    assert replicas_agree(found)
    moments = [{k: x for k, x in result["state"].items() if k.endswith(f"/{MOMENT}")} for result in found]
    assert alike(*moments) and all(x.any() for k, x in moments[0].items() if "bias" not in k)
    assert found[0]["losses"][:2] == plain[0]["losses"][:2]  # the first step is whole
    assert found[0]["losses"] != plain[0]["losses"]
    assert found[0]["losses"] == pytest.approx(plain[0]["losses"], rel=0.1)


def test_moments_cross_in_the_last_step_of_a_period_alone(text, threads) -> None:  # noqa: F811
    train = OPTIMISERS["zeroone_adam"]
    plan = "dp=2 codec=sign+ef sync=period:3"
    found = threads(trained, 2, text=text, plan=plan, steps=9, **train)  # the first two updates are whole
    plain = threads(trained, 2, text=text, plan="dp=2 sync=period:3", steps=9, **train)
    assert replicas_agree(found) and found[0]["losses"] == plain[0]["losses"]
    assert not alike(found[0]["weights"], plain[0]["weights"])  # the third is not


@pytest.mark.parametrize(("before", "after"), [(2, 4), (2, 1)])
def test_a_run_goes_on_exactly_and_with_another_dp_the_moment_is_the_same(
    before,
    after,
    text,  # noqa: F811
    tmp_path,
    threads,
) -> None:
    plan, train = "dp={} codec=sign+ef", OPTIMISERS["onebit_adam"]
    was = threads(
        trained, before, text=text, plan=plan.format(before), steps=3, folder=str(tmp_path), **train
    )
    at = {"text": text, "first": 3, "resume": str(latest(tmp_path)), **train}
    if after == 1:  # nothing crosses any more
        then = threads(trained, 1, plan="dp=1", steps=2, **at)
        assert then[0]["losses"][-1] < was[0]["losses"][0]
        return
    whole = threads(trained, before, text=text, plan=plan.format(before), steps=5, **train)
    same = threads(trained, before, plan=plan.format(before), steps=2, **at)
    for one, other in zip(same, whole, strict=True):
        assert alike(one["weights"], other["weights"]) and alike(one["state"], other["state"])
    now = threads(trained, after, plan=plan.format(after), steps=0, **at)
    for key in (key for key in was[0]["own"] if key.endswith(f"/{MOMENT}")):
        then, kept = (sum(result["own"][key] for result in results) for results in (was, now))
        torch.testing.assert_close(kept, then, rtol=1e-9, atol=1e-12)
        assert all(torch.equal(result["own"][key], now[0]["own"][key]) for result in now)
    more = threads(trained, after, plan=plan.format(after), steps=2, **at)
    assert replicas_agree(more) and more[0]["losses"][-1] < was[0]["losses"][0]


def test_from_one_replica_the_optimisers_own_counter_says_what_crosses(text, tmp_path, threads) -> None:  # noqa: F811
    train = OPTIMISERS["onebit_adam"]
    threads(trained, 1, text=text, plan="dp=1", steps=2, folder=str(tmp_path), **train)
    at = {"text": text, "first": 2, "resume": str(latest(tmp_path)), **train}
    coded = threads(trained, 2, plan="dp=2 codec=sign+ef", steps=1, **at)
    plain = threads(trained, 2, plan="dp=2", steps=1, **at)
    assert replicas_agree(coded) and not alike(coded[0]["weights"], plain[0]["weights"])


PLANS = {
    "onebit_adam": ("dp=2 codec=sign+ef", "dp=2 codec=plain"),
    "zeroone_adam": ("dp=2 tp=2 codec=sign+ef21",),
}
MORE = ("dp=2 pp=2 codec=sign+ef", "dp=2 tp=2 codec=int8:block=64", "dp=2 shard=2 codec=topk:ratio=0.05+ef",
        "dp=3 codec=ternary", "dp=2 shard=2 zero=1 codec=powersgd:r=2+ef", "dp=2 tp=2 pp=2 codec=sign+ef21")  # fmt: skip


def proofs(name: str, plans):
    model = ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1)
    train = TrainConfig(
        steps=6,
        global_batch=12,
        micro_batch=1,
        lr=1e-2,
        dtype="float64",
        **OPTIMISERS[name],  # type: ignore[arg-type]
    )
    read = [Plan.parse(f"{plan} precision=fp64") for plan in plans]
    return prove(Recipe(seed=3, model=model, train=train), read, steps=3)


@pytest.mark.parametrize("name", OPTIMISERS)
def test_the_updates_law_holds_whatever_crosses(name: str) -> None:
    found = proofs(name, PLANS[name])
    assert all(proof.passed for proof in found), found


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", OPTIMISERS)
def test_and_beside_every_axis(name: str) -> None:
    found = proofs(name, MORE)
    assert all(proof.passed for proof in found), found


@pytest.mark.parametrize(
    ("train", "codec", "word"),
    [
        ({"optimizer": "onebit_adam"}, "sign+ef", "train.clip"),
        ({"optimizer": "zeroone_adam", "clip": 0.0}, "topk+mc", "two momenta"),
        ({"optimizer": "onebit_adam", "clip": 0.0}, "auto", "chooses"),
        ({"optimizer": "adamw", "clip": 0.0}, "sign+ef", "divides by their size"),
        ({"optimizer": "onebit_adam", "clip": 0.0}, "sign", "ends nowhere"),
    ],
)
def test_what_means_nothing_together_is_refused(train, codec: str, word: str) -> None:
    problems = Plan.parse(f"dp=2 codec={codec}").check(Recipe(train=TrainConfig(**train)))
    assert [p.code for p in problems] == ["P23"]
    assert any(word in p.what or word in p.where or "end nowhere" in p.what for p in problems)


@pytest.mark.parametrize("member", [OneBitAdam(), ZeroOneAdam()])
def test_without_clipping_one_bit_is_allowed_and_clipping_is_where_nothing_is_coded(member) -> None:
    train = {"optimizer": member.name}
    assert not Plan.parse("dp=2 codec=sign+ef").check(Recipe(train=TrainConfig(clip=0.0, **train)))
    for plan in ("dp=1", "dp=2", "dp=2 codec=plain"):
        assert not Plan.parse(plan).check(Recipe(train=TrainConfig(**train)))
