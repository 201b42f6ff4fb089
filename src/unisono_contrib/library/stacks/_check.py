"""`unisono.check_stack` and `unisono.check_updates`: is a training step on another stack that of one device?"""

import tempfile
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from unisono.launch.fork_server import ForkServer, print_output
from unisono.launch.loop import OnEvent
from unisono.library.explain import explained
from unisono.library.gradient_check import GradientVerdict, home_of, judge, path_of, run
from unisono.library.loop_check import BOUNDS, COARSE, ROUNDINGS
from unisono.spec.errors import UnisonoError
from unisono.spec.words import listed
from unisono.verify.evidence import Cause
from unisono_contrib.library.stacks._adapter import misfit, stack_named
from unisono_contrib.library.stacks._one_device import added, clipped_share, other_means, scaled
from unisono_contrib.library.stacks._rank import ENTRY
from unisono_contrib.library.stacks._step import TrainingStep

Tensors = Mapping[str, Tensor]
Step = type[TrainingStep] | partial[Any]


@explained()
def check_stack(
    stack: str,
    step: Step,
    *,
    ranks: int = 2,
    micros: int = 1,
    steps: int = 2,
    options: Mapping[str, Any] | None = None,
    dtype: str = "",
    tokens: int = 4096,
    timeout: float = 300.0,
) -> GradientVerdict:
    """Compare a training step on another stack with one device. The verdict is true if they agree.

    The gradients that the stack's optimiser is given are compared where the stack shows them, then the weights after
    each step. Ranks are processes on this machine's CPU, over Gloo.

    stack: `ddp`, `fsdp2`, `accelerate`, `deepspeed`, `lightning`, `transformers`, `trl`, `pipelining`, `torchft` or
    `jax`. step: a class at the top of a file, see `TrainingStep`, or a partial of one with keywords that fit into JSON.
    ranks: how many processes. micros: micro-batches of each rank in a step. steps: how many to compare. options: the
    stack's own, as docs/stacks.md says; they must fit into JSON. dtype: torch's default one; the adapter's if "", which
    is float64 wherever the stack has it. tokens: how many terms a weight's gradient sums. timeout: seconds that a rank
    may keep the others waiting.

    Raises UsageError V08 for a stack that is unknown or not installed, V09 for a step that it cannot play, V03 for
    names or shapes that do not fit; UserCodeError where the step raises, HangError where ranks wait for each other.
    """
    with ForkServer(ENTRY, path=path_of(_class_of(step))) as server:
        return stack_on(server, stack, step, ranks, micros, steps, options, dtype, tokens, timeout)


@explained()
def check_updates(
    step: Step,
    loop: Callable[[Any], Tensors | Sequence[Tensors]],
    *,
    ranks: int = 2,
    micros: int = 1,
    steps: int = 1,
    dtype: str = "float64",
    timeout: float = 300.0,
) -> GradientVerdict:
    """Compare the weights that any loop comes to with those of one device; for optimisers, and where no gradient shows.

    step: a class at the top of a file that says what one device does, see `TrainingStep`. loop: a function at the top
    of a file that takes a rank with `rank` and `world`, and returns {name: weight} after `steps` steps, or a list of
    them, one for each step. torch.distributed is initialised with Gloo. ranks, micros: into how many micro-batches a
    step's global batch is cut. steps: how many the loop makes. dtype: torch's default one. timeout: seconds that a rank
    may keep the others waiting.

    Raises UsageError V03 where names or shapes do not fit, UserCodeError when the loop raises.
    """
    with ForkServer(ENTRY, path=path_of(_class_of(step))) as server:
        return updates_on(server, step, loop, ranks, micros, steps, dtype, timeout)


