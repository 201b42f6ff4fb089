"""A coder under watch: what it yields and returns, held to what `Coder.exchange` says. A fault is one line."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest

from torch import Size, Tensor

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Sent, Sum

ENDLESS = 100
"""Operations of one exchange behind which it is taken to have no end."""


class CodecFault(Exception):
    """What a codec does wrong, where nothing more can be played."""


class WatchedCoder(Coder):
    """The same coder. log: gets a line for each operation that it asks for, to be compared with other replicas'."""

    def __init__(self, coder: object, log: list[str]) -> None:
        if not isinstance(coder, Coder):
            raise CodecFault(f"bind returns {_kind(coder)}; it returns a subclass of unisono.codecs.Coder")
        self.coder, self.log = coder, log
        self.keeps, self.counts = coder.keeps, coder.counts

    def alike(self, name: str, like: Tensor) -> Mapping[str, Tensor]:
        return self.coder.alike(name, like)

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        """Raises CodecFault for what no drive could play."""
        length, numel = len(grad), sum(shape.numel() for shape in shapes)
        inner = self.coder.exchange(grad, shapes, replace(memory, kept=_Kept(memory.kept)))
        if not hasattr(inner, "send"):
            raise CodecFault(f"exchange returns {_kind(inner)} at once; it is a generator, which has a yield")
        answer = None
        for _ in range(ENDLESS):
            try:
                asked = inner.send(answer)
            except StopIteration as end:
                _check_sum(end.value, length, numel)
                self.log.append(f"the end of a bucket of {numel}")
                return end.value
            if isinstance(asked, Sent):
                sent = _decoded(asked, length)
                answer = yield Sent(lambda sent=sent: sent)
                continue
            for request in asked if isinstance(asked, tuple) else (asked,):
                self.log.append(_request(request, memory.replicas))
            answer = yield asked
        raise CodecFault(f"exchange has asked for {ENDLESS} operations and does not end")


class _Kept(dict[str, Tensor]):
    def __missing__(self, key: str) -> Tensor:
        raise CodecFault(f"exchange asks memory for {key!r}, which `keeps` of its coder does not name")


def _request(asked: object, replicas: int) -> str:
    """A request in words. Raises CodecFault for one that cannot be met."""
    if not isinstance(asked, Sum | Gather | Deal):
        raise CodecFault(f"exchange yields {_kind(asked)}; it yields Sum, Gather, Deal or Sent")
    x, word = asked.tensor, type(asked).__name__
    if not isinstance(x, Tensor):
        raise CodecFault(f"exchange yields {word} of {_kind(x)}; it takes a tensor")
    said = f"{word} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"
    if not x.is_contiguous():
        raise CodecFault(f"exchange yields {said}, which is not contiguous")
    if not isinstance(asked, Sum) and x.dim() != 1:
        raise CodecFault(f"exchange yields {said}; it takes one dim")
    if isinstance(asked, Deal) and len(x) % replicas:
        raise CodecFault(f"exchange yields {said}, which {replicas} replicas have no equal parts of")
    return said


def _check_sum(total: object, length: int, numel: int) -> None:
    """Raises CodecFault for what an exchange returns and is no sum."""
    if not isinstance(total, Tensor):
        raise CodecFault(f"exchange returns {_kind(total)}; it returns the sum, a tensor [{length}]")
    if total.shape != (length,):
        fill = f", of which the last {length - numel} are zeros" if length > numel else ""
        raise CodecFault(f"exchange returns {list(total.shape)}; grad is [{length}]{fill}, and so is the sum")


def _decoded(said: Sent, length: int) -> Tensor:
    """What a replica says that it sent. Raises CodecFault."""
    sent = said.decoded()
    if not isinstance(sent, Tensor) or sent.dim() != 1 or len(sent) > length:
        what = list(sent.shape) if isinstance(sent, Tensor) else _kind(sent)
        raise CodecFault(f"decoded of Sent returns {what}; it returns a tensor [{length}], or shorter")
    return sent


def unlike(logs: Sequence[Sequence[str]]) -> str:
    """Where replicas ask for other operations, the first place in words; "" where nothing is seen of that. A replica
    that raised asks for nothing more, which is no fault of its own."""
    for at, lines in enumerate(zip_longest(*logs)):
        for rank, line in enumerate(lines):
            if line is not None and lines[0] is not None and line != lines[0]:
                what = f"where replica 0 has {lines[0]}, replica {rank} has {line}"
                return f"{what} (operation {at + 1}); all ask for the same ones in the same order"
    return ""


def _kind(x: object) -> str:
    if x is None:
        return "nothing"
    return "a tensor" if isinstance(x, Tensor) else type(x).__name__
