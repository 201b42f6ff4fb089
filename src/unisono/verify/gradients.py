"""What is wrong with a gradient: regress it on what it should have been made of."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from unisono.verify.record import RecordedBox, box_of
from unisono.verify.solve import AXES, Cause, Fit, axis_text, fit, listed, lower_precision, ratio

if TYPE_CHECKING:
    from unisono.verify.cause import Case

ROOM = 1 << 18  # rows of a regression: more would only make it slower


def explain_gradient(case: "Case") -> Cause:
    """The likely cause of the first wrong gradient; gradients before clipping, all else before them right."""
    wrong = [d for d in case.found if d.name.startswith("raw/") and d.kind in ("raw", "copies", "missing")]
    keys = list(dict.fromkeys(d.name for d in wrong))
    slack = max(1e-9, 1e3 * case.unit)
    absent = [d.name for d in wrong if d.kind == "missing"]
    if absent and absent == keys:
        return Cause("missing_share", f"{_many(absent)}, or parts of it, are not there at all")
    worst = max((d.error for d in wrong), default=math.inf)
    if case.exact and worst < 1e3 * case.unit:
        return Cause(
            "summation_order", f"{_many(keys)} differ by rounding alone: a sum is taken in another order"
        )
    for explain in (
        _not_reduced,
        _rounded,
        _factor,
        _tied,
        _leaves,
        _copies_apart,
        _carried,
        _elements,
        _permuted,
        _slice,
    ):
        cause = explain(case, keys, slack)
        if cause is not None:
            return cause
    if case.calm:
        return Cause(
            "masks_differ", f"{_many(keys)} are wrong, and right without dropout: backward sees other masks"
        )
    return Cause(
        "gradient",
        f"{_many(keys)} are wrong, by up to {worst:.1e} of the largest entry, in no pattern known here",
    )


def _many(keys: Sequence[str]) -> str:
    names = [key.partition("/")[2] for key in keys]
    return (
        f"the gradient of {names[0]}"
        if len(names) == 1
        else f"the gradients of {names[0]} and {len(names) - 1} more"
    )


def _want(case: "Case", key: str) -> Tensor | None:
    kind, _, name = key.partition("/")
    return case.ref.whole(f"{kind}/{case.owners.get(name, name)}")


def _pairs(case: "Case", keys: Sequence[str]) -> list[tuple[str, Tensor, Tensor]]:
    found = []
    for key in keys:
        got, want = case.seen.whole(key), _want(case, key)
        if got is not None and want is not None and bool(torch.isfinite(got).all()):
            found.append((key, got.double(), want.double()))
    return found


# Copies --------------------------------------------------------------------------------------------------------------


def _not_reduced(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """Copies differ, and their sum over one axis is the right gradient."""
    for axis in (a for a in AXES if getattr(case.plan, a) > 1):
        done = [key for key in keys if _sum_is_right(case, key, axis, slack)]
        if done:
            what = "replica" if axis == "dp" else f"{axis} rank"
            return Cause(
                "not_reduced", f"{_many(done)} are not summed over {axis}: each {what} keeps its own part"
            )
    return None


def _sum_is_right(case: "Case", key: str, axis: str, slack: float) -> bool:
    want = _want(case, key)
    if want is None:
        return False
    any_apart = False
    for ranks in case.seen.copies(key):
        by = {p.at[axis]: p.tensor.double() for p in ranks}
        if len(by) < getattr(case.plan, axis):
            return False
        right = box_of(want.double(), ranks[0])
        total = torch.stack(list(by.values())).sum(0)
        any_apart |= any(not torch.equal(other, by[0]) for other in by.values())
        if (total - right).abs().max() > slack * max(right.abs().max().item(), 1e-300):
            return False
    return any_apart


def _copies_apart(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """Copies differ in some other way: name who has the right one."""
    for key in keys:
        want = _want(case, key)
        for ranks in case.seen.copies(key):
            if want is None or all(torch.equal(p.tensor, ranks[0].tensor) for p in ranks[1:]):
                continue
            right = box_of(want.double(), ranks[0])
            room = slack * max(right.abs().max().item(), 1e-300)
            good = [p.rank for p in ranks if (p.tensor.double() - right).abs().max() <= room]
            bad = [p for p in ranks if p.rank not in good]
            word = (
                f"right on ranks {listed(good)}, wrong on {listed([p.rank for p in bad])}"
                if good
                else "wrong on all"
            )
            axes = [a for a in AXES if len({p.at[a] for p in ranks}) > 1]
            return Cause(
                "replicas_drifted",
                f"copies of {_many([key])} that {' and '.join(axes)} should keep equal differ: {word}",
            )
    return None


# Mixtures ------------------------------------------------------------------------------------------------------------


def _factor(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    pairs = _pairs(case, keys)
    if not pairs:
        return None
    every = len(keys) >= len(case.ref.names("raw")) - len(case.owners)
    _, got, want = max(pairs, key=lambda p: p[1].numel())
    c = ratio(got, want, slack)
    near = 1e2 * slack
    if c is None or not all(bool(((g - c * w).abs() <= near * w.abs().max()).all()) for _, g, w in pairs):
        return None
    who = "every gradient" if every else _many(keys)
    if c == 0:
        return Cause("missing_share", f"{who} is zero" if every or len(keys) == 1 else f"{who} are zero")
    text = axis_text(c, case.plan, len(case.ref.leaves()))
    be = "is" if every or len(keys) == 1 else "are"
    if text:
        return Cause("factor_of_axis", f"{who} {be} off by a factor of {c:.6g}: {text}")
    return Cause("factor", f"{who} {be} off by a factor of {c:.6g}")


def _tied(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """A weight with two uses: the sum has one of them, or one twice."""
    for alias, owner in case.owners.items():
        key = next((k for k in keys if k in (f"raw/{owner}", f"raw/{alias}")), None)
        if key is None or owner not in case.leaves or alias not in case.leaves:
            continue
        got = case.seen.whole(key)
        if got is None:
            continue
        uses = torch.stack([case.leaves[n].double().sum(0).flatten() for n in (owner, alias)], 1)
        found = fit(got.double().flatten(), uses)
        if found is None or found.residual > 10 * slack:
            continue
        one, two = found.weights
        for weight, name in ((one, owner), (two, alias)):
            other = two if weight is one else one
            if abs(weight) < 1e-4 and abs(other) > 1e-3:
                return Cause("tied_use_missing", f"the gradient of {owner} lacks its use as {name}")
            if abs(weight - 2) < 1e-4 and abs(other - 1) < 1e-4:
                return Cause("tied_use_twice", f"the gradient of {owner} counts its use as {name} twice")
    return None


def _leaf_parts(case: "Case", name: str) -> Tensor | None:
    """[elements, leaves]: what each leaf adds to one gradient; both uses of a tied weight together."""
    owner = case.owners.get(name, name)
    if owner not in case.leaves:
        return None
    parts = case.leaves[owner].double()
    for alias, other in case.owners.items():
        if other == owner and alias in case.leaves:
            parts = parts + case.leaves[alias].double()
    return parts.flatten(1).T


def regress(case: "Case", keys: Sequence[str], at: RecordedBox | None = None) -> Fit | None:
    """The weight of each leaf in what is observed, over all of `keys` together; on one rank's boxes with `at`."""
    rows, columns, room = [], [], ROOM
    for key in keys:
        name = key.partition("/")[2]
        parts = _leaf_parts(case, name)
        got = case.seen.whole(key) if at is None else None
        if at is not None:
            held = [p for p in case.seen.parts[key] if p.rank == at.rank and p.tensor.numel()]
            if held and parts is not None:
                shape = case.seen.shapes[key]
                whole = parts.T.reshape(-1, *shape)
                boxes = [box_of(leaf, held[0]).flatten() for leaf in whole]
                got, parts = held[0].tensor, torch.stack(boxes, 1)
        if got is None or parts is None or room < got.numel() // 2:
            continue
        room -= got.numel()
        rows.append(got.double().flatten())
        columns.append(parts)
    if not rows:
        return None
    return fit(torch.cat(rows), torch.cat(columns))


