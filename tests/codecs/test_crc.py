"""Checksums: whatever bit of a payload is another, whoever receives it says so; without damage nothing changes."""

from datetime import timedelta

import pytest
import torch
from torch import Size, nn

from unisono.codecs import CODECS, BucketMemory, Codec
from unisono.codecs.int8 import ByteLevels
from unisono.comm.bucket import Bucket
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError, UserCodeError
from unisono.sync._drive import Drive
from unisono_contrib.codecs._marks.crc import SUM, checksum
from unisono_contrib.comm.threads import run
from unisono_contrib.verify.conformance.codec import NoisyGroup, of_wire

pytestmark = pytest.mark.timeout(60)

SHAPES = (Size((40, 24)), Size((24,)), Size((3, 5, 20)))
CHECKED = ("int8+crc", "int4+ef+crc", "sign+crc+ef", "qsgd:levels=1+crc", "topk:ratio=0.05,values=bf16+crc",
           "topk:kind=chunked+crc+ef21", "threshold:every=2+crc", "cast:fp8+crc", "chunktopk+crc+ef")  # fmt: skip


def summed(
    codec: Codec, rank: int, ranks: int, steps: int = 3, noisy: int | None = None
) -> list[torch.Tensor]:
    """The sums of some steps; noisy: number of the payload of rank 0 that rank 1 receives damaged."""
    group = Mesh(Shape(dp=ranks), rank, Recorder(rank), timedelta(seconds=60)).dp
    params = {f"layer{i}": nn.Parameter(torch.zeros(shape)) for i, shape in enumerate(SHAPES)}
    bucket, found = Bucket(list(params.values()), ranks), []
    drive = Drive(codec.bind(), NoisyGroup(group, 0, noisy if rank == 1 else None), params)  # type: ignore[arg-type]
    for step in range(steps):
        seed = torch.Generator().manual_seed(100 * step + rank)
        bucket.body.copy_(torch.randn(bucket.body.numel(), generator=seed))
        drive.begin(bucket)
        drive.finish()
        found.append(bucket.body.clone())
    return found


@pytest.mark.parametrize("text", CHECKED)
def test_a_flipped_bit_in_any_payload_is_found(text: str) -> None:
    assert list(of_wire(CODECS.read(text), SHAPES)) == []


@pytest.mark.parametrize("text", CHECKED)
def test_without_damage_it_sends_and_sums_the_same(text: str) -> None:
    checked, plain = (
        run(2, lambda rank, t=t: summed(CODECS.read(t), rank, 2)) for t in (text, text.replace("+crc", ""))
    )
    assert all(torch.equal(a, b) for a, b in zip(checked[0], plain[1], strict=True))


class Careless(ByteLevels):
    """Says that its payloads are checked, and looks at none."""

    name = "careless"
    checked = True


def test_the_suite_finds_a_codec_that_promises_and_does_not_look() -> None:
    faults = list(of_wire(Careless(), SHAPES))
    assert len(faults) == 2 and all("was taken" in fault for fault in faults)


def test_the_error_names_who_sent_what_and_when() -> None:
    with pytest.raises(UserCodeError) as caught:  # three payloads and three checksums a step
        run(2, lambda rank: summed(CODECS.read("int8+crc"), rank, 2, steps=3, noisy=2 * 6 + 1))
    error = caught.value
    assert (error.code, error.exit) == ("G03", 1)
    assert "in step 2 what replica 0 scattered to replica 1" in error.what
    assert "seen on replica 1" in error.where and "layer0, layer1, layer2" in error.where


@pytest.mark.parametrize(
    ("text", "place"), [("int8+crc", 0), ("topk:ratio=0.05+crc+ef", 1), ("threshold:every=2+crc", 1)]
)
def test_what_is_added_up_beside_a_codec_is_given_to_all_and_compared(text: str, place: int) -> None:
    """place: of the bias of layer1 among what rank 1 gets in a step."""
    with pytest.raises(UserCodeError, match="in step 1 what replica 0 gave to all arrived as other bytes"):
        inner = CODECS.read(text)
        first = len(inner.work(SHAPES, 4, 2).calls)  # of the second step
        run(2, lambda rank: summed(inner, rank, 2, noisy=first + place))


def test_every_bit_and_every_place_counts() -> None:
    memory = BucketMemory(names=("a", "b"), step=3)
    payload = torch.randint(0, 256, (48,), dtype=torch.uint8)
    right = checksum(payload, memory, 1)
    for byte in range(48):
        for bit in range(8):
            other = payload.clone()
            other[byte] ^= 1 << bit
            assert checksum(other, memory, 1) != right
    words = torch.arange(6)
    assert checksum(words, memory, 1) != checksum(words.flip(0), memory, 1)
    assert checksum(payload, memory, 2) != right
    assert checksum(payload, BucketMemory(names=("a", "c"), step=3), 1) != right
    assert checksum(payload, BucketMemory(names=("a", "b"), step=4), 1) != right
    assert checksum(payload.view(torch.bfloat16), memory, 1) == right


@pytest.mark.parametrize("text", ("plain", "cast", "powersgd:r=2", "randomk+ef", "block"))
def test_a_sum_has_no_checksum_and_the_refusal_says_why(text: str) -> None:
    with pytest.raises(UsageError, match="added up on the way") as caught:
        CODECS.read(f"{text}+crc")
    assert caught.value.code == "P23"


def test_twice_is_refused() -> None:
    with pytest.raises(UsageError, match="has checksums already"):
        CODECS.read("int8+crc+ef+crc")


@pytest.mark.parametrize("text", CHECKED)
def test_bytes_of_checksums_are_declared(text: str) -> None:
    shapes, dp = [tuple(shape) for shape in SHAPES], 4
    work, plain = (CODECS.read(t).work(shapes, 4, dp) for t in (text, text.replace("+crc", "")))
    whole = sum(call.nbytes * call.times for call in plain.calls if call.op == "all_reduce")
    times = sum(call.times for call in plain.calls)
    assert not [call for call in work.calls if call.op == "all_reduce"]
    assert work.sent - plain.sent == SUM * (dp - 1) * times + (dp / 2 - 1) * whole > 0
    assert work.moved > plain.moved and work.kept == plain.kept
