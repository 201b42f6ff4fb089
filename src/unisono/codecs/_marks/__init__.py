"""What may stand around a codec, a mark a file: `codec=topk:ratio=0.01+ef` is the codec `topk` inside the mark `ef`.

A mark makes a codec of a codec, so whoever plays, prices or proves one needs not know of marks.
"""

from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from unisono.codecs import Codec, Coder, Exchange, Sent
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Tensor


class Around(Codec):
    """A codec around another one: its traits and what it sends are the inner one's."""

    name = "around"

    inner: Codec

    @property
    def fidelity(self) -> Fidelity:  # type: ignore[override]
        return self.inner.fidelity

    @property
    def error(self) -> float:  # type: ignore[override]
        return self.inner.error

    @property
    def linear(self) -> bool:  # type: ignore[override]
        return self.inner.linear

    @property
    def biased(self) -> bool:  # type: ignore[override]
        return self.inner.biased

    @property
    def matrix(self) -> bool:  # type: ignore[override]
        return self.inner.matrix

    @property
    def tells(self) -> bool:  # type: ignore[override]
        return self.inner.tells

    @property
    def owed(self) -> bool:  # type: ignore[override]
        return self.inner.owed

    @property
    def sparse(self) -> bool:  # type: ignore[override]
        return self.inner.sparse

    @property
    def diverges(self) -> bool:  # type: ignore[override]
        return self.inner.diverges and not self.owed

    @property
    def contracts(self) -> bool:
        return self.inner.contracts

    @property
    def varies(self) -> bool:  # type: ignore[override]
        return self.inner.varies

    @property
    def checked(self) -> bool:  # type: ignore[override]
        return self.inner.checked

    def lost(self, dp: int) -> float:
        return self.inner.lost(dp)

    def problems(self, plan: Any, train: Any) -> Iterator[Problem]:
        yield from self.inner.problems(plan, train)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        return self.inner.work(shapes, itemsize, dp)

    def more(self, work: Work, kept: int, moved: int) -> Work:
        """`work`, and bytes that are kept and moved beside."""
        return replace(work, kept=work.kept + kept, moved=work.moved + moved)


class AroundCoder(Coder):
    """A live codec around another one, with what that one keeps and some more."""

    def __init__(self, inner: Coder, keeps: Sequence[str] = (), counts: bool = False) -> None:
        self.inner, self.keeps, self.counts = inner, (*inner.keeps, *keeps), inner.counts or counts
        self.cap = inner.cap

    def alike(self, name: str, like: "Tensor") -> "dict[str, Tensor]":
        return dict(self.inner.alike(name, like))


def hearing(exchange: Exchange, listener: "Callable[[Tensor], object]") -> "Generator[Any, Any, Tensor]":
    """The exchange of an inner codec, of whose `Sent` the outer one is told; `yield from` gives what it returns.
    Raises TypeError where the inner one says nothing."""
    answer, heard = None, False
    while True:
        try:
            request = exchange.send(answer)
        except StopIteration as end:
            if not heard:
                raise TypeError("a codec inside error feedback has to yield Sent") from None
            return end.value
        if isinstance(request, Sent):
            listener(request.decoded())
            answer, heard = None, True
        else:
            answer = yield request
