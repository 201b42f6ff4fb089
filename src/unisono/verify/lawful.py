"""One device held to formulas that know nothing of it: norm, clipping, the optimiser's update, validation, epochs.

`verify` compares plans with one device, which runs the same program. A mistake that both sides share shows here: from
the gradients that the one device had, its norm, its clipped gradients and its update are computed again, in float64, by
`verify/laws.py`. The result is a record, so the same comparison and the same search for a cause serve both.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from unisono.config import Resolved
from unisono.verify.compare import CompareTerms, Divergence, judge, state_before
from unisono.verify.laws import clip_factor, update
from unisono.verify.record import Record
from unisono.verify.solve import Cause
from unisono.verify.stretch import told_by


def lawful(terms: CompareTerms, step: int, seen: Record, before: Record | None) -> Record:
    """What the step should have come to, given its gradients before clipping."""
    train, raws = terms.train, {key: seen.whole(key) for key in seen.names("raw")}
    own = {key.partition("/")[2]: x for key, x in raws.items() if x is not None}
    norm = math.sqrt(sum(x.double().square().sum().item() for n, x in own.items() if n not in terms.owners))
    made: dict[str, Tensor] = {}
    for name, raw in own.items():
        made[f"grad/{name}"] = raw.double() * clip_factor(norm, train.clip)
        state = None if name in terms.owners else state_before(seen, before, name)
        if state is not None:
            made |= _updated(terms, name, state, made[f"grad/{name}"], seen.notes[0].lr, step)
    return seen.with_tensors(made, norm)


def _updated(
    terms: CompareTerms,
    name: str,
    state: tuple[Tensor, dict[str, Tensor]],
    grad: Tensor,
    lr: float,
    step: int,
) -> dict[str, Tensor]:
    lazy = name in terms.lazy
    keep = terms.kept(name, step)
    law = update(terms.train, *state, grad, 0.0, lr=lr, step=step, unit=0.0, lazy=lazy, keep=keep)
    return {f"model/{name}" if k == "param" else f"optim/{name}/{k}": value for k, (value, _) in law.items()}


def unlawful(
    terms: CompareTerms, step: int, seen: Record, before: Record | None
) -> tuple[list[Divergence], Record]:
    """What of a step of one device does not follow from its own gradients, and the record that would."""
    right = lawful(terms, step, seen, before)
    if not seen.notes[0].finite:
        return [], right
    bounds = replace(terms.bounds, loss=0.0, grad=0.0)
    return judge(replace(terms, bounds=bounds, exact=False), step, right, before, seen).found, right


def unlawful_run(terms: CompareTerms, resolved: Resolved, folder: Path) -> Iterator[tuple[str, Cause]]:
    """What of data and validation is wrong on one device: text, cause."""
    (told,) = told_by(folder, 1)
    if told.epochs:
        yield told.epochs, Cause("wrong_samples", told.epochs)
    loss, bare = told.validation.get("loss"), told.bare
    room = terms.bounds.total(2 * resolved.batch.global_batch) + 64 * terms.bounds.unit
    if loss is not None and bare is not None and not abs(loss - bare) <= room * abs(bare):
        text = f"the validation loss is {loss:.9g}, and {bare:.9g} by the bare modules, which drop nothing"
        yield text, Cause("validation", text)
