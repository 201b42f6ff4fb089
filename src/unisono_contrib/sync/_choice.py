"""Which codec of several a run plays: measured when it begins, weighed again when backward's time is known.

All ranks of a run decide alike, also those that hold the same weights in other groups of `dp`: else their copies would
drift apart. So what is weighed are the largest numbers of any rank.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Size, Tensor

from unisono.codecs import Coder
from unisono.comm.device import has_numbers
from unisono.comm.group import Group
from unisono.spec.words import seconds as written
from unisono.sync import Sync
from unisono.sync._around import SyncAround
from unisono_contrib.sync._probe import CodecSeconds, Gradient, probe

if TYPE_CHECKING:
    from unisono_contrib.codecs.auto import LadderCoder

WARM, KNOWN = 1, 3
"""Steps after which backward is looked at, and after which its time counts."""
HIDES = 0.5
"""Of backward, what buckets that leave one after the other hide behind: the last one leaves when it is over."""


class ChoosingSync(SyncAround):
    """A policy, and beside it the choice of its codec. later: ranks are between two steps at the same time, so that
    they can decide again there. Every rank of `world` makes one and calls `after_update`, or it hangs."""

    def __init__(
        self, inner: Sync, coder: "LadderCoder", gradient: Gradient, world: Group, *, later: bool = True
    ) -> None:
        super().__init__(inner)
        self.coder, self.gradient, self.world, self.later = coder, gradient, world, later
        self._steps, self._since = 0, (0, torch.zeros(2))  # and when computing was looked at last, its time
        # Sums in memory that all see cost less than encoding, and begin when backward is over.
        self._near = inner.dp.near(gradient.device)
        self._why, self._announced = "", False
        self._seconds: Sequence[CodecSeconds] = ()
        self._measure()
        self._decide(0.0, 0.0)
        # Of buckets that are laid out now, and stay as they are.
        self.cap = inner.cap if inner.sliced or inner.settled else coder.now.cap

    def _measure(self) -> None:
        here = torch.tensor([float(not self._near)])
        if self.world.all_gather(here[None]).amax():
            tried = [rung.bind() for rung in self.coder.member.rungs.values()]
            self._seconds = probe(tried, self.gradient, self.dp, self.world)

    def _decide(self, backward: float, computing: float) -> None:
        """Seconds of a step: of backward, and of all computing; 0 where they are not known."""
        if not self._seconds:
            place, why = 0, f"replicas of {self.dp.axis} see each other's memory"
        else:
            shows = self._shown(HIDES * backward)
            place = self.coder.member.taken([computing + shown for shown in shows])
            why = self._reason(shows, backward)
        said = f"{self.coder.rungs[place][0]}: {why}"
        if said != self._why:
            self._why, self._announced = said, False
        if not self._steps or self.coder.now is not self.coder.rungs[place][1]:
            self.coder.take(place)

    def _shown(self, hidden: float) -> list[float]:
        """Seconds that show with each: encoding, and what travels beyond what is hidden; the last exchange of a step
        has nothing to hide behind in any case."""
        shows, gradient = list[float](), self.gradient
        for took, (_, coder) in zip(self._seconds, self.coder.rungs, strict=True):
            parts = max(1, gradient.nbytes // coder.cap) if coder.cap else gradient.buckets
            travels = took.whole - took.computed
            shows.append(took.computed + max(travels - hidden, travels / parts if hidden else 0.0))
        return shows

    def _reason(self, shows: Sequence[float], backward: float) -> str:
        names = [name for name, _ in self.coder.rungs]
        each = ", ".join(f"{name} {written(shown)}" for name, shown in zip(names, shows, strict=True))
        n = self.dp.size
        rate = 2 * (n - 1) / n * self.gradient.nbytes / self._seconds[0].whole
        behind = f"a backward of {written(backward)}" if backward else "nothing"
        return f"beside {behind} a step shows {each}; of plain sums a rank sends {8e-6 * rate:,.0f} Mbit/s"

    def after_update(self, step: int) -> None:
        self.inner.after_update(step)
        self._steps += 1
        if not self.later or not self._seconds:
            return
        if self._steps == WARM:
            self._since = self._steps, self._computing()
        again = self.coder.member.again
        due = bool(again) and self._steps % again == 0 and self._steps > WARM
        if self._steps != KNOWN and not due:
            return
        if due:
            self._measure()
        steps, before = self._since
        now = self._computing()
        mean = (now - before) / max(1, self._steps - steps)
        self._since = self._steps, now
        self._decide(*self.world.all_gather(mean[None]).amin(0).tolist())

    def _computing(self) -> Tensor:
        """Seconds so far: of backward, and of it and forward."""
        totals = self.dp.recorder.totals()
        forward, backward = totals.get("forward", 0.0), totals.get("backward", 0.0)
        return torch.tensor([backward, forward + backward], dtype=torch.float64)

    def says(self) -> str:
        return self._why

    def metrics(self) -> Mapping[str, Any]:
        chosen = {} if self._announced else {"codec": self.coder.called, "codec_why": self._why}
        self._announced = True
        return {**self.inner.metrics(), **chosen}


def choosing(sync: Sync, coder: Coder, slots: Sequence[Any], world: Group, *, later: bool = True) -> Sync:
    """The policy itself, or with the choice of its codec where the plan leaves it to what is measured. Every rank of
    `world` calls it, or it hangs."""
    learning = [slot.master for slot in slots if slot.live.requires_grad and not slot.sparse]
    device = learning[0].device if learning else torch.device("cpu")
    if not coder.rungs or sync.dp.size == 1 or not has_numbers(device):
        return sync
    shapes, dtype = (
        [Size(p.shape) for p in learning],
        (learning[0].grad_dtype or learning[0].dtype) if learning else torch.float32,
    )
    gradient = Gradient(shapes, dtype, device)
    return ChoosingSync(sync, cast("LadderCoder", coder), gradient, world, later=later)
