"""A user's own loop, played by one process and by several: is each of its steps that of one process?

What the first steps of a run cannot notice is seen here: losses in custom autograd functions, samples that meet in the
model, draws that decide, statistics of a batch, gradients that never met. `compare(play(one), play(several))` is the
whole of it, for a function of `job` (`unisono.prove`) and for a script (`unisono prove`).

Errors are relative to the largest of the model's gradients (losses, parameters, states of one kind), so that noise in
a gradient that should be zero is none. A step is held to BOUNDS, or to what rounding does to this loop on one process,
where that is more: a second play of it, whose gradients carry noise, says how much.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unisono.launch.fork_server import ForkServer, print_output
from unisono.launch.loop import OnEvent
from unisono.library.gradient_check import PLAYS, home_of, path_of, run
from unisono.library.loop_cause import cause_of, steps_differ
from unisono.plan import Plan
from unisono.spec.errors import HangError, PeerGone, UnisonoError, UsageError, UserCodeError, VerifyMismatch

ENTRY = "unisono.library.proof_rank:main"
KINDS = ("grad", "loss", "param", "optim")  # in the order in which a mistake shows
# Of a few steps: a mistake is larger, rounding 1e-13 or 1e-6.
BOUNDS = {torch.float64: 1e-9, torch.float32: 2e-4}
COARSE = 5e-2  # of bfloat16 and float16
ROUNDINGS = 50.0  # how much larger an error may be than what noise of rounding's size does
TIMEOUT = 600.0

Step = Mapping[str, Tensor]
Call = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Terms:
    """How a loop is played. steps: of optimisers, until it is stopped. dtype: torch's default one; "" leaves it. seed:
    of torch's, Python's and NumPy's generators, before it begins. timeout: seconds that a rank may keep the others
    waiting. hear: what is done with what ranks print."""

    steps: int = 3
    dtype: str = "float64"
    seed: int = 0
    timeout: float = TIMEOUT
    hear: OnEvent = print_output


@dataclass(frozen=True, slots=True)
class LoopPlay:
    """The tensors that one play wrote. ranks: of each, its steps. ends: of each, its weights at the loop's own end, if
    it came to it. notes: what the loop was told. files: of a script, its own and what it imported. jobs: calls of
    `init`. coarsest: of a noisy play, the coarsest dtype that anything was computed in."""

    ranks: Sequence[Sequence[Step]]
    ends: Sequence[Step | None] = ()
    notes: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    jobs: int = 1
    coarsest: str = ""


@dataclass(frozen=True, slots=True)
class LoopVerdict:
    """Whether a loop computes under a plan what it computes in one process.

    errors: of each step, the largest difference of a gradient over the model's largest, on any rank. worst: of each of
    KINDS, the largest relative error of any step; a kind that was not seen is absent. bound: what an error may be.
    first: (step, tensor) of the first that is too large, and its kind. cause: a stable name, explanation: one sentence;
    None if nothing is wrong. notes: what the loop was told while it ran.
    """

    passed: bool
    errors: tuple[float, ...]
    first: tuple[int, str] | None
    notes: tuple[str, ...]
    cause: str | None = None
    explanation: str | None = None
    kind: str = "grad"
    worst: Mapping[str, float] = field(default_factory=dict)
    bound: float = BOUNDS[torch.float64]
    plan: str = ""
    ranks: int = 0
    steps: int = 0

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        if self.passed:
            worst = max((*self.errors, *self.worst.values()), default=0.0)
            return f"ok: {self.steps} steps, largest error {worst:.1e} (bound {self.bound:.0e})"
        notes = "".join(f"\n  told: {note}" for note in self.notes if note.startswith("U-"))
        likely = f"; likely: {self.explanation} ({self.cause})" if self.cause else ""
        return f"WRONG: {self.where()}{likely}{notes}"

    def where(self) -> str:
        """Name the first tensor that is wrong."""
        if self.first is None:
            return "it could not be played"
        step, name = self.first
        if self.kind == "step":
            return f"step {step}, {name}"
        noun = {"grad": "the gradient of ", "param": "the update of ", "optim": "the optimiser's "}
        at_step = self.kind == "grad" and step <= len(self.errors)
        error = self.errors[step - 1] if at_step else self.worst.get(self.kind, float("inf"))
        size = f"{error:.1e}" if error < float("inf") else "missing"
        return f"step {step}, {noun.get(self.kind, '')}{name}: error {size} (bound {self.bound:.0e})"

    def check(self) -> None:
        """Raises VerifyMismatch V01 if anything is wrong."""
        if not self.passed:
            raise VerifyMismatch("the loop does not compute what it does in one process", where=str(self))

    def as_dict(self) -> dict[str, Any]:
        """What `--json` carries."""
        return {
            "plan": self.plan,
            "ranks": self.ranks,
            "steps": self.steps,
            "pass": self.passed,
            "max_rel_err": {kind: self.worst.get(kind) for kind in KINDS},
            "bound": self.bound,
            "first_divergence": None if self.passed else self.where(),
            "cause": self.cause,
            "explanation": self.explanation,
            "notes": list(self.notes),
        }


def prove_loop(loop: Callable[..., Any], plan: Plan, steps: int) -> LoopVerdict:
    """See `unisono.prove`. Raises what the loop raises, in one process or in several."""
    with ForkServer(ENTRY, path=path_of(loop)) as server:
        return prove_loop_on(server, loop, plan, steps)


def prove_loop_on(server: ForkServer, loop: Callable[..., Any], plan: Plan, steps: int) -> LoopVerdict:
    """Do as `prove_loop` on processes forked from a fork server of this module's ENTRY."""
    with playing(server, home_of(loop), Terms(steps)) as verdict:
        return verdict(plan)


