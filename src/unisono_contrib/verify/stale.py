"""A pipeline that is not emptied between steps is no one device's run, but it must be the run that it says it is.

What is proven of it: every backward used the weights of its forward, of the version that the schedule's formula says;
and losses, gradient norms, weights and optimiser state after all steps are those of one device that keeps every version
there ever was, and computes micro-batch k with, in each stage, the weights of that formula. That device knows nothing
of rows, messages or stashes.

How far the two may differ is measured by a twin of the one device (`twin.py`): lambda times what it differs by.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from unisono.config import Resolved
from unisono.observe.span import Recorder
from unisono.parallel.cut import Stage, stage_of
from unisono.parallel.player import noise_of
from unisono.parallel.precision import computing
from unisono.plan import Plan
from unisono.programs.schedules import Unflushed
from unisono.train.build.build import Place, build, feeds
from unisono.train.data.dataset import Corpus
from unisono.train.state.checkpoint import read_full, save
from unisono.train.state.run_state import pieces_of
from unisono.train.step.run import Run
from unisono.train.step.train_step import train
from unisono.train.step.update import set_rate
from unisono.verify.bounds import Bounds, bounds_of
from unisono.verify.path import sizes_of
from unisono.verify.twin import apart, gap, largest, push
from unisono_contrib.parallel.flow import FlowPlayer

FLOWING = 4  # steps at least: weights of every age are used, and the pipeline runs over the ends of steps


@dataclass(slots=True)
class Aged:
    """One device's run with old weights. weights: by piece, as `pieces_of` names them."""

    numbers: list[tuple[float, float]]
    weights: dict[str, Tensor]


def play_stale(resolved: Resolved, place: Place, corpus: Corpus, steps: int, folder: Path) -> Run:
    """All ranks of a plan, from an empty pipeline to an empty one, with what they did and have written down."""
    resolved = _alone(resolved, steps)
    run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(place.rank))
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    numbers = [(report.loss, report.norm) for report in train(run, feed, steps)]
    folder.mkdir(parents=True, exist_ok=True)
    player = run.player
    log = player.log if isinstance(player, FlowPlayer) else []
    facts = {"numbers": numbers, "log": log, "stage": run.mesh.at["pp"], "blocks": run.local.blocks}
    (folder / f"stale-{place.rank}.json").write_text(json.dumps(facts))
    save(folder, steps - 1, pieces_of(run), {}, rank=place.rank, world=place.world, token="stale")
    run.mesh.world.barrier()
    return run


def judge_stale(
    schedule: Unflushed,
    resolved: Resolved,
    alone: Resolved,
    place: Place,
    corpus: Corpus,
    steps: int,
    folder: Path,
) -> dict[str, Any]:
    """As `judge_plan`. alone, place: of the one device, which is played here."""
    plan, micros = resolved.plan, resolved.batch.micros
    bounds = bounds_of(plan, sizes_of(resolved, corpus))
    reports = [json.loads((folder / f"stale-{rank}.json").read_text()) for rank in range(plan.world)]
    wrong = next(
        (text for one_rank in reports for text in _misused(schedule, plan.pp, micros, steps, one_rank)), None
    )
    result = {
        "bound": bounds.grad, "errors": dict.fromkeys(("loss", "grad", "param", "optim"), 0.0), "bit_identical": False,
        "first": None, "step": None, "kind": None, "wide": bounds.shows_nothing(resolved.batch.leaves),
        "notes": [schedule.loses(plan.pp, micros)],
    }  # fmt: skip
    if wrong is not None:
        cause = {
            "cause": "wrong_version",
            "explanation": "a stage uses weights that its schedule does not say",
        }
        return result | {"first": wrong, "step": 0, "kind": "version"} | cause
    blocks = reports[0]["blocks"]
    right = aged(schedule, plan, blocks, alone, place, corpus, steps)
    pushed = aged(schedule, plan, blocks, alone, place, corpus, steps, pushed=bounds)
    rows = list(_compared(reports, _saved(folder, steps, right), right, pushed, bounds.spread, bounds.unit))
    for kind, _, error, _, _ in rows:
        result["errors"][kind] = max(result["errors"][kind], min(error, 1e308))
    result["bit_identical"] = all(same for *_, same in rows)
    bad = next((row for row in rows if not row[2] <= row[3]), None)
    if bad is not None:
        text = f"{bad[1]}: off by {bad[2]:.1e} of its largest, {bad[3]:.1e} is allowed"
        cause = {
            "cause": "stale_run",
            "explanation": "not what one device with the same versions of weights computes",
        }
        return result | {"first": text, "step": steps - 1, "kind": bad[0]} | cause
    return result


