"""What is wrong with an update whose gradients are right: solve the optimiser's formula for what was done."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.spec.words import listed
from unisono.verify.bounds import steps_of
from unisono.verify.case import Case
from unisono.verify.compare import state_before
from unisono.verify.evidence import AXES, Cause, axis_text, box_of, fit, lower_precision, only_at


def explain_update(case: Case) -> Cause:
    """The likely cause of the first wrong parameter, moment, counter or learning rate."""
    kinds = ("lr", "optim", "model", "ema", "copies", "missing", "law")
    wrong = [d for d in case.divergences if d.kind in kinds]
    rates = [d for d in wrong if d.kind == "lr"]
    if rates:
        return Cause("learning_rate", rates[0].what)
    names = list(dict.fromkeys(name_of(d.name) for d in wrong))
    early = _draws(case, names) or _ties(case)
    if early is not None:
        return early
    counters = [d for d in wrong if d.name.endswith("/step")]
    if counters:
        got, want = (r.whole(counters[0].name) for r in (case.seen, case.ref))
        if got is not None and want is not None:
            return Cause(
                "step_count",
                f"the optimiser counts {got.item():g} updates where one device counts {want.item():g}",
            )
    if wrong and all(d.name.startswith("ema/") for d in wrong):
        what = f"weights are right, {listed(names, 3)} is averaged in another way than the recipe says"
        return Cause("average_rule", what)
    copies = [d for d in wrong if d.kind == "copies"]
    for name in names:
        cause = _parameter(case, name, names)
        if cause is not None:
            return cause
    if copies:
        return Cause("replicas_drifted", f"gradients are right, but after the update {copies[0].what}")
    return _at_some(case, names) or Cause(
        "update_rule",
        f"gradients and learning rate are right, {listed(names, 3)} does not follow the recipe's formula",
    )


def _at_some(case: Case, names: Sequence[str]) -> Cause | None:
    """Only what some ranks hold is wrong."""
    axes = [axis for axis in AXES if getattr(case.plan, axis) > 1]
    for name in names:
        want = case.ref.whole(f"model/{name}")
        if want is not None:
            boxes = [p for p in case.seen.parts.get(f"model/{name}", ()) if p.tensor.numel()]
            where = only_at(boxes, axes, lambda p, x=want: not _close(p.tensor, box_of(x, p), case.unit))
            if where:
                text = f"of {name} only what is held at {where} does not follow the recipe's formula"
                return Cause("rank_slice", f"gradients and learning rate are right, {text}")
    return None


def name_of(key: str) -> str:
    """optim/NAME/KEY or model/NAME → NAME."""
    kind, _, rest = key.partition("/")
    return rest.rpartition("/")[0] if kind == "optim" else rest


def _ties(case: Case) -> Cause | None:
    for alias, owner in case.owners.items():
        alias_weight, two = case.seen.whole(f"model/{alias}"), case.seen.whole(f"model/{owner}")
        if alias_weight is not None and two is not None and not torch.equal(alias_weight, two):
            return Cause(
                "tied_copies_differ", f"{alias} and {owner} are one weight, and differ after the update"
            )
    return None


def _parameter(case: Case, name: str, names: list[str]) -> Cause | None:
    state = state_before(case.terms.train, case.ref, case.before, name)
    got, want = case.seen.whole(f"model/{name}"), case.ref.whole(f"model/{name}")
    grad = case.seen.whole(f"grad/{name}")
    if state is None or got is None or want is None or grad is None:
        return None
    param, moments = state
    who = name if len(names) == 1 else f"{name} and {len(names) - 1} more"
    if bad_copies := [d for d in case.divergences if d.kind == "copies" and name_of(d.name) == name]:
        return Cause("replicas_drifted", f"gradients are right, but after the update {bad_copies[0].what}")
    if torch.equal(got, param) and not torch.equal(want, param):
        return Cause("not_updated", f"{who} did not move in this step")
    for key in ("model/" + name, *(f"optim/{name}/{k}" for k in moments)):
        a, b = case.seen.whole(key), case.ref.whole(key)
        if a is not None and b is not None and a.dim() and not torch.equal(a, b):
            word = lower_precision(a, b)
            if word:
                return Cause(
                    "precision_lost", f"all entries of {key} are {word} numbers: it was rounded on its way"
                )
    for key, old in moments.items():
        cause = _moment(case, name, key, (param, old, grad), who)
        if cause is not None:
            return cause
    return _move(case, name, param, got, want, who)


def _draws(case: Case, names: Sequence[str]) -> Cause | None:
    """Parameters without masters that are right but for the way that they were rounded."""
    if not case.plan.arithmetic.stochastic or any(d.kind == "optim" for d in case.divergences):
        return None
    pairs = [(case.seen.whole(f"model/{name}"), case.ref.whole(f"model/{name}")) for name in names]
    whole = [(a, b) for a, b in pairs if a is not None and b is not None]
    apart = any(not torch.equal(a, b) for a, b in whole)
    if apart and len(whole) == len(pairs) and all(_neighbours(a, b) for a, b in whole):
        what = f"{listed(names, 3)} is right but for its last digit in bf16"
        return Cause(
            "rounding_draws", f"{what}: updates are not rounded by the draws of this step, tensor and element"
        )
    return None


def _neighbours(got: Tensor, want: Tensor) -> bool:
    """Whether numbers of bf16 are each the other's next one at most."""
    gap = (got.double() - want.double()).abs()
    return bool((gap <= 2.0**-7 * torch.maximum(got.abs(), want.abs()).double()).all())


