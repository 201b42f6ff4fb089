"""A user's own loop, played by one process and by several: are the gradients of each step those of one process?

What the first steps of a run cannot notice is seen here: losses in custom autograd functions, samples that meet in the
model, draws that decide, data that ranks order for themselves. Errors are relative to the largest gradient of the
model, so that noise in a gradient that should be zero is none.
"""

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unisono.launch.nursery import Nursery
from unisono.library.gradient_check import home_of, path_of, run
from unisono.plan import Plan
from unisono.spec.errors import VerifyMismatch
from unisono.spec.words import listed
from unisono.verify.evidence import Evidence, RecordedBox
from unisono.verify.gradients import are, explain
from unisono.verify.solve import Cause, fit, plan_sizes

ENTRY = "unisono.library.loop_check_rank:main"
BOUND = 1e-9  # of float64 in a few steps: a mistake is larger, rounding is 1e-13 or so
TIMEOUT = 600.0


Gradients = Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """errors: of each step, the largest difference of a gradient over the model's largest, on any rank. first: (step,
    gradient) of the first that is too large. cause: a stable name, explanation: one sentence; None if nothing is wrong.
    notes: what the loop was told while it ran."""

    passed: bool
    errors: tuple[float, ...]
    first: tuple[int, str] | None
    notes: tuple[str, ...]
    cause: str | None = None
    explanation: str | None = None

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.passed:
            worst = max(self.errors, default=0.0)
            return f"ok: {len(self.errors)} steps, largest error {worst:.1e} (bound {BOUND:.0e})"
        step, name = self.first or (0, "nothing")
        told = "".join(f"\n  told: {note}" for note in self.notes if note.startswith("U-"))
        size = f"{self.errors[step - 1]:.1e}" if 0 < step <= len(self.errors) else "missing"
        likely = f"; likely: {self.explanation} ({self.cause})" if self.cause else ""
        return f"WRONG: step {step}, the gradient of {name}: error {size} (bound {BOUND:.0e}){likely}{told}"

    def check(self) -> None:
        """Raises VerifyMismatch V01 if anything is wrong."""
        if not self.passed:
            raise VerifyMismatch("the loop does not compute what it does in one process", where=str(self))


def prove_loop(loop: Callable[..., Any], plan: Plan, steps: int) -> LoopVerdict:
    """See `unisono.prove`. Raises what the loop raises, in one process or in several."""
    with Nursery(ENTRY, path=path_of(loop)) as nursery:
        return prove_loop_on(nursery, loop, plan, steps)


def prove_loop_on(nursery: Nursery, loop: Callable[..., Any], plan: Plan, steps: int) -> LoopVerdict:
    """As `prove_loop`, on processes forked from a nursery of this module's ENTRY."""
    ranks = plan.fill(1).world
    with tempfile.TemporaryDirectory(prefix="unisono-loop-") as name:
        call = {**home_of(loop), "folder": name, "steps": steps}
        run(nursery, {**call, "plan": "dp=1", "kind": "one"}, 1, TIMEOUT)
        (told, *_) = run(nursery, {**call, "plan": str(plan), "kind": "all"}, ranks, TIMEOUT)
        (one,), several = (
            [[load_file(path) for path in sorted(Path(name).glob(f"{kind}-{r}-*"))] for r in range(size)]
            for kind, size in (("one", 1), ("all", ranks))
        )
    return judged(one, several, tuple(told["notes"]), plan)


