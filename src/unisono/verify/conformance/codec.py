"""What every codec owes: one sum for all, as near as declared, the bytes declared, a memory that comes back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Size, Tensor, nn

from unisono.codecs import CODECS, Codec
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.threads import run
from unisono.comm.tree import tree_sum
from unisono.observe.span import Recorder
from unisono.spec.fidelity import Fidelity
from unisono.sync._drive import Drive

BUCKETS = ((Size((40, 24)), Size((24,)), Size((3, 5, 20))), (Size((24, 24)),))
STEPS = 4


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one rank: sums of each step and bucket, bytes that it sent in the first step, bytes kept; of each bucket, what
    error feedback has left."""

    sums: list[list[Tensor]]
    sent: int
    kept: int
    left: list[Tensor]


def faults(codec: Codec, folder: Path, text: str) -> Iterator[str]:
    """1. All replicas get the same bits. 2. The first sum is as near to the plain one as fidelity and error say; of
    zeros it is zeros; a number that is not finite reaches all. 3. It sends and keeps what it declares. 4. With its
    memory taken from one life to the next it does what it does in one. 5. What replicas say that they sent adds up to
    the sum, and with feedback nothing is lost: all sums and what is left add up to all gradients."""
    for dp in (2, 3):
        seen = run(dp, lambda rank, dp=dp: _driven(codec, rank, dp, STEPS, 0))
        for rank, other in enumerate(seen[1:], 1):
            if not _same(other.sums, seen[0].sums):
                yield f"dp={dp}: rank {rank} gets another sum than rank 0"
        yield from (f"dp={dp}: {fault}" for fault in _of_sum(codec, seen, dp))
        declared = [codec.work([tuple(s) for s in shapes], 8, dp) for shapes in BUCKETS]
        for rank, mine in enumerate(seen):
            for said, does, word in (
                (sum(work.sent for work in declared), mine.sent, "sends"),
                (sum(work.kept for work in declared), mine.kept, "keeps"),
            ):
                if abs(said - does) > 8 * 2 * dp * len(
                    BUCKETS
                ):  # a bucket is as long as a multiple of its replicas
                    yield f"dp={dp}: rank {rank} {word} {does} bytes a step and declares {said}"
        if codec.tells and not codec.owed:
            yield from (f"dp={dp}: {fault}" for fault in _of_sent(codec, dp))
        again = run(dp, lambda rank, dp=dp: _driven(codec, rank, dp, STEPS, STEPS // 2))
        if not all(_same(a.sums, b.sums) for a, b in zip(again, seen, strict=True)):
            yield f"dp={dp}: with its memory saved and loaded after {STEPS // 2} steps it gives other sums"
    for filled, wrong in (
        (0.0, "the sum of zeros is not zero"),
        (torch.nan, "an overflow of one replica is lost"),
    ):
        sums = run(2, lambda rank, filled=filled: _driven(codec, rank, 2, 1, 0, filled if rank else 0.0))[
            0
        ].sums
        if any(total.count_nonzero() if filled == 0.0 else total.isfinite().all() for total in sums[0]):
            yield wrong


def _gradient(rank: int, step: int, bucket: int, dp: int, filled: float | None = None) -> Tensor:
    numel = sum(shape.numel() for shape in BUCKETS[bucket])
    seed = torch.Generator().manual_seed(10_000 * step + 100 * bucket + rank)
    body = torch.randn(numel, generator=seed) if filled is None else torch.full((numel,), filled)
    return torch.cat([body, torch.zeros(-numel % dp)]).double()


def _driven(codec: Codec, rank: int, dp: int, steps: int, anew: int, filled: float | None = None) -> _Seen:
    """Some steps on one rank; after `anew` of them in another life, to which its state was given."""
    recorder = Recorder(rank)
    group = Mesh(Shape(dp=dp), rank, recorder, timedelta(seconds=60)).dp
    held = [[nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in shapes] for shapes in BUCKETS]
    params = {f"{i}.{j}": p for i, some in enumerate(held) for j, p in enumerate(some)}
    buckets = [Bucket(some, dp) for some in held]
    drive, sums, sent = Drive(codec.bind(), group, params), [], 0
    for step in range(steps):
        if anew and step == anew:
            state = {key: x.clone() for key, x in drive.state.items()}
            drive = Drive(codec.bind(), group, params)
            for key, x in drive.state.items():
                x.copy_(state[key])
        for i, bucket in enumerate(buckets):
            bucket.flat.copy_(_gradient(rank, step, i, dp, filled))
            drive.begin(bucket)
        drive.finish()
        sums.append([bucket.flat.clone() for bucket in buckets])
        if step == 0:
            sent = sum(recorder.bytes().values())
    state = drive.state
    parts = [[state.get(f"{i}.{j}/left") for j in range(len(some))] for i, some in enumerate(held)]
    left = [torch.cat([x.flatten() for x in some if x is not None] or [torch.zeros(0)]) for some in parts]
    return _Seen(sums, sent, sum(x.nbytes for x in state.values()), left)


def _of_sent(codec: Codec, dp: int) -> Iterator[str]:
    """With error feedback around the codec."""
    fed = CODECS.marked().find("ef")().around(codec)
    seen = run(dp, lambda rank: _driven(fed, rank, dp, STEPS, 0))
    for bucket in range(len(BUCKETS)):
        numel = sum(shape.numel() for shape in BUCKETS[bucket])
        given = [_gradient(rank, step, bucket, dp) for rank in range(dp) for step in range(STEPS)]
        whole = tree_sum(given)
        left = [_padded(one.left[bucket], dp) for one in seen]
        came = tree_sum([*(sums[bucket] for sums in seen[0].sums), *left])
        off = ((came - whole).norm() / whole.norm()).item()
        room = max(codec.error, 1e-5) if codec.linear else 1e-5
        if off > room:
            yield f"of bucket {bucket}, {numel} elements, {off:.2g} is neither sent nor said to be left (Sent)"


def _padded(x: Tensor, dp: int) -> Tensor:
    return torch.cat([x, x.new_zeros(-len(x) % dp)])


def _of_sum(codec: Codec, seen: Sequence[_Seen], dp: int) -> Iterator[str]:
    lossy = codec.fidelity is Fidelity.LOSSY
    for bucket, got in enumerate(seen[0].sums[0]):
        whole = tree_sum([_gradient(rank, 0, bucket, dp) for rank in range(dp)])
        if not got.isfinite().all():
            yield f"the sum of bucket {bucket} is not finite"
            continue
        error, bound = ((got - whole).norm() / whole.norm()).item(), codec.error if lossy else dp * 2.0**-53
        if error > bound:
            word = codec.fidelity.name
            yield f"the sum of bucket {bucket} is off by {error:.2g} of its norm; {word} allows {bound:.2g}"
        sizes = [shape.numel() for shape in BUCKETS[bucket]]
        parts = zip(got[: sum(sizes)].split(sizes), whole[: sum(sizes)].split(sizes), strict=True)
        worst = max(((a - b).abs().max() / b.abs().max()).item() for a, b in parts)
        if lossy and worst > codec.lost(dp):
            room = f"`lost` allows {codec.lost(dp):.2g}"
            yield f"an element of bucket {bucket} is off by {worst:.2g} of the largest; {room}"


def _same(some: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)
    )
