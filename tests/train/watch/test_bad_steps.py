"""Bad steps: what makes one, that all ranks answer alike, and that a run goes on exactly as one that never had it."""

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.threads import context
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.spec.errors import UserCodeError
from unisono.sync import Verdict
from unisono.train.data.dataset import Corpus, Dataset
from unisono.train.data.feed import Permuted
from unisono.train.data.load import load
from unisono.train.state.checkpoint import read_full
from unisono.train.step.numbers import Numbers
from unisono.train.watch.bad_steps import LEAST, Judge, spread
from unisono.verbs.train import rank as train_rank
from unisono.verbs.train.order import TrainOrder
from unisono_contrib.comm import threads

pytestmark = pytest.mark.timeout(120)


@dataclass(frozen=True)
class Spoilt:
    """Some samples of a data set times a factor. by: factor of each, by its number."""

    inner: Dataset
    by: Mapping[int, float]

    def __len__(self) -> int:
        return len(self.inner)

    def fetch(self, indices: np.ndarray) -> tuple[Tensor, Tensor]:
        inputs, targets = self.inner.fetch(indices)
        factors = torch.tensor([self.by.get(int(i), 1.0) for i in indices], dtype=inputs.dtype)
        return inputs * factors.view(-1, *[1] * (inputs.dim() - 1)), targets


def recipe(**train: Any) -> Recipe:
    """An MLP over digits; four micro-batches in a step."""
    given = {"steps": 8, "global_batch": 8, "micro_batch": 2, "lr": 1e-2, "save_every": 2, **train}
    return Recipe(
        seed=3,
        model=ModelConfig(kind="mlp"),
        data=DataConfig(source="digits"),
        train=TrainConfig(**given),
    )


def spoilt(told: Recipe, at: Mapping[tuple[int, int], float]) -> Corpus:
    """The recipe's data; the first sample of a (step from 1, leaf) times a factor."""
    corpus = load(told.data, told.model)
    feed = Permuted(corpus.train, told.seed, told.train.global_batch, told.train.micro_batch or 1)
    by = {feed.samples_of(step - 1, leaf)[0]: factor for (step, leaf), factor in at.items()}
    return replace(corpus, train=Spoilt(corpus.train, by))


def play(
    told: Recipe,
    corpus: Corpus,
    plan: str,
    ranks: int,
    run: Path,
    resume: bool = False,
    heard: list[str] | None = None,
) -> list[dict[str, Any]]:
    """`unisono train` on ranks that are threads."""
    run.mkdir(exist_ok=True)
    resolved = resolve(told, plan, ranks)
    argument = TrainOrder(resolved.recipe, resolved.plan, "", run, resume).as_json()

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "note" and heard is not None:
            heard.append(event["text"])

    return threads.run(
        ranks, lambda rank: train_rank.main(context(rank, ranks, hear), dict(argument), corpus), join=False
    )


def lines(run: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / name).read_text().splitlines()]


def weights(run: Path, step: int) -> dict[str, Tensor]:
    return read_full(run / "checkpoints" / f"step-{step:06d}")


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# What is bad ---------------------------------------------------------------------------------------------------------


def judged(judge: Judge, *losses: float, verdict: Verdict = Verdict.APPLY, norm: float = 1.0) -> list[str]:
    return [judge(99, verdict, Numbers(norm, loss, False)) for loss in losses]


def test_a_number_that_is_none_is_bad_without_being_asked() -> None:
    judge = Judge(0.0)
    assert judged(judge, math.nan, math.inf, 1e9) == ["the loss is nan", "the loss is inf", ""]
    assert judged(judge, 1.0, norm=math.nan) == ["the gradient norm is nan"]
    assert judged(judge, 1.0, norm=math.nan, verdict=Verdict.REMOTE) == [""]
    assert judged(judge, 1.0, norm=math.inf, verdict=Verdict.REMOTE) == ["the gradient norm is inf"]