def judged(
    one: Sequence[Gradients], several: Sequence[Sequence[Gradients]], notes: tuple[str, ...], plan: Plan
) -> LoopVerdict:
    """one: of each step, the gradients by name, as `GradientLog` writes them. several: the same of each rank."""
    errors: list[float] = []
    first: tuple[int, str] | None = None
    cause: Cause | None = None
    ones = [_kind(step, "grad") for step in one]
    for step, (a, *ranks) in enumerate(zip(ones, *several, strict=False), start=1):
        found = [differences(a, _kind(rank, "grad")) for rank in ranks]
        errors.append(max((e for rank in found for e in rank.values()), default=0.0))
        wrong = [name for name in found[0] if not all(rank.get(name, 0.0) <= BOUND for rank in found)]
        if wrong and first is None:
            first = step, wrong[0]
            cause = _cause(a, ones[: step - 1][-1:], ranks, plan, wrong)
    made = min((len(one), *map(len, several)))
    if first is None and (made < max(len(one), *map(len, several)) or not one):
        first = made + 1, "a step that is missing"
    told = (None, None) if cause is None else (cause.name, cause.text)
    return LoopVerdict(first is None, tuple(errors), first, notes, *told)


def differences(a: Gradients, b: Gradients) -> dict[str, float]:
    """name -> the largest difference over the largest gradient of all; infinite where one has none."""
    largest = max((float(x.abs().max()) for x in a.values() if x.numel()), default=0.0) or 1.0
    found = {
        name: float((a[name] - b[name]).abs().max()) / largest if name in b else float("inf")
        for name in a
        if a[name].numel()
    }
    return found | {name: float("inf") for name in b if name not in a}


def _kind(tensors: Gradients, kind: str) -> dict[str, Tensor]:
    return {key.removeprefix(f"{kind}/"): x for key, x in tensors.items() if key.startswith(f"{kind}/")}


def _cause(
    want: Gradients, past: Sequence[Gradients], ranks: Sequence[Gradients], plan: Plan, wrong: Sequence[str]
) -> Cause:
    """The likely cause of gradients that are wrong. past: of the step before, if there is one."""
    whole = {name: x.double() for name, x in want.items()}
    held = {
        name: [
            RecordedBox(rank, {"dp": rank // plan.shard, "shard": rank % plan.shard}, (0,) * x.dim(), x)
            for rank, seen in enumerate(ranks)
            if (x := seen.get(f"grad/{name}")) is not None
        ]
        for name in whole
    }
    axes = [axis for axis in ("dp", "shard") if getattr(plan, axis) > 1]
    evidence = Evidence(whole, held, axes, plan_sizes(plan, 1), BOUND, {}, past=past)
    if not all(held.get(name) for name in wrong):
        return Cause("missing_share", f"{are(wrong)} there on one side alone")
    cause = explain(evidence, wrong)
    return (_by_rank(whole, ranks) or cause) if cause.name in ("gradient", "replicas_drifted") else cause


def _by_rank(want: Gradients, ranks: Sequence[Gradients]) -> Cause | None:
    """What the samples of each rank weigh in the sum, beside what they should; None where that is not known."""
    owns = [_kind(rank, "own") for rank in ranks]
    names = [name for name in want if all(name in own for own in owns)]
    if not names:
        return None
    columns = torch.stack([torch.cat([own[name].double().flatten() for name in names]) for own in owns], 1)
    twins = [r for r in range(len(ranks)) if any(torch.equal(columns[:, r], x) for x in columns.T[:r])]
    if twins:
        text = f"what ranks {listed(twins)} make is what a rank before them makes: they have the same samples"
        return Cause("leaf_twice", text)
    got = torch.cat([ranks[0][f"grad/{name}"].double().flatten() for name in names])
    found, right = fit(got, columns), fit(torch.cat([want[name].flatten() for name in names]), columns)
    if found is None or found.residual > BOUND:
        return None
    if right is None or right.residual > BOUND:
        text = "ranks add up what they made, and that is not what one device makes of their samples"
        return Cause("forward", f"{text}: others were read, or samples meet in the model")
    odd = {
        r: (a, b)
        for r, (a, b) in enumerate(zip(found.weights, right.weights, strict=True))
        if abs(a - b) > 1e-6
    }
    told = [f"those of rank {r} weigh {a:.4g} instead of {b:.4g}" for r, (a, b) in odd.items()]
    return Cause("factor", f"each rank's samples are right, but {listed(told, 3)}") if odd else None
