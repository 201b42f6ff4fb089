"""What a codec owes that is `checked`: of a payload with one bit another than was sent, no replica makes a gradient."""

from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Size, Tensor, nn

from unisono.codecs import Codec
from unisono.comm.bucket import Bucket
from unisono.comm.group import Group, Pending
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.threads import run
from unisono.observe.span import Recorder
from unisono.spec.errors import UserCodeError
from unisono.sync._drive import Drive

REPLICAS = 3
SENDER, RECEIVER = 1, 2


class NoisyGroup:
    """A group on one rank, in which one bit flips of what comes from one replica. noisy: in which of its gathers and
    exchanges, counted from 0; None in none. seen: how many there were."""

    def __init__(self, group: Group, sender: int, noisy: int | None) -> None:
        self._group, self._sender, self._noisy, self.seen = group, sender, noisy, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._group, name)

    def start_all_gather(self, out: Tensor, part: Tensor) -> Pending:
        return self._through(out.view(self._group.size, -1), self._group.start_all_gather(out, part))

    def start_exchange(self, x: Tensor) -> tuple[Tensor, Pending]:
        rows, pending = self._group.start_exchange(x)
        return rows, self._through(rows, pending)

    def _through(self, rows: Tensor, pending: Pending) -> Pending:
        self.seen += 1
        return _Flipped(pending, rows[self._sender]) if self.seen - 1 == self._noisy else pending


class _Flipped:
    """An operation of whose result one bit is another in the end."""

    def __init__(self, pending: Pending, row: Tensor) -> None:
        self._pending, self._row = pending, row

    def wait(self) -> None:
        self._pending.wait()
        data = self._row.view(torch.uint8)
        data[len(data) // 3] ^= 0x10


def of_wire(codec: Codec, shapes: Sequence[Size]) -> Iterator[str]:
    """What is wrong with how a codec that is `checked` finds damage, if anything."""
    if not codec.checked:
        return
    payloads = run(REPLICAS, lambda rank: _stepped(codec, shapes, rank, None))[RECEIVER]
    if not payloads:
        yield "it says that payloads are checked, and none is gathered or dealt"
    for noisy in range(payloads):
        try:
            run(REPLICAS, lambda rank, noisy=noisy: _stepped(codec, shapes, rank, noisy))
            yield f"payload {noisy} arrived with a flipped bit, and was taken"
        except UserCodeError as error:
            if f"replica {SENDER}" not in error.what:
                yield f"payload {noisy} of replica {SENDER} was damaged, and the error says: {error.what}"


def _stepped(codec: Codec, shapes: Sequence[Size], rank: int, noisy: int | None) -> int:
    """How many payloads came in one step of one bucket."""
    group = Mesh(Shape(dp=REPLICAS), rank, Recorder(rank), timedelta(seconds=60)).dp
    params = {str(i): nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(shapes)}
    bucket = Bucket(list(params.values()), REPLICAS)
    heard: Any = NoisyGroup(group, SENDER, noisy if rank == RECEIVER else None)
    drive = Drive(codec.bind(), heard, params)
    bucket.flat.copy_(torch.randn(len(bucket.flat), generator=torch.Generator().manual_seed(rank)))
    drive.begin(bucket)
    drive.finish()
    return heard.seen
