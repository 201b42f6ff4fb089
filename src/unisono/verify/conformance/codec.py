"""What every codec owes: one sum for all, as near as declared, the bytes declared, a memory that comes back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from torch import Size, Tensor, nn

from unisono.codecs import Codec
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.comm.threads import run
from unisono.comm.tree import tree_sum
from unisono.observe.span import Recorder
from unisono.spec.fidelity import Fidelity
from unisono.sync._drive import Drive

BUCKETS = ((Size((24, 16)), Size((24,))), (Size((8, 8)),))
STEPS = 4


@dataclass(frozen=True, slots=True)
class _Seen:
    """Of one rank: sums of each step and bucket, bytes that it sent in the first step, bytes kept."""

    sums: list[list[Tensor]]
    sent: int
    kept: int


def faults(codec: Codec, folder: Path, text: str) -> Iterator[str]:
    """1. All replicas get the same bits. 2. The first sum is as near to the plain one as fidelity and error say; of
    zeros it is zeros. 3. It sends and keeps what it declares. 4. With its memory taken from one life to the next it
    does what it does in one."""
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
        again = run(dp, lambda rank, dp=dp: _driven(codec, rank, dp, STEPS, STEPS // 2))
        if not all(_same(a.sums, b.sums) for a, b in zip(again, seen, strict=True)):
            yield f"dp={dp}: with its memory saved and loaded after {STEPS // 2} steps it gives other sums"
    zeros = run(2, lambda rank: _driven(codec, rank, 2, 1, 0, nothing=True))
    if any(total.count_nonzero() for total in zeros[0].sums[0]):
        yield "the sum of zeros is not zero"


def _gradient(rank: int, step: int, bucket: int, dp: int, nothing: bool = False) -> Tensor:
    numel = sum(shape.numel() for shape in BUCKETS[bucket])
    seed = torch.Generator().manual_seed(10_000 * step + 100 * bucket + rank)
    body = torch.zeros(numel) if nothing else torch.randn(numel, generator=seed)
    return torch.cat([body, torch.zeros(-numel % dp)]).double()


def _driven(codec: Codec, rank: int, dp: int, steps: int, anew: int, nothing: bool = False) -> _Seen:
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
            bucket.flat.copy_(_gradient(rank, step, i, dp, nothing))
            drive.begin(bucket)
        drive.finish()
        sums.append([bucket.flat.clone() for bucket in buckets])
        if step == 0:
            sent = sum(recorder.bytes().values())
    return _Seen(sums, sent, sum(x.nbytes for x in drive.state.values()))


def _of_sum(codec: Codec, seen: Sequence[_Seen], dp: int) -> Iterator[str]:
    for bucket, got in enumerate(seen[0].sums[0]):
        whole = tree_sum([_gradient(rank, 0, bucket, dp) for rank in range(dp)])
        if not got.isfinite().all():
            yield f"the sum of bucket {bucket} is not finite"
            continue
        error = ((got - whole).norm() / whole.norm()).item()
        bound = codec.error if codec.fidelity is Fidelity.LOSSY else dp * 2.0**-53
        if error > bound:
            yield (
                f"the sum of bucket {bucket} is off by {error:.2g} of its norm; "
                f"{codec.fidelity.name} allows {bound:.2g}"
            )


def _same(some: Sequence[Sequence[Tensor]], others: Sequence[Sequence[Tensor]]) -> bool:
    return all(
        torch.equal(a, b) for x, y in zip(some, others, strict=True) for a, b in zip(x, y, strict=True)
    )
