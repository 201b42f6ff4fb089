"""Members come and go between two steps: what the run computes stays the same, in canonical mode to the last bit."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

RECIPE = {
    "model": {"n_layer": 2, "n_head": 2, "d_model": 16, "context": 8, "dropout": 0.1},
    "data": {"source": "text:words.txt"},
    "train": {"steps": 6, "micro_batch": 1, "warmup_steps": 2, "lr": 0.01},
}


def begun(ctx: Any, folder: str, plan: str, batch: int = 8) -> Any:
    """(run, feed) of a rank, joined by all."""
    from unisono.config import Recipe, resolve
    from unisono.observe.span import Recorder
    from unisono.train.build.build import build, feeds, place_of
    from unisono.train.data.load import load

    train = {**RECIPE["train"], "global_batch": batch}
    recipe = {**RECIPE, "data": {"source": f"text:{folder}/words.txt"}, "train": train}
    got = resolve(Recipe.model_validate_json(json.dumps(recipe)), plan, ctx.world)
    corpus = load(got.recipe.data, got.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, "gloo", 60.0)
    run = build(got.recipe, got.plan, place, corpus, Recorder(ctx.rank))
    return run, feeds(got.recipe, got.plan, corpus, place.device)[0]


def bits(run: Any) -> str:
    """A digest of weights and moments, by name."""
    from unisono.train.state.run_state import pieces_of

    digest = hashlib.blake2b()
    for piece in sorted(pieces_of(run), key=lambda piece: piece.name):
        digest.update(piece.name.encode() + piece.tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


def steps(run: Any, feed: Any, count: int) -> list[float]:
    from unisono.train.step.train_step import train_step

    return [train_step(run, feed.fetch(run.step, run.leaves)).loss for _ in range(count)]


def comes_and_goes(ctx: Any, folder: str, plan: str, alone: int) -> Any:
    """Two steps of both ranks, two of rank `alone`, two of both again; the one who was away loads what it missed."""
    from unisono.train.state.checkpoint import load, save
    from unisono.train.state.run_state import pieces_of
    from unisono.train.step.join import join

    run, feed = begun(ctx, folder, plan)
    losses, all_of = steps(run, feed, 2), run.mesh.members
    one, place = all_of.now([alone]), Path(folder) / "run"
    if ctx.rank == alone:
        run = join(run, one)
        losses += steps(run, feed, 2)
        save(place, run.step, pieces_of(run), {"step": run.step})
        ctx.store.set("saved", "")
    ctx.store.get("saved")
    run = join(run, one.now(all_of.ranks))
    if ctx.rank != alone:
        run.step = load(place / "checkpoints/step-000004", pieces_of(run))["step"]
        losses += [0.0, 0.0]
    losses += steps(run, feed, 2)
    return {"bits": bits(run), "losses": losses, "step": run.step, "epoch": run.mesh.members.epoch}


def straight(ctx: Any, folder: str, plan: str, batch: int = 8) -> Any:
    run, feed = begun(ctx, folder, plan, batch)
    return {"losses": steps(run, feed, 6), "bits": bits(run)}


@pytest.fixture
def folder(tmp_path: Path) -> str:
    (tmp_path / "words.txt").write_text("the quick brown fox jumps over the lazy dog " * 60)
    return str(tmp_path)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("alone", [0, 1])
def test_canonical_bits_are_the_same_whoever_takes_part(threads: Any, folder: str, alone: int) -> None:
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1 sync=canonical")
    ends = threads(comes_and_goes, 2, folder=folder, plan="dp=2 sync=canonical", alone=alone)
    assert [end["bits"] for end in ends] == [expected["bits"]] * 2
    assert ends[alone]["losses"] == expected["losses"]
    assert all(end["step"] == 6 and end["epoch"] == 2 for end in ends)


def leaves_three(ctx: Any, folder: str) -> Any:
    """Three replicas, of which rank 1 leaves: the others join without it. Then dealt by speed."""
    from unisono.train.step.join import join

    run, feed = begun(ctx, folder, "dp=3", 12)
    losses = steps(run, feed, 2)
    if ctx.rank == 1:
        return None
    run = join(run, run.mesh.members.now((2, 0)))
    losses += steps(run, feed, 2)
    run = join(run, run.mesh.members.now((2, 0)), speeds=[1.0, 4.0])
    return {"losses": losses + steps(run, feed, 2), "leaves": list(run.leaves)}


@pytest.mark.timeout(180)
def test_of_three_replicas_one_leaves_and_leaves_are_dealt_by_speed(threads: Any, folder: str) -> None:
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1", batch=12)
    first, gone, last = threads(leaves_three, 3, folder=folder)
    assert gone is None and first["losses"] == last["losses"]
    assert first["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    assert last["leaves"] == list(range(2)) and first["leaves"] == list(range(2, 12))


def changes_hands(ctx: Any, folder: str, plan: str, batch: int, speeds: list[list[float]]) -> Any:
    """Six steps; before every second one leaves are assigned by other speeds."""
    from unisono.comm.members import stretches_of
    from unisono.train.step.join import take_leaves

    run, feed = begun(ctx, folder, plan, batch)
    losses, leaves = [], [list(run.leaves)]
    for by in [None, *speeds]:
        if by is not None:
            shape, branches = run.mesh.shape, "canonical" in plan
            take_leaves(run, stretches_of(run.of_leaves, shape.dp, shape.shard, by, branches))
            leaves.append(list(run.leaves))
        losses += steps(run, feed, 2)
    return {"losses": losses, "leaves": leaves, "bits": bits(run)}


UNEVEN: dict[str, tuple[int, list[list[float]]]] = {
    "dp=2": (2, [[3.0, 1.0], [1.0, 2.0]]),
    "dp=3": (3, [[1.0, 5.0, 1.0], [1.0, 1.0, 3.0]]),
    "dp=2 shard=2": (4, [[3.0, 1.0], [1.0, 2.0]]),
    "dp=2 pp=2": (4, [[3.0, 1.0], [1.0, 2.0]]),
    "dp=2 sync=every_step:speeds=5/1": (2, [[1.0, 1.0], [1.0, 2.0]]),
}


@pytest.mark.timeout(180)
@pytest.mark.parametrize("plan", UNEVEN)
def test_leaves_change_hands_between_two_steps(threads: Any, folder: str, plan: str) -> None:
    ranks, speeds = UNEVEN[plan]
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1", batch=12)
    ends = threads(changes_hands, ranks, folder=folder, plan=plan, batch=12, speeds=speeds)
    for end in ends:
        assert end["losses"] == pytest.approx(expected["losses"], rel=1e-5)
    for turn in range(3):
        held = sorted({leaf for end in ends for leaf in end["leaves"][turn]})
        assert held == list(range(12))
    assert all(any(end["leaves"][turn] != end["leaves"][turn + 1] for end in ends) for turn in range(2))


@pytest.mark.timeout(180)
@pytest.mark.parametrize("plan", ["dp=4 sync=canonical", "dp=4 sync=canonical:speeds=1/4/1/1"])
def test_no_bit_depends_on_whose_leaves_they_are(threads: Any, folder: str, plan: str) -> None:
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1 sync=canonical")
    speeds = [[9.0, 1.0, 1.0, 1.0], [1.0, 1.0, 9.0, 1.0]]
    ends = threads(changes_hands, 4, folder=folder, plan=plan, batch=8, speeds=speeds)
    assert all(end["bits"] == expected["bits"] and end["losses"] == expected["losses"] for end in ends)
    assert [[len(leaves) for leaves in end["leaves"][1:]] for end in ends] == [[4, 2], [2, 1], [1, 4], [1, 1]]


def three_of_eight(ctx: Any, folder: str) -> Any:
    """Three replicas share eight leaves as whole branches, of which the second has the largest."""
    from unisono.train.step.join import join

    run, feed = begun(ctx, folder, "dp=4 sync=canonical")
    losses = steps(run, feed, 2)
    if ctx.rank == 3:
        return None
    run = join(run, run.mesh.members.now((0, 1, 2)), speeds=[1.0, 2.0, 1.0])
    return {"losses": losses + steps(run, feed, 4), "bits": bits(run), "leaves": len(run.leaves)}


@pytest.mark.timeout(180)
def test_three_replicas_of_four_keep_the_bits(threads: Any, folder: str) -> None:
    (expected,) = threads(straight, 1, group=False, folder=folder, plan="dp=1 sync=canonical")
    *ends, gone = threads(three_of_eight, 4, folder=folder)
    assert gone is None and [end["leaves"] for end in ends] == [2, 4, 2]
    assert all(end["bits"] == expected["bits"] and end["losses"] == expected["losses"] for end in ends)


def refuses(ctx: Any, folder: str, plan: str, speeds: list[float]) -> str:
    from unisono.spec.errors import UsageError
    from unisono.train.step.join import join

    run, _ = begun(ctx, folder, plan, 6)
    try:
        join(run, run.mesh.members, speeds)
    except (UsageError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.timeout(180)
def test_what_cannot_be_assigned_is_refused(threads: Any, folder: str) -> None:
    said = threads(refuses, 2, folder=folder, plan="dp=2", speeds=[1.0, 3.0, 1.0])
    assert all("as many speeds" in words for words in said), "on every rank, or the others would wait"
