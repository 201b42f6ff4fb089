"""What all policies have in common whose replicas have weights of their own: what they refuse, send and keep."""

from collections.abc import Iterator
from typing import Any

from pydantic import Field

from unisono.plan.grammar import named
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Call, Durations, Work
from unisono.sync import OuterPolicy


def usual_problems(policy: OuterPolicy, plan: Any, inside: int = 1) -> Iterator[Problem]:
    """What of a plan no policy of this kind can be played with. inside: replicas that stay in lock-step."""
    said = f"sync={plan.sync}: replicas have weights of their own"
    if plan.dp != -1 and plan.dp % inside:
        what = f"sync={plan.sync}: groups of {inside} replicas do not divide dp={plan.dp}"
        yield Problem("P16", what, "plan.sync, plan.dp", f"dp={-(-plan.dp // inside) * inside}, or inside=1")
    if plan.precision == "fp16":
        what = f"{said}, and precision=fp16 has one scale of the loss for all"
        yield Problem("P16", what, "plan.sync, plan.precision", "precision=bf16")
    if plan.offload != "none":
        what = f"{said}, which are compared where they are computed with, and offload={plan.offload} puts them away"
        yield Problem("P16", what, "plan.sync, plan.offload", "offload=none")
    schedule, codec = named("schedule", plan.schedule), named("codec", plan.codec)
    if plan.pp > 1 and schedule is not None and not schedule.flushed:
        what = f"{said}, which meet between steps, and schedule={plan.schedule} has no time between steps"
        yield Problem("P16", what, "plan.sync, plan.schedule", "schedule=1f1b")
    if codec is not None and codec.rungs:
        what = f"{said}: what a codec takes beside a step, by which codec={plan.codec} chooses, is not known there"
        yield Problem("P23", what, "plan.sync, plan.codec", "a codec by its name")


class GroupedPolicy(OuterPolicy):
    """A policy under which groups of neighbouring replicas stay in lock-step, and come together with other groups."""

    inside: int = Field(default=1, ge=1, description="neighbouring replicas that stay in lock-step")

    @property
    def neighbours(self) -> int:
        return self.inside

    def problems(self, plan: Any, batch: Any) -> Iterator[Problem]:
        yield from usual_problems(self, plan, self.inside)


def plain_problems(plan: Any, why: str) -> Iterator[Problem]:
    """What speaks against a codec. why: in words."""
    codec = named("codec", plan.codec)
    if codec is not None and codec.fidelity is not Fidelity.EXACT:
        what = f"sync={plan.sync}: {why}, and not through codec={plan.codec}"
        yield Problem("P23", what, "plan.sync, plan.codec", "codec=plain")


def rounds_work(
    gradient_bytes: int,
    dp: int,
    h: int,
    inside: int = 1,
    *,
    momentum: bool = False,
    in_flight: int = 0,
    chosen: int = 0,
) -> Work:
    """What one rank sends in a mean step and keeps: outer weights, their momentum, a counter, what has arrived of
    `in_flight` fragments that travel for some steps, and `chosen` numbers by which it chooses its rounds. inside: see
    above."""
    outer = dp // inside
    calls = [Call("dp", "all_reduce", 2 * gradient_bytes * (outer - 1) // outer, 1.0 / h)]
    if inside > 1:
        calls.append(Call("dp", "reduce", 2 * gradient_bytes * (inside - 1) // inside))
    copies = 1 + momentum + bool(in_flight)
    return Work(tuple(calls), gradient_bytes * copies + 8 * (1 + in_flight + chosen))


def gossip_work(
    gradient_bytes: int, dp: int, inside: int, report: int, message: int, messages: float, kept: int
) -> Work:
    """What one rank sends in a mean step and keeps. report: steps from one mean over all replicas to the next, whose
    weights cross as they are. message: its bytes. messages: to other replicas in a mean step."""
    outer = max(1, dp // inside)
    calls = [
        Call("dp", "send", message, messages),
        Call("dp", "reduce", 2 * gradient_bytes * (outer - 1) // outer, 1.0 / report),
    ]
    if inside > 1:
        calls.append(Call("dp", "reduce", 2 * gradient_bytes * (inside - 1) // inside))
    return Work(tuple(calls), kept)


def lock_step(durations: Durations, inside: int) -> list[list[float]]:
    """[replicas / inside][steps]: durations of neighbours that are in lock-step, which wait for each other."""
    groups = (durations[i : i + inside] for i in range(0, len(durations), inside))
    return [[max(step) for step in zip(*group, strict=True)] for group in groups]


def played(durations: Durations) -> int:
    """How many steps are looked at where each replica is followed by itself: fewer of many replicas."""
    return min(len(durations[0]), max(16, 8192 // len(durations)))


def pace_of_rounds(durations: Durations, h: int, inside: int = 1) -> float:
    """Mean time of a step where replicas wait for each other every h-th step. Steps after the last whole round count
    for one."""
    replicas = lock_step(durations, inside)
    steps = len(replicas[0])
    rounds = (max(sum(each[at : at + h]) for each in replicas) for at in range(0, steps, h))
    return sum(rounds) / steps
