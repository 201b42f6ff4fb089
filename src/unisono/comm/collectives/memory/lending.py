"""Memory that is lent for one operation: the output of a gather, the input of a scattered sum.

A gather's output is one for all members: each writes its part, and all read the whole where it lies. Of a scattered sum
each member has an input, and all read their part of it. So a gather is one copy of a part, and a sum needs none.

A member lets go of a loan when its tensor and all views of that are gone. The words of every operation say what the
sender has let go of by then; what all have let go of is lent again. Everybody hears the same words, so all choose the
same memory without asking, however far one is ahead of the others.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from unisono.comm.algorithm import Once
from unisono.comm.collectives.memory.mapping import mapped
from unisono.comm.collectives.messages.live import InFlight, exchanged
from unisono.comm.tags import LOANS
from unisono.comm.tree import tree_sum

MOST = 24
"""Loans that a group has at once; what is asked for beyond is each member's own memory."""
_WARM = 1 << 17  # bytes that are added up at once, in the CPU's second cache


@dataclass(slots=True, eq=False)
class Loan:
    """Memory that can be lent, of one member after the other or of all. free: everybody has let go of it. since: when
    it was lent last. held(): what lives as long as a tensor there does, on this member."""

    each: Sequence[Tensor]
    free: bool = True
    since: int = 0
    held: Callable[[], object] = lambda: None
    nbytes: int = 0

    @property
    def room(self) -> int:
        return self.each[0].numel()


@dataclass
class _Meeting(Once):
    """Members that meet over a loan. After `wait`, all have written what is theirs."""

    lending: "Lending"
    words: Sequence[Tensor]
    there: InFlight
    since: int

    def end(self) -> None:
        self.there.wait()
        self.lending._heard(self.words, self.since)


class Lending:
    """What the members of a group lend each other. Every member makes it and calls each method, in one order, or it
    hangs."""

    def __init__(self, pg: dist.ProcessGroup) -> None:
        self._pg, self._now, self._refused = pg, 0, False
        self._loans: list[Loan] = []

    def lend(self, op: str, numel: int, like: Tensor) -> Tensor | None:
        """Memory [numel] of the dtype of `like`, with whatever was there, for the output of an `all_gather` or the
        input of a `reduce_scatter`; None, for all members, where there is none."""
        nbytes, of_all = numel * like.element_size(), op == "all_gather"
        fit = [
            loan
            for loan in self._loans
            if loan.free and nbytes <= loan.room <= 2 * nbytes and (len(loan.each) == 1) == of_all
        ]
        loan = min(fit, key=lambda loan: loan.room) if fit else self._new_loan(nbytes, of_all)
        if loan is None:
            return None
        self._now += 1
        loan.free, loan.since, loan.nbytes = False, self._now, nbytes
        view = self._mine(loan).numpy()[:nbytes]  # torch keeps it for as long as a tensor is there
        loan.held = weakref.ref(view)
        return torch.from_numpy(view).view(like.dtype)

    def of(self, x: Tensor) -> Loan | None:
        """The loan whose whole x is."""
        return self._at(x.data_ptr(), x.nbytes)

    def around(self, part: Tensor) -> Loan | None:
        """The loan in which `part` lies at this member's place."""
        return self._at(part.data_ptr() - self._pg.rank() * part.nbytes, self._pg.size() * part.nbytes)

    def meet(self, loan: Loan) -> _Meeting:
        """Begin to let all members know that this one has written its own."""
        self._now += 1
        gone = sum(1 << i for i, other in enumerate(self._loans) if not other.free and other.held() is None)
        mine = torch.tensor([self._loans.index(loan), gone])
        words = torch.zeros(self._pg.size(), 2, dtype=torch.int64).unbind(0)
        there = exchanged(words, [mine] * self._pg.size(), self._pg, LOANS.first)
        return _Meeting(self, words, there, self._now)

    def reduce_scatter(self, out: Tensor, loan: Loan) -> None:
        """This member's part of the sum of everybody's loan, along the tree over the members."""
        self.meet(loan).wait()
        into, index = out.view(-1), self._pg.rank()
        whole = [buffer[: loan.nbytes].view(out.dtype) for buffer in loan.each]
        mine = [x[into.numel() * index : into.numel() * (index + 1)] for x in whole]
        step = _WARM // out.element_size()
        with torch.no_grad():
            for at in range(0, into.numel(), step):
                into[at : at + step].copy_(tree_sum([x[at : at + step] for x in mine]))

    def _at(self, address: int, nbytes: int) -> Loan | None:
        for loan in self._loans:
            if not loan.free and loan.nbytes == nbytes > 0 and self._mine(loan).data_ptr() == address:
                return loan
        return None

    def _mine(self, loan: Loan) -> Tensor:
        return loan.each[0 if len(loan.each) == 1 else self._pg.rank()]

    def _new_loan(self, nbytes: int, of_all: bool) -> Loan | None:
        if self._refused or len(self._loans) == MOST:
            return None
        each = mapped(self._pg, nbytes, torch.uint8, makers=1 if of_all else self._pg.size())
        if each is None:
            self._refused = True
            return None
        self._loans.append(Loan(each))
        return self._loans[-1]

    def _heard(self, words: Sequence[Tensor], since: int) -> None:
        """What members said, `since` when they said it: of a loan that was lent later, it means the one before."""
        places, gone = zip(*(word.tolist() for word in words), strict=True)
        if len(set(places)) > 1:
            raise RuntimeError(f"members of a group meet over different memory: {places}")
        for i, loan in enumerate(self._loans):
            if loan.since < since and all(bits >> i & 1 for bits in gone):
                loan.free = True
