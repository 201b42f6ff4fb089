"""The order of a pass through data, made again: the random numbers with which it began, around what draws for it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch

from unisono.comm.device import is_apart
from unisono.library.noise import all_states, kept, set_all_states, state_of
from unisono.spec.errors import UsageError

Context = Callable[[], AbstractContextManager[None]]


def states_now(generators: Sequence[torch.Generator]) -> list[Any]:
    """Of torch's, Python's and NumPy's generators, and of these, as JSON values."""
    return [all_states(), *(g.get_state().numpy().tobytes().hex() for g in generators)]


def as_before(states: Sequence[Any], generators: Sequence[torch.Generator]) -> Context:
    """A context with the random numbers of a pass that was begun in another process, as `states_now` wrote them; around
    it, all but the loader's own generators stay as they are."""
    now, *own = states
    inside = False
    for generator, state in zip(generators, own, strict=False):
        generator.set_state(state_of(state))

    @contextmanager
    def before() -> Iterator[None]:
        nonlocal now, inside
        if inside:  # a loader with workers asks for its first batches as it is made
            yield
            return
        with kept():
            set_all_states(now)
            inside = True
            try:
                yield
            finally:
                now, inside = all_states(), False

    return before


def generators_of(data: Any) -> list[torch.Generator]:
    """Generators of a loader's and its samplers' own."""
    batches = getattr(data, "batch_sampler", None)
    owners = (data, getattr(data, "sampler", None), batches, getattr(batches, "sampler", None))
    found = (getattr(owner, "generator", None) for owner in owners)
    known = [g for g in found if isinstance(g, torch.Generator) and not is_apart(g.device)]
    return list({id(g): g for g in known}.values())


def other_order(data: Any, place: int) -> UsageError:
    """J17."""
    return UsageError(
        f"the first {place} batches of this pass are not those that it began with before the checkpoint",
        where=type(data).__name__,
        likely="a sampler that counts its own passes, or draws from a generator of its own",
        fix="a sampler whose order follows from set_epoch(epoch) or torch's random numbers; or save after a pass",
        code="J17",
    )