def test_a_spike_is_measured_by_what_was_good_before_it() -> None:
    judge, noise = Judge(6.0), [2.0 + 0.01 * (i % 5) for i in range(LEAST)]
    assert judged(judge, 50.0, *noise[1:]) == [""] * LEAST  # too few to know
    assert judged(judge, 2.05, 1.0) == ["", ""]  # noise, and what is below
    (said,) = judged(judge, 3.0)
    assert said.startswith("the loss is 3, ") and "deviations above 2.02" in said
    assert judged(judge, 3.0) == [said]  # bad ones do not count among those before
    assert judged(judge, 2.0, norm=9.0)[0].startswith("the gradient norm is 9")
    assert judged(judge, 2.0, norm=9.0, verdict=Verdict.HOLD) == [""]


def test_the_deviation_is_that_of_a_normal_distribution_whatever_outliers_do() -> None:
    drawn = np.random.default_rng(0).normal(5.0, 2.0, 4001).tolist()
    median, deviation = spread([*drawn, *[1e6] * 40])
    assert abs(median - 5.0) < 0.15 and abs(deviation - 2.0) < 0.15
    assert spread([1.0] * 9) == (1.0, 1e-3)


# Skip ----------------------------------------------------------------------------------------------------------------

PLANS = [
    ("dp=1", 1), ("dp=2", 2), ("pp=2", 2), ("shard=2 zero=3", 2), ("dp=2 sync=canonical", 2),
    ("dp=4 codec=int8+ef", 4), ("dp=2 sync=priority", 2), ("dp=2 pp=2", 4),
]  # fmt: skip


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_skipped_step_leaves_everything_as_it_was_and_counts(tmp_path: Path, plan: str, ranks: int) -> None:
    told = recipe(on_bad="skip", clip=0.0)
    run = tmp_path / "run"
    ended = play(told, spoilt(told, {(3, 2): math.nan}), plan, ranks, run)
    assert all(end["skipped"] == [{"step": 3, "reason": "the loss is nan"}] for end in ended)
    told_of = lines(run)
    assert [line["step"] for line in told_of] == list(range(1, 9))
    assert [line.get("skipped") for line in told_of] == [None] * 2 + ["the loss is nan"] + [None] * 5
    assert told_of[2]["loss"] is None and all(line["loss"] for line in told_of if line["step"] != 3)
    (found,) = lines(run, "quarantine.jsonl")
    assert (found["step"], found["leaf"], found["loss"]) == (3, 2, "nan") and len(found["samples"]) == 2
    # Saved after the step before it and the step itself: weights, moments and what a codec keeps are the same.
    whole = tmp_path / "whole"
    three = told.model_copy(update={"train": told.train.model_copy(update={"save_every": 1, "steps": 3})})
    play(three, spoilt(told, {(3, 2): math.nan}), plan, ranks, whole)
    assert same(weights(whole, 2), weights(whole, 3))


def test_a_run_that_skips_has_the_same_bits_on_other_ranks_in_canonical_mode(tmp_path: Path) -> None:
    told, at = recipe(on_bad="skip"), {(3, 2): math.nan, (6, 0): math.inf}
    runs = [("dp=1 sync=canonical", 1), ("dp=4 sync=canonical", 4), ("dp=2 pp=2 sync=canonical", 4)]
    for i, (plan, ranks) in enumerate(runs):
        play(told, spoilt(told, at), plan, ranks, tmp_path / str(i))
    assert same(weights(tmp_path / "0", 8), weights(tmp_path / "1", 8))
    assert same(weights(tmp_path / "0", 8), weights(tmp_path / "2", 8))


def test_too_many_in_a_row_end_it_and_are_named(tmp_path: Path) -> None:
    told = recipe(on_bad="skip", bad_limit=2)
    with pytest.raises(UserCodeError) as caught:
        play(told, spoilt(told, {(step, 0): math.nan for step in (3, 4, 5)}), "dp=1", 1, tmp_path / "run")
    assert caught.value.code == "N03"
    assert caught.value.what == "step 5: the loss is nan; the 2 bad steps before it were skipped"
    assert caught.value.where == "step 3 (the loss is nan); step 4 (the loss is nan)"


