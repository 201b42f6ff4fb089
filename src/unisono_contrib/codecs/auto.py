"""The least lossy of some codecs that is about as quick as any, by what ranks measure on their own links.

Who builds a run has all rungs of the ladder measured (`sync/_choice.py`), and all ranks take the same one. A rung may
change between two steps: what an error feedback has left then goes along with the next gradient, whatever codec that
one meets.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from unisono.codecs import CODECS, BucketMemory, Codec, Coder, Exchange
from unisono.codecs._marks.ef import LEFT
from unisono.spec.errors import Problem
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Work

if TYPE_CHECKING:
    from torch import Size, Tensor

LADDER = {
    "plain": "plain",
    "bf16": "cast:bf16",
    "int8": "int8",
    "int4": "int4+ef",
    "powersgd": "powersgd:r=4+ef",
}
"""By what `most` says: codecs, the least lossy first."""
NEAR, CLEAR = 0.05, 0.1
"""Of the quickest step: how much longer it may be with a less lossy codec, and with the first one, so that neither
chance nor a rough estimate makes a run lose anything."""


class MeasuredChoice(Codec):
    """What is quickest on the links that are there, by measurement: gradients as they are, or as little of them as
    `most` allows."""

    name = "auto"
    main = "most"

    most: Literal["bf16", "int8", "int4", "powersgd"] = Field(
        default="int4",
        description="the lossiest that may be taken, of plain, bf16, int8, int4+ef, powersgd+ef",
    )
    again: int = Field(default=0, ge=0, description="steps after which links are measured anew; 0: never")

    @property
    def rungs(self) -> Mapping[str, Codec]:  # type: ignore[override]
        texts = list(LADDER.values())
        return {text: CODECS.read(text) for text in texts[: texts.index(LADDER[self.most]) + 1]}

    @property
    def error(self) -> float:  # type: ignore[override]
        return max(rung.error for rung in self.rungs.values())

    @property
    def owed(self) -> bool:  # type: ignore[override]
        return any(rung.owed for rung in self.rungs.values())

    def lost(self, dp: int) -> float:
        return max(rung.lost(dp) for rung in self.rungs.values() if rung.fidelity is Fidelity.LOSSY)

    def problems(self, plan: Any, train: Any) -> Iterator[Problem]:
        for rung in self.rungs.values():
            yield from rung.problems(plan, train)

    def taken(self, seconds: Sequence[float]) -> int:
        least = min(seconds)
        if seconds[0] <= (1.0 + CLEAR) * least:
            return 0
        return next(place for place, spent in enumerate(seconds) if spent <= (1.0 + NEAR) * least)

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        """As long as nobody has measured: what the first rung sends, and what any of them keeps."""
        every = [rung.work(shapes, itemsize, dp) for rung in self.rungs.values()]
        return Work(every[0].calls, kept=max(rung.kept for rung in every))

    def bind(self) -> "LadderCoder":
        return LadderCoder(self, [(text, rung.bind()) for text, rung in self.rungs.items()])


class LadderCoder(Coder):
    """One of several coders, the first until `take`. rungs: names and coders; those that keep `left` mean the same by
    it."""

    def __init__(self, member: MeasuredChoice, rungs: Sequence[tuple[str, Coder]]) -> None:
        self.member, self.rungs = member, tuple(rungs)
        self.keeps = tuple(dict.fromkeys(key for _, rung in rungs for key in rung.keeps))
        self.counts = any(rung.counts for _, rung in rungs)
        self._empty: dict[int, int] = {}  # by memory: since which step nothing is left in it
        self.take(0)

    def take(self, place: int) -> None:
        """Play this rung from the next step on. All replicas call it before the same step."""
        self.called, self.now = self.rungs[place]
        self.loses = place > 0
        self._empty.clear()

    def alike(self, name: str, like: "Tensor") -> "Mapping[str, Tensor]":
        return {key: x for _, rung in self.rungs for key, x in rung.alike(name, like).items()}

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        # A step that did not count gives back what was left before it, and comes once more under its number.
        if (
            LEFT in self.keeps
            and LEFT not in self.now.keeps
            and self._empty.get(id(memory), memory.step) >= memory.step
        ):
            grad.add_(memory[LEFT])
            memory[LEFT].zero_()
            self._empty[id(memory)] = memory.step
        return (yield from self.now.exchange(grad, shapes, memory))
