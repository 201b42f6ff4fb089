"""From the pattern of what is wrong to a likely cause: a stable name and one sentence.

`docs/proof.md` has the table of names; new ones may be added, none changes its meaning. `gradients.py` looks at
gradients, `updates.py` at the update, `float8.py` at products in eight bits, `beyond.py` at what a run does besides
steps.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from unisono.spec.words import listed
from unisono.verify.case import Case
from unisono.verify.evidence import AXES, Cause, Evidence, axis_text, factor, plan_sizes, ratio
from unisono.verify.gradients import are, explain
from unisono.verify.record import Record
from unisono.verify.updates import explain_update

NOISE = 1e3  # units: what is less apart differs by rounding alone


def diagnose(case: Case) -> Cause:
    """Return the likely cause of the first divergence."""
    first = case.divergences[0]
    by = {
        "data": _data,
        "init": _init,
        "loss": _loss,
        "raw": _gradient,
        "norm": _norm,
        "grad": _clipping,
        "buffer": lambda case: Cause("buffer", f"{first.name} is not what one device makes of it"),
    }
    if first.kind in ("copies", "missing", "law"):
        kind = first.name.partition("/")[0]
        return {"init": _init, "raw": _gradient, "grad": _clipping}.get(kind, explain_update)(case)
    return by.get(first.kind, explain_update)(case)


def _data(case: Case) -> Cause:
    kinds = [d.what for d in case.divergences if d.kind == "data"]
    twice = [w for w in kinds if "times" in w]
    nobody = [w for w in kinds if "nobody" in w]
    ours = case.seen.leaves().values()
    if twice and all(len({leaf["inputs"] for leaf in leaves}) == len(leaves) for leaves in ours):
        text = f"{len(twice)} numbers are given to several micro-batches that differ"
        return Cause(
            "samples_renumbered", f"{text}: ranks number samples on their own, so their dropout is alike"
        )
    if twice:
        also = f", and {len(nobody)} by nobody" if nobody else ""
        return Cause("leaf_twice", f"{len(twice)} micro-batches are computed more than once{also}")
    if nobody and not any("belong" in w for w in kinds):
        return Cause(
            "leaf_missing", f"{len(nobody)} micro-batches of the global batch are computed by nobody"
        )
    return Cause("wrong_samples", f"a rank computes samples that one device does not: {kinds[0]}")


def _init(case: Case) -> Cause:
    names = [d.name.partition("/")[2] for d in case.divergences if d.kind in ("init", "copies", "missing")]
    where = f"{names[0]} and {len(names) - 1} more" if len(names) > 1 else names[0]
    return Cause(
        "initialisation", f"initial values depend on the layout: {where} differ before the first step"
    )


# Forward -------------------------------------------------------------------------------------------------------------


def _loss(case: Case) -> Cause:
    if any("not a number" in d.what for d in case.divergences):
        return Cause("not_a_number", "the loss or the norm is not a number, where one device has numbers")
    ours, theirs = case.seen.leaves(), case.ref.leaves()
    order = sorted(theirs)
    got = torch.tensor([ours[f][0]["loss"] if f in ours else math.nan for f in order], dtype=torch.float64)
    want = torch.tensor([theirs[f][0]["loss"] for f in order], dtype=torch.float64)
    slack = 1e3 * case.unit
    wrong = ~torch.isclose(got, want, rtol=slack, atol=0.0)
    if not bool(wrong.any()):
        return _loss_of_step(case)
    c = ratio(got, want, slack)
    if c is not None:
        return factor("the loss of every micro-batch is", c, plan_sizes(case.plan, len(order)))
    if bool((got[wrong] == 0).all()):
        return Cause("leaf_missing", f"{int(wrong.sum())} micro-batches are never computed: their loss is 0")
    c = ratio(got[wrong], want[wrong], slack)
    if c is not None and (int(wrong.sum()) > 1 or min(abs(c - 0.5), abs(c - 2)) < slack):
        bad = listed([i for i in range(len(order)) if wrong[i]])
        return Cause(
            "factor", f"micro-batches {bad} of {len(order)} count {c:.6g} times in the loss, the others once"
        )
    if case.old_losses is not None:
        old = torch.tensor(case.old_losses, dtype=torch.float64)
        if torch.allclose(got[wrong], old[wrong], rtol=slack, atol=0.0):
            share = "all" if bool(wrong.all()) else f"{int(wrong.sum())} of {len(order)}"
            return Cause(
                "stale_parameters", f"the losses of {share} micro-batches are those of the step before"
            )
    if torch.allclose(got.sort().values, want.sort().values, rtol=slack, atol=0.0):
        return Cause(
            "leaves_permuted",
            "the right losses, but under other micro-batches: inputs and targets are mixed up",
        )
    if case.crossed is not None and _is_crossed(got[wrong], case.crossed, slack):
        return Cause("leaves_permuted", "inputs and targets of different micro-batches meet in the loss")
    if case.foreign:
        text = f"{listed(case.foreign, 3)} of the model is torch's own dropout, whose masks depend on rank and order"
        return Cause("masks_differ", f"{text}: unisono.models.noise.Dropout draws them by sample")
    if case.calm:
        return Cause(
            "masks_differ", "without dropout the plan is right: its masks are not those of one device"
        )
    return _own_weights(case, got / want) or _forward(case, wrong)


def _own_weights(case: Case, times: Tensor) -> Cause | None:
    """Return `factor` where each loss and its gradient are off by the same number: then the forward pass is right."""
    evidence = _evidence(case)
    weights = evidence.weights([name for name in evidence.want if evidence.held.get(name)])
    if weights is None or not torch.allclose(times, times.new_tensor(weights), rtol=evidence.near):
        return None
    text = f"micro-batches count {min(weights):.4g} to {max(weights):.4g} times, with their gradients"
    return Cause("factor", f"{text}: each is divided by a number of its own, not by that of the global batch")


def _forward(case: Case, wrong: Tensor) -> Cause:
    """Return the cause of wrong losses; `vocabulary` where all of them, and no right one, have a token in common."""
    for word, sides in zip(("input", "target"), zip(*case.tokens, strict=True), strict=False):
        bad, good = ([t for t, w in zip(sides, wrong.tolist(), strict=True) if w is b] for b in (True, False))
        guilty = sorted(frozenset.intersection(*bad) - frozenset().union(*good)) if case.plan.tp > 1 else []
        if guilty and good and len(bad) > 1:
            text = f"the losses of just those micro-batches are wrong that have token {listed(guilty, 3)} as an {word}"
            return Cause("vocabulary", f"{text}: a rank's slice of the vocabulary lacks it")
    where = "" if bool(wrong.all()) else f" in {int(wrong.sum())} of {len(wrong)} micro-batches"
    return Cause("forward", f"the forward pass itself differs{where}, before any gradient is made")


def _is_crossed(got: Tensor, crossed: Tensor, slack: float) -> bool:
    """Whether each loss is that of some leaf's inputs with another leaf's targets."""
    near = torch.isclose(got[:, None, None], crossed.double()[None], rtol=slack, atol=0.0)
    return bool(near.flatten(1).any(1).all())


def _loss_of_step(case: Case) -> Cause:
    note = next(n for n in case.seen.notes if n.loss != case.ref.notes[0].loss)
    c = note.loss / case.ref.notes[0].loss if case.ref.notes[0].loss else math.inf
    text = axis_text(c, case.plan, len(case.ref.leaves()))
    about = f": {text}" if text else f", times {c:.6g}"
    wrong = list(
        dict.fromkeys(d.name.removeprefix("raw/") for d in case.divergences if d.kind in ("raw", "copies"))
    )
    if c > 1 and wrong:  # losses and gradients meet in one group
        return Cause(
            "wrong_group",
            f"losses and gradients are added up over too many ranks: the loss on rank {note.rank} is {c:.6g} times"
            f" that of one device{f', {text}' if text else ''}, and {are(wrong)} wrong too",
        )
    return Cause(
        "loss_reduction",
        f"every micro-batch's loss is right, but their sum on rank {note.rank} is not{about}",
    )


# Backward ------------------------------------------------------------------------------------------------------------


def _gradient(case: Case) -> Cause:
    """Return the cause of wrong gradients before clipping, where everything before them is right."""
    wrong = [
        d for d in case.divergences if d.name.startswith("raw/") and d.kind in ("raw", "copies", "missing")
    ]
    names = list(dict.fromkeys(d.name.removeprefix("raw/") for d in wrong))
    if all(d.kind == "missing" for d in wrong):
        return Cause("missing_share", f"{are(names)} not there, or only in part")
    if case.terms.exact and max(d.error for d in wrong) < NOISE * case.unit:
        return Cause(
            "summation_order", f"{are(names)} off by rounding alone: a sum is taken in another order"
        )
    cause = explain(_evidence(case), names)
    if cause.name == "gradient" and case.calm:
        return Cause(
            "masks_differ", f"{are(names)} wrong, and right without dropout: backward sees other masks"
        )
    return (_received(case, names) or cause) if cause.name == "gradient" else cause


def _received(case: Case, names: Sequence[str]) -> Cause | None:
    """Return the cause of gradients that are wrong in no pattern though every loss is right: the backward read other
    activations than the forward."""
    tied = {*case.owners, *case.owners.values()}  # two stages hold them, and one that is wrong makes both so
    untied = [name for name in names if name not in tied]
    stages = sorted({part.at["pp"] for name in untied for part in case.seen.parts.get(f"raw/{name}", ())})
    text = f"losses are right and {are(names)} wrong in no mixture of micro-batches: the backward"
    order = [key.removeprefix("raw/") for key in case.ref.names("raw")]
    last = max(untied, key=order.index, default="")
    layer, block = last.rpartition(".")[0], last.split(".")[:2]
    later = [name for name in order[order.index(last) :] if name.split(".")[:2] == block] if last else []
    behind = [name for name in later if name.rpartition(".")[0] != layer]
    if case.plan.cp > 1 and behind:
        about = (
            f"{last} is the first that backward gets wrong, and {behind[0]} behind it in its block is right"
        )
        return Cause(
            "context", f"losses are right, {about}: the way back from keys and values of other ranks of cp"
        )
    if case.plan.recompute != "none":
        return Cause("kept_activation", f"{text} computes other activations again than its forward had")
    if case.plan.offload != "none":
        about = "reads other activations or weights than its forward had: something came back changed"
        return Cause("kept_activation", f"{text} {about}")
    if case.plan.pp == 1 or not stages or not stages[-1]:
        return None
    about = "sees other activations than its forward, as where a buffer is used again"
    return Cause("kept_activation", f"{text} of stage {stages[-1]} {about}")


def _evidence(case: Case) -> Evidence:
    """Collect what the records tell about gradients before clipping."""
    keys = dict.fromkeys((*case.ref.names("raw"), *case.seen.names("raw")))
    names = [key.removeprefix("raw/") for key in keys]

    def wholes(record: Record, kind: str) -> dict[str, Tensor]:
        tensors = {name: record.whole(f"{kind}/{case.owners.get(name, name)}") for name in names}
        return {name: x.double() for name, x in tensors.items() if x is not None}

    order = {first: i for i, first in enumerate(sorted(case.ref.leaves()))}
    targets = [leaf["count"] for leaf in case.ref.notes[0].leaves]
    return Evidence(
        want=wholes(case.ref, "raw"),
        held={name: case.seen.parts.get(f"raw/{name}", ()) for name in names},
        axes=[axis for axis in AXES if getattr(case.plan, axis) > 1],
        sizes=plan_sizes(case.plan, len(order)) | {"targets of the global batch": sum(targets)},
        slack=max(1e-9, 1e3 * case.unit),
        shares=case.leaves,
        share="micro-batch",
        places={
            order[leaf["first"]]: (f"dp={note.at['dp']} shard={note.at['shard']}", i, len(note.leaves))
            for note in case.seen.notes
            for i, leaf in enumerate(note.leaves)
            if leaf["first"] in order
        },
        past=[] if case.before is None else [wholes(case.before, kind) for kind in ("grad", "raw")],
        ties=case.owners,
    )


# Clipping ------------------------------------------------------------------------------------------------------------


def _norm(case: Case) -> Cause:
    want = case.ref.notes[0].norm
    note = next((n for n in case.seen.notes if not math.isclose(n.norm, want, rel_tol=1e3 * case.unit)), None)
    note = note or case.seen.notes[0]
    got = note.norm
    if not math.isfinite(got):
        return Cause("not_a_number", f"all gradients are right, but their norm on rank {note.rank} is {got}")
    if case.terms.exact and math.isclose(got, want, rel_tol=NOISE * case.unit):
        return Cause(
            "summation_order", "the norm is off by rounding alone: its sum is taken in another order"
        )
    squared = (got / want) ** 2 if want else math.inf
    text = axis_text(squared, case.plan, len(case.ref.leaves()))
    if text:
        return Cause(
            "norm_counted_twice", f"the squared norm is {squared:.6g} times that of one device: {text}"
        )
    where = f"on rank {note.rank} {got:.6g} instead of {want:.6g}"
    text = f"all gradients are right but their norm is {where}"
    if len({n.norm for n in case.seen.notes}) > 1:
        return Cause("partial_norm", f"{text}: ranks clip by different norms")
    if got < want:
        return Cause("partial_norm", f"{text}: a part of the model is left out")
    return Cause("norm_counted_twice", f"{text}: something is counted more than once")


def _clipping(case: Case) -> Cause:
    if any(d.kind == "copies" for d in case.divergences[:1]):
        return Cause("replicas_drifted", f"clipping left copies that differ: {case.divergences[0].what}")
    return Cause(
        "clipping", f"gradients are right before clipping and wrong after: {case.divergences[0].what}"
    )
