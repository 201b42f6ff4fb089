"""What a codec's bytes are counted as, and how far its sum is sampled to be off."""

from datetime import timedelta

import pytest
import torch
from torch import nn

from unisono.codecs import CODECS
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.sync._drive import Drive
from unisono.sync._sample import EVERY, SAMPLED, ErrorSampler
from unisono_contrib.comm.threads import run

pytestmark = pytest.mark.timeout(100)
SHAPES = ((96, 64), (64,), (128, 96))


def driven(rank: int, codec: str, steps: int, ranks: int = 2):
    """Steps over three buckets: bytes by algorithm and codec of each, and errors that were told."""
    recorder = Recorder(rank)
    group = Mesh(Shape(dp=ranks), rank, recorder, timedelta(seconds=60)).dp
    params = {f"p{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
    buckets, coder = [Bucket([p], ranks) for p in params.values()], CODECS.read(codec).bind()
    coder.called, coder.loses = codec, codec != "plain"
    drive, told, laps = Drive(coder, group, params), [], []
    for step in range(steps):
        for i, bucket in enumerate(buckets):
            bucket.flat.copy_(
                torch.randn(len(bucket.flat), generator=torch.Generator().manual_seed(9 * step + i + rank))
            )
            drive.begin(bucket)
        drive.finish()
        told.append(drive.sampler.take_error())
        laps.append(recorder.lap().ledger)
    return laps, told


@pytest.mark.parametrize("codec", ["plain", "int8", "int4+ef", "topk:ratio=0.1+ef"])
def test_bytes_of_a_codec_are_told_apart_and_are_what_it_declares(codec: str) -> None:
    (ledger, *_), _ = run(2, lambda rank: driven(rank, codec, 1))[0]
    assert {key.codec for key in ledger} == {codec} and all(key.algorithm for key in ledger)
    declared = sum(CODECS.read(codec).work([shape], 4, 2).sent for shape in SHAPES)
    assert sum(ledger.values()) == pytest.approx(declared, abs=64)


def test_the_error_is_sampled_alike_on_all_replicas_and_costs_less_than_a_hundredth() -> None:
    ended = run(2, lambda rank: driven(rank, "int4", 2 * EVERY + 2))
    laps, told = ended[0]
    assert [bool(one) for one in told] == [step % EVERY == 1 for step in range(2 * EVERY + 2)]
    errors = [one["codec_error"] for one in told if one]
    assert errors == [one["codec_error"] for one in ended[1][1] if one]
    assert all(0.01 < error < CODECS.read("int4").error for error in errors) and len(set(errors)) == len(
        errors
    )
    sent = sum(n for lap in laps for key, n in lap.items())
    samples = sum(n for lap in laps for key, n in lap.items() if key.codec == SAMPLED)
    assert 0 < samples < 0.01 * sent


def test_what_loses_nothing_is_not_sampled() -> None:
    _, told = run(2, lambda rank: driven(rank, "plain", 3))[0]
    assert not any(told)


def test_samples_walk_through_all_buckets() -> None:
    """No element is looked at twice before the walk begins anew, and in the end all have been."""
    group = Mesh(Shape(dp=1), 0, Recorder(0), timedelta(seconds=60)).dp
    sampler, seen = ErrorSampler(group), torch.zeros(300)
    flats = seen[:200], seen[200:]
    for step in range(100 * EVERY):
        for flat in flats:
            was = sampler._taken
            sampler.see(flat)
            if sampler._taken is not None and sampler._taken is not was:
                sampler._taken[1].add_(1.0)
        sampler.compare()
        assert step != 5 * EVERY - 1 or seen.max() == 1.0
    assert seen.min() > 0
