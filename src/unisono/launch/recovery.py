"""When ranks that were lost are replaced, and when a run is given up. Pure: no process, no socket, no torch.

A rank is *lost* when the kernel ended it by a signal, or when the supervisor did because it stood still. Then a new
process takes its place, and all ranks meet again (an *epoch*), while the others keep theirs. A rank that failed by
itself (its code raised, it left by os._exit) would fail again, so that ends the run as ever.

A run that only loses ranks and makes no step is not kept alive for ever: `LIMIT` changes without one end it.
"""

from dataclasses import dataclass, field

LIMIT = 5
"""Changes without a step between them, after which a run is given up."""
LOOK_EVERY = 0.2
"""Seconds between two looks at whether a rank is stopped."""
STOPPED = 0.4
"""Seconds for which a rank may be stopped by a signal before it counts as lost."""


@dataclass
class Recovery:
    """What is known of a run's changes. ready: ranks that trained in this epoch. changes: how often ranks were lost."""

    ranks: int
    epoch: int = 0
    changes: int = 0
    ready: set[int] = field(default_factory=set)
    _step: int = -1
    _tries: int = 0
    _since: dict[int, float] = field(default_factory=dict)

    def stepped(self, step: int) -> None:
        """The run has made so many steps."""
        if step > self._step:
            self._step, self._tries = step, 0

    def may(self) -> bool:
        """Whether one more change is worth a try."""
        return self._tries < LIMIT

    def change(self) -> int:
        """Ranks were lost: the next epoch begins. Returns it."""
        self.epoch += 1
        self.changes += 1
        self._tries += 1
        self.ready.clear()
        self._since.clear()
        return self.epoch

    def all_ready(self) -> bool:
        """Whether all ranks have met in this epoch and train."""
        return len(self.ready) == self.ranks

    def stands(self, rank: int, stopped: bool, now: float) -> bool:
        """Whether a rank, stopped by a signal or not, has been so for too long. now: seconds."""
        if not stopped:
            self._since.pop(rank, None)
            return False
        return now - self._since.setdefault(rank, now) >= STOPPED
