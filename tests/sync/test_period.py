"""sync=period: replicas meet in every k-th step, and the run is that of one device which does the same."""

from typing import Any

import pytest
import torch

from tests.threads import prove as prove_on_threads
from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.sync import Verdict
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono.verify.prover import Proof, prove
from unisono_contrib.sync.period import PeriodSync, period_for

pytestmark = pytest.mark.timeout(120)


def trained(ctx, text, plan, steps=6, folder=None, resume=None) -> dict[str, Any]:  # noqa: F811
    live, feed = started(ctx, text, "gpt", plan)
    if resume is not None:
        restore(live, resume)
    weights, reports, sent = [], [], []
    for step in range(live.step, live.step + steps):
        before = live.recorder.bytes().get(("dp", "all_reduce"), 0)
        reports.append(train_step(live, feed.fetch(step, live.leaves)))
        sent.append(live.recorder.bytes().get(("dp", "all_reduce"), 0) - before)
        weights.append(torch.cat([slot.master.detach().flatten().double() for slot in live.local.slots]))
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(folder, live.step, boxes, {"step": live.step}, rank=ctx.rank, world=ctx.world, token="t")
    return {"weights": weights, "reports": reports, "sent": sent, "step": live.step}


def close(some: torch.Tensor, others: torch.Tensor) -> bool:
    return ((some - others).norm() / others.norm()).item() < 1e-6


@pytest.mark.parametrize("plan", ["dp=2", "dp=2 tp=2", "dp=2 pp=2", "dp=2 shard=2"])
def test_any_layout_makes_the_updates_of_one_device(threads, text, plan: str) -> None:  # noqa: F811
    (one,) = threads(trained, 1, text=text, plan="dp=1 sync=period:3")
    ranks = Plan.parse(plan).world
    for end in threads(trained, ranks, text=text, plan=f"{plan} sync=period:3"):
        assert [report.verdict for report in end["reports"]] == [
            Verdict.HOLD,
            Verdict.HOLD,
            Verdict.APPLY,
        ] * 2
        assert [n > 0 for n in end["sent"]] == [False, False, True] * 2
        assert end["step"] == 6
        for mine, theirs in zip(end["reports"], one["reports"], strict=True):
            assert mine.loss == pytest.approx(theirs.loss, rel=1e-5)
            assert mine.norm == pytest.approx(theirs.norm, rel=1e-4)
        if ranks == 2:
            assert all(close(a, b) for a, b in zip(end["weights"], one["weights"], strict=True))
        held = end["weights"]
        assert torch.equal(held[0], held[1]) and not torch.equal(held[1], held[2])


def test_a_checkpoint_in_a_period_serves_any_number_of_replicas(threads, text, tmp_path) -> None:  # noqa: F811
    plan = "dp=2 sync=period:4"
    whole = threads(trained, 2, text=text, plan=plan, steps=8)
    threads(trained, 2, text=text, plan=plan, steps=6, folder=tmp_path)
    folder = latest(tmp_path)
    then = threads(trained, 2, text=text, plan=plan, steps=2, resume=folder)
    assert torch.equal(then[0]["weights"][-1], whole[0]["weights"][-1])
    (alone,) = threads(trained, 1, text=text, plan="dp=1 sync=period:4", steps=2, resume=folder)
    assert close(alone["weights"][-1], whole[0]["weights"][-1])
    four = threads(trained, 4, text=text, plan="dp=4 sync=period:4", steps=2, resume=folder)
    assert close(four[0]["weights"][-1], whole[0]["weights"][-1])


def test_a_codec_sees_the_sum_of_a_period_once(threads, text) -> None:  # noqa: F811
    ended = threads(trained, 2, text=text, plan="dp=2 codec=int8 sync=period:3")
    assert torch.equal(ended[0]["weights"][-1], ended[1]["weights"][-1])
    plain = threads(trained, 2, text=text, plan="dp=2 sync=period:3")
    off = (ended[0]["weights"][2] - plain[0]["weights"][2]).norm() / plain[0]["weights"][2].norm()
    assert 0 < off < 0.05


@pytest.fixture
def seen(monkeypatch) -> list[list[float]]:
    """Of each rank, what its meetings show, in seconds, where a step computes for one."""
    shown: list[list[float]] = []

    def times(self, world):
        own = torch.tensor([[shown[self.dp.index].pop(0), 1.0]], dtype=torch.float64)
        return tuple(world.all_gather(own).amin(0).tolist())

    monkeypatch.setattr(PeriodSync, "_times", times)
    return shown


