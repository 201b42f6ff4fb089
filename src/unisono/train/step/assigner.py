"""Who computes which leaves of a step while a run goes on. This one: whoever did at its start."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Assigner:
    """The leaves of each replica stay as they are. counts: how many each one has.

    What assigns them anew by measured speed lies in the sister package (`train.step.balance`).
    """

    def __init__(self, counts: Sequence[int] = ()) -> None:
        self.counts = list(counts)

    def computing(self) -> AbstractContextManager[None]:
        """Around the forwards and backwards of a step."""
        return nullcontext()

    def stepped(self) -> None:
        """After a step that counts, in which leaves may be assigned anew. Every rank calls it, or it hangs."""
        return None

    def metrics(self) -> Mapping[str, Any]:
        """For the line of a step: `leaves` of each replica, where they are not alike."""
        return {"leaves": self.counts} if len(set(self.counts)) > 1 else {}

    def take_note(self) -> str:
        """What is to be said on the user's screen, once; "" for nothing."""
        return ""
