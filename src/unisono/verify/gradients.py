"""The likely cause of a wrong gradient: a list of patterns, the first of which fits is it.

One list serves the prover and `check_gradients`: what both know is an `Evidence`.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.spec.words import listed
from unisono.verify.evidence import Cause, Evidence, box_of, factor, fit, lower_precision, only_at, ratio
from unisono.verify.part_patterns import by_local_norms, rounding_noise
from unisono.verify.share_weights import NEAR, by_weights


def explain(ev: Evidence, names: Sequence[str]) -> Cause:
    """The likely cause of wrong gradients, in backward order; what comes before gradients is right."""
    known = [name for name in names if name in ev.want and ev.held.get(name)]
    for find in (
        _not_a_number,
        _not_reduced,
        _foreign,
        _rounded,
        _factor,
        by_local_norms,
        _tied,
        _shares,
        _copies_apart,
        _carried,
        rounding_noise,
        _elements,
        _permuted,
        _slice,
    ):
        cause = find(ev, known) if known else None
        if cause is not None:
            return cause
    worst = max((ev.worst(name) / ev.top(name) for name in known), default=1e308)
    text = f"{are(names)} wrong, by up to {worst:.1e} of the largest entry, in no pattern known here"
    return Cause("gradient", text)


def many(names: Sequence[str]) -> str:
    """The gradient of x; the gradients of x and 3 more."""
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"the gradient{'s' if more else ''} of {names[0]}{more}"


def are(names: Sequence[str]) -> str:
    """Return `many` with its verb."""
    return f"{many(names)} {'is' if len(names) == 1 else 'are'}"


def _pairs(ev: Evidence, names: Sequence[str]) -> list[tuple[str, Tensor, Tensor]]:
    """(name, as ranks have it, as it should be), float64, of gradients that are there as a whole."""
    wholes = [(name, ev.whole(name)) for name in names]
    return [(name, got.double(), ev.want[name]) for name, got in wholes if got is not None]


def _not_a_number(ev: Evidence, names: Sequence[str]) -> Cause | None:
    bad = [n for n in names if not all(bool(p.tensor.isfinite().all()) for p in ev.held[n])]
    return Cause("not_a_number", f"an entry of {many(bad[:1])} is not a number") if bad else None


# Copies --------------------------------------------------------------------------------------------------------------


def _not_reduced(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Copies differ, and their sum or mean over one axis is the right gradient."""
    for axis in ev.axes:
        for how in ("sum", "mean"):
            done = [name for name in names if _adds_up(ev, name, axis, how)]
            if done and not _share_in_common(ev, done, axis):
                text = f"not summed over the {axis} axis: each rank keeps its own, and their {how} is right"
                return Cause("not_reduced", f"{are(done)} {text}")
    return None


def _adds_up(ev: Evidence, name: str, axis: str, how: str) -> bool:
    """Whether the sum or mean over an axis is right for each box that is wrong."""
    for ranks in ev.copies(name):
        if all(ev.is_right(p, name) for p in ranks):
            continue
        copies = torch.stack(list({p.at[axis]: p.tensor.double() for p in ranks}.values()))
        total = copies.sum(0) if how == "sum" else copies.mean(0)
        gap = (total - box_of(ev.want[name], ranks[0])).abs().max().item()
        if len(copies) < 2 or not gap <= ev.near * ev.top(name):
            return False
    return bool(ev.differ(name))


