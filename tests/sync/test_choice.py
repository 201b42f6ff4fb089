"""codec=auto: all ranks take the same codec, the right one for their links, and lose nothing where it changes."""

from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.step.test_gradients import started, text  # noqa: F401
from unisono.codecs import CODECS
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.sync import SampleLane
from unisono.sync._drive import Drive
from unisono.train.state.checkpoint import latest, save
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train_step
from unisono_contrib.codecs.auto import LADDER, MeasuredChoice
from unisono_contrib.comm.threads import run
from unisono_contrib.sync import _choice
from unisono_contrib.sync._choice import CodecSeconds, Gradient, probe

pytestmark = pytest.mark.timeout(120)


@pytest.mark.parametrize(
    ("seconds", "taken"),
    [
        ([1.0, 0.92], 0),  # that may be chance
        ([1.0, 0.8], 1),
        ([1.0, 0.52, 0.5, 0.49], 2),  # within 5 % of the quickest, the least lossy
        ([1.0, 2.0, 3.0, 4.0], 0),
        ([0.0, 0.0], 0),
        ([1.0, 0.0], 1),
    ],
)
def test_the_least_lossy_of_the_quickest_is_taken_and_plain_where_little_is_gained(seconds, taken) -> None:
    assert MeasuredChoice().taken(seconds) == taken


def test_the_ladder_ends_where_the_user_says() -> None:
    for i, most in enumerate(("bf16", "int8", "int4", "powersgd"), 2):
        member = CODECS.read(f"auto:{most}")
        assert [one.work([(512, 512)], 4, 4).sent for one in member.rungs.values()] == [
            CODECS.read(name).work([(512, 512)], 4, 4).sent for name in list(LADDER.values())[:i]
        ]
        sent = [one.work([(512, 512)], 4, 4).sent for one in member.rungs.values()]
        assert sent == sorted(sent, reverse=True), "each rung sends less than the one before"