def test_under_fp16_a_bad_sample_does_not_cost_the_scale(tmp_path: Path) -> None:
    told = recipe(on_bad="skip")
    plan = "dp=2 precision=fp16:scale=1024"
    (end, _) = play(told, spoilt(told, {(3, 2): math.nan}), plan, 2, tmp_path / "run")
    assert [one["step"] for one in end["skipped"]] == [3]
    scales = [line["loss_scale"] for line in lines(tmp_path / "run") if line["step"] != 3]
    assert set(scales) == {1024.0}


@pytest.mark.parametrize("step", [3, 4])
def test_a_period_loses_the_bad_step_alone_or_is_given_up_where_replicas_meet(
    tmp_path: Path, step: int
) -> None:
    told = recipe(on_bad="skip", save_every=1)
    run = tmp_path / "run"
    play(told, spoilt(told, {(step, 0): math.nan}), "dp=2 sync=period:2", 2, run)
    kept = [weights(run, n) for n in (6, 7, 8)]
    assert all(torch.isfinite(x).all() for one in kept for x in one.values() if x.is_floating_point())
    changed = [
        n for n in (7, 8)
        if not same(*({k: v for k, v in kept[i].items() if k.startswith("model/")} for i in (n - 7, n - 6)))
    ]  # fmt: skip
    assert changed == ([7] if step == 3 else [8])


# Roll back -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "ranks"), [*PLANS, ("dp=2 sync=period:2", 2), ("dp=2 precision=fp16:scale=1024", 2)]
)
def test_a_run_that_goes_back_ends_as_one_that_knew_what_to_leave_out(
    tmp_path: Path, plan: str, ranks: int
) -> None:
    told = recipe(on_bad="roll_back", skip_around=1, clip=0.0)
    run, heard = tmp_path / "run", list[str]()
    ended = play(told, spoilt(told, {(6, 1): math.nan}), plan, ranks, run, heard=heard)
    (back,) = ended[0]["rolled_back"]
    assert back == {"step": 6, "reason": "the loss is nan", "to": 4, "left_out": (5, 6, 7)}
    assert [one["step"] for one in ended[-1]["skipped"]] == [5, 6, 7]
    assert [line["step"] for line in lines(run)] == list(range(1, 9))
    assert [line["step"] for line in lines(run) if "skipped" in line] == [5, 6, 7]
    assert [(one["step"], one["leaf"]) for one in lines(run, "quarantine.jsonl")] == [(6, 1)]
    assert any(
        text.startswith("step 6: the loss is nan; back to step 4, and without steps 5 to 7") for text in heard
    )
    steps = [line["step"] for line in lines(run, f"events/rank{ranks - 1}.jsonl") if line["kind"] == "step"]
    assert steps == list(range(1, 9))
    before, after = ({k: v for k, v in weights(run, n).items() if "scaler" not in k} for n in (4, 6))
    assert same(before, after)  # steps 5 and 6 changed nothing


def test_it_goes_on_after_a_kill_as_if_it_had_not_been_killed(tmp_path: Path) -> None:
    """Killed after it went back and before it came to the bad step again: what is left out is known."""
    told = recipe(on_bad="roll_back", steps=10, save_every=4)
    corpus, whole, halves = spoilt(told, {(6, 1): math.nan}), tmp_path / "whole", tmp_path / "halves"
    (want,) = play(told, corpus, "dp=1", 1, whole)
    shutil.copytree(whole, halves)
    for name in ("step-000008", "step-000010"):
        shutil.rmtree(halves / "checkpoints" / name)
    (halves / "latest").write_text("checkpoints/step-000004\n")
    (got,) = play(told, corpus, "dp=1", 1, halves, resume=True)
    assert got["skipped"] == want["skipped"] and got["loss"] == want["loss"]
    assert [line["loss"] for line in lines(halves)] == [line["loss"] for line in lines(whole)]
    assert same(weights(halves, 10), weights(whole, 10))