def _leaves(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """Some micro-batches' shares are missing, or there more than once."""
    for chosen in (keys, keys[:1]):
        found = regress(case, chosen)
        if found is not None and found.residual <= 1e2 * slack:
            cause = _by_weights(case, chosen, found.weights)
            if cause is not None:
                return cause
    drifted = [d for d in case.found if d.kind == "copies" and d.name in keys]
    for divergence in drifted[:1]:
        for part in case.seen.parts[divergence.name]:
            found = regress(case, keys, part)
            if found is not None and found.residual <= 1e2 * slack:
                cause = _by_weights(case, keys, found.weights)
                if cause is not None:
                    return Cause(cause.name, f"on rank {part.rank}, {cause.text}")
    return None


def _by_weights(case: "Case", keys: Sequence[str], weights: Sequence[float]) -> Cause | None:
    near = 1e-3
    missing = [i for i, w in enumerate(weights) if abs(w) < near]
    more = [i for i, w in enumerate(weights) if w > 1 + near]
    if missing and len(missing) < len(weights):
        return _missing(case, keys, missing, weights)
    if more:
        times = weights[more[0]]
        return Cause("counted_twice", f"in {_many(keys)} micro-batch {listed(more)} counts {times:.4g} times")
    odd = [i for i, w in enumerate(weights) if abs(w - 1) > near]
    if odd:
        shown = listed([f"{w:.4g}" for w in weights])
        return Cause("factor", f"in {_many(keys)} micro-batches have other weights than one: {shown}")
    return None


def _missing(case: "Case", keys: Sequence[str], missing: Sequence[int], weights: Sequence[float]) -> Cause:
    order = sorted(case.ref.leaves())
    place: dict[int, tuple[tuple[int, int], int, int]] = {}
    for note in case.seen.notes:
        for i, leaf in enumerate(note.leaves):
            if leaf["first"] in order:
                place[order.index(leaf["first"])] = ((note.at["dp"], note.at["shard"]), i, len(note.leaves))
    kept = [i for i in range(len(weights)) if i not in missing]
    where = _many(keys)
    if all(i in place for i in range(len(weights))):
        if all(place[i][1] == place[i][2] - 1 for i in kept) and any(place[i][2] > 1 for i in kept):
            return Cause(
                "missing_micro_batch", f"in {where} all but the last micro-batch of each rank are lost"
            )
        if all(place[i][1] == 0 for i in kept) and any(place[i][2] > 1 for i in kept):
            return Cause(
                "missing_micro_batch", f"in {where} all but the first micro-batch of each rank are lost"
            )
        ranks = {place[i][0] for i in missing}
        if not ranks & {place[i][0] for i in kept}:
            shown = listed([f"dp={d} shard={s}" for d, s in sorted(ranks)])
            return Cause("missing_share", f"in {where} the whole share of {shown} is missing")
        if all(place[i][1] == place[i][2] - 1 for i in missing):
            return Cause("missing_micro_batch", f"in {where} the last micro-batch of a rank is lost")
    return Cause("missing_micro_batch", f"in {where} the share of micro-batch {listed(missing)} is missing")


def _carried(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """Something of the last step's gradient in this one's."""
    pairs = _pairs(case, keys)
    if case.before is None or not pairs:
        return None
    for kind in ("grad", "raw"):
        got, right, old = [], [], []
        for key, g, w in pairs:
            name = key.partition("/")[2]
            past = case.before.whole(f"{kind}/{case.owners.get(name, name)}")
            if past is not None:
                got.append(g.flatten())
                right.append(w.flatten())
                old.append(past.double().flatten())
        if not got:
            continue
        found = fit(torch.cat(got), torch.stack((torch.cat(right), torch.cat(old)), 1))
        if found is not None and found.residual <= 1e2 * slack and abs(found.weights[1]) > 1e-3:
            if abs(found.weights[0]) < 1e-3:
                return Cause("stale_gradient", f"{_many(keys)} are those of the step before")
            return Cause(
                "carried_over", f"{_many(keys)} contain {found.weights[1]:.4g} times those of the step before"
            )
    return None


# Parts of one tensor -------------------------------------------------------------------------------------------------


def _rounded(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    for key in keys:
        got, want = case.seen.whole(key), _want(case, key)
        if got is None or want is None or got.numel() < 2 or not got.is_floating_point():
            continue
        word = lower_precision(got, want)
        error = (got.double() - want.double()).abs().max().item() / max(
            want.double().abs().max().item(), 1e-300
        )
        if word and error < 0.02:
            return Cause(
                "precision_lost",
                f"all entries of {_many([key])} are {word} numbers: it was rounded on its way",
            )
    return None


def _elements(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """A handful of entries of one tensor."""
    if len(keys) > 2:
        return None
    for key, got, want in _pairs(case, keys[:1]):
        d = next(d for d in case.found if d.name == key)
        gap = (got - want).abs()
        count = int((gap > gap.max() * 1e-3).sum())
        if got.numel() >= 8 and count <= max(1, got.numel() // 100):
            return Cause(
                "few_elements",
                f"{count} of {got.numel()} entries of {_many([key])} are wrong, by {d.error:.1e}",
            )
    return None


def _permuted(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    for key, got, want in _pairs(case, keys):
        room = slack * want.abs().max().item()
        if got.numel() > 1 and torch.allclose(
            got.flatten().sort().values, want.flatten().sort().values, rtol=0, atol=room
        ):
            return Cause(
                "permuted",
                f"the entries of {_many([key])} are right but stand elsewhere: {_how(got, want, room)}",
            )
    return None


def _how(got: Tensor, want: Tensor, room: float) -> str:
    for dim, word in ((0, "rows"), (1, "columns")):
        if got.dim() > dim:
            a, b = (x.movedim(dim, 0).reshape(x.shape[dim], -1) for x in (got, want))
            hits = (torch.cdist(a, b, p=float("inf")) <= room).any(1)
            if bool(hits.all()):
                return f"{word} are permuted"
    return "they are permuted"


def _slice(case: "Case", keys: Sequence[str], slack: float) -> Cause | None:
    """Only what some ranks hold is wrong."""
    for key, _, want in _pairs(case, keys[:1]):
        right, bad = [], []
        for ranks in case.seen.copies(key):
            box = box_of(want, ranks[0])
            gap = (ranks[0].tensor.double() - box).abs().max().item()
            (bad if gap > slack * want.abs().max().item() else right).append(ranks)
        if not bad or not right:
            continue
        for axis in AXES:
            at = {p.at[axis] for ranks in bad for p in ranks}
            other = {p.at[axis] for ranks in right for p in ranks}
            if not at & other:
                who = listed([f"{axis}={i}" for i in sorted(at)])
                return Cause("rank_slice", f"only the slice that {who} holds of {_many([key])} is wrong")
    return None
