"""Rank 0 of a proof: read the records of a plan and of its reference, judge every step, and explain a failure."""

import math
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from unisono.config import Resolved
from unisono.parallel.stochastic import Dither
from unisono.plan.fidelity import beside_like
from unisono.spec.fidelity import Fidelity
from unisono.spec.layout import Anatomy
from unisono.train.build.build import Place, model_of
from unisono.train.data.dataset import Corpus
from unisono.train.watch.locate_nan import odd_loss
from unisono.verify.averages import no_average
from unisono.verify.beyond import beyond
from unisono.verify.bounds import Bounds, bounds_of, lag_of, rhythm_of
from unisono.verify.case import Case
from unisono.verify.cause import diagnose
from unisono.verify.compare import CONTRACT, Divergence, judge, state_before
from unisono.verify.evidence import Cause
from unisono.verify.laws import clip_factor, observed_after, update
from unisono.verify.parts import parts_of
from unisono.verify.path import sizes_of
from unisono.verify.play import crossed_losses, losses_with, play_leaves, play_twin, record_of, tokens_of
from unisono.verify.record import Record
from unisono.verify.room import CompareTerms
from unisono.verify.stretch import met_by


def terms_of(resolved: Resolved, corpus: Corpus) -> CompareTerms:
    """Return what the comparison of a step of this plan needs."""
    plan, sizes = resolved.plan, sizes_of(resolved, corpus)
    exact = beside_like(plan) is Fidelity.EXACT and not sizes.regrouped
    bounds = bounds_of(plan, sizes)
    model = model_of(resolved.recipe, corpus)
    anatomy: Anatomy = getattr(model, "anatomy", Anatomy())  # type: ignore[assignment]
    tables = f"{anatomy.tables}." if anatomy.tables else "\n"
    lazy = frozenset(name for name, _ in model.named_parameters() if name.startswith(tables))
    owners = dict(anatomy.ties)
    dither = Dither(resolved.recipe.seed, owners) if resolved.plan.arithmetic.stochastic else None
    rhythm, lag = rhythm_of(resolved.plan), lag_of(resolved.plan)
    follow = next((part.average_step for part in resolved.recipe.sections() if part.kept), no_average)
    return CompareTerms(resolved.recipe.train, bounds, exact, owners, lazy, dither, rhythm, lag, follow)


def judge_reference(resolved: Resolved, corpus: Corpus, steps: int, folder: Path) -> dict[str, Any]:
    """Compare the one device with formulas. Keys: first (text, or None), cause, explanation; unseen: tokens of the
    vocabulary that the data of these steps has not; note: on the first loss, or ""."""
    terms = terms_of(resolved, corpus)
    inexact = replace(terms, exact=False)
    first, cause, before = None, Cause("", ""), None
    for step in range(steps):
        seen = Record(record_of(folder, step))
        faults, right = _unlawful(terms, step, seen, before)
        if faults:
            first = str(faults[0])
            cause = diagnose(Case(resolved.plan, inexact, step, faults, right, before, seen))
            break
        before = seen
    if first is None:
        first, cause = next(_unlawful_run(terms, resolved, folder), (None, cause))
    why = {} if first is None else {"cause": cause.name, "explanation": cause.text}
    said = first and f"one device itself: {first}"
    met = [tokens_of(resolved, corpus, step, folder) for step in range(steps)] if corpus.vocab else []
    tokens = frozenset().union(*(side for leaves in met for sides in leaves for side in sides))
    loss = Record(record_of(folder, 0)).notes[0].loss
    return {
        "first": said, **why, "unseen": (corpus.vocab or 0) - len(tokens),
        "note": odd_loss(resolved.recipe, corpus.classes, loss),
    }  # fmt: skip


