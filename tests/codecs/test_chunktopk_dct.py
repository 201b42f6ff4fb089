"""Frequencies of tiles: as many as elements, orthonormal, whatever the shape; and few of them say most."""

import pytest
import torch
from torch import Size

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs import CODECS
from unisono.spec.fidelity import Fidelity
from unisono_contrib.codecs.chunktopk.dct import basis, from_frequencies, to_frequencies

SHAPES = [Size(shape) for shape in [(64, 64), (7,), (0, 4), (), (131, 67), (128, 192), (2, 3, 5), (1,)]]
NUMEL = sum(shape.numel() for shape in SHAPES)


def test_coefficients_are_those_of_the_cosine_transform() -> None:
    fft = pytest.importorskip("scipy.fft")
    x = torch.randn(131, 67, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    got = to_frequencies(x.reshape(-1), [x.shape])
    tiles = [(slice(0, 64), slice(0, 64)), (slice(64, 128), slice(0, 64))]
    edges = [(slice(0, 64), slice(64, 67)), (slice(64, 128), slice(64, 67)), (slice(128, 131), slice(0, 64))]
    last = (slice(128, 131), slice(64, 67))
    want = [
        torch.from_numpy(fft.dctn(x[at].numpy(), norm="ortho")).reshape(-1) for at in [*tiles, *edges, last]
    ]
    torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_elements_come_back_and_lengths_are_kept(dtype: torch.dtype) -> None:
    x = drawn(NUMEL, 1)[0].to(dtype)
    there = to_frequencies(x, SHAPES)
    assert there.shape == x.shape and there.dtype == dtype
    near = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}[dtype]
    torch.testing.assert_close(from_frequencies(there, SHAPES), x, rtol=near, atol=near)
    assert float(there.double().norm() / x.double().norm()) == pytest.approx(1.0, abs=near)
    torch.testing.assert_close(basis(64) @ basis(64).T, torch.eye(64, dtype=torch.float64))


def test_a_smooth_matrix_is_in_few_of_them_at_any_shape() -> None:
    """A prime number of rows costs nothing: its edge has tiles of its own."""
    for rows, columns in ((128, 128), (127, 131)):
        down, across = torch.linspace(0, 3, rows).double()[:, None], torch.linspace(0, 2, columns).double()
        x = torch.sin(down) * torch.cos(across)
        shares = []
        for text in ("chunktopk:top=32,values=plain", "chunktopk:top=32,dct=true,values=plain"):
            meeting = Meeting(text, [(rows, columns)], replicas=1)
            shares.append(float((meeting.step([x.reshape(-1)]) - x.reshape(-1)).norm() / x.norm()))
        assert shares[1] < 0.02 < 0.9 < shares[0]


@pytest.mark.parametrize("around", ["", "+ef:beta=0.999"])
def test_all_frequencies_make_the_plain_sum(around: str) -> None:
    text = f"chunktopk:top=4096,dct=true,values=plain{around}"
    assert CODECS.read(text).fidelity is Fidelity.ROUNDING
    meeting = Meeting(text, SHAPES, replicas=3)
    for step in range(2):
        grads = drawn(meeting.numel, 3 * step, 3 * step + 1, 3 * step + 2)
        torch.testing.assert_close(meeting.step(grads), grads[0] + grads[1] + grads[2], rtol=0, atol=1e-12)


def test_what_was_not_sent_is_sent_later() -> None:
    meeting = Meeting("chunktopk:top=32,dct=true,values=plain+ef:beta=1", [(64, 64)], replicas=1)
    (x,) = drawn(4096, 1)
    total = sum(meeting.step([x.clone() if step == 0 else torch.zeros_like(x)]) for step in range(128))
    torch.testing.assert_close(total, x, rtol=0, atol=1e-10)
