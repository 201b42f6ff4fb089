"""`unisono.prove` plays a loop of the user's on one process and on several."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import unisono
from unisono.library.loop_check import LoopPlay, LoopVerdict, compare
from unisono.plan import Plan

pytestmark = pytest.mark.timeout(120)


class Opaque(torch.autograd.Function):
    """The sum of squares, of which autograd's graph says nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square().sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * grad * ctx.saved_tensors[0]


def trained(job: unisono.Job, opaque: bool) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    data = DataLoader(TensorDataset(torch.rand(11, 3)), batch_size=4, shuffle=True)
    model, optimizer, data = job.prepare(model, optimizer, data)
    for _ in range(10):
        for (x,) in data:
            out = model(x)
            loss = Opaque.apply(out) if opaque else F.mse_loss(out, torch.zeros_like(out))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()


def right(job: unisono.Job) -> None:
    trained(job, False)


def wrong(job: unisono.Job) -> None:
    trained(job, True)


def test_a_loop_that_is_right(tmp_path: Any) -> None:
    verdict = unisono.prove(right, "dp=2", steps=4)
    assert isinstance(verdict, LoopVerdict) and verdict and len(verdict.errors) == 4, verdict
    verdict.check()


def test_a_loss_that_the_graph_says_nothing_of() -> None:
    verdict = unisono.prove(wrong, "dp=2")
    assert isinstance(verdict, LoopVerdict) and not verdict and verdict.first is not None, verdict
    assert verdict.first[0] == 1 and verdict.errors[0] == pytest.approx(0.5)
    assert verdict.cause == "factor_of_axis" and "U-J31" in str(verdict.notes), verdict
    with pytest.raises(unisono.UnisonoError, match="one process"):
        verdict.check()


def judged(one: Any, several: Any, notes: Any, plan: Plan) -> LoopVerdict:
    return compare(LoopPlay([one]), LoopPlay(several, notes=notes), plan)


def test_steps_that_are_missing_are_wrong() -> None:
    plan = Plan(dp=2)
    step = {"grad/0.weight": torch.ones(2)}
    assert judged([step, step], [[step, step]] * 2, (), plan).passed
    assert judged([step, step], [[step], [step, step]], (), plan).first == (2, "a step that is missing")
    assert not judged([], [[], []], (), plan).passed
    bad = {"grad/0.weight": torch.tensor([1.0, float("nan")])}
    found = judged([step], [[step], [bad]], (), plan)
    assert (found.first, found.cause) == ((1, "0.weight"), "not_a_number")


def test_what_the_samples_of_a_rank_weigh_is_told() -> None:
    own = [{"own/0.weight": torch.randn(8, dtype=torch.float64)} for _ in range(3)]

    def mixed(*weights: float) -> dict[str, Tensor]:
        return {"grad/0.weight": sum(w * o["own/0.weight"] for w, o in zip(weights, own, strict=True))}  # type: ignore[dict-item]

    ranks = [[mixed(0.5, 0.25, 0.25) | o] for o in own]
    found = judged([mixed(0.25, 0.25, 0.5)], ranks, (), Plan(dp=3))
    assert found.cause == "factor" and "rank 0 weigh 0.5 instead of 0.25" in str(found), found
    other = {"grad/0.weight": torch.randn(8, dtype=torch.float64)}
    assert judged([other], ranks, (), Plan(dp=3)).cause == "forward"