def stack_on(
    server: ForkServer,
    stack: str,
    step: Step,
    ranks: int = 2,
    micros: int = 1,
    steps: int = 2,
    options: Mapping[str, Any] | None = None,
    dtype: str = "",
    tokens: int = 4096,
    timeout: float = 300.0,
) -> GradientVerdict:
    """Do as `check_stack` on processes forked from a fork server of ENTRY."""
    kind, wanted = stack_named(stack), dict(options or {})
    call = {
        "role": "stack", "stack": stack, "step": _home(step), "micros": micros, "steps": steps, "options": wanted,
        "groups": kind.groups(ranks, wanted), "clipped": kind.shows_clipped, "dtype": dtype or kind.dtype,
    }  # fmt: skip
    return _checked(server, call, ranks if kind.processes else 1, tokens, timeout)


def updates_on(
    server: ForkServer,
    step: Step,
    loop: Callable[[Any], Tensors | Sequence[Tensors]],
    ranks: int = 2,
    micros: int = 1,
    steps: int = 1,
    dtype: str = "float64",
    timeout: float = 300.0,
) -> GradientVerdict:
    """Do as `check_updates` on processes forked from a fork server of ENTRY."""
    call = {
        "role": "loop", "stack": "", "step": _home(step), "loop": home_of(loop), "micros": micros, "steps": steps,
        "groups": ranks, "clipped": True, "dtype": dtype,
    }  # fmt: skip
    return _checked(server, call, ranks, 4096, timeout)


def _class_of(step: Step) -> Callable[..., TrainingStep]:
    return step.func if isinstance(step, partial) else step


def _home(step: Step) -> dict[str, Any]:
    """Where another process finds the step, and its keywords."""
    return {**home_of(_class_of(step)), "keys": step.keywords if isinstance(step, partial) else {}}


def _checked(
    server: ForkServer, call: dict[str, Any], ranks: int, tokens: int, timeout: float
) -> GradientVerdict:
    """Play the stack and one device, and compare them; where an update is wrong, look for its cause."""
    if ranks < 1 or call["micros"] < 1 or call["steps"] < 1:
        raise misfit("ranks, micros and steps are at least 1", "check_stack", "ranks=2, micros=1, steps=2")
    with tempfile.TemporaryDirectory(prefix="unisono-stack-") as folder:
        call |= {"folder": folder, "processes": ranks}
        with _quiet() as hear:
            results = run(server, call, ranks, timeout, hear)
        (alone,) = run(server, call | {"role": "one device"}, 1, timeout)
        plays = Plays(Path(folder), ranks, call, results, alone)
        verdict = _gradients_then_updates(plays, tokens)
        if not verdict.passed and verdict.cause is None:
            wrong = [name for name, error in verdict.updates.items() if not error <= verdict.update_bound]
            look = {"role": "cause", "at": verdict.step, "wrong": wrong, "near": verdict.update_bound}
            (cause,) = run(server, call | look, 1, timeout)
            verdict = replace(verdict, cause=cause["cause"], explanation=cause["text"])
        return _with_calls(verdict, plays)


@dataclass(frozen=True, slots=True)
class Plays:
    """What ranks and one device have left in a folder."""

    folder: Path
    ranks: int
    call: Mapping[str, Any]
    results: Sequence[Mapping[str, Any]]
    alone: Mapping[str, Any]

    @property
    def steps(self) -> int:
        """How many steps all ranks have made, of those asked for."""
        return min(self.call["steps"], *(result["steps"] for result in self.results))

    def seen(self, kind: str, step: int) -> list[dict[str, Tensor]]:
        """Each rank's tensors of a step."""
        return [load_file(self.folder / f"{kind}-{rank}-{step}") for rank in range(self.ranks)]

    def shares(self, step: int) -> list[dict[str, Tensor]]:
        """What each micro-batch adds to the gradient, in the order of the model."""
        count = self.call["groups"] * self.call["micros"]
        parts = [load_file(self.folder / f"share-{step}-{index}") for index in range(count)]
        return [{name: part[name] for name in self.alone["order"]} for part in parts]

    def alone_at(self, kind: str, step: int) -> dict[str, Tensor]:
        """One device's weights after so many steps."""
        return load_file(self.folder / f"{kind}-weight-{step}")

    @property
    def first(self) -> int:
        """The first step of which there are weights."""
        return max(result["first"] for result in self.results)


