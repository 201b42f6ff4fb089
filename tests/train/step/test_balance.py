"""Leaves by measured speed: what each rank has said of itself decides, on all ranks alike. No clock is asked."""

import json
from typing import Any

import pytest

from tests.train.step.test_join import RECIPE, bits, folder, steps, straight
from unisono.config import Recipe, resolve
from unisono.observe.span import Recorder
from unisono.spec.errors import ConfigProblems
from unisono.sync import POLICIES

__all__ = ["folder"]


class Pretended(Recorder):
    """The recorder of a rank that computes so many seconds for a leaf. seconds: in each phase of the run."""

    def __init__(self, rank: int, seconds: float) -> None:
        super().__init__(rank)
        self.seconds, self._spent = seconds, 0.0

    def span(self, kind: str, **tags: Any) -> Any:
        self._spent += self.seconds if kind == "forward" and "micro" in tags else 0.0
        return super().span(kind, **tags)

    def totals(self) -> dict[str, float]:
        return {"forward": self._spent, "backward": 0.0}


def balanced(ctx: Any, folder: str, plan: str, batch: int, phases: list[tuple[int, list[float]]]) -> Any:
    """phases: (steps, seconds of a leaf on each rank)."""
    from unisono.train.build.build import build, feeds, place_of
    from unisono.train.data.load import load

    train = {**RECIPE["train"], "global_batch": batch, "steps": sum(count for count, _ in phases)}
    recipe = {**RECIPE, "data": {"source": f"text:{folder}/words.txt"}, "train": train}
    got = resolve(Recipe.model_validate_json(json.dumps(recipe)), plan, ctx.world)
    corpus = load(got.recipe.data, got.recipe.model)
    place, recorder = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 60.0), Pretended(ctx.rank, 1.0)
    run = build(got.recipe, got.plan, place, corpus, recorder)
    feed, said, losses, notes = feeds(got.recipe, got.plan, corpus, place.device)[0], [], [], []
    for count, seconds in phases:
        recorder.seconds = seconds[ctx.rank]
        for _ in range(count):
            losses += steps(run, feed, 1)
            said.append(run.assigner.metrics())
            notes.append(run.assigner.take_note())
    return {"said": said, "losses": losses, "notes": [note for note in notes if note], "bits": bits(run)}


SLOW = [1.0, 1.0, 1.0, 5.0]


@pytest.mark.timeout(180)
def test_a_slow_replica_gets_fewer_leaves_and_the_step_stays_what_it_is(threads: Any, folder: str) -> None:
    phases = [(4, [1.0] * 4), (6, SLOW), (6, [1.0] * 4)]
    ends = threads(balanced, 4, folder=folder, plan="dp=4 sync=every_step:balance=2", batch=16, phases=phases)
    counts = [said["leaves"] for said in ends[0]["said"]]
    assert counts[0] == [4, 4, 4, 4] and [5, 5, 5, 1] in counts, "given fewer where it is slow"
    assert counts[-1] == [4, 4, 4, 4], "and as many as others again where it is not"
    assert all(end["losses"] == ends[0]["losses"] and end["notes"] == ends[0]["notes"] for end in ends)
    idle = [said["idle_share"] for said in ends[0]["said"] if "idle_share" in said]
    assert idle[0] == 0.0 and max(idle) == pytest.approx(0.6) and idle[-1] == 0.0
    assert "5/5/5/1" in ends[0]["notes"][0] and "replica 3" in ends[0]["notes"][0]
    (alone,) = threads(balanced, 1, group=False, folder=folder, plan="dp=1", batch=16, phases=[(16, [1.0])])
    assert ends[0]["losses"] == pytest.approx(alone["losses"], rel=1e-5)


@pytest.mark.timeout(180)
def test_no_bit_changes_in_canonical_mode(threads: Any, folder: str) -> None:
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1 sync=canonical")
    ends = threads(
        balanced, 4, folder=folder, plan="dp=4 sync=canonical:balance=1", batch=8, phases=[(6, SLOW)]
    )
    assert all(end["bits"] == expected["bits"] and end["losses"] == expected["losses"] for end in ends)
    assert ends[0]["said"][-1]["leaves"] == [4, 2, 1, 1]


@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("phases", "why"),
    [
        ([(2, [1.0, 1.0]), (1, [1.0, 4.0]), (9, [1.0, 1.0])], "what passes"),
        ([(12, [1.0, 1.08])], "what is not worth it"),
        ([(2, [1.0, 1.0]), *[(1, [4.0, 1.0]), (1, [1.0, 4.0])] * 4], "another one each time"),
    ],
)
def test_noise_changes_nothing(
    threads: Any, folder: str, phases: list[tuple[int, list[float]]], why: str
) -> None:
    ends = threads(balanced, 2, folder=folder, plan="dp=2 sync=every_step:balance=1", batch=8, phases=phases)
    assert all(said["leaves"] == [4, 4] for end in ends for said in end["said"]), why


def test_what_the_options_mean() -> None:
    policy = POLICIES.read("every_step:balance=10,speeds=2/1/0.5")
    assert policy.look_every == 10 and policy.replica_speeds == (2.0, 1.0, 0.5)
    assert policy.among("every_step:balance=10,speeds=2/1/0.5", 2) == "every_step:balance=10"
    assert policy.steady("every_step:balance=10,speeds=2/1/0.5") == "every_step:speeds=2/1/0.5"
    exact = POLICIES.read("canonical:shards=2,balance=5")
    assert exact.steady("canonical:shards=2,balance=5") == "canonical:shards=2,balance=5", "the same bits"


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ("dp=2 sync=every_step:speeds=2/1/1", "3 speeds, and dp=2"),
        ("dp=2 sync=every_step:speeds=2/0", "a number above 0"),
        ("dp=2 sync=every_step:speeds=fast", "a number above 0"),
        ("dp=2 pp=2 schedule=interleaved sync=every_step:balance=5", "timetables for some numbers alone"),
        ("dp=2 pp=2 schedule=interleaved sync=canonical:balance=5", "timetables for some numbers alone"),
    ],
)
def test_what_cannot_be_played_is_refused_by_name(plan: str, said: str) -> None:
    said_of = {"model": {**RECIPE["model"], "n_layer": 4}, "train": {"global_batch": 8}}
    recipe = Recipe.model_validate_json(json.dumps(said_of))
    with pytest.raises(ConfigProblems, match=said):
        resolve(recipe, f"{plan} micros=4", 4 if "pp" in plan else 2)