def aged(
    schedule: Unflushed,
    plan: Plan,
    blocks: Sequence[int],
    alone: Resolved,
    place: Place,
    corpus: Corpus,
    steps: int,
    pushed: Bounds | None = None,
) -> Aged:
    """One device's run in which each micro-batch uses, in each stage of the plan, weights of the version that the
    schedule says. blocks: of each stage. pushed: how far all gradients are pushed, if they are."""
    alone = _alone(alone, steps)
    run = build(alone.recipe, alone.plan, place, corpus, Recorder(0))
    feed, _ = feeds(alone.recipe, alone.plan, corpus, place.device)
    (stage,), owners = run.local.stages.values(), run.local.owners
    slots = {slot.name: slot for slot in run.local.slots}
    cuts = [range(end - count, end) for count, end in zip(blocks, accumulate(blocks), strict=True)]
    micros = len(run.leaves) // plan.dp
    history, numbers, draw = [], [], torch.Generator().manual_seed(1)
    for step in range(steps):
        history.append({name: slot.master.detach().clone() for name, slot in slots.items()})
        lost = 0.0
        leaves = feed.fetch(step, run.leaves)
        weight = 1.0 / sum(leaf.targets.numel() for leaf in leaves)
        grads: dict[str, Tensor] = {}
        for i, leaf in enumerate(leaves):
            ages = [schedule.version(s, plan.pp, micros, step * micros + i % micros) for s in range(plan.pp)]
            used = {name: history[ages[stage_of(name, cuts)]][name].requires_grad_() for name in slots}
            loss = _loss(stage, used, leaf, run.seed, plan.precision, place.device) * (weight * leaf.scale)
            lost += loss.item()
            gradients = torch.autograd.grad(loss, list(used.values()), allow_unused=True)
            for name, grad in zip(used, gradients, strict=True):
                owner = owners.get(name, name)
                if grad is not None:
                    grads[owner] = grads[owner] + grad if owner in grads else grad.clone()
        if pushed is not None:
            push(grads, pushed, draw)
        for name, slot in slots.items():
            slot.master.grad = grads.get(owners.get(name, name))
        parts = [
            p for name, slot in slots.items() if name not in owners and (p := slot.master.grad) is not None
        ]
        numbers.append((lost, math.sqrt(sum(p.double().square().sum().item() for p in parts))))
        set_rate(run.update.optimizer, run.update.rate(step))
        run.update.optimizer.step()
    return Aged(numbers, {piece.name: piece.tensor.detach().clone() for piece in pieces_of(run)})


def _alone(resolved: Resolved, steps: int) -> Resolved:
    """The recipe with nothing between its first step and its last."""
    train = resolved.recipe.train.model_copy(update={"steps": steps, "eval_every": 0, "save_every": 0})
    return replace(resolved, recipe=resolved.recipe.model_copy(update={"train": train}))


def _loss(
    stage: Stage, used: Mapping[str, Tensor], leaf: Any, seed: int, precision: str, device: torch.device
) -> Tensor:
    with computing(precision, device):
        return stage.loss(
            functional_call(stage, dict(used), (leaf.inputs, noise_of(leaf, seed))), leaf.targets
        )


def _misused(
    schedule: Unflushed, ranks: int, micros: int, steps: int, report: Mapping[str, Any]
) -> Sequence[str]:
    """What is wrong with the versions that one rank has used, in words."""
    stage, wrong = report["stage"], []
    if [micro for micro, _, _ in report["log"]] != list(range(steps * micros)):
        wrong.append(f"stage {stage} went backward through other micro-batches than its steps have")
    for micro, ahead, back in report["log"]:
        says = schedule.version(stage, ranks, micros, micro)
        if not ahead == back == says:
            text = f"micro-batch {micro} in stage {stage} went forward with version {ahead} of the weights"
            wrong.append(f"{text} and backward with {back}, its schedule says {says}")
    return wrong


def _saved(folder: Path, steps: int, right: Aged) -> dict[str, Tensor]:
    return read_full(folder / "checkpoints" / f"step-{steps - 1:06d}", list(right.weights))


def _compared(
    reports: Sequence[Mapping[str, Any]],
    got: Mapping[str, Tensor],
    right: Aged,
    pushed: Aged,
    spread: float,
    unit: float,
) -> Sequence[tuple[str, str, float, float, bool]]:
    """(kind, name, error, what is allowed, whether the bits are the same) of all numbers and tensors."""
    rows = []
    for rank in reports:
        for step, (seen, want, off) in enumerate(
            zip(rank["numbers"], right.numbers, pushed.numbers, strict=True)
        ):
            for at, (kind, word) in enumerate((("loss", "the loss"), ("grad", "the gradient norm"))):
                allowed = spread * (apart(off[at], want[at]) + 64 * unit)
                error, same = apart(seen[at], want[at]), seen[at] == want[at]
                rows.append((kind, f"{word} of step {step}", error, allowed, same))
    for name, want in right.weights.items():
        error = gap(got[name], want) / largest(want)
        moved = gap(pushed.weights[name], want) / largest(want)
        kind = "param" if name.startswith("model/") else "optim"
        rows.append((kind, name, error, spread * (moved + 2 * unit), torch.equal(got[name], want)))
    return rows