@contextmanager
def _quiet() -> Iterator[OnEvent]:
    """What ranks print is kept for the error that ends them: stacks say much where all is well."""
    lines: deque[str] = deque(maxlen=40)

    def hear(rank: int, event: dict[str, Any]) -> None:
        if event["kind"] == "output":
            lines.append(f"rank {rank} | {event['text']}")
        else:
            print_output(rank, event)

    try:
        yield hear
    except UnisonoError as error:
        if lines:
            error.add_note("\n".join(("what ranks printed last:", *lines)))
        raise


def _gradients_then_updates(plays: Plays, tokens: int) -> GradientVerdict:
    """Judge each step's gradients, then its update, up to the first that is wrong; a wrong update has no cause yet."""
    verdict, past = GradientVerdict(True, 0.0, {}), []
    for step in range(plays.first, plays.steps):
        if all(result["gradients"][step] for result in plays.results):
            judged = _gradients(plays, step, tokens, past)
            errors = {
                name: max(error, verdict.errors.get(name, 0.0)) for name, error in judged.errors.items()
            }
            if not judged.passed:
                return replace(judged, step=step)
            verdict = replace(
                judged, errors=errors, updates=verdict.updates, update_bound=verdict.update_bound
            )
            past = [added(plays.shares(step))]
        weights = plays.seen("weight", step)
        if not any(weights):  # of a stack of which gradients are all that is compared
            continue
        errors, bound = _update_errors(plays, step, weights)
        wrong = [name for name in reversed(errors) if not errors[name] <= bound]
        if wrong:
            return replace(
                verdict, passed=False, first=wrong[0], updates=errors, update_bound=bound, step=step
            )
        kept = {name: max(error, verdict.updates.get(name, 0.0)) for name, error in errors.items()}
        verdict = replace(verdict, updates=kept, update_bound=max(bound, verdict.update_bound))
    return verdict


def _gradients(plays: Plays, step: int, tokens: int, past: Sequence[Tensors]) -> GradientVerdict:
    """Judge the gradients of one step, of what all ranks show."""
    seen, parts = plays.seen("grad", step), plays.shares(step)
    names = [name for name in parts[0] if all(name in rank for rank in seen)]
    if unknown := sorted({*seen[0]} - {*parts[0]}):
        raise misfit(
            f"the stack has gradients of {listed(unknown, 3)}, which one device does not have",
            "check_stack",
            "a `wrap` that keeps the names of the model's parameters",
        )
    micros = plays.call["micros"]
    places = {i: (f"rank {i // micros}", i % micros, micros) for i in range(len(parts))}
    parts = [{name: part[name] for name in names} for part in parts]
    seen = [{name: rank[name] for name in names} for rank in seen]

    # After a coarse update, weights and gradients differ as coarsely.
    inside = [dtype_of(plays.alone[key]) for key in ("backward", "coarsest")][: 1 + (step > 0)]
    coarse = max(inside, key=lambda dtype: torch.finfo(dtype).eps)

    def judged(shares: Sequence[Tensors]) -> GradientVerdict:
        return judge(shares, seen, {}, plays.ranks, tokens, places, past, coarse)

    verdict = judged(parts)
    if verdict.passed:
        return verdict
    fitting = (c for c, times in _mistakes(plays, step, parts) if judged(scaled(parts, times)).passed)
    cause = next(fitting, Cause(verdict.cause or "gradient", verdict.explanation or ""))
    return replace(verdict, cause=cause.name, explanation=cause.text)