def stepped(rank: int, order: list[int], ranks: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Steps with these rungs: the sum of all that the exchanges gave, and what is left on this rank."""
    group = Mesh(Shape(dp=ranks), rank, Recorder(rank), timedelta(seconds=60)).dp
    p = nn.Parameter(torch.zeros(96, 64, dtype=torch.float64))
    coder = CODECS.read("auto:powersgd").bind()
    drive, bucket, got = Drive(coder, group, {"p": p}), Bucket([p], ranks), torch.zeros(96 * 64).double()
    for step, place in enumerate(order):
        if step == 0 or place != order[step - 1]:
            coder.take(place)  # type: ignore[attr-defined]
        bucket.flat.copy_(given(rank, step))
        drive.begin(bucket)
        drive.finish()
        got += bucket.flat
    return got, drive.state["p/left"].flatten()


def given(rank: int, step: int) -> torch.Tensor:
    return torch.randn(96 * 64, generator=torch.Generator().manual_seed(100 * step + rank)).double()


@pytest.mark.parametrize("order", [[3, 3, 0], [3, 1, 3, 0, 0], [4, 3, 4, 0, 3]])
def test_what_feedback_has_left_survives_a_change_of_codec(order: list[int]) -> None:
    ended = run(2, lambda rank: stepped(rank, order))
    whole = torch.stack([given(rank, step) for rank in range(2) for step in range(len(order))]).sum(0)
    assert torch.equal(ended[0][0], ended[1][0])
    missing = whole - ended[0][0] - ended[0][1] - ended[1][1]
    # bf16, which feeds nothing back, rounds; all else is sent or left.
    assert missing.norm() / whole.norm() < (1e-2 if 1 in order else 1e-6)
    if order[-1] == 0:
        assert all(not left.count_nonzero() for _, left in ended)


def test_a_step_that_did_not_count_gives_back_what_was_left() -> None:
    def twice(rank: int) -> torch.Tensor:
        group = Mesh(Shape(dp=2), rank, Recorder(rank), timedelta(seconds=60)).dp
        own = CODECS.read("auto").bind()
        own.scale = torch.ones(())
        p = nn.Parameter(torch.zeros(96, 64))
        drive, bucket = Drive(own, group, {"p": p}), Bucket([p], 2)
        drive.state["p/left"].fill_(1.0)
        for fill in (torch.inf, 0.0):
            bucket.flat.fill_(fill)
            drive.begin(bucket)
            drive.finish()
            if fill:
                drive.kept.undo()
        return bucket.flat.clone()

    assert torch.equal(run(2, twice)[0], torch.full((96 * 64,), 2.0))


def probed(rank: int) -> list[CodecSeconds]:
    mesh = Mesh(Shape(dp=2, tp=2), rank, Recorder(rank), timedelta(seconds=60))
    # Ranks of tp have different shares, and so measure different times.
    shapes = [torch.Size((64, 32 + 32 * mesh.at["tp"])), torch.Size((64,))]
    coders = [one.bind() for one in CODECS.read("auto").rungs.values()]
    told = probe(coders, Gradient(shapes, torch.float32, torch.device("cpu")), mesh.dp, mesh.world)
    assert not mesh.dp.recorder.ledger(), "what is tried is in no ledger"
    return told


def test_all_ranks_of_the_world_measure_the_same() -> None:
    ended = run(4, probed)
    assert all(told == ended[0] for told in ended) and len(ended[0]) == 4
    assert all(0 <= one.computed <= one.whole > 0 for one in ended[0])


def trained(ctx, text, plan, steps=6, folder=None, resume=None) -> dict[str, Any]:  # noqa: F811
    live, feed = started(ctx, text, "gpt", plan)
    if resume is not None:
        restore(live, resume)
    said, told = [live.sync.says()], []
    for step in range(live.step, live.step + steps):
        report = train_step(live, feed.fetch(step, live.leaves))
        told.append(dict(live.sync.metrics()))
        said.append(live.sync.says())
    if folder is not None:
        boxes = [*pieces_of(live), *kept_of(live)]
        save(folder, live.step, boxes, {"step": live.step}, rank=ctx.rank, world=ctx.world, token="t")
    weights = {slot.name: slot.master.detach().clone() for slot in live.local.slots}
    whole = [slot.name for slot in live.local.slots if slot.master.shape == slot.shape]
    return {
        "whole": whole,
        "said": said,
        "told": told,
        "weights": weights,
        "at": live.mesh.at,
        "ledger": live.recorder.ledger(),
        "report": report,
    }


def slow(monkeypatch: pytest.MonkeyPatch, seconds: list[float]) -> None:
    """Links on which the rungs take so long; each rank measures something of its own."""

    def pretended(coders, gradient, dp, world):
        own = torch.tensor([one / (1 + world.index) for one in seconds]).double()
        return [CodecSeconds(float(x), 0.0) for x in world.all_gather(own[None]).amax(0)]

    monkeypatch.setattr(_choice, "probe", pretended)


def test_a_run_takes_what_is_quick_on_its_links_and_says_so(threads, text, monkeypatch) -> None:  # noqa: F811
    slow(monkeypatch, [100.0, 50.0, 25.0, 24.0])
    ended = threads(trained, 4, text=text, plan="dp=2 tp=2 codec=auto collective=ring", steps=3)
    for end in ended:
        assert all(said.startswith("int8: ") for said in end["said"])
        assert end["told"][0]["codec"] == "int8" and "codec" not in end["told"][1]
        assert {key.codec for key in end["ledger"] if key.axis == "dp" and key.codec} - {"(sample)"} == {
            "int8"
        }
    by = {(end["at"]["dp"], end["at"]["tp"]): end["weights"] for end in ended}
    for tp in range(2):
        assert all(torch.equal(x, by[1, tp][name]) for name, x in by[0, tp].items())
    copies = ended[0]["whole"]
    assert copies and all(torch.equal(by[0, 0][name], by[0, 1][name]) for name in copies)


def test_what_hides_behind_backward_is_no_reason_to_lose_anything(threads, text, monkeypatch) -> None:  # noqa: F811
    """At the start all would show; after three steps backward is known to hide it."""
    slow(monkeypatch, [1e-6, 1e-7, 1e-7, 1e-7])
    ended = threads(trained, 2, text=text, plan="dp=2 codec=auto collective=ring", steps=5)
    for end in ended:
        assert end["said"][0].startswith("cast:bf16: ") and end["said"][-1].startswith("plain: ")
        assert [one.get("codec") for one in end["told"]] == ["cast:bf16", None, "plain", None, None]


def test_links_are_measured_anew(threads, text, monkeypatch) -> None:  # noqa: F811
    asked = []

    def pretended(coders, gradient, dp, world):
        asked.append(world.index)
        many = asked.count(world.index)
        return [
            CodecSeconds(x, 0.0) for x in ((100.0, 100.0, 1.0, 1.0) if many == 1 else (100.0, 1.0, 1.0, 1.0))
        ]

    monkeypatch.setattr(_choice, "probe", pretended)
    plan = "dp=2 codec=auto:again=4 collective=ring"
    for end in threads(trained, 2, text=text, plan=plan, steps=9):
        assert [one.partition(": ")[0] for one in end["said"]] == ["int8"] * 4 + ["cast:bf16"] * 6
    assert asked.count(0) == 3


def test_a_resumed_run_goes_on_with_what_was_left(threads, text, tmp_path, monkeypatch) -> None:  # noqa: F811
    """A checkpoint of int4+ef, resumed where plain is quickest: what was left is in the first sum."""
    slow(monkeypatch, [100.0, 99.0, 98.0, 1.0])
    plan = "dp=2 codec=auto collective=ring"
    threads(trained, 2, text=text, plan=plan, steps=2, folder=tmp_path)
    folder = latest(tmp_path)
    slow(monkeypatch, [1.0, 2.0, 2.0, 2.0])
    with_left = threads(trained, 2, text=text, plan=plan, steps=1, resume=folder)
    without = threads(trained, 2, text=text, plan="dp=2 collective=ring", steps=1, resume=folder)
    assert with_left[0]["said"][0].startswith("plain: ")
    assert any(not torch.equal(x, without[0]["weights"][name]) for name, x in with_left[0]["weights"].items())
    assert all(torch.equal(x, with_left[1]["weights"][name]) for name, x in with_left[0]["weights"].items())


def test_replicas_that_see_each_others_memory_send_plain_without_measuring(monkeypatch) -> None:
    monkeypatch.setattr(_choice, "_measured", None)  # or this would be called

    class Near:
        size, axis = 2, "dp"

    class Site:
        private = shares = sliced = False
        settled, kept, cap = "", None, 0
        equal, replicas, keeps_weights, one_copy, lane = True, None, True, False, SampleLane()
        dp = Near()

    Near.near = lambda self, device: True  # type: ignore[attr-defined]
    world = Mesh(Shape(), 0, Recorder(0), timedelta(seconds=60)).world
    gradient = Gradient([torch.Size((4, 4))], torch.float32, torch.device("cpu"))
    choice = _choice.ChoosingSync(Site(), CODECS.read("auto").bind(), gradient, world)  # type: ignore[arg-type]
    assert choice.says() == "plain: replicas of dp see each other's memory"
