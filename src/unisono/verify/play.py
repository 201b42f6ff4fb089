"""What each rank of a proof does: a few steps, everything that they made written down, and rank 0 compares."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch.distributed as dist

from unisono.config import Resolved
from unisono.observe.span import Recorder
from unisono.train.build import Place, build, connect, feeds
from unisono.train.checkpoint import Piece, save
from unisono.train.data.dataset import Corpus
from unisono.train.state import pieces_of
from unisono.train.step import Run, train_step
from unisono.verify.compare import compare


def play(
    resolved: Resolved,
    place: Place,
    store: dist.Store | None,
    corpus: Corpus,
    *,
    steps: int,
    folder: Path,
    reference: Path | None,
    bound: float,
    token: str,
) -> dict[str, Any]:
    """`steps` steps under the plan; gradients, parameters and optimiser state of each go to `folder`. With a reference
    folder, rank 0 returns the comparison."""
    connect(place, store)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(place.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, run.mesh, corpus, place.device)
    owners = dict(run.local.stage.ties)
    for step in range(steps):
        gradients: list[Piece] = []
        report = train_step(
            run, feed.fetch(step), inspect=lambda kept=gradients: kept.extend(_gradients(run, owners))
        )
        state = {"loss": report.loss, "norm": report.norm}
        save(
            folder,
            step,
            [*gradients, *pieces_of(run, owners)],
            state,
            rank=place.rank,
            world=place.world,
            token=token,
        )
    if place.rank or reference is None:
        return {}
    return asdict(compare(reference, folder, steps, bound))


def _gradients(run: Run, owners: dict[str, str]) -> list[Piece]:
    """Copies: the step forgets its gradients before it ends."""
    pieces = (p for p in pieces_of(run, owners, gradients=True) if p.name.startswith("grad/"))
    return [replace(piece, tensor=piece.tensor.clone()) for piece in pieces]