def _mistakes(plays: Plays, step: int, parts: Sequence[Tensors]) -> Iterator[tuple[Cause, list[float]]]:
    """What clipping and means may do to a gradient: a cause, and how often each share of the right one then counts."""
    factor, limit, many = plays.alone["clips"][step], plays.alone["clip"], len(parts)

    def clipped(times: Sequence[float]) -> list[float]:
        """As often as these, before clipping."""
        bare = [k / factor for k in times]
        return [clipped_share(scaled(parts, bare), limit) * k for k in bare]

    if factor < 1:
        text = f"gradients are not clipped, which would multiply them by {factor:.4g}"
        yield Cause("not_clipped", text), [1 / factor] * many
    micros = plays.call["micros"]
    for text, times in other_means(plays.alone["parts"][step], micros).items():
        yield Cause("loss_normalisation", text), clipped(times)
    for size in {plays.call["groups"], micros, many} - {1} if factor < 1 else ():
        for k in (float(size), 1 / size):
            text = f"before clipping, which hides most of it, gradients are {k:g} times the right ones"
            yield Cause("factor_of_axis", text), clipped([k] * many)


def _update_errors(plays: Plays, step: int, seen: Sequence[Tensors]) -> tuple[dict[str, float], float]:
    """Return each tensor's error over its largest movement in a step, and what it may be. seen: each rank's weights."""
    before, after, noisy = (
        plays.alone_at("one", step),
        plays.alone_at("one", step + 1),
        plays.alone_at("noisy", step + 1),
    )
    for rank, held in enumerate(seen):
        if lost := [name for name in after if name not in held or held[name].shape != after[name].shape]:
            fix = "weights by the names and in the shapes of one device, for all that is trained"
            raise misfit(f"rank {rank} has no {listed(lost, 3)} of one device's shape", "check_stack", fix)
    dtypes = {x.dtype for x in after.values()} | {
        dtype_of(plays.alone[key]) for key in ("backward", "coarsest")
    }
    bound = max(BOUNDS.get(dtype, COARSE) for dtype in dtypes)
    roundings = 4.0 if bound >= COARSE else ROUNDINGS  # noise of that size is as large as rounding
    moves = {name: _gap(after[name], before[name]) for name in after}
    floor = 1e-3 * max(moves.values(), default=0.0)
    errors = {}
    for name in plays.alone["order"]:
        gap = max(_gap(held[name], after[name]) for held in seen)
        room = max(bound * max(moves[name], floor), roundings * _gap(noisy[name], after[name]))
        room += (
            8 * torch.finfo(after[name].dtype).eps * after[name].abs().max().item()
            if after[name].numel()
            else 0
        )
        errors[name] = bound * gap / room if room else (0.0 if gap == 0 else float("inf"))
    return errors, bound


def dtype_of(name: str) -> torch.dtype:
    """A dtype by its name; float64 if that is empty."""
    return getattr(torch, name or "float64")


def _gap(a: Tensor, b: Tensor) -> float:
    """The largest difference; infinite where there is no number."""
    gap = (a.double() - b.double()).abs().max().item() if a.numel() else 0.0
    return gap if gap == gap else float("inf")


def _with_calls(verdict: GradientVerdict, plays: Plays) -> GradientVerdict:
    """Name the number of the optimiser's calls as the cause where something is wrong and they are not one a step."""
    calls = [result["calls"] for result in plays.results if result["calls"]]
    counts = {count for ranks in calls for count in ranks}
    wanted, micros = plays.call["steps"], plays.call["micros"]
    steps = max(result["steps"] for result in plays.results)
    if steps == wanted and (verdict.passed or counts <= {0, 1}):
        return verdict
    most, right = (max(counts), 1) if steps == wanted else (steps, wanted)
    each = most == right * micros
    text = f"the optimiser makes {most} steps, {'one for each micro-batch, ' * each}where one device makes {right}"
    name = "steps_per_micro_batch" if each else "steps"
    return replace(verdict, passed=False, first=verdict.first or "the steps", cause=name, explanation=text)