def judge_plan(
    resolved: Resolved,
    alone: Resolved,
    place: Place,
    corpus: Corpus,
    steps: int,
    folder: Path,
    reference: Path,
) -> dict[str, Any]:
    """Compare every step of a plan. Records of a step that is right are deleted. alone, place: of the one device, whose
    leaves are played again where a codec has a plan out of its bound.

    Keys: bound, errors (by the contract's kinds), bit_identical, wide (whether the bound shows nothing), first (text,
    or None), step (of it), kind, notes.
    """
    terms = terms_of(resolved, corpus)
    errors = dict.fromkeys(CONTRACT, 0.0)
    same, first, at, kind = True, None, None, None
    before: Record | None = None
    for step in range(steps):
        ref, seen = Record(record_of(reference, step)), Record(record_of(folder, step))
        judgement = judge(terms, step, ref, before, seen)
        if judgement.divergences and terms.bounds.lost:
            parts = parts_of(resolved, play_leaves(alone, place, corpus, step, reference), terms.owners)
            judgement = judge(replace(terms, parts=parts), step, ref, before, seen)
        errors = {k: max(v, judgement.errors[k]) for k, v in errors.items()}
        same &= judgement.bit_identical
        if judgement.divergences and first is None:
            first, at, kind = str(judgement.divergences[0]), step, judgement.divergences[0].kind
        elif not judgement.divergences:
            shutil.rmtree(record_of(folder, step), ignore_errors=True)
        before = ref
    finite = {k: v if math.isfinite(v) else 1e308 for k, v in errors.items()}  # JSON has no infinity
    return {
        "bound": terms.bounds.grad, "errors": finite, "bit_identical": same, "first": first, "step": at, "kind": kind,
        "wide": terms.bounds.shows_nothing(resolved.batch.leaves * terms.rhythm), "notes": list(_notes(terms.bounds)),
    }  # fmt: skip


def _notes(bounds: Bounds) -> Iterator[str]:
    """Yield a note on weights that are held to less than the others."""
    if bounds.more:
        yield (
            f"the model itself reads {len(bounds.more)} weights in float32, {min(bounds.more)} among them: their"
            f" gradients are held to {bounds.most:.1e}, all others to {bounds.grad:.1e}"
        )


def judge_stretch(
    resolved: Resolved,
    alone: Resolved,
    place: Place,
    corpus: Corpus,
    steps: int,
    folder: Path,
    reference: Path,
) -> dict[str, Any]:
    """Return the keys of `judge_plan` that the stretch changes: none if all of it is right, else what is wrong and why.
    alone, place: of the one device, whose twin is played here where it is needed."""
    terms = terms_of(resolved, corpus)
    needs_twin = not terms.exact and not terms.bounds.parts_runs
    twin = _twin(terms, alone, place, corpus, steps, reference) if needs_twin else None
    fault_and_cause = next(
        beyond(terms, resolved.plan, resolved.batch.leaves, steps, folder, reference, twin), None
    )
    if fault_and_cause is None:
        return {}
    fault, cause = fault_and_cause
    return {
        "bit_identical": False, "first": str(fault), "step": fault.step, "kind": fault.kind, "cause": cause.name,
        "explanation": cause.text,
    }  # fmt: skip


def _twin(
    terms: CompareTerms, alone: Resolved, place: Place, corpus: Corpus, steps: int, reference: Path
) -> Path:
    """The stretch of one device whose gradients are off by the plan's bound, played once for each bound."""
    folder = reference / f"twin-{terms.bounds.grad:.6e}-{terms.bounds.most:.6e}"
    if not folder.exists():
        play_twin(alone, place, corpus, steps, folder, reference, terms.bounds)
    return folder


