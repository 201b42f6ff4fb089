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
    return [all_states(), *own_states(generators)]


def own_states(generators: Sequence[torch.Generator]) -> list[str]:
    """Of generators of a loader's own, as JSON values."""
    return [g.get_state().numpy().tobytes().hex() for g in generators]


def set_own_states(generators: Sequence[torch.Generator], states: Sequence[str]) -> None:
    """The reverse of `own_states`; a loader may have got another generator since."""
    for generator, state in zip(generators, states, strict=False):
        generator.set_state(state_of(state))


def keep_workers_waiting(loader: Any) -> None:
    """Starts workers that stay from pass to pass (`persistent_workers`), and takes no random number for it. For the
    first pass that a process makes, if others were made before it: the loader draws a seed for its workers in the pass
    that starts them, and in none after it."""
    if not getattr(loader, "persistent_workers", False) or loader._iterator is not None:
        return
    generators, found = generators_of(loader), vars(loader)
    own, order = own_states(generators), {name: found[name] for name in ("sampler", "batch_sampler")}
    nothing = {name: [] for name, value in order.items() if value is not None}
    with kept():
        found.update(nothing)  # around the guard of names that its iterator may use: there is none yet
        try:
            made: Any = iter(loader)  # which keeps what says the order
        finally:
            found.update(order)
    made._index_sampler = loader._index_sampler
    set_own_states(generators, own)


def as_before(states: Sequence[Any], generators: Sequence[torch.Generator]) -> Context:
    """A context with the random numbers of a pass that was begun in another process, as `states_now` wrote them; around
    it, all but the loader's own generators stay as they are."""
    now, *own = states
    inside = False
    set_own_states(generators, own)

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