def _moment(case: Case, name: str, key: str, before: tuple[Tensor, Tensor, Tensor], who: str) -> Cause | None:
    """Find which mixture of the parameter, the moment and the gradient `before` the update is the moment after it."""
    got, want = case.seen.whole(f"optim/{name}/{key}"), case.ref.whole(f"optim/{name}/{key}")
    if got is None or want is None or not got.dim() or _close(got, want, case.unit):
        return None
    param, old, grad = (x.double().flatten() for x in before)
    sources = {
        "the past": old,
        "the gradient": grad**2 if key == "exp_avg_sq" else grad,
        "the parameter": param,
    }
    known = {word: x for word, x in sources.items() if bool(x.any())}
    columns = torch.stack(list(known.values()), 1)
    solution, right = fit(got.double().flatten(), columns), fit(want.double().flatten(), columns)
    if solution is None or right is None or solution.residual > 1e-6:
        return Cause("moments", f"{key} of {who} is wrong although its gradient is right")
    pairs = zip(known, solution.weights, right.weights, strict=True)
    other = [(word, w, r) for word, w, r in pairs if not math.isclose(w, r, rel_tol=1e-4, abs_tol=1e-7)]
    shown = " and ".join(f"{word} by {w:.6g} instead of {r:.6g}" for word, w, r in other)
    if other and all(word == "the parameter" for word, *_ in other):
        return Cause("weight_decay", f"{key} of {who} takes in {shown}: another weight decay")
    return Cause(
        "moments",
        f"{key} of {who} weighs {shown}" if other else f"{key} of {who} is wrong, its gradient right",
    )


def _close(a: Tensor, b: Tensor, unit: float) -> bool:
    return bool(
        (a.double() - b.double()).abs().max() <= 1e4 * unit * max(b.double().abs().max().item(), 1e-300)
    )


def _move(case: Case, name: str, param: Tensor, got: Tensor, want: Tensor, who: str) -> Cause | None:
    """got - param = a · move + b · param, where move is what the reference's optimiser alone does."""
    train = case.terms.train
    decay = train.weight_decay if param.dim() >= 2 else 0.0
    pull = -train.rate()(steps_of(case.plan, case.step)[-1]) * param.double().flatten()
    move = (want.double() - param.double()).flatten() - decay * pull
    known = torch.stack((move, pull), 1) if bool(pull.any()) else move[:, None]
    solution = fit((got.double() - param.double()).flatten(), known)
    if solution is None or solution.residual > 1e-4:
        return None
    a, b = (*solution.weights, decay)[:2]
    if abs(a - 1) > 1e-4:
        text = axis_text(a, case.plan, len(case.ref.leaves()))
        near = f" ({text})" if text else ""
        return Cause(
            "learning_rate", f"{who} moved {a:.6g} times as far as it should{near}: another learning rate"
        )
    if abs(b - decay) > 1e-4 * max(1.0, abs(decay)):
        if math.isclose(b, 0.0, abs_tol=1e-4):
            return Cause("weight_decay", f"{who} does not decay, the recipe says {decay:g}")
        return Cause("weight_decay", f"{who} decays by {b:.6g} where the recipe says {decay:g}")
    return None