@contextmanager
def playing(
    server: ForkServer, call: Call, terms: Terms, played: Callable[[LoopPlay], None] = lambda alone: None
) -> Iterator[Callable[[Plan], LoopVerdict]]:
    """A function from a plan to the verdict of the loop that `call` names: a function by `module`, `name` and `file`, a
    script by `script`, `words` and `cwd`. It is played by one process at once, which `played` is shown.

    Raises what the loop raises, and UsageError V05 where it has no steps to compare."""
    with tempfile.TemporaryDirectory(prefix=PLAYS) as name:
        alone = play(server, call, Plan(), terms, Path(name, "one"))
        _with_steps(alone, call)
        played(alone)

        @cache
        def noise() -> LoopPlay | None:
            with suppress(UserCodeError):  # what looks at every operation may be more than the loop bears
                return play(server, call, Plan(), terms, Path(name, "noise"), noisy=True)

        def verdict(plan: Plan) -> LoopVerdict:
            several = play(server, call, plan, terms, Path(name, f"plan-{len(list(Path(name).iterdir()))}"))
            comparison = compare(alone, several, plan)
            return comparison if comparison.passed else compare(alone, several, plan, noise())

        yield verdict


def not_played(plan: Plan, error: UnisonoError) -> LoopVerdict:
    """The verdict of a loop that one process plays and several do not."""
    kinds = ((HangError, "parted"), (PeerGone, "parted"), (UserCodeError, "raised"))
    cause = next((name for kind, name in kinds if isinstance(error, kind)), "refused")
    cause = "refused" if error.code.startswith("J") else cause  # by the job, whatever the exit code
    text = f"U-{error.code} {error.what}" + (f", at {error.where}" if error.where else "")
    return LoopVerdict(False, (), None, (), cause, text, plan=str(plan), ranks=plan.fill(1).world)


def play(
    server: ForkServer, call: Call, plan: Plan, terms: Terms, folder: Path, noisy: bool = False
) -> LoopPlay:
    """A loop under a plan, from the same seed. folder: for what its steps come to. Raises what the loop raises."""
    folder.mkdir()
    ranks = plan.fill(1).world
    argument = {
        **call, "folder": str(folder), "plan": str(plan), "noisy": noisy,
        "steps": terms.steps, "dtype": terms.dtype, "seed": terms.seed,
    }  # fmt: skip
    hear = terms.hear if not noisy else lambda rank, event: None  # the same words once more
    result, *_ = run(server, argument, ranks, terms.timeout, hear)
    steps = [[load_file(path) for path in sorted(folder.glob(f"{r}-[0-9]*"))] for r in range(ranks)]
    ends = [load_file(path) if (path := folder / f"{r}-end").exists() else None for r in range(ranks)]
    return LoopPlay(
        steps, ends, tuple(result["notes"]), tuple(result["files"]), result["jobs"], result["coarsest"]
    )


