"""A run trained under one plan and restored under another, on ranks that are threads."""

from pathlib import Path

import torch

from tests.threads import context
from tests.train.small import recipe, started
from unisono.config import Recipe
from unisono.plan import Plan
from unisono.train.state.checkpoint import Saver, latest
from unisono.train.state.run_state import kept_of, pieces_of, restore
from unisono.train.step.train_step import train
from unisono_contrib.comm import threads

Pieces = list[tuple[str, tuple[int, ...], torch.Tensor]]


def told(place: Path) -> Recipe:
    """Two heads, and a batch that 1, 2, 3, 4 and 8 replicas can be dealt."""
    place.mkdir(parents=True, exist_ok=True)
    return recipe(place, global_batch=24, micro_batch=1, dtype="float32")


def trained(place: Path, plan: str) -> Path:
    """The checkpoint of a run's second step."""
    asked, ranks = told(place), Plan.parse(plan).world

    def live(rank: int) -> None:
        run, feed, _ = started(context(rank, ranks), asked, plan)
        for _ in train(run, feed, 2):
            pass
        saver = Saver(place, rank, ranks, token=plan)
        saver.save(run.step, [*pieces_of(run), *kept_of(run)], {"step": run.step})

    threads.run(ranks, live, join=True, timeout=120.0)
    folder = latest(place)
    assert folder is not None
    return folder


def restored_pieces(place: Path, folder: Path, plan: str) -> list[Pieces]:
    """(name, offset, values) of what each rank holds after it was restored under `plan`."""
    asked, ranks = told(place / "text"), Plan.parse(plan).world

    def live(rank: int) -> Pieces:
        run, _, _ = started(context(rank, ranks), asked, plan)
        restore(run, folder)
        return [(box.name, tuple(box.start), box.tensor.detach().clone()) for box in pieces_of(run)]

    return threads.run(ranks, live, join=True, timeout=120.0)