def find_cause(
    proven: Resolved,
    alone: Resolved,
    place: Place,
    corpus: Corpus,
    folder: Path,
    reference: Path,
    step: int,
    calm: bool | None,
) -> Cause:
    """Return the likely cause of what went wrong at `step`. proven: the plan. alone: its reference, which this process
    plays again to learn what each micro-batch adds. calm: whether the plan is right without dropout, if that was
    tried."""
    terms = terms_of(proven, corpus)
    ref, seen = Record(record_of(reference, step)), Record(record_of(folder, step))
    before = Record(record_of(reference, step - 1)) if step else None
    judgement = judge(terms, step, ref, before, seen)
    leaves = play_leaves(alone, place, corpus, step, reference)
    old = losses_with(alone, place, corpus, step, reference, step - 1) if step else None
    case = Case(
        proven.plan, terms, step, judgement.divergences, ref, before, seen, leaves, old_losses=old, calm=calm
    )
    if judgement.divergences[0].kind == "loss":
        case = replace(
            case,
            crossed=crossed_losses(alone, place, corpus, step, reference),
            tokens=tokens_of(alone, corpus, step, reference) if corpus.vocab else (),
            foreign=torch_dropouts(model_of(alone.recipe, corpus)),
        )
    return diagnose(case)


def torch_dropouts(model: nn.Module) -> list[str]:
    """Return the names of modules that draw from torch's own generator."""
    return [name for name, module in model.named_modules() if isinstance(module, _DropoutNd) and module.p]


# One device held to formulas that know nothing of it ------------------------------------------------------------------
#
# A plan and its one device run the same program. A mistake that both share shows here: from the gradients that the one
# device had, its norm, its clipped gradients and its update are computed again, in float64, by `verify/laws.py`. The
# result is a record, so the same comparison and the same search for a cause serve both.


def _lawful(terms: CompareTerms, step: int, seen: Record, before: Record | None) -> Record:
    """Compute the step again, in float64, from its gradients before clipping."""
    train, raws = terms.train, {key: seen.whole(key) for key in seen.names("raw")}
    gradients = {key.partition("/")[2]: x for key, x in raws.items() if x is not None}
    norm = math.sqrt(
        sum(x.double().square().sum().item() for n, x in gradients.items() if n not in terms.owners)
    )
    tensors: dict[str, Tensor] = {}
    for name, raw in gradients.items():
        tensors[f"grad/{name}"] = raw.double() * clip_factor(norm, train.clip)
        state = None if name in terms.owners else state_before(train, seen, before, name)
        if state is not None:
            tensors |= _updated(terms, name, state, tensors[f"grad/{name}"], seen, step)
    return seen.with_tensors(tensors, norm)


def _updated(
    terms: CompareTerms,
    name: str,
    state: tuple[Tensor, dict[str, Tensor]],
    grad: Tensor,
    seen: Record,
    step: int,
) -> dict[str, Tensor]:
    lazy, lr = name in terms.lazy, seen.notes[0].lr
    keep = terms.kept(name, step)
    how = {"lazy": lazy, "keep": keep, "name": name, "observed": observed_after(terms.train, seen, name, 0.0)}
    law = update(terms.train, *state, grad, 0.0, lr=lr, step=step, unit=0.0, **how)
    return {f"model/{name}" if k == "param" else f"optim/{name}/{k}": value for k, (value, _) in law.items()}


def _unlawful(
    terms: CompareTerms, step: int, seen: Record, before: Record | None
) -> tuple[list[Divergence], Record]:
    """Return the divergences of one device from the step that follows from its gradients, and that step's record."""
    right = _lawful(terms, step, seen, before)
    if not seen.notes[0].finite:
        return [], right
    bounds = replace(terms.bounds, loss=0.0, grad=0.0)
    return judge(replace(terms, bounds=bounds, exact=False), step, right, before, seen).divergences, right


def _unlawful_run(terms: CompareTerms, resolved: Resolved, folder: Path) -> Iterator[tuple[str, Cause]]:
    """Yield (text, cause) of what is wrong with data and validation on one device."""
    (met,) = met_by(folder, 1)
    if met.epochs:
        yield met.epochs, Cause("wrong_samples", met.epochs)
    loss, bare = met.validation.get("loss"), met.bare
    room = terms.bounds.total(2 * resolved.batch.global_batch) + 64 * terms.bounds.unit
    if loss is not None and bare is not None and not abs(loss - bare) <= room * abs(bare):
        text = f"the validation loss is {loss:.9g}, and {bare:.9g} by the bare modules, which drop nothing"
        yield text, Cause("validation", text)