def _with_steps(alone: LoopPlay, call: Call) -> None:
    """Raises UsageError V05."""
    if not alone.jobs:
        what, fix = (
            "it never calls unisono.init",
            "job = unisono.init(), then job.prepare(model, optimizer, data)",
        )
    elif not alone.ranks[0] and not alone.ends[0]:
        what, fix = (
            "it never calls job.prepare",
            "model, optimizer, data = job.prepare(model, optimizer, data)",
        )
    else:
        return
    raise UsageError(
        f"there is nothing to prove: {what}",
        where=call.get("script", call.get("name", "")),
        fix=fix,
        code="V05",
    )


def compare(alone: LoopPlay, several: LoopPlay, plan: Plan, noise: LoopPlay | None = None) -> LoopVerdict:
    """Compare several ranks with one process. noise: the play of one process that measures what rounding does."""
    bound = _bound(alone)
    if noise is not None and noise.coarsest:
        bound = max(bound, BOUNDS.get(getattr(torch, noise.coarsest), COARSE))
    compared = [*_differing(alone, several), *_at_the_end(alone, several), *_losses(alone, several)]
    rounding = {} if noise is None else _rounding(alone, noise)
    wrong = [d for d in compared if d.wrong(max(bound, ROUNDINGS * rounding.get((d.step, d.kind), 0.0)))]
    first = min(wrong, key=lambda d: (d.step, KINDS.index(d.kind)), default=None)
    codes = [note for note in several.notes if note.startswith("U-")]
    cause, at = None, None
    if first is not None:
        names = first.wrong(max(bound, ROUNDINGS * rounding.get((first.step, first.kind), 0.0)))
        past = [of_kind(step, "grad") for step in alone.ranks[0][: first.step - 1][-1:]]
        at, cause = (
            (first.step, names[0]),
            cause_of(first.kind, first.alone, past, first.ranks, plan, names, bound, codes),
        )
    elif (counts := [len(steps) for steps in (alone.ranks[0], *several.ranks)]) and (
        len({*counts}) > 1 or not compared
    ):
        at, cause = (min(counts) + 1, "a step that is missing"), steps_differ(counts)
    worst = {kind: max((d.largest for d in compared if d.kind == kind), default=None) for kind in KINDS}
    return LoopVerdict(
        at is None, tuple(d.largest for d in compared if d.kind == "grad"), at, several.notes,
        cause and cause.name, cause and cause.text, first.kind if first else "step" if at else "grad",
        {kind: error for kind, error in worst.items() if error is not None}, bound,
        str(plan), plan.fill(1).world, len(alone.ranks[0]),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """One kind of tensors in one step. alone, ranks: the step there. errors: of each rank, by name."""

    step: int
    kind: str
    alone: Step
    ranks: Sequence[Step]
    errors: Sequence[Mapping[str, float]]

    @property
    def largest(self) -> float:
        return max((e for rank in self.errors for e in rank.values()), default=0.0)

    def wrong(self, bound: float) -> list[str]:
        """Return the names of tensors that are further off, or not a number."""
        names = dict.fromkeys(name for rank in self.errors for name in rank)
        return [name for name in names if not all(rank.get(name, 0.0) <= bound for rank in self.errors)]


def _differing(alone: LoopPlay, several: LoopPlay) -> Iterator[Difference]:
    for number, (a, *ranks) in enumerate(together(alone.ranks[0], several.ranks), start=1):
        yield from _of_kinds(number, a, ranks, ("grad", "param", "optim"))


def _at_the_end(alone: LoopPlay, several: LoopPlay) -> Iterator[Difference]:
    """Compare the weights that a loop leaves at its end: something else than an optimiser may have changed them."""
    ends = [end for end in (*alone.ends, *several.ends) if end is not None]
    if len(ends) == 1 + len(several.ranks):
        yield from _of_kinds(len(alone.ranks[0]) + 1, ends[0], ends[1:], ("param",))


def _losses(alone: LoopPlay, several: LoopPlay) -> Iterator[Difference]:
    """Compare losses in their order, with the sum of the ranks' parts. Yields nothing where their numbers differ."""
    whole, *ranks = [
        [(number, x) for number, step in enumerate(steps, 1) for x in of_kind(step, "loss").values()]
        for steps in (alone.ranks[0], *several.ranks)
    ]
    if all(len(losses) == len(whole) for losses in ranks):
        for (number, a), *parts in zip(whole, *ranks, strict=True):
            total = torch.stack([x for _, x in parts]).sum(0)
            yield from _of_kinds(number, {"loss/the loss": a}, [{"loss/the loss": total}], ("loss",))


def _of_kinds(number: int, a: Step, ranks: Sequence[Step], kinds: Sequence[str]) -> Iterator[Difference]:
    for kind in kinds:
        errors = [differences(of_kind(a, kind), of_kind(rank, kind)) for rank in ranks]
        if any(errors):
            yield Difference(number, kind, a, ranks, errors)


def together(ones: Sequence[Step], several: Sequence[Sequence[Step]]) -> Iterator[tuple[Step, ...]]:
    """Each step beside the next of the same parameters on every rank: optimisers that step as gradients arrive take
    turns in an order of each rank's own, and of the last turns each side may have another part."""
    waiting = [list(steps) for steps in several]
    for step_alone in ones:
        updated = {key for key in step_alone if key.startswith("param/")}
        at = [next((i for i, step in enumerate(left) if updated <= step.keys()), None) for left in waiting]
        if None not in at:
            yield step_alone, *(left.pop(i) for i, left in zip(at, waiting, strict=True) if i is not None)


def _rounding(alone: LoopPlay, noise: LoopPlay) -> dict[tuple[int, str], float]:
    """(step, kind) -> the largest error that rounding alone has made until then."""
    errors: dict[tuple[int, str], float] = {}
    for d in (*_differing(alone, noise), *_at_the_end(alone, noise), *_losses(alone, noise)):
        before = errors.get((d.step - 1, d.kind), 0.0)
        errors[d.step, d.kind] = max(before, errors.get((d.step, d.kind), 0.0), d.largest)
    return errors


def _bound(alone: LoopPlay) -> float:
    steps = [*alone.ranks[0], *(end for end in alone.ends if end is not None)]
    seen = {x.dtype for step in steps[:1] for key, x in step.items() if key.startswith(("grad/", "param/"))}
    return max((BOUNDS.get(d, COARSE) for d in seen if d.is_floating_point), default=BOUNDS[torch.float64])


def of_kind(tensors: Step, kind: str) -> dict[str, Tensor]:
    """Return the tensors of one kind, by their names without it."""
    return {key.removeprefix(f"{kind}/"): x for key, x in tensors.items() if key.startswith(f"{kind}/")}


def differences(a: Step, b: Step) -> dict[str, float]:
    """name -> the largest difference over the largest of all (of an optimiser's state, of those of one key); infinite
    where one has none. What is no number on both sides is no difference."""
    largest: dict[str, float] = {}
    for name, x in a.items():
        top = float(x.double().abs().nan_to_num(0, 0).max()) if x.numel() else 0.0
        largest[_group(name)] = max(largest.get(_group(name), 0.0), top)
    errors = {
        name: _apart(a[name], b[name]) / (largest[_group(name)] or 1.0) if name in b else float("inf")
        for name in a
        if a[name].numel()
    }
    return errors | {name: float("inf") for name in b if name not in a}


def _group(name: str) -> str:
    """`exp_avg` of `exp_avg/0.weight`."""
    return name.partition("/")[0] if "/" in name else ""


def _apart(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return float("inf")
    a, b = a.double(), b.double()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, (a - b).abs()).max())
