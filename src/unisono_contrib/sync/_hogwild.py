"""The live part of `sync/hogwild.py`: weights and optimiser state in memory that all replicas see."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, Adagrad

from unisono.comm.collectives.memory.mapping import mapped
from unisono.comm.device import is_apart
from unisono.spec.errors import UsageError
from unisono.sync._outer import OuterSync, Site

_ALIGNED = 64  # bytes of a line of a cache


class HogwildSync(OuterSync):
    """Of each learning parameter, `data` and the tensors of the optimiser's state lie in memory of the first replica
    that all others map. It goes with the last process that has it.

    Staleness of an update: how many updates others made between the read of the weights, before the forward, and the
    write. Each replica counts its own updates in shared memory, so that no count is lost."""

    def __init__(self, site: Site, meet: int) -> None:
        super().__init__(site)
        self.one_copy, self.meet = True, meet
        self._stale: Counter[int] = Counter()
        self._read, self._halted = 0, False
        self._updates = torch.zeros(site.dp.size, _ALIGNED // 8, dtype=torch.int64)
        if site.dp.size > 1:
            _check(site)
            self._share()
            site.optimizer.adds_rows = True  # type: ignore[attr-defined]  # see `train.step.lazy`

    @torch.no_grad()
    def _share(self) -> None:
        """Move weights and states into shared memory; those of the first replica are the run's. Every replica calls
        it, or it hangs."""
        homes = self._homes()
        uses: dict[int, list[Tensor]] = {}  # of one storage: those of a tied weight move together
        for slot in self.site.slots:
            uses.setdefault(slot.master.data_ptr(), []).append(slot.master)
        dtypes = sorted({x.dtype for x in homes}, key=str)
        rooms = {
            dtype: self._room(sum(_span(x) for x in homes if x.dtype == dtype), dtype) for dtype in dtypes
        }
        self._updates = self._room(self._updates.numel(), torch.int64).view_as(self._updates)
        used = dict.fromkeys(dtypes, 0)
        for x in homes:
            at = used[x.dtype]
            shared = rooms[x.dtype][at : at + x.numel()].view(x.shape)
            used[x.dtype] += _span(x)
            if self.group.index == 0:
                shared.copy_(x)
            for use in (x, *uses.get(x.data_ptr(), ())):
                use.data = shared
        self.group.barrier()

    def _homes(self) -> list[Tensor]:
        """What is shared, in one order on all replicas: parameters, then their states; not numbers of steps."""
        slots = list(self.site.learning())
        states = [self.site.optimizer.state.get(slot.master, {}) for slot in slots]
        kept = [x for state in states for _, x in sorted(state.items()) if isinstance(x, Tensor) and x.dim()]
        return [*(slot.master for slot in slots), *kept]

    def _room(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Zeros [numel] of the first replica, which all see. Raises UsageError P20, on all of them, where one does
        not."""
        pg = self.group.pg
        rooms = None if pg is None else mapped(pg, max(1, numel), dtype, makers=1)
        if rooms is None:
            raise UsageError(
                "sync=hogwild: replicas do not see each other's memory: they are on several hosts, or in several"
                " containers",
                where="plan.sync",
                fix="replicas on one host; between hosts sync=local_sgd, or sync=async",
                code="P20",
            )
        return rooms[0]

    # A step.

    def before_step(self, step: int) -> None:
        super().before_step(step)
        if self._halted:
            self.group.barrier()  # what somebody saved or looked at was not to change meanwhile
            self._halted = False
        self._read = self._others()

    def after_update(self, step: int) -> None:
        super().after_update(step)
        self._stale[self._others() - self._read] += 1
        self._updates[self.group.index, 0] += 1

    def _others(self) -> int:
        """How many updates other replicas have made."""
        counts: list[int] = self._updates[:, 0].tolist()
        return sum(counts) - counts[self.group.index]

    def meets(self, step: int) -> bool:
        return (step + 1) % self.meet == 0 or step + 1 == self.site.steps

    def exchange(self, step: int) -> None:
        if self.meets(step):
            self.average_buffers()

    def merge(self, step: int) -> None:
        return None

    # Between steps.

    def center(self) -> Mapping[str, Tensor]:
        """None beside the weights there are. Nobody changes them before all have gone on to the next step."""
        self.group.barrier()
        self._halted = True
        return {}

    def agree(self) -> None:
        """After a run was restored: nobody trains before all have filled what they share."""
        self.group.barrier()
        self._halted = False

    def metrics(self) -> Mapping[str, Any]:
        """staleness_counts[i]: updates of this replica of staleness i since the last line. staleness: their mean."""
        counts, self._stale = self._stale, Counter()
        total = sum(counts.values())
        if not total:
            return self.inner.metrics()
        listed = [counts[i] for i in range(max(counts) + 1)]
        mean = sum(i * n for i, n in counts.items()) / total
        return {**self.inner.metrics(), "staleness": mean, "staleness_counts": listed}


def _span(x: Tensor) -> int:
    """Elements that x takes, whole lines of a cache."""
    line = _ALIGNED // x.element_size()
    return -(-x.numel() // line) * line


def _check(site: Site) -> None:
    """Raises UsageError where weights cannot lie in memory that replicas share, or an update of one of them needs more
    than the gradient of that element."""
    masters: Sequence[Any] = [slot.master for slot in site.learning()]
    if any(is_apart(master) for master in masters):
        what = "sync=hogwild: weights lie in memory that processes share, and a GPU's is its process's own"
        raise UsageError(what, where="plan.sync", fix="launch.backend = gloo, or sync=every_step", code="P20")
    if type(site.optimizer) not in (SGD, Adagrad):
        what = (
            "sync=hogwild: replicas update one state without locks, which sgd and adagrad bear: they step each"
            f" element by its own gradient; {type(site.optimizer).__name__} has moments and a count of steps that"
            " must fit each other"
        )
        raise UsageError(
            what, where="plan.sync, train.optimizer", fix="train.optimizer sgd or adagrad", code="P16"
        )
