"""A codec of a user's own goes through training: exchanges in a fixed order, memory kept and given back, losses whole."""

from datetime import timedelta
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.codecs.own import Largest, Rounded
from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.codecs import CODECS, Coder, Sum
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.sync._drive import Drive
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono_contrib.comm.threads import run

pytestmark = pytest.mark.timeout(180)
OWN = Path(__file__).parents[1] / "codecs" / "own.py"


def drawn(rank: int, step: int, numel: int) -> torch.Tensor:
    seed = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(numel, generator=seed, dtype=torch.float64)


def driven(
    rank: int, ranks: int, coder: Coder, sizes: tuple[int, ...], steps: int
) -> list[list[torch.Tensor]]:
    dp = Mesh(Shape(dp=ranks), rank, Recorder(rank), timedelta(seconds=60)).dp
    params = {f"p{i}": nn.Parameter(torch.zeros(numel).double()) for i, numel in enumerate(sizes)}
    buckets = [Bucket([p]) for p in params.values()]
    drive, found = Drive(coder, dp, params), []
    for step in range(steps):
        for bucket in buckets:
            bucket.flat.copy_(drawn(rank, step, bucket.flat.numel()))
            drive.begin(bucket)
        drive.finish()
        found.append([bucket.flat.clone() for bucket in buckets])
    return found


@pytest.mark.parametrize("member", [Largest(ratio=0.25), Rounded()], ids=lambda m: m.name)
def test_all_replicas_get_the_same_and_what_was_left_comes_later(member) -> None:
    results = run(4, lambda rank: driven(rank, 4, member.bind(), (64, 4, 128), 30))
    for rank in range(1, 4):
        for mine, first in zip(results[rank], results[0], strict=True):
            assert all(torch.equal(a, b) for a, b in zip(mine, first, strict=True))
    for i, numel in enumerate((64, 4, 128)):
        sent = sum(flats[i] for flats in results[0])
        whole = sum(drawn(rank, step, numel) for rank in range(4) for step in range(30))
        assert (sent - whole).norm() / whole.norm() < 0.5  # without memory three quarters would be gone


@pytest.mark.parametrize("turns", [2, 3, 4])
def test_a_codec_that_takes_turns_sends_each_element_once_in_them(turns: int) -> None:
    coders = [CODECS.read(f"block:ratio={1 / turns!r},dense=0").bind() for _ in range(2)]
    flats, _ = run(2, lambda rank: driven(rank, 2, coders[rank], (96, 12), 2 * turns))
    for i in range(2):
        sent = torch.stack([step[i] != 0 for step in flats])
        assert (sent[:turns].sum(0) == 1).all() and (sent[turns:].sum(0) == 1).all()


class InTwo(Coder):
    """A sum of each half, one after the other; says what it begins."""

    def __init__(self, log: list[str]) -> None:
        self.log = log

    def exchange(self, grad, shapes, memory):
        for half, name in zip(grad.chunk(2), ("first", "second"), strict=True):
            self.log.append(f"{name} of {grad.numel()}")
            half.copy_((yield Sum(half.clone())))
        return grad


def test_operations_are_issued_in_one_order_round_by_round() -> None:
    def logged(rank):
        log: list[str] = []
        driven(rank, 2, InTwo(log), (4, 2, 8), 1)
        return log

    assert (
        run(2, logged)
        == [["first of 4", "first of 2", "first of 8", "second of 4", "second of 2", "second of 8"]] * 2
    )


def trained(ctx, text, plan, steps=4, first=0, stop=None, folder=None, resume=None):  # noqa: F811
    live, feed = started(ctx, text, "gpt", plan)
    if resume is not None:
        restore(live, Path(resume))
        live.step = first
    reports = [
        train_step(live, feed.fetch(step, live.leaves), stop=partial(bool, step == stop and ctx.rank == 1))
        for step in range(first, first + steps)
    ]
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(Path(folder), live.step, boxes, {}, rank=ctx.rank, world=ctx.world, token="t")
    return {
        "losses": [report.loss for report in reports],
        "stops": [report.stop for report in reports],
        "weights": torch.cat([slot.master.detach().flatten() for slot in live.local.slots]).tolist(),
        "kept": {key: x.numel() for key, x in live.sync.state().items()},
    }


def test_training_goes_through_it_and_losses_and_stop_do_not(threads, text) -> None:  # noqa: F811
    plain = threads(trained, 2, text=text, plan="dp=2", stop=2)
    own = threads(trained, 2, text=text, plan=f"dp=2 codec={OWN}:Largest:ratio=0.1", stop=2)
    assert own[0]["losses"][0] == plain[0]["losses"][0]  # to the bit: no codec saw it
    assert own[0]["losses"][1:] != plain[0]["losses"][1:]
    assert own[0]["losses"][-1] < own[0]["losses"][0]
    assert own[0]["losses"] == own[1]["losses"]
    assert own[0]["stops"] == own[1]["stops"] == [False, False, True, False]
    assert own[0]["weights"] == own[1]["weights"] != plain[0]["weights"]
    assert own[0]["kept"] and not plain[0]["kept"]


def test_what_is_left_is_in_the_checkpoint(threads, text, tmp_path) -> None:  # noqa: F811
    plan = f"dp=2 codec={OWN}:Largest:ratio=0.1"
    whole = threads(trained, 2, text=text, plan=plan, steps=6)
    threads(trained, 2, text=text, plan=plan, steps=3, folder=str(tmp_path))
    folder = latest(tmp_path)
    then = threads(trained, 2, text=text, plan=plan, steps=3, first=3, resume=str(folder))
    assert [r["weights"] for r in then] == [r["weights"] for r in whole]


def test_canonical_takes_no_codec_that_loses_something() -> None:
    recipe = Recipe(model=ModelConfig(n_layer=2), train=TrainConfig(global_batch=8))
    plan = Plan.parse(f"dp=2 sync=canonical codec={OWN}:Rounded")
    assert "P21" in {problem.code for problem in plan.check(recipe)}
    assert Plan.parse("dp=2 sync=canonical").check(recipe) == []
