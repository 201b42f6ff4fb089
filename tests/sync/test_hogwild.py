"""sync=hogwild: one set of weights, and one of optimiser states, in memory that replicas share."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.sync.outer import distance, flat, play, recipe_of, save_now
from unisono.config import DataConfig, Recipe, TrainConfig, resolve
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import UsageError
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.state.checkpoint import latest, tensor_names
from unisono.train.state.run_state import restore
from unisono.train.step.train_step import train_step
from unisono_contrib.comm import threads
from unisono_contrib.models.dlrm import DLRMConfig
from unisono_contrib.sync import _hogwild
from unisono_contrib.train.step.lazy import step_rows

pytestmark = pytest.mark.timeout(120)

STEPS = 5


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def clicks(**train: Any) -> Recipe:
    """A small recommender: its tables get gradients of the rows that were read alone."""
    options = {
        "optimizer": "adagrad",
        "lr": 0.05,
        "clip": 0.0,
        "weight_decay": 0.0,
        "global_batch": 16,
        **train,
    }
    return Recipe(
        model=DLRMConfig(tables=(40, 20), lookups=2, d_table=4, n_dense=3, bottom=(8,), top=(8,)),
        data=DataConfig(source="clicks:samples=400"),
        train=TrainConfig(steps=STEPS, micro_batch=8, dtype="float64", **options),
    )


def shared(
    recipe: Recipe, ranks: int = 2, folder: Path | None = None, begin: Path | None = None
) -> list[dict[str, Any]]:
    """Of each rank after all have ended: weights, optimiser states, and what it subtracted from each weight in all."""

    def rank_of(rank: int) -> dict[str, Any]:
        resolved = resolve(recipe, f"dp={ranks} sync=hogwild:meet=2 precision=fp64", ranks)
        place, corpus = place_of(rank, ranks, rank, "gloo", 60.0), load(recipe.data, recipe.model)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(rank))
        if begin is not None:
            restore(run, begin)
        feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
        masters = {slot.name: slot.master for slot in run.local.slots}
        start = {name: x.detach().clone() for name, x in masters.items()}
        moved = {name: torch.zeros_like(x) for name, x in start.items()}
        before: dict[str, Tensor] = {}
        run.sync.center()  # all have begun with the same
        run.update.optimizer.register_step_pre_hook(
            lambda *_: before.update({name: x.detach().clone() for name, x in masters.items()})
        )

        def after(*_: object) -> None:
            for name, x in masters.items():
                moved[name] += x.detach() - before[name]

        run.update.optimizer.register_step_post_hook(after)
        says = []
        while run.step < STEPS:
            train_step(run, feed.fetch(run.step, run.leaves))
            says.append(dict(run.sync.metrics()))
        if folder is not None:
            save_now(run, folder, rank, ranks)
        run.sync.center()
        states = {
            f"{name}/{key}": x.clone()
            for name, p in masters.items()
            for key, x in run.update.optimizer.state[p].items()
            if x.dim()
        }
        weights = {name: x.detach().clone() for name, x in masters.items()}
        run.mesh.dp.barrier()
        return {"start": start, "weights": weights, "moved": moved, "states": states, "says": says}

    return threads.run(ranks, rank_of)


def test_all_that_replicas_change_lands_in_one_set_of_weights() -> None:
    ends = shared(clicks())
    for name, start in ends[0]["start"].items():
        together = start + sum(end["moved"][name] for end in ends)
        for end in ends:
            assert torch.allclose(end["weights"][name], together, rtol=1e-12, atol=1e-12), name
            assert end["moved"][name].any(), name


def test_the_state_of_the_optimiser_is_one_too() -> None:
    ends = shared(clicks())
    for key, value in ends[0]["states"].items():
        assert torch.equal(value, ends[1]["states"][key]), key
    alone = shared(clicks(global_batch=8), ranks=1)  # half of the gradients
    kept = {key: float(value.sum()) for key, value in ends[0]["states"].items()}
    assert sum(kept.values()) > 1.3 * sum(float(x.sum()) for x in alone[0]["states"].values())


def test_what_others_write_while_rows_are_stepped_is_kept() -> None:
    """Another replica's update falls between the read of a table's rows and their write."""
    torch.manual_seed(0)
    master, still = (nn.Parameter(torch.zeros(6, 2, dtype=torch.float64)) for _ in range(2))
    stand_in = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    optimizer = torch.optim.Adagrad([stand_in], lr=0.1)
    optimizer.state[master] = {"step": torch.zeros(()), "sum": torch.ones_like(master)}
    optimizer.adds_rows = True  # type: ignore[attr-defined]
    step_rows(optimizer, {master: stand_in}, 4)

    def other(*_: object) -> None:
        with torch.no_grad():
            master[3] += 5.0
            optimizer.state[master]["sum"][3] += 7.0

    optimizer.register_step_pre_hook(other)  # runs when rows have been read
    master.grad = torch.sparse_coo_tensor(
        [[1, 3]], torch.full((2, 2), 2.0).double(), (6, 2), check_invariants=True
    ).coalesce()
    optimizer.step()
    moved = -0.1 * 2.0 / 5.0**0.5
    right = still.detach().clone()
    right[1], right[3] = moved, moved + 5.0
    torch.testing.assert_close(master.detach(), right, rtol=1e-9, atol=1e-9)
    assert optimizer.state[master]["sum"][:, 0].tolist() == pytest.approx([1, 5, 1, 12, 1, 1])


def test_staleness_counts_the_updates_of_others_between_read_and_write() -> None:
    for end in shared(clicks()):
        counts = [line["staleness_counts"] for line in end["says"]]
        assert sum(map(sum, counts)) == STEPS  # one of each of its updates
        assert (
            max(map(len, counts)) <= 4
        )  # others are at most three updates ahead: all meet in every second step
    stale = [line["staleness"] for end in shared(clicks()) for line in end["says"]]
    assert any(stale)
    assert not any(line["staleness"] for line in shared(clicks(global_batch=8), ranks=1)[0]["says"])


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "adamw"])
def test_one_replica_is_plain_training(source, optimizer) -> None:
    recipe = recipe_of(source, STEPS, optimizer=optimizer, clip=0.5)
    (plain,), (alone,) = (play(recipe, f"dp=1 sync={each}") for each in ("every_step", "hogwild"))
    assert distance(alone.last, plain.last) < 1e-12


def test_a_checkpoint_is_that_of_plain_training(source, tmp_path) -> None:
    shared(clicks(), folder=tmp_path)
    folder = latest(tmp_path)
    assert folder is not None and not any(name.startswith("replica/") for name in tensor_names(folder))
    recipe = recipe_of(source, STEPS, momentum=0.9)
    play(recipe, "dp=2 sync=hogwild:meet=3", save_at=3, folder=tmp_path / "run")
    begin = latest(tmp_path / "run")
    again, plain = (play(recipe, f"dp=2 sync={sync}", begin=begin) for sync in ("hogwild", "every_step"))
    assert len(again[0].reports) == len(plain[0].reports) == STEPS - 3
    assert flat(again[0].start).equal(flat(plain[0].start))


def test_a_request_to_stop_is_heard_by_all_at_the_next_meeting(source) -> None:
    ends = play(
        recipe_of(source, 6), "dp=2 sync=hogwild:meet=3", stop=lambda rank, step: rank == 1 and step == 1
    )
    assert [[r.stop for r in end.reports] for end in ends] == [[False, False, True, False, False, False]] * 2


def test_what_has_no_meaning_is_refused(source, monkeypatch) -> None:
    recipe = recipe_of(source, STEPS)
    for plan in (
        "tp=2",
        "pp=2",
        "shard=2",
        "codec=int8",
        "precision=fp16",
        "precision=bf16",
        "offload=optimizer",
    ):
        found = Plan.parse(f"dp=2 sync=hogwild {plan}").check(recipe)
        assert any("hogwild" in problem.what for problem in found), plan
    assert not Plan.parse("dp=2 sync=hogwild precision=fp64").check(recipe)
    with pytest.raises(UsageError, match="AdamW has moments") as error:
        play(recipe_of(source, STEPS, optimizer="adamw"), "dp=2 sync=hogwild")
    assert error.value.code == "P16"
    monkeypatch.setattr(_hogwild, "mapped", lambda *_, **__: None)
    with pytest.raises(UsageError, match="several hosts") as error:
        play(recipe, "dp=2 sync=hogwild")
    assert error.value.code == "P20"
