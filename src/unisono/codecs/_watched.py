"""A coder under watch: what it yields and returns, held to what `Coder.exchange` says. A fault is one line, and says
at which line of the codec's."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

from torch import Size, Tensor

from unisono.codecs import BucketMemory, Codec, Coder, Deal, Exchange, Gather, Sent, Sum
from unisono.spec.errors import UserCodeError
from unisono.spec.finder import is_ours
from unisono.spec.frames import place

ENDLESS = 100
"""Operations of one exchange behind which it is taken to have no end."""


class CodecFault(UserCodeError):
    """What a codec does wrong, where nothing more can be played."""


class WatchedCoder(Coder):
    """The same coder. log: gets a line for each operation that it asks for, to be compared with other replicas'; what
    it says that it sent is looked at then, even if nobody around it wants to know."""

    def __init__(self, coder: object, log: list[str] | None = None, source: object = None) -> None:
        """source: the codec that it was bound of."""
        if not isinstance(coder, Coder):
            what = f"bind returns {_kind(coder)}; it returns a subclass of unisono.codecs.Coder"
            raise CodecFault(what, where=_line(getattr(source, "bind", None)))
        self.coder, self.log, self._tells = coder, log, log is None and getattr(source, "tells", False)
        self.keeps, self.counts, self.cap = coder.keeps, coder.counts, coder.cap

    def alike(self, name: str, like: Tensor) -> Mapping[str, Tensor]:
        return self.coder.alike(name, like)

    def exchange(self, grad: Tensor, shapes: Sequence[Size], memory: BucketMemory) -> Exchange:
        """Raises CodecFault for what no drive could play."""
        length, numel = len(grad), sum(shape.numel() for shape in shapes)
        inner = self.coder.exchange(grad, shapes, replace(memory, kept=_Kept(memory.kept)))
        if not hasattr(inner, "send"):
            what = f"exchange returns {_kind(inner)} at once; it is a generator, which has a yield"
            raise CodecFault(what, where=_line(self.coder.exchange))
        answer, silent = None, self._tells
        for _ in range(ENDLESS):
            try:
                wish = inner.send(answer)
            except StopIteration as end:
                wrong = _odd_sum(end.value, length, numel)
                if wrong := wrong or (
                    "exchange yields no Sent, and the codec says `tells`" if silent else ""
                ):
                    raise CodecFault(wrong, where=_line(inner)) from None
                self._note(f"the end of a bucket of {numel}")
                return end.value
            except CodecFault as fault:  # of its memory
                fault.where = fault.where or place(fault)
                raise
            if isinstance(wish, Sent):
                answer, silent = (yield Sent(self._decoded(wish, length))), False
                continue
            for request in wish if isinstance(wish, tuple) else (wish,):
                if wrong := _odd_request(request, memory.replicas):
                    raise CodecFault(wrong, where=_line(inner))
                self._note(_said(request))
            answer = yield wish
        raise CodecFault(f"exchange has asked for {ENDLESS} operations and does not end", where=_line(inner))

    def _note(self, line: str) -> None:
        if self.log is not None:
            self.log.append(line)

    def _decoded(self, said: Sent, length: int) -> Callable[[], Tensor]:
        """As `said.decoded`, which raises CodecFault for what is no part of a gradient."""

        def decoded() -> Tensor:
            if wrong := _odd_part(sent := said.decoded(), length):
                raise CodecFault(wrong, where=_line(said.decoded))
            return sent

        if self.log is None:
            return decoded
        now = decoded()
        return lambda: now


def bound(codec: Codec) -> Coder:
    """The live codec of one rank. One of a user's own is watched: what no drive could play is an error at its line."""
    coder = codec.bind()
    if is_ours(type(codec).__module__) or codec.rungs:
        return coder
    return WatchedCoder(coder, source=codec)


def _line(function: Any) -> str:
    """`file:line in name` of a function's first line, or of where a generator waits; "" of anything else."""
    frame, code = getattr(function, "gi_frame", None), getattr(function, "gi_code", None)
    code = code or getattr(function, "__code__", None)
    return (
        f"{code.co_filename}:{frame.f_lineno if frame else code.co_firstlineno} in {code.co_name}"
        if code
        else ""
    )


class _Kept(dict[str, Tensor]):
    def __missing__(self, key: str) -> Tensor:
        raise CodecFault(f"exchange asks memory for {key!r}, which `keeps` of its coder does not name")


def _odd_request(request: object, replicas: int) -> str:
    """What is wrong with a request that cannot be met; "" where it can."""
    if not isinstance(request, Sum | Gather | Deal):
        return f"exchange yields {_kind(request)}; it yields Sum, Gather, Deal or Sent"
    x = request.tensor
    if not isinstance(x, Tensor):
        return f"exchange yields {type(request).__name__} of {_kind(x)}; it takes a tensor"
    if not x.is_contiguous():
        return f"exchange yields {_said(request)}, which is not contiguous"
    if not isinstance(request, Sum) and x.dim() != 1:
        return f"exchange yields {_said(request)}; it takes one dim"
    if isinstance(request, Deal) and len(x) % replicas:
        return f"exchange yields {_said(request)}, which {replicas} replicas have no equal parts of"
    return ""


def _said(request: Sum | Gather | Deal) -> str:
    """A request in words."""
    x = request.tensor
    return f"{type(request).__name__} of {list(x.shape)} {str(x.dtype).removeprefix('torch.')}"


def _odd_sum(total: object, length: int, numel: int) -> str:
    """What is wrong with what an exchange returns and is no sum; "" of one that is."""
    if not isinstance(total, Tensor):
        return f"exchange returns {_kind(total)}; it returns the sum, a tensor [{length}]"
    if total.shape != (length,):
        fill = f", of which the last {length - numel} are zeros" if length > numel else ""
        return f"exchange returns {list(total.shape)}; grad is [{length}]{fill}, and so is the sum"
    return ""


def _odd_part(sent: object, length: int) -> str:
    """What is wrong with what a replica says that it sent."""
    if isinstance(sent, Tensor) and sent.dim() == 1 and len(sent) <= length:
        return ""
    what = list(sent.shape) if isinstance(sent, Tensor) else _kind(sent)
    return f"decoded of Sent returns {what}; it returns a tensor [{length}], or shorter"


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