def _foreign(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Different parts of one tensor were added to each other."""
    for axis in ev.axes:
        done = [name for name in names if _of_all_parts(ev, name, axis)]
        if done:
            text = f"the sum of the different parts that ranks along {axis} hold: a group was taken that cuts them"
            return Cause("wrong_group", f"{are(done)} {text}")
    return None


def _of_all_parts(ev: Evidence, name: str, axis: str) -> bool:
    parts = [p for p in ev.held[name] if p.tensor.numel()]
    for p in parts:
        # With a part of their own.
        peers = {q.start: q for q in parts if all(q.at[a] == p.at[a] for a in p.at if a != axis)}
        boxes = [box_of(ev.want[name], q) for q in peers.values()]
        if len(boxes) < 2 or any(box.shape != p.tensor.shape for box in boxes):
            return False
        if not (p.tensor.double() - sum(boxes)).abs().max().item() <= ev.near * ev.top(name):
            return False
    return bool(parts)


def _share_in_common(ev: Evidence, names: Sequence[str], axis: str) -> bool:
    """Whether two ranks along an axis have a share in common: then some of the sum was made."""
    ranks = list({p.at[axis]: p.rank for p in ev.differ(names[0])}.values())[:2]
    weights, other = (ev.weights(names, rank) for rank in ranks)
    both = zip(weights or (), other or (), strict=False)
    return any(abs(a) > NEAR and abs(b) > NEAR for a, b in both)


def _copies_apart(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Copies differ in some other way: name who has the right one."""
    for name in names:
        ranks = ev.differ(name)
        if ranks:
            good = [p.rank for p in ranks if ev.is_right(p, name)]
            bad = [p.rank for p in ranks if p.rank not in good]
            word = f"right on ranks {listed(good)}, wrong on {listed(bad)}" if good else "wrong on all"
            axes = " and ".join(a for a in ev.axes if len({p.at[a] for p in ranks}) > 1)
            return Cause("replicas_drifted", f"copies of {many([name])} differ along {axes}: {word}")
    return None


# Mixtures ------------------------------------------------------------------------------------------------------------


def _factor(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """All that is wrong is the right gradient times one number."""
    pairs = _pairs(ev, names)
    if not pairs:
        return None
    _, got, want = max(pairs, key=lambda p: p[1].numel())
    c = ratio(got, want, ev.near)
    if c is None or not all(
        ev.gap(p, name, c) <= ev.near * ev.top(name)
        for name in names
        for p in ev.held[name]
        if p.tensor.numel()
    ):
        return None
    who = "every gradient is" if len(names) >= len(ev.want) - len(ev.ties) else are(names)
    if c == 0:
        return Cause("missing_share", f"{who} zero")
    return factor(who, c, ev.sizes)


def _tied(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """A weight with two uses: the sum has one of them, or one twice."""
    for alias, owner in ev.ties.items():
        name = next((n for n in names if n in (owner, alias)), None)
        got = None if name is None or not {owner, alias} <= ev.shares.keys() else ev.whole(name)
        if got is None:
            continue
        uses = torch.stack([ev.shares[n].double().sum(0).flatten() for n in (owner, alias)], 1)
        solution = fit(got.double().flatten(), uses)
        if solution is None or solution.residual > ev.near:
            continue
        for weight, other, use in zip(
            solution.weights, reversed(solution.weights), (owner, alias), strict=True
        ):
            if abs(weight) < 1e-4 and abs(other) > NEAR:
                return Cause("tied_use_missing", f"the gradient of {owner} lacks its use as {use}")
            if abs(weight - 2) < 1e-4 and abs(other - 1) < 1e-4:
                return Cause("tied_use_twice", f"the gradient of {owner} counts its use as {use} twice")
    return None


def _shares(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Some shares of the batch are missing, or there more than once; on one rank, if ranks differ."""
    drifted = next(filter(None, map(ev.differ, names)), [])
    looks = [(names, p.rank) for p in drifted] + [(names, None), (names[:1], None)]
    for chosen, rank in looks:
        weights = ev.weights(chosen, rank)
        on = "" if rank is None else f" on rank {rank}"
        where = f"in {many(chosen)}{on}"
        cause = None if weights is None else by_weights(ev, weights, where, alike=not drifted)
        if cause is not None:
            return cause
    return None


def _carried(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """A gradient that contains the one of the step before."""
    for past in ev.past:
        rows = [(g, w, past[name].double()) for name, g, w in _pairs(ev, names) if name in past]
        if not rows:
            continue
        got, right, old = (torch.cat([x.flatten() for x in column]) for column in zip(*rows, strict=True))
        solution = fit(got, torch.stack((right, old), 1))
        if solution is not None and solution.residual <= ev.near and abs(solution.weights[1]) > NEAR:
            if abs(solution.weights[0]) < NEAR:
                return Cause("stale_gradient", f"{are(names)} of the step before")
            text = f"what the step before had counts {solution.weights[1]:.4g} times"
            return Cause("carried_over", f"in {many(names)} {text}")
    return None


# Parts of one tensor -------------------------------------------------------------------------------------------------


def _rounded(ev: Evidence, names: Sequence[str]) -> Cause | None:
    for name in names:
        got = ev.whole(name)
        if got is None or got.numel() < 2 or not got.is_floating_point():
            continue
        word = lower_precision(got, ev.want[name])
        if word and ev.worst(name) < 0.02 * ev.top(name):
            noise = rounding_noise(ev, names)
            if noise and f" {word} " not in noise.text:
                return noise  # a few numbers of a smaller dtype fit, added up, into this one
            text = f"all entries of {many([name])} are {word} numbers: it was rounded on its way"
            return Cause("precision_lost", text)
    return None


def _elements(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """A handful of entries of one tensor."""
    for name, got, want in _pairs(ev, names[:1] if len(names) <= 2 else ()):
        gap = (got - want).abs()
        count = int((gap > gap.max() * 1e-3).sum())
        if got.numel() >= 8 and count <= max(1, got.numel() // 100):
            error = gap.max().item() / ev.top(name)
            text = f"{count} of {got.numel()} entries of {many([name])} are wrong, by {error:.1e}"
            return Cause("few_elements", text)
    return None


def _permuted(ev: Evidence, names: Sequence[str]) -> Cause | None:
    for name, got, want in _pairs(ev, names):
        room = ev.near * ev.top(name)
        sorted_got, other = (x.flatten().sort().values for x in (got, want))
        if got.numel() > 1 and bool(((sorted_got - other).abs() <= room).all()):
            return Cause("permuted", f"the entries of {many([name])} are right but stand elsewhere")
    return None


def _slice(ev: Evidence, names: Sequence[str]) -> Cause | None:
    """Only what some ranks hold is wrong."""
    name = names[0]
    where = only_at(
        [p for p in ev.held[name] if p.tensor.numel()], ev.axes, lambda p: not ev.is_right(p, name)
    )
    return Cause("rank_slice", f"of {many([name])} only what is held at {where} is wrong") if where else None
