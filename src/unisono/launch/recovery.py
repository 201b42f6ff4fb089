"""When ranks that were lost are replaced, and when a run is given up. Pure: no process, no socket, no torch.

A rank is *lost* when the kernel ended it by a signal, or when the supervisor did because it stood still. Then a new
process takes its place, and all ranks meet again (an *epoch*), while the others keep theirs. A rank that failed by
itself (its code raised, it left by os._exit) would fail again, so that ends the run as ever.

A run that only loses ranks and makes no step is not kept alive for ever: `LIMIT` losses of the same rank without one
end it. Of several ranks that are lost one by one, as those of a host without memory, each has its own count.
"""

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field

ECHO_GRACE = 2.0
"""Seconds to wait for the true failure after one that is only an echo of another."""
ALIKE_GRACE = 0.3
"""Seconds in which other ranks may fail too after one that did: what all raise is no fault of one of them."""
STACK_GRACE = 0.5
"""Seconds that ranks get to write their stacks in a hang."""
LIMIT = 5
"""Losses of one rank without a step between them, after which a run is given up."""
LOOK_EVERY = 0.2
"""Seconds between two looks at whether a rank is stopped."""
STOPPED = 0.4
"""Seconds for which a rank may be stopped by a signal before it counts as lost."""
CUT_GRACE = 0.5
"""Seconds to wait for a death after a rank has missed another; without one, their connection was cut."""


@dataclass
class Recovery:
    """What is known of a run's changes. changes: how often ranks were lost. begun: whether all ranks have trained since
    they were started together, so that those that are left hold the run; else all are started anew."""

    ranks: int
    epoch: int = 0
    changes: int = 0
    begun: bool = False
    _ready: set[int] = field(default_factory=set)
    _step: int = -1
    _tries: Counter[int | None] = field(default_factory=Counter)
    _since: dict[int, float] = field(default_factory=dict)
    _hung: set[tuple[int, int]] = field(default_factory=set)
    _looked: float = float("-inf")

    def stepped(self, step: int) -> None:
        """The run has made so many steps."""
        if step > self._step:
            self._step = step
            self._tries.clear()

    def may(self) -> bool:
        """Whether one more change is worth a try."""
        return max(self._tries.values(), default=0) < LIMIT

    def may_hang(self, rank: int) -> bool:
        """Whether to replace a rank that stood still: not where it does so after the same step again."""
        again = (rank, self._step) in self._hung
        self._hung.add((rank, self._step))
        return self.may() and not again

    def change(
        self, ranks: int | None = None, anew: bool = False, planned: bool = False, lost: Collection[int] = ()
    ) -> int:
        """The next epoch begins, of so many ranks. anew: all are started together. planned: nothing was lost. lost: the
        ranks that were, if not a connection or all of them. Returns it."""
        self.epoch += 1
        self.ranks = ranks or self.ranks
        self.changes += not planned
        if not planned:
            self._tries.update(lost or [None])
        self.begun = self.begun and not anew
        self._ready.clear()
        self._since.clear()
        return self.epoch

    def ready(self, rank: int) -> bool:
        """A rank trains in this epoch; returns whether it is the last to do so."""
        known = len(self._ready)
        self._ready.add(rank)
        done = len(self._ready) == self.ranks
        self.begun = self.begun or done
        return done and known < self.ranks

    def next_look(self) -> float:
        """When to look at whether ranks are stopped, in seconds of the clock that `looks` is told."""
        return self._looked + LOOK_EVERY

    def looks(self, now: float) -> bool:
        """Whether it is time for that; then it is done until the next time. Not at each word of a rank: a look takes
        longer than an answer."""
        if now < self.next_look():
            return False
        self._looked = now
        return True

    def stands(self, rank: int, stopped: bool, now: float) -> bool:
        """Whether a rank, stopped by a signal or not, has been so for too long. now: seconds."""
        if not stopped:
            self._since.pop(rank, None)
            return False
        return now - self._since.setdefault(rank, now) >= STOPPED