def test_returns_that_do_not_help_end_it_and_are_named(tmp_path: Path) -> None:
    told = recipe(on_bad="roll_back", bad_limit=3, skip_around=0)
    at = {(step, 0): math.nan for step in (5, 6, 7, 8)}
    with pytest.raises(UserCodeError) as caught:
        play(told, spoilt(told, at), "dp=1", 1, tmp_path / "run")
    assert caught.value.code == "N03"
    assert caught.value.what == "step 8: the loss is nan; the run went back 3 times and came no further"
    tries = "step 5 (the loss is nan): back to 4; step 6 (the loss is nan): back to 2; step 7 (the loss is nan): back to 2"
    assert caught.value.where == tries


# Spikes --------------------------------------------------------------------------------------------------------------


def test_a_spike_stops_skips_or_goes_back_alike(tmp_path: Path) -> None:
    at = {(LEAST + 4, 1): 1e4}
    given = {"steps": LEAST + 8, "spike": 20.0, "lr": 1e-3, "save_every": 6}
    stops, skips, back = (recipe(on_bad=how, **given) for how in ("stop", "skip", "roll_back"))
    with pytest.raises(UserCodeError) as caught:
        play(stops, spoilt(stops, at), "dp=1", 1, tmp_path / "stop")
    assert caught.value.code == "N02" and f"step {LEAST + 4}: the loss is" in caught.value.what
    for told in (skips, back):
        run = tmp_path / told.train.on_bad
        ended = play(told, spoilt(told, at), "dp=2", 2, run)
        left = [one["step"] for one in ended[0]["skipped"]]
        assert left == ([LEAST + 4] if told is skips else [LEAST + 3, LEAST + 4, LEAST + 5])
        assert ended[0]["skipped"] == ended[1]["skipped"]


# Quarantine ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plan", "ranks"), PLANS)
def test_a_quarantined_micro_batch_leaves_the_mean_of_the_others(
    tmp_path: Path, plan: str, ranks: int
) -> None:
    told = recipe(quarantine=True, clip=0.0)
    ended = play(told, spoilt(told, {(3, 2): math.nan}), plan, ranks, tmp_path / "run")
    assert not ended[0]["skipped"]
    told_of = lines(tmp_path / "run")
    assert [line.get("quarantined") for line in told_of] == [None, None, [2], *[None] * 5]
    assert all(math.isfinite(line["loss"]) for line in told_of)
    (found,) = lines(tmp_path / "run", "quarantine.jsonl")
    assert (found["step"], found["leaf"]) == (3, 2)


def test_the_step_without_it_is_that_of_a_smaller_batch(tmp_path: Path) -> None:
    """Loss and update are those of the three micro-batches that are left."""
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, place_of
    from unisono.train.data.filtered import FilteredFeed
    from unisono.train.step.train_step import train_step

    def one(global_batch: int, left: bool) -> tuple[float, dict[str, Tensor]]:
        told = resolve(recipe(global_batch=global_batch, dtype="float64"), "dp=1", 1)
        corpus = load(told.recipe.data, told.recipe.model)
        run = build(told.recipe, told.plan, place_of(0, 1, 0, "gloo", 60.0), corpus, Recorder(0))
        feed = FilteredFeed(Permuted(corpus.train, 3, 8, 2, dtype=torch.float64))
        if left:
            feed.leave_out(0, {3})
        report = train_step(run, feed.fetch(0, run.leaves))
        return report.loss, {slot.name: slot.master.detach().clone() for slot in run.local.slots}

    (loss, got), (less, want) = one(8, True), one(6, False)
    assert loss == pytest.approx(less, rel=1e-12)
    for name, x in want.items():
        torch.testing.assert_close(got[name], x, rtol=1e-9, atol=1e-12)


def test_where_weights_are_not_numbers_no_sample_is_to_blame(tmp_path: Path) -> None:
    told = recipe(lr=1e38, lr_schedule="constant", steps=8)
    with pytest.raises(UserCodeError) as caught:
        play(told, load(told.data, told.model), "dp=1", 1, tmp_path / "run")
    assert caught.value.code == "N01"
    assert not (tmp_path / "run" / "quarantine.jsonl").exists()
