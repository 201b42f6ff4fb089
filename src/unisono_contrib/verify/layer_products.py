"""Means of what passes linear layers, of one device, once more: by torch's own hooks and in float64.

A plan and its one device run the same program, and take the products of layers in the same way. A mistake that both
share shows here, as one of the formulas does in `verify/judge.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from unisono.config import Resolved
from unisono.parallel.player import Leaf, noise_of
from unisono.parallel.precision import computing
from unisono.train.build.build import Place
from unisono.train.data.dataset import Corpus
from unisono.train.step.run import Run
from unisono.train.step.train_step import fetch
from unisono.verify.judge import terms_of
from unisono.verify.play import record_of, rewind, start
from unisono.verify.record import Record
from unisono_contrib.train.step.layer_products import LayerProducts
from unisono_contrib.train.step.owners import Owners

CAUSE = "layer_products"
STEPS = 2  # that are computed once more: the first, whose means are its own, and one that goes on from means


def unlawful_means(
    resolved: Resolved, place: Place, corpus: Corpus, steps: int, folder: Path
) -> dict[str, Any]:
    """What of a proof's result changes, as `judge_reference` gives it; nothing where all means are right. folder: with
    the records of one device."""
    run, feed = start(resolved, place, corpus)
    terms, train = terms_of(resolved, corpus), resolved.recipe.train
    for step in range(min(steps, STEPS)):
        rewind(run, resolved.plan, folder, step)
        leaves = fetch(run, feed)
        before = Record(record_of(folder, step - 1)) if step else None
        seen = Record(record_of(folder, step))
        new = train.optimiser().observed_share(step)
        names = [slot.name for slot in run.local.slots if f"optim/{slot.name}/left" in seen.parts]
        rows = sum(leaf.inputs.numel() for leaf in leaves)
        room = 4 * terms.bounds.total(rows) + 64 * terms.bounds.unit
        for key, want in _means(run, resolved, leaves, names):
            key, got = f"optim/{key}", seen.whole(f"optim/{key}")
            old = None if before is None else before.whole(key)
            want = want if old is None else (1 - new) * old.double() + new * want
            if got is not None and not bool(((got.double() - want).abs() <= room * want.abs().max()).all()):
                off = float((got.double() - want).abs().max() / want.abs().max())
                what = f"{key} is off by {off:.1e} of the mean of what has passed its layer"
                first = f"one device itself: step {step + 1}: {what}"
                feed.close()
                return {"first": first, "cause": CAUSE, "explanation": what}
    feed.close()
    return {}


def _means(
    run: Run, resolved: Resolved, leaves: Sequence[Leaf], names: Sequence[str]
) -> Iterator[tuple[str, Tensor]]:
    """(NAME/left or NAME/right, the mean of one step, float64)."""
    (stage,) = run.local.stages.values()
    passed: dict[str, list[tuple[Tensor, Tensor]]] = {name: [] for name in names}
    sums: dict[str, Tensor | float] = {}
    rows = dict.fromkeys(names, 0)
    counted = sum(leaf.targets.numel() / leaf.scale for leaf in leaves)
    scale = 1.0 if run.update.scaler.factor is None else float(run.update.scaler.factor)
    hooks = [
        stage.get_submodule(name.rpartition(".")[0]).register_forward_hook(
            lambda _, x, y, at=passed[name]: at.append((x[0].detach(), y))
        )
        for name in names
    ]
    for leaf in leaves:
        with computing(resolved.plan.precision, run.local.device):
            y = stage(leaf.inputs, noise_of(leaf, run.seed, 1.0 / counted))
            loss = stage.loss(y, leaf.targets) * (scale / counted)
        pairs = [(name, *pair) for name in names for pair in passed[name]]
        grads = torch.autograd.grad(loss, [out for _, _, out in pairs])
        for (name, x, _), grad in zip(pairs, grads, strict=True):
            x, g = x.double().flatten(0, -2), grad.double().flatten(0, -2) / scale
            rows[name] += len(x)
            sums[f"{name}/left"] = sums.get(f"{name}/left", 0.0) + g.mT @ g
            sums[f"{name}/right"] = sums.get(f"{name}/right", 0.0) + x.mT @ x
        for pair in passed.values():
            pair.clear()
    for hook in hooks:
        hook.remove()
    yield from _divided(sums, rows, counted)


def _divided(
    sums: Mapping[str, Any], rows: Mapping[str, int], counted: float
) -> Iterator[tuple[str, Tensor]]:
    """Of gradients, which are those of a mean over `counted` targets, the mean of what each target's own would be."""
    for key, total in sums.items():
        yield key, total * counted if key.endswith("/left") else total / rows[key.rpartition("/")[0]]


def push_means(products: LayerProducts, bound: float, noise: torch.Generator) -> None:
    """Have one device take other means from now on: each element of a side is moved by `bound` times its largest."""
    gather = products.gather

    def pushed(
        params: Sequence[nn.Parameter], owners: Owners | None
    ) -> dict[nn.Parameter, dict[str, Tensor]]:
        means = gather(params, owners)
        for mean in (mean for sides in means.values() for mean in sides.values()):
            signs = torch.randint(0, 2, mean.shape, generator=noise).to(mean).triu() * 2 - 1
            signs = torch.where(torch.ones_like(signs).triu() > 0, signs, signs.mT)
            mean.add_(signs, alpha=bound * float(mean.abs().max()))
        return means

    products.gather = pushed  # type: ignore[method-assign]
