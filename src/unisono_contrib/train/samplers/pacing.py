"""Why prompts are admitted at the pace of training: a logical clock on which samplers and a trainer work.

A prompt of step c is admitted once c - version <= bound, and step c trains the prompts that were admitted for it, the
slow ones too. Whoever admits at any pace, and trains what has come first, has more short sequences in a batch than were
drawn: what comes later than the bound allows is thrown away.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

from unisono_contrib.train.samplers.pool import admits

Length = Callable[[int], int]
"""Tokens that will be drawn for a prompt, by its number."""


@dataclass(slots=True)
class PlayedSamples:
    """admitted, trained: numbers of prompts, in the order in which that happened. staleness: of each trained one, in
    versions. seconds: that all took, a token of one sequence taking one."""

    admitted: list[int] = field(default_factory=list)
    trained: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    seconds: float = 0.0


def play(
    length: Length, *, steps: int, batch: int, slots: int, update: float, bound: int, paced: bool
) -> PlayedSamples:
    """slots: sequences that samplers draw at once. update: seconds of a trainer's step. bound: largest staleness.
    paced: prompts wait for admission, and a step for its own prompts; else every free slot takes the next prompt, and a
    step takes the first that have come of those which the bound admits."""
    played, running = PlayedSamples(), list[tuple[float, int, int]]()
    ready, version, now, busy_until = list[tuple[int, int]](), 0, 0.0, None
    while version < steps:
        while len(running) < slots:
            number = len(played.admitted)
            if paced and (number >= steps * batch or not admits(version, number // batch, bound)):
                break
            played.admitted.append(number)
            heappush(running, (now + length(number), number, version))
        if busy_until is None and (taken := _batch(ready, version, batch, bound, paced)):
            ready = [each for each in ready if each not in taken]
            played.trained += [number for number, _ in taken]
            played.staleness += [version - drawn for _, drawn in taken]
            busy_until = now + update
        ends = running[0][0] if running else float("inf")
        if busy_until is not None and busy_until <= ends:
            now, busy_until, version = busy_until, None, version + 1
        else:
            now, number, drawn = heappop(running)
            ready.append((number, drawn))
    played.seconds = now
    return played


def _batch(
    ready: Sequence[tuple[int, int]], version: int, batch: int, bound: int, paced: bool
) -> list[tuple[int, int]]:
    """(prompt, version of its weights) of each that the next step trains; nothing while some are missing."""
    if paced:
        wanted = range(version * batch, (version + 1) * batch)
        taken = sorted(each for each in ready if each[0] in wanted)
    else:
        taken = [each for each in ready if version - each[1] <= bound][:batch]
    return taken if len(taken) == batch else []