def verdicts(end: dict[str, Any]) -> str:
    return "".join("a" if report.verdict is Verdict.APPLY else "h" for report in end["reports"])


def test_a_period_follows_the_links_alike_on_all_ranks(threads, text, seen) -> None:  # noqa: F811
    seen += [[0.3, 9.0, 0.05, 0.0], [0.29, 2.0, 0.5, 0.0]]
    ends = threads(trained, 2, text=text, plan="dp=2 sync=period:most=4", steps=9)
    assert [verdicts(end) for end in ends] == ["ahhahhhaa"] * 2  # 1, then 3, then 4 at most, then 1
    assert torch.equal(ends[0]["weights"][-1], ends[1]["weights"][-1])


def test_a_period_that_has_grown_goes_on_from_a_checkpoint(threads, text, seen, tmp_path) -> None:  # noqa: F811
    seen += [[0.3] * 9, [0.3] * 9]
    plan = "dp=2 sync=period:most=4"
    threads(trained, 2, text=text, plan=plan, steps=2, folder=tmp_path)
    ends = threads(trained, 2, text=text, plan=plan, steps=5, resume=latest(tmp_path))
    assert [verdicts(end) for end in ends] == ["hahha"] * 2


@pytest.mark.parametrize(
    ("shown", "computing", "period"),
    [(0.0, 1.0, 1), (0.1, 1.0, 1), (0.11, 1.0, 2), (5.0, 1.0, 8), (1.0, 0.0, 1)],
)
def test_the_shortest_period_in_which_a_meeting_shows_a_tenth(
    shown: float, computing: float, period: int
) -> None:
    assert period_for(shown, computing, 1, 8) == period


def test_what_has_no_meaning_is_refused() -> None:
    recipe = Recipe(model=ModelConfig(n_layer=2), train=TrainConfig(global_batch=8))
    told = Plan.parse("dp=2 precision=fp16 sync=period:2").check(recipe)
    assert any("scale" in problem.what for problem in told)
    assert Plan.parse("dp=2 sync=period:2").check(recipe) == []
    with pytest.raises(UsageError) as error:
        prove(recipe, [Plan.parse("dp=2 sync=period:2,most=4")], 1)
    assert error.value.code == "V04" and "sync=period:2," in error.value.fix


def proofs(text: str, *plans: str) -> list[Proof]:  # noqa: F811
    recipe = Recipe(
        seed=3,
        model=ModelConfig(n_layer=2, n_head=2, d_model=16, context=8, dropout=0.1),
        data=DataConfig(source=f"text:{text}"),
        train=TrainConfig(steps=9, global_batch=8, micro_batch=1, lr=1e-2, dtype="float64", clip=0.5),
    )
    return prove_on_threads(recipe, [Plan.parse(f"{plan} precision=fp64") for plan in plans], steps=2)


@pytest.mark.parametrize(
    "plan",
    [
        "dp=2 sync=period:3",
        pytest.param("dp=2 tp=2 sync=period:2", marks=pytest.mark.slow),
        pytest.param("dp=2 pp=2 sync=period:2", marks=pytest.mark.slow),
        pytest.param("dp=2 shard=2 sync=period:2", marks=pytest.mark.slow),
        pytest.param("dp=2 codec=int8:block=64 sync=period:2", marks=pytest.mark.slow),
    ],
)
def test_a_period_is_proven_beside_one_device_that_keeps_it_too(plan: str, text) -> None:  # noqa: F811
    (proof,) = proofs(text, plan)
    assert proof.passed, proof
    assert not proof.bit_identical and proof.max_rel_err["param"] > 0


def half_lost(self: PeriodSync) -> bool:
    """Of what was added up, a little is lost on one replica before it meets."""
    meets = int(self._count) == self.steps - 1
    if meets and self.dp.index == 1:
        for held in self._held.values():
            held.mul_(0.999)
    return meets


def test_a_replica_that_loses_some_of_its_sum_is_found(text, monkeypatch) -> None:  # noqa: F811
    monkeypatch.setattr(PeriodSync, "is_due", property(half_lost))
    (proof,) = proofs(text, "dp=2 sync=period:3")
    assert proof.verdict == "wrong" and "step 1" in str(proof.first_divergence)
