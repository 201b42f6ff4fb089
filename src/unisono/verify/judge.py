"""Rank 0 of a proof: read the records of a plan and of its reference, judge every step, and explain a failure."""

import math
import shutil
from pathlib import Path
from typing import Any

from unisono.config import Resolved
from unisono.models.build import build as build_model
from unisono.plan.fidelity import fidelity_of
from unisono.spec.fidelity import Fidelity
from unisono.train.build import Place, facts_of
from unisono.train.data.dataset import Corpus
from unisono.verify.bounds import bounds_of
from unisono.verify.cause import Case, diagnose
from unisono.verify.compare import CONTRACT, CompareTerms, judge
from unisono.verify.path import sizes_of
from unisono.verify.play import crossed_losses, losses_with, play_leaves, record_of
from unisono.verify.record import Record
from unisono.verify.solve import Cause


def terms_of(resolved: Resolved, corpus: Corpus) -> CompareTerms:
    """What comparing a step of this plan has to know."""
    exact = fidelity_of(resolved.plan) is Fidelity.EXACT
    bounds = bounds_of(resolved.plan, sizes_of(resolved, corpus))
    model = build_model(resolved.recipe.model, facts_of(corpus))
    ties = getattr(getattr(model, "anatomy", None), "ties", ())
    return CompareTerms(resolved.recipe.train, bounds, exact, dict(ties))


def judge_plan(
    resolved: Resolved, corpus: Corpus, steps: int, folder: Path, reference: Path
) -> dict[str, Any]:
    """Every step of a plan, as plain data. Records of a step that is right are deleted.

    Keys: bound, errors (by the contract's kinds), bit_identical, first (text, or None), step (of it), kind.
    """
    terms = terms_of(resolved, corpus)
    errors = dict.fromkeys(CONTRACT, 0.0)
    same, first, at, kind = True, None, None, None
    before: Record | None = None
    for step in range(steps):
        ref, seen = Record(record_of(reference, step)), Record(record_of(folder, step))
        judgement = judge(terms, step, ref, before, seen)
        errors = {k: max(v, judgement.errors[k]) for k, v in errors.items()}
        same &= judgement.bit_identical
        if judgement.found and first is None:
            first, at, kind = str(judgement.found[0]), step, judgement.found[0].kind
        elif not judgement.found:
            shutil.rmtree(record_of(folder, step), ignore_errors=True)
        before = ref
    finite = {k: v if math.isfinite(v) else 1e308 for k, v in errors.items()}  # JSON has no infinity
    return {
        "bound": terms.bounds.grad, "errors": finite, "bit_identical": same, "first": first, "step": at, "kind": kind,
    }  # fmt: skip


def find_cause(
    asked: Resolved,
    one: Resolved,
    place: Place,
    corpus: Corpus,
    folder: Path,
    reference: Path,
    step: int,
    calm: bool | None,
) -> Cause:
    """The likely cause of what went wrong at `step`. asked: the plan; one: its reference, which this process plays
    again to learn what each micro-batch adds. calm: whether the plan is right without dropout, if that was tried."""
    terms = terms_of(asked, corpus)
    ref, seen = Record(record_of(reference, step)), Record(record_of(folder, step))
    before = Record(record_of(reference, step - 1)) if step else None
    judgement = judge(terms, step, ref, before, seen)
    train = asked.recipe.train
    case = Case(
        plan=asked.plan,
        step=step,
        found=judgement.found,
        ref=ref,
        before=before,
        seen=seen,
        leaves=play_leaves(one, place, corpus, step, reference),
        owners=terms.owners,
        clip=train.clip,
        decay=train.weight_decay,
        rate=train.rate()(step),
        unit=terms.bounds.unit,
        exact=terms.exact,
        old_losses=losses_with(one, place, corpus, step, reference, step - 1) if step else None,
        calm=calm,
        crossed=crossed_losses(one, place, corpus, step, reference)
        if judgement.found[0].kind == "loss"
        else None,
    )
    return diagnose(case)
