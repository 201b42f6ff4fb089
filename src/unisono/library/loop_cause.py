"""The likely cause of a loop's first wrong step, in a name and a sentence."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from unisono.plan import Plan
from unisono.spec.words import listed
from unisono.verify.evidence import Cause, Evidence, RecordedBox, fit, plan_sizes
from unisono.verify.gradients import are, explain

Tensors = Mapping[str, Tensor]
_VAGUE = ("gradient", "forward", "replicas_drifted")


def cause_of(
    kind: str,
    alone: Tensors,
    past: Sequence[Tensors],
    ranks: Sequence[Tensors],
    plan: Plan,
    wrong: Sequence[str],
    bound: float,
    notes: Sequence[str],
) -> Cause:
    """Return the likely cause of a wrong step. kind: of the tensors that are wrong, one of `loop_check.KINDS`. alone,
    ranks: the step on one process and on each rank. past: gradients of the step before, if there is one. wrong: the
    tensors' names. notes: what the loop was told with a code, which says more than a vague cause."""
    cause = _of_gradients(alone, past, ranks, plan, wrong, bound) if kind == "grad" else None
    if notes and (cause is None or cause.name in _VAGUE):
        code, _, text = notes[0].partition(": ")
        return Cause("told", f"{text.partition(';')[0]} ({code})")
    if cause is not None:
        return cause
    of_kind = [{name: rank[name] for name in rank if name.startswith(f"{kind}/")} for rank in ranks]
    if kind != "loss" and _drifted(of_kind):
        return Cause(
            "replicas_drifted", "ranks no longer hold the same: each changes it by what it alone sees"
        )
    if kind == "loss":
        return Cause("loss", "the ranks' losses do not make up that of the global batch, though gradients do")
    text = "gradients are those of one device and the update is not: a rate, a norm or a draw differs"
    return Cause("update", text)


def steps_differ(counts: Sequence[int]) -> Cause:
    """Return the cause where ranks make another number of steps. counts: steps of one process, then of each rank."""
    alone, *ranks = counts
    text = listed([f"rank {rank} {count}" for rank, count in enumerate(ranks)])
    return Cause(
        "steps", f"one process made {alone} steps, {text}: the loop decides by what a rank alone sees"
    )


def _drifted(ranks: Sequence[Tensors]) -> bool:
    return any(
        name in other and x.shape == other[name].shape and not torch.equal(x, other[name])
        for other in ranks[1:]
        for name, x in ranks[0].items()
    )


def _of_gradients(
    alone: Tensors,
    past: Sequence[Tensors],
    ranks: Sequence[Tensors],
    plan: Plan,
    wrong: Sequence[str],
    bound: float,
) -> Cause:
    whole = {key.removeprefix("grad/"): x.double() for key, x in alone.items() if key.startswith("grad/")}
    held = {
        name: [
            RecordedBox(rank, {"dp": rank // plan.shard, "shard": rank % plan.shard}, (0,) * x.dim(), x)
            for rank, seen in enumerate(ranks)
            if (x := seen.get(f"grad/{name}")) is not None
        ]
        for name in whole
    }
    axes = [axis for axis in ("dp", "shard") if getattr(plan, axis) > 1]
    evidence = Evidence(whole, held, axes, plan_sizes(plan, 1), bound, {}, past=past)
    if not all(held.get(name) for name in wrong):
        return Cause("missing_share", f"{are(wrong)} there on one side alone")
    cause = explain(evidence, wrong)
    return (
        (_by_rank(whole, ranks, bound) or cause) if cause.name in ("gradient", "replicas_drifted") else cause
    )


def _by_rank(want: Tensors, ranks: Sequence[Tensors], bound: float) -> Cause | None:
    """What the samples of each rank weigh in the sum, beside what they should; None where that is not known."""
    owns = [{k.removeprefix("own/"): x for k, x in rank.items() if k.startswith("own/")} for rank in ranks]
    names = [name for name in want if all(name in parts for parts in owns)]
    if not names:
        return None
    columns = torch.stack(
        [torch.cat([parts[name].double().flatten() for name in names]) for parts in owns], 1
    )
    busy = [r for r in range(len(ranks)) if columns[:, r].any()]  # others have no samples of this batch
    twins = [r for r in busy if any(torch.equal(columns[:, r], x) for x in columns.T[:r])]
    if twins:
        text = f"what ranks {listed(twins)} make is what a rank before them makes: they have the same samples"
        return Cause("leaf_twice", text)
    got = torch.cat([ranks[0][f"grad/{name}"].double().flatten() for name in names])
    weighed, right = fit(got, columns), fit(torch.cat([want[name].flatten() for name in names]), columns)
    if weighed is None or weighed.residual > bound:
        return None
    if right is None or right.residual > bound:
        text = "ranks add up what they made, and that is not what one device makes of their samples"
        return Cause("forward", f"{text}: others were read, or samples meet in the model")
    odd = {
        r: (a, b)
        for r, (a, b) in enumerate(zip(weighed.weights, right.weights, strict=True))
        if abs(a - b) > max(1e-6, bound)
    }
    texts = [f"those of rank {r} weigh {a:.4g} instead of {b:.4g}" for r, (a, b) in odd.items()]
    return Cause("factor", f"each rank's samples are right, but {listed(texts, 3)}") if odd else None
