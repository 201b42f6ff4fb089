"""What every codec owes: one sum for all, as near as declared, the bytes declared, a memory that comes back.

One that says that payloads are checked makes no gradient of a payload that arrives damaged.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Size, Tensor, nn

from unisono.codecs import CODECS, Codec
from unisono.codecs._watched import CodecFault, WatchedCoder, unlike
from unisono.comm.bucket import Bucket
from unisono.comm.group import Group, Pending
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.tree import tree_sum
from unisono.observe.span import Recorder
from unisono.spec.errors import UserCodeError
from unisono.spec.fidelity import Fidelity
from unisono.spec.work import Work
from unisono.sync._drive import Drive
from unisono_contrib.comm.threads import run

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
        yield "it says that payloads are checked, and none is gathered or scattered"
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


BUCKETS = (
    (Size((40, 24)), Size((24,)), Size((3, 5, 20))),
    (Size((24, 24)), Size(()), Size((0, 8)), Size((6,))),  # of 583 elements, so zeros fill it up
)
STEPS = 4
FAR = 1_000_001  # number of a step in which all that warms up is warm
ITEM = 8  # bytes of an element of BUCKETS


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one rank: sums of each step and bucket, bytes that it sends in a step far on, bytes kept; of each bucket, what
    error feedback has left."""

    sums: list[list[Tensor]]
    sent: int
    kept: int
    left: list[Tensor]


def faults(codec: Codec, folder: Path, text: str) -> Iterator[str]:
    """1. All replicas get the same bits. 2. The first sum is as near to the plain one as fidelity and error say; of
    zeros it is zeros; a number that is not finite reaches all. 3. It sends and keeps what it declares. 4. With its
    memory taken from one life to the next it does what it does in one. 5. What replicas say that they sent adds up to
    the sum, and with feedback nothing is lost: all sums and what is left add up to all gradients. 6. Where it says that
    payloads are checked, one with a flipped bit is an error."""
    try:
        for dp in (2, 3):
            yield from (f"dp={dp}: {fault}" for fault in _of_replicas(codec, dp))
        yield from _of_odd_numbers(codec)
        yield from of_wire(codec, BUCKETS[0])
    except CodecFault as fault:
        yield str(fault)


