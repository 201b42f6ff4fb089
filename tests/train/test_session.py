"""A whole run on every rank: what it leaves in its folder, that it goes on from there, and that it stops when asked."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.threads import context
from tests.train.small import recipe
from tests.verify.test_beyond import MODEL
from unisono.config import LaunchConfig, ModelConfig, Recipe, resolve
from unisono.launch.context import NullChannel
from unisono.train.data.load import load
from unisono.train.state.checkpoint import read_full
from unisono.verbs.train import rank as train_rank
from unisono.verbs.train.order import TrainOrder
from unisono_contrib.comm import threads

SAVED = {"save_every": 2, "eval_every": 3, "steps": 5}


class Asked(NullChannel):
    """Asks for a stop when it was asked so often whether to."""

    def __init__(self, after: int) -> None:
        self.left = after

    def stop_requested(self) -> bool:
        self.left -= 1
        return self.left < 0

    def rendezvous(self, error: BaseException) -> None:
        return None


def play(
    told: Recipe, plan: str, ranks: int, run_dir: Path, resume: bool = False, stop: int = 99,
    heard: list[str] | None = None,
) -> list[Any]:  # fmt: skip
    """`unisono train` on ranks that are threads; the last rank is asked to stop after `stop` steps. heard: gets
    rank 0's notes."""
    run_dir.mkdir(exist_ok=True)
    resolved = resolve(told, plan, ranks)
    corpus = load(told.data, told.model)
    argument = TrainOrder(resolved.recipe, resolved.plan, "", run_dir, resume).as_json()

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "note" and heard is not None:
            heard.append(event["text"])

    def live(rank: int) -> dict[str, Any]:
        ctx = context(rank, ranks, hear)
        if rank and rank == ranks - 1:
            object.__setattr__(ctx, "channel", Asked(stop))
        return train_rank.main(ctx, dict(argument), corpus)

    return threads.run(ranks, live, join=False)


def losses(run: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(("plan", "ranks"), [("dp=2", 2), ("shard=2 sync=canonical", 2), ("dp=2 pp=2", 4)])
def test_a_run_that_was_stopped_goes_on_to_the_same_bits(tmp_path: Path, plan: str, ranks: int) -> None:
    told = recipe(tmp_path, **SAVED)
    whole, halves = tmp_path / "whole", tmp_path / "halves"
    ended = play(told, plan, ranks, whole)
    assert {(end["steps"], end["loss"], end["stopped"]) for end in ended} == {(5, losses(whole)[-1], False)}
    stopped = play(told, plan, ranks, halves, stop=2)
    assert {(end["steps"], end["stopped"]) for end in stopped} == {(3, True)}
    assert (halves / "latest").read_text().strip() == "checkpoints/step-000003"
    resumed = play(told, plan, ranks, halves, resume=True)
    assert {end["resumed_from"] for end in resumed} == {"step-000003"}
    assert losses(halves) == losses(whole)
    last = [read_full(run / "checkpoints" / "step-000005") for run in (whole, halves)]
    assert last[0].keys() == last[1].keys() and all(
        (last[0][name] == last[1][name]).all() for name in last[0]
    )
    for name in ("events/rank0.jsonl", f"events/rank{ranks - 1}.jsonl", "metrics.jsonl", "latest"):
        assert (whole / name).is_file(), name


def test_what_it_saw_on_validation_is_the_same_with_other_ranks(tmp_path: Path) -> None:
    told = recipe(tmp_path, **SAVED)
    (alone,) = play(told, "dp=1", 1, tmp_path / "one")
    two = play(told, "tp=2", 2, tmp_path / "two")
    assert [step for step, _ in alone["val"]] == [3, 5]
    for end in two:
        assert [loss for _, loss in end["val"]] == pytest.approx(
            [loss for _, loss in alone["val"]], rel=1e-10
        )


def test_the_generalisation_gap_is_the_validations_loss_less_that_of_the_steps_before(tmp_path: Path) -> None:
    """Of as many steps as a validation has batches: here 2."""
    (end,) = play(recipe(tmp_path, **SAVED, eval_batches=2), "dp=1", 1, tmp_path / "one")
    lines = [json.loads(line) for line in (tmp_path / "one" / "metrics.jsonl").read_text().splitlines()]
    gaps = {line["step"]: line["val_gap"] for line in lines if "val_gap" in line}
    trained, held_out = losses(tmp_path / "one"), dict(end["val"])
    assert gaps.keys() == {3, 5} and gaps[5] == end["val_gap"]
    for step, gap in gaps.items():
        assert gap == pytest.approx(held_out[step] - sum(trained[step - 2 : step]) / 2)


CANONICAL = [("dp=1", 1), ("dp=2", 2), ("pp=2", 2), ("shard=2", 2), ("dp=4", 4), ("dp=2 shard=2", 4)]


def test_validation_and_metrics_have_the_same_bits_where_the_policy_promises_bits(tmp_path: Path) -> None:
    """In float32 they differed with the number of ranks: each rank added up its own leaves' losses first."""
    told = recipe(
        tmp_path, **{**SAVED, "steps": 3, "dtype": "float32", "metrics": ("accuracy", "perplexity")}
    )
    seen = []
    for plan, ranks in CANONICAL:
        end = play(told, f"{plan} sync=canonical", ranks, tmp_path / plan)[0]
        seen.append((end["loss"], end["val"], end["val_metrics"]))
    assert all(each == seen[0] for each in seen), seen


def test_plans_whose_bits_depend_on_the_threads_of_a_rank_say_so_at_their_start(tmp_path: Path) -> None:
    told = recipe(tmp_path, steps=1)

    def said(told: Recipe, plan: str, ranks: int) -> bool:
        heard: list[str] = []
        play(told, plan, ranks, tmp_path / f"{plan} {told.launch.threads_per_rank}", heard=heard)
        return any(
            "same bits as one device with 1 threads, which is what each rank has here" in text
            for text in heard
        )

    assert said(told, "pp=2", 2)
    held = told.model_copy(update={"launch": LaunchConfig(threads_per_rank=1)})
    silent = [(told, "dp=2", 2), (told, "dp=2 sync=canonical", 2), (told, "dp=1", 1), (held, "pp=2", 2)]
    assert not any(said(*one) for one in silent)


def test_a_first_loss_that_no_untrained_model_has_is_told_once(tmp_path: Path) -> None:
    models, told = tmp_path / "own.py", recipe(tmp_path, steps=2)
    models.write_text(MODEL)
    for function, expected in (("mean", 1), ("right", 0)):
        model = ModelConfig(kind=f"{models}:{function}", context=8)
        heard: list[str] = []
        play(told.model_copy(update={"model": model}), "dp=2", 2, tmp_path / function, heard=heard)
        assert sum("a sum over targets, not a mean" in text for text in heard) == expected, heard


def test_a_run_that_promises_bits_has_one_thread_a_rank_unless_told() -> None:
    for plan in ("dp=1", "dp=2", "pp=2"):
        assert resolve(Recipe(), f"{plan} sync=canonical").recipe.launch.threads_per_rank == 1
        assert resolve(Recipe(), plan).recipe.launch.threads_per_rank is None
    told = Recipe(launch=LaunchConfig(threads_per_rank=3))
    assert resolve(told, "dp=2 sync=canonical").recipe.launch.threads_per_rank == 3
