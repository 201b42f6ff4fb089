"""Codes of a few bits: what is packed comes back, an error is as small as its level, bits do not depend on where
numbers lie."""

import pytest
import torch

from tests.codecs.meeting import Meeting
from unisono.codecs import CODECS
from unisono.codecs._packing import (
    CHUNK,
    FloatPacker,
    LevelPacker,
    Packer,
    SignPacker,
    pack,
    unpack,
    unpacked,
)

pytestmark = pytest.mark.timeout(60)

PACKERS = {
    "int8": (LevelPacker(127, 8), 8, 0.5 / 127),
    "int4": (LevelPacker(7, 4), 4, 0.5 / 7),
    "two bits": (LevelPacker(1, 2), 2, 0.5),
    "fp8": (FloatPacker(torch.float8_e4m3fn), 8, 2.0**-4),
}


def encoded(packer: Packer, x: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of x [rows, block]."""
    codes = torch.empty(len(x), x.shape[1] * bits // 8, dtype=torch.uint8)
    scales = torch.empty(len(x), dtype=torch.bfloat16)
    packer.encode(x, codes, scales, torch.empty_like(x), None)
    return codes, scales


def decoded(packer: Packer, x: torch.Tensor, bits: int) -> torch.Tensor:
    out = torch.empty_like(x)
    packer.decode(*encoded(packer, x, bits), out)
    return out


def drawn(rows: int, block: int) -> torch.Tensor:
    """Rows of very different sizes."""
    x = torch.randn(rows, block, generator=torch.Generator().manual_seed(rows))
    return x * torch.logspace(-30, 30, rows)[:, None]


@pytest.mark.parametrize("bits", (1, 2, 4))
@pytest.mark.parametrize(("rows", "n"), ((1, 64), (3, 128), (2, 4096)))
def test_what_is_packed_comes_back_from_the_place_that_is_told(bits: int, rows: int, n: int) -> None:
    small = torch.randint(0, 1 << bits, (rows, n), dtype=torch.uint8)
    codes, out = torch.empty(rows, n * bits // 8, dtype=torch.uint8), torch.empty(rows, n)
    pack(small, codes, bits)
    assert torch.equal(unpacked(codes, bits), small)
    unpack(codes, out, bits)
    assert torch.equal(out, small.float())
    planes = small.view(rows, 8 // bits, -1).int()
    shifted = [planes[:, k] << k * bits for k in range(8 // bits)]
    assert torch.equal(codes.int(), torch.stack(shifted).sum(0, dtype=torch.int32))


@pytest.mark.parametrize("name", PACKERS)
def test_an_error_is_at_most_half_a_level_of_the_blocks_largest(name: str) -> None:
    packer, bits, room = PACKERS[name]
    x = drawn(40, 192)
    most = x.abs().amax(1, keepdim=True)
    assert ((decoded(packer, x, bits) - x).abs() <= 1.02 * room * most).all()


def test_signs_have_the_mean_magnitude_of_their_block() -> None:
    x = drawn(40, 192)
    out, mean = decoded(SignPacker(), x, 1), x.abs().mean(1, keepdim=True)
    assert torch.equal(out < 0, x < 0)
    assert ((out.abs() - mean).abs() <= 2.0**-8 * mean).all()


@pytest.mark.parametrize("name", (*PACKERS, "sign"))
def test_zeros_stay_zeros_and_what_is_not_finite_arrives_in_its_block_alone(name: str) -> None:
    packer, bits, _ = PACKERS.get(name, (SignPacker(), 1, 0.0))
    x = drawn(4, 64)
    x[0], x[1, 5], x[2, 63] = 0.0, torch.nan, -torch.inf
    out = decoded(packer, x, bits)
    assert not out[0].any() and out[3].isfinite().all()
    assert not out[1].isfinite().any() or out[1, 5].isnan()
    assert not out[2].isfinite().all()


@pytest.mark.parametrize("name", (*PACKERS, "sign"))
def test_bits_do_not_depend_on_where_numbers_lie(name: str) -> None:
    packer, bits, _ = PACKERS.get(name, (SignPacker(), 1, 0.0))
    x = drawn(8, 320)
    for off in (1, 3):
        moved = torch.empty(x.numel() + off)[off:].view_as(x).copy_(x)
        assert all(
            torch.equal(a, b)
            for a, b in zip(encoded(packer, x, bits), encoded(packer, moved, bits), strict=True)
        )


@pytest.mark.parametrize("text", ("int8", "int4", "sign", "qsgd", "qsgd:levels=1", "cast:fp8"))
def test_sums_of_many_chunks_and_of_a_last_small_one_keep_to_the_bound(text: str) -> None:
    shape = (5, (2 * CHUNK + 3 * 1024) // 4)
    meeting, member = Meeting(text, [shape], replicas=2, dtype=torch.float32), CODECS.read(text)
    grads = [torch.randn(meeting.numel, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2)]
    total, plain = meeting.step(grads), grads[0] + grads[1]
    assert (total - plain).norm() <= member.error * plain.norm()
    assert torch.allclose(
        meeting.decoded[0] + meeting.decoded[1], total, atol=1e-5 * float(total.abs().max())
    )
