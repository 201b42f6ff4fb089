"""What lies elsewhere between its uses changes no bit of a run; a run goes on from a checkpoint of it; a full disk is
an error of its own."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import World
from tests.train.small import recipe, started
from unisono.config import Recipe, TrainConfig
from unisono.parallel.offload.param_streaming import at_home
from unisono.parallel.offload.store import Store, layout_of
from unisono.plan import Plan
from unisono.spec.errors import Infeasible
from unisono.train.state.checkpoint import Saver
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.evaluate import evaluate
from unisono.train.step.train_step import train

WAYS = [
    "optimizer:to=host", "optimizer:to=disk", "params:to=disk", "activations:to=disk", "activations:to=host",
    "params:to=disk+activations",
]  # fmt: skip
CASES = [
    ("", 1),
    ("recompute=full", 1),
    ("recompute=selective", 1),
    ("dp=2 tp=2 recompute=auto:full=1", 4),
    ("pp=2 schedule=zb1p micros=4", 2),
    ("dp=2 sync=canonical", 2),
    ("shard=2 zero=2", 2),
    ("shard=2 zero=3 recompute=selective", 2),
]


def played(ctx: Any, told: Any, plan: str) -> list[float]:
    run, feed, val = started(ctx, told, plan)
    reports = list(train(run, feed, 3))
    loss, _ = evaluate(run, [val.fetch(0, run.leaves)])
    run.local.store.settle()
    held = [piece.tensor.double().sum().item() for piece in pieces_of(run)]
    assert plan.split()[-1] == "offload=none" or run.local.store.most > 0
    return [loss, *(number for report in reports for number in (report.loss, report.norm)), *held]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("plan", "ranks"), CASES)
def test_the_same_bits_as_without(threads: World, tmp_path: Path, plan: str, ranks: int, way: str) -> None:
    if ("shard" in plan and way.startswith("params")) or (ranks > 1 and "to=host" in way):
        return
    told = recipe(tmp_path, micro_batch=None)
    without, away = (
        threads(played, ranks, group=ranks > 1, told=told, plan=f"{plan} offload={how}")
        for how in ("none", way)
    )
    assert without == away


def saved_and_gone_on(ctx: Any, told: Any, first: str, then: str, folder: str) -> bool:
    run, feed, _ = started(ctx, told, first)
    list(train(run, feed, 2))
    Saver(Path(folder), token="t").save(2, [*pieces_of(run), *kept_of(run)], {"step": 2})
    list(train(run, feed, 4))
    other, again, _ = started(ctx, told, then)
    restore(other, Path(folder, "checkpoints", "step-000002"))
    list(train(other, again, 4))
    pairs = zip(pieces_of(run), pieces_of(other), strict=True)
    return all(a.name == b.name and torch.equal(a.tensor, b.tensor) for a, b in pairs)


@pytest.mark.parametrize(
    ("first", "then"), [("params:to=disk", "none"), ("none", "params"), ("optimizer", "params:to=disk")]
)
def test_a_run_goes_on_from_what_lies_elsewhere(
    threads: World, tmp_path: Path, first: str, then: str
) -> None:
    told = recipe(tmp_path)
    given = {"told": told, "first": f"offload={first}", "then": f"offload={then}", "folder": str(tmp_path)}
    assert threads(saved_and_gone_on, 1, group=False, **given) == [True]


def weights_between_steps(ctx: Any, told: Any) -> dict[str, bool]:
    run, feed, _ = started(ctx, told, "offload=params")
    list(train(run, feed, 1))
    slots = run.local.slots
    state = [v for s in slots for v in run.update.optimizer.state[s.master].values() if v.dim()]
    return {
        "no number is in the place of a weight": all(slot.live.isnan().all() for slot in slots),
        "nor memory": all(slot.live.untyped_storage().nbytes() == slot.live.element_size() for slot in slots),
        "it is at home": all(at_home(slot.live).isfinite().all() for slot in slots),
        "so is the state": all(value.any() for value in state),
    }


def test_between_steps_weights_are_nowhere_but_at_home(threads: World, tmp_path: Path) -> None:
    (found,) = threads(weights_between_steps, 1, group=False, told=recipe(tmp_path))
    assert [what for what, holds in found.items() if not holds] == []


@pytest.mark.parametrize("on_disk", [False, True])
def test_homes_are_used_again_and_what_is_fetched_is_what_was_put(tmp_path: Path, on_disk: bool) -> None:
    store = Store(torch.device("cpu"), on_disk, tmp_path)
    for n in range(1, 6):
        x = torch.randn(n, 7).T[1:]
        home = store.home(x.untyped_storage().nbytes())
        store.put(x, home)
        store.ahead(home)
        assert torch.equal(layout_of(x).of(store.fetch(home)), x)
        store.leave(home)
        again = store.home(x.untyped_storage().nbytes())
        assert again is home
        store.leave(again)
    assert store.away == 0
    assert store.most == 5 * 7 * 4
    assert list(tmp_path.iterdir()) == []  # the file has no name


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(Infeasible, match="No space left") as caught:
        Store(torch.device("cpu"), True, tmp_path).home(1 << 20)
    assert caught.value.code == "M02"
    assert "to=host" in caught.value.fix


def test_plans_that_cannot_put_it_away_are_refused() -> None:
    codes = {p.code for p in Plan.parse("shard=2 offload=params").check(Recipe())}
    assert codes == {"P22"}
    compiled = Recipe(train=TrainConfig(compile=True))
    assert {p.code for p in Plan.parse("offload=optimizer+activations").check(compiled)} == {"P22"}
    assert Plan.parse("offload=optimizer:to=disk").check(compiled) == []


@pytest.mark.parametrize("keys", [{"lora_rank": 2}, {"freeze": ("blocks.*.norm*", "head.*")}])
def test_weights_that_do_not_learn_are_there_when_a_block_is_computed_again(
    threads: World, tmp_path: Path, keys: dict[str, Any]
) -> None:
    told = recipe(tmp_path)
    told = told.model_copy(update={"train": told.train.model_copy(update=keys)})
    without, away = (
        threads(played, 1, group=False, told=told, plan=f"recompute=full offload={how}")
        for how in ("none", "params:to=disk")
    )
    assert without == away
