"""Checksums beside payloads: bytes that arrive as others than were sent are an error, not a gradient.

CRC-32 (Peterson & Brown, "Cyclic codes for error detection", 1961) finds every burst of up to 32 bits, and of all other
damage all but one in 4 billion. Ethernet and TCP have checksums too, but network cards, drivers and memory lie behind
them (Stone & Partridge, "When the CRC and TCP checksum disagree", 2000).

What a codec adds up beside its payloads, such as norms and biases, no replica has sent as a sum. So here each replica
gives its own to all, who compare and add up in one order.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar
from zlib import crc32

from unisono.codecs import BucketMemory, Coder, Deal, Exchange, Gather, Sent, Sum
from unisono.codecs._marks import Around, AroundCoder
from unisono.spec.errors import UserCodeError
from unisono.spec.family import Mark
from unisono.spec.words import listed
from unisono.spec.work import Call, Work

if TYPE_CHECKING:
    from torch import Size, Tensor

SUM = 8
"""Bytes of a checksum on its way: an int64, which every backend sends."""
_AS_MOVED = 3
"""Bytes that are copied while one is summed: 2.8 GB/s on a core that copies 4.4 GB/s, which moves every byte twice."""


class Checksums(Mark):
    """A checksum beside each payload: damage on the way is the error U-G03, which names who sent it."""

    name = "crc"

    def misfit(self, member: Any) -> str:
        if member.checked:
            return "it has checksums already"
        if member.linear:
            return (
                "its codes are added up on the way, and a sum has no checksum that a replica could have sent"
            )
        return ""

    def around(self, member: Any) -> "CheckedCodec":
        return CheckedCodec(inner=member)


class CheckedCodec(Around):
    """A codec whose payloads are compared with checksums before they are decoded."""

    name = "checked"

    checked: ClassVar[bool] = True  # type: ignore[override]

    def work(self, shapes: Sequence[tuple[int, ...]], itemsize: int, dp: int) -> Work:
        """Every payload is read before it leaves and when it has come."""
        inner = self.inner.work(shapes, itemsize, dp)
        calls = [_checked_call(call, dp) for call in inner.calls]
        beside = (Call(call.axis, call.op, SUM * (dp - 1), call.times) for call in calls)
        read = sum(2 * call.nbytes * call.times * dp / max(1, dp - 1) for call in calls)
        return self.more(replace(inner, calls=(*calls, *beside)), 0, round(_AS_MOVED * read))

    def bind(self) -> "CheckedCoder":
        from unisono.codecs._watched import bound

        return CheckedCoder(bound(self.inner))


def _checked_call(call: Call, dp: int) -> Call:
    """Of a sum, each replica giving all of its own to the others."""
    if call.op != "all_reduce" or dp == 1:
        return call
    whole = -(-call.nbytes * dp // (2 * (dp - 1)))
    return Call(call.axis, "all_gather", whole * (dp - 1), call.times)


class CheckedCoder(AroundCoder):
    """Sends checksums beside what the codec inside gives and deals, and gives to all what it would have added up."""

    def __init__(self, inner: Coder) -> None:
        super().__init__(inner, counts=True)

    def exchange(self, grad: "Tensor", shapes: "Sequence[Size]", memory: BucketMemory) -> Exchange:
        """Raises UserCodeError (U-G03)."""
        inner, answer, turn = self.inner.exchange(grad, shapes, memory), None, 0
        while True:
            try:
                wish = inner.send(answer)
            except StopIteration as end:
                return end.value
            if isinstance(wish, Sent):
                answer = yield wish
                continue
            requests = wish if isinstance(wish, tuple) else (wish,)
            gathers = [Gather(part.tensor.view(-1)) if isinstance(part, Sum) else part for part in requests]
            turn += 1
            checksums = yield (*gathers, *(_summed(part, memory, turn) for part in gathers))
            answers = []
            for part, request, rows, sums in zip(
                gathers, requests, checksums[: len(gathers)], checksums[len(gathers) :], strict=True
            ):
                _compare(rows, sums, part, memory, turn)
                answers.append(_added(rows, request.tensor) if isinstance(request, Sum) else rows)
            answer = tuple(answers) if isinstance(wish, tuple) else answers[0]


def _added(rows: "Tensor", out: "Tensor") -> "Tensor":
    """out, overwritten with the sum of rows [replicas, n], one after the other: the same bits everywhere."""
    total = out.view(-1).copy_(rows[0])
    for row in rows[1:]:
        total.add_(row)
    return out


def _summed(request: Gather | Deal, memory: BucketMemory, turn: int) -> Gather | Deal:
    """The same operation with a checksum in the place of each payload."""
    import torch

    rows = request.tensor.reshape(memory.replicas if isinstance(request, Deal) else 1, -1)
    sums = [checksum(row, memory, turn) for row in rows]
    return type(request)(torch.tensor(sums, dtype=torch.int64, device=rows.device))


def checksum(payload: "Tensor", memory: BucketMemory, turn: int) -> int:
    """Of a payload [n]. It depends on bucket and step too, so that a payload of another one does not pass. turn: of the
    requests in this exchange. A device's payload is copied to the host."""
    import torch

    about = f"{memory.step} {turn} {' '.join(memory.names)}".encode()
    return crc32(payload.contiguous().view(torch.uint8).cpu().numpy().data, crc32(about))


def _compare(rows: "Tensor", sums: "Tensor", request: Gather | Deal, memory: BucketMemory, turn: int) -> None:
    """rows [replicas, n]: payloads as they came. told [replicas, 1]: their checksums."""
    for sender in _damaged(rows, sums, memory, turn):
        way = "gave to all" if isinstance(request, Gather) else f"scattered to replica {memory.place}"
        raise UserCodeError(
            f"in step {memory.step} what replica {sender} {way} arrived as other bytes",
            where=f"dp, seen on replica {memory.place}; the bucket of {listed(memory.names, 3)}",
            likely="a flipped bit in memory or on the wire: a faulty link, network card or core",
            fix="look at the machines of these replicas; go on from the last checkpoint",
            code="G03",
        )


def _damaged(rows: "Tensor", checksums: "Tensor", memory: BucketMemory, turn: int) -> Iterator[int]:
    sums = checksums.reshape(-1).tolist()
    for sender, (row, said) in enumerate(zip(rows, sums, strict=True)):
        if checksum(row, memory, turn) != said:
            yield sender