def _of_replicas(codec: Codec, dp: int) -> Iterator[str]:
    seen = _played(codec, dp, STEPS)
    for rank, other in enumerate(seen[1:], 1):
        if not _same(other.sums, seen[0].sums):
            yield f"rank {rank} gets another sum than rank 0"
    yield from _of_sum(codec, seen, dp)
    yield from _of_bytes(codec, seen, dp)
    if codec.tells and not codec.owed:
        yield from _of_sent(codec, dp)
    again = _played(codec, dp, STEPS, STEPS // 2)
    if not all(_same(a.sums, b.sums) for a, b in zip(again, seen, strict=True)):
        yield f"with its memory saved and loaded after {STEPS // 2} steps it gives other sums"


def _of_odd_numbers(codec: Codec) -> Iterator[str]:
    zeros, overflow = ([rank.sums[0] for rank in _played(codec, 2, 1, filled=x)] for x in (0.0, torch.nan))
    if any(total.count_nonzero() for sums in zeros for total in sums):
        yield "the sum of zeros is not zero"
    if any(total.isfinite().all() for sums in overflow for total in sums):
        yield "an overflow of one replica is lost"


def _of_bytes(codec: Codec, seen: Sequence[_Seen], dp: int) -> Iterator[str]:
    """Against what it declares. Zeros that fill a bucket up travel too, and bytes of a call are rounded."""
    declared = [codec.work([tuple(s) for s in shapes], ITEM, dp) for shapes in BUCKETS]
    for work in declared:
        if not isinstance(work, Work):
            raise CodecFault(f"work returns {work!r}; it returns a unisono.spec.work.Work")
    room = 2 * ITEM * (dp - 1) + 4 * sum(len(work.calls) for work in declared)
    for said, does, word in (
        (sum(work.sent for work in declared), [seen_by_rank.sent for seen_by_rank in seen], "sends"),
        (sum(work.kept for work in declared), [seen_by_rank.kept for seen_by_rank in seen], "keeps"),
    ):
        rank = max(range(dp), key=lambda rank: abs(said - does[rank]))
        if abs(said - does[rank]) > room:
            yield f"rank {rank} {word} {does[rank]} bytes a step and declares {said:.0f}"


def _played(codec: Codec, dp: int, steps: int, anew: int = 0, filled: float | None = None) -> list[_Seen]:
    """On ranks that are threads. Raises CodecFault."""
    logs: list[list[str]] = [[] for _ in range(dp)]
    try:
        return run(dp, lambda rank: _driven(codec, rank, dp, steps, anew, logs[rank], filled))
    except CodecFault:
        raise
    except Exception as error:
        if what := unlike(logs):
            raise CodecFault(what) from error
        raise


def _gradient(rank: int, step: int, bucket: int, dp: int, filled: float | None = None) -> Tensor:
    numel = sum(shape.numel() for shape in BUCKETS[bucket])
    seed = torch.Generator().manual_seed(10_000 * step + 100 * bucket + rank)
    body = torch.randn(numel, generator=seed)
    if filled is not None:
        body.fill_(filled if rank else 0.0)
    return torch.cat([body, torch.zeros(-numel % dp)]).double()


def _driven(
    codec: Codec, rank: int, dp: int, steps: int, anew: int, log: list[str], filled: float | None
) -> _Seen:
    """Some steps on one rank; after `anew` of them in another life, to which its state was given. filled: what the
    gradients of all ranks but the first are, which has zeros then."""
    recorder = Recorder(rank)
    group = Mesh(Shape(dp=dp), rank, recorder, timedelta(seconds=60)).dp
    held = [[nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes] for shapes in BUCKETS]
    params = {f"{i}.{j}": p for i, parameters in enumerate(held) for j, p in enumerate(parameters)}
    buckets = [Bucket(parameters, dp) for parameters in held]
    drive, sums = Drive(WatchedCoder(codec.bind(), log, codec), group, params), []
    for step in range(steps):
        if anew and step == anew:
            state = {key: x.clone() for key, x in drive.state.items()}
            drive = Drive(WatchedCoder(codec.bind(), log, codec), group, params)
            for key, x in drive.state.items():
                x.copy_(state[key])
        for i, bucket in enumerate(buckets):
            bucket.flat.copy_(_gradient(rank, step, i, dp, filled))
            drive.begin(bucket)
        drive.finish()
        sums.append([bucket.flat.clone() for bucket in buckets])
    state = {key: x.clone() for key, x in drive.state.items()}
    before = sum(recorder.bytes().values())
    drive.kept.steps.fill_(FAR)
    for i, bucket in enumerate(buckets):
        bucket.flat.copy_(_gradient(rank, 0, i, dp, filled))
        drive.begin(bucket)
    drive.finish()
    sent = sum(recorder.bytes().values()) - before
    parts = [
        [state.get(f"{i}.{j}/left") for j in range(len(parameters))] for i, parameters in enumerate(held)
    ]
    left = [
        torch.cat([x.flatten() for x in parameters if x is not None] or [torch.zeros(0)])
        for parameters in parts
    ]
    return _Seen(sums, sent, sum(x.nbytes for x in state.values()), left)


def _of_sent(codec: Codec, dp: int) -> Iterator[str]:
    """With error feedback around the codec."""
    fed = CODECS.marked().find("ef")().around(codec)
    seen = _played(fed, dp, STEPS)
    for bucket in range(len(BUCKETS)):
        numel = sum(shape.numel() for shape in BUCKETS[bucket])
        gradients = [_gradient(rank, step, bucket, dp) for rank in range(dp) for step in range(STEPS)]
        whole = tree_sum(gradients)
        left = [_padded(seen_by_rank.left[bucket], dp) for seen_by_rank in seen]
        came = tree_sum([*(sums[bucket] for sums in seen[0].sums), *left])
        off = ((came - whole).norm() / whole.norm()).item()
        room = max(codec.error, 1e-5) if codec.linear else 1e-5
        if off > room:
            yield f"of bucket {bucket}, {numel} elements, {off:.2g} is neither sent nor said to be left (Sent)"


def _padded(x: Tensor, dp: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % dp)])


def _of_sum(codec: Codec, seen: Sequence[_Seen], dp: int) -> Iterator[str]:
    """Of all buckets together, where it is furthest off."""
    lossy, off, far = codec.fidelity is Fidelity.LOSSY, 0.0, 0.0
    for bucket, got in enumerate(seen[0].sums[0]):
        whole = tree_sum([_gradient(rank, 0, bucket, dp) for rank in range(dp)])
        if not got.isfinite().all():
            yield f"the sum of bucket {bucket} is not finite"
            return
        off = max(off, ((got - whole).norm() / whole.norm()).item())
        sizes = [shape.numel() for shape in BUCKETS[bucket]]
        parts = zip(got[: sum(sizes)].split(sizes), whole[: sum(sizes)].split(sizes), strict=True)
        far = max(far, *(((a - b).abs().max() / b.abs().max()).item() for a, b in parts if len(b)))
    bound = codec.error if lossy else dp * 2.0**-53
    if off > bound:
        yield f"a sum is off by {off:.2g} of its norm; {codec.fidelity.name} allows {bound:.2g} (`error`)"
    if lossy and far > codec.lost(dp):
        yield f"an element is off by {far:.2g} of its parameter's largest; `lost` allows {codec.lost(dp):.2g}"


def _same(sums: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(sums, others, strict=True) for a, b in zip(x, y, strict=True)
    )
