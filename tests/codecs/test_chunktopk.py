"""The largest of each chunk in two bits: what is chosen, coded and added up, and how few bytes it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.meeting import Meeting, drawn, same
from unisono.codecs import CODECS
from unisono.spec.errors import UsageError
from unisono.spec.fidelity import Fidelity
from unisono_contrib.codecs.chunktopk import ChunkTopK, rice_parameter, unary_bits
from unisono_contrib.codecs.chunktopk.gaps import (
    ChunkCut,
    from_packed,
    from_unary,
    gaps_of,
    packed,
    padded,
    places_of,
    unary,
)
from unisono_contrib.codecs.chunktopk.levels import from_levels, two_levels
from unisono_contrib.codecs.chunktopk.live import largest_of_rows

SHAPES = [(30, 40), (7,), (0, 4), (), (100, 97), (1,)]


def cut_of(*lengths_and_counts: tuple[int, int]) -> ChunkCut:
    """Chunks of these lengths, each of which sends so many elements."""
    lengths, counts = (torch.tensor(column) for column in zip(*lengths_and_counts, strict=True))
    chunk_of = torch.arange(len(counts)).repeat_interleave(counts)
    return ChunkCut(lengths.cumsum(0) - lengths, counts.cumsum(0) - counts, counts, chunk_of)


def member(text: str) -> ChunkTopK:
    codec = CODECS.read(text)
    assert isinstance(codec, ChunkTopK)
    return codec


@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 1)), min_size=1, max_size=6), st.integers(0, 99))
@settings(max_examples=30, deadline=None)
def test_places_come_back_from_their_gaps(chunks: list[tuple[int, float]], seed: int) -> None:
    sizes = [(length, max(1, int(share * length))) for length, share in chunks]
    cut, lot = cut_of(*sizes), torch.Generator().manual_seed(seed)
    parts = [torch.randperm(n, generator=lot)[:kept].sort().values for n, kept in sizes]
    places = torch.cat([part + begin for part, begin in zip(parts, cut.begins, strict=True)])
    gaps = gaps_of(places, cut)
    assert bool((gaps >= 0).all())
    for low in (0, 1, 5, 12):
        quotients = from_unary(unary(gaps >> low))
        lows = from_packed(packed(padded(gaps), low), low, len(padded(gaps)))[: len(gaps)]
        assert torch.equal(places_of((quotients << low) + lows, cut), places)


def test_the_parameter_of_the_rice_code_follows_density() -> None:
    assert rice_parameter(4096, 64) == 5
    assert rice_parameter(4096, 4096) == 0
    assert rice_parameter(4096, 16) == 7


@pytest.mark.parametrize(("length", "kept"), [(4096, 64), (4096, 41), (1024, 512), (300, 5), (64, 64)])
def test_the_price_of_gaps_is_what_they_take_where_nothing_is_preferred(length: int, kept: int) -> None:
    chunks, low = 400, rice_parameter(length, kept)
    places = torch.rand(chunks, length, generator=torch.Generator().manual_seed(1)).topk(kept).indices
    flat = (places.sort(1).values + torch.arange(0, chunks * length, length).unsqueeze(1)).view(-1)
    gaps = gaps_of(flat, cut_of(*[(length, kept)] * chunks))
    assert unary(gaps >> low).nbytes * 8 == pytest.approx(chunks * unary_bits(length, kept, low), rel=0.02)


@given(st.integers(0, 13), st.integers(0, 99))
@settings(max_examples=20, deadline=None)
def test_numbers_of_any_width_come_back(bits: int, seed: int) -> None:
    x = torch.randint(1 << bits, (192,), generator=torch.Generator().manual_seed(seed))
    codes = packed(x, bits)
    assert codes.nbytes == 192 * bits // 8 and torch.equal(from_packed(codes, bits, 192), x)


@pytest.mark.parametrize("kept", [1, 5, 64, 512, 4096])
@pytest.mark.parametrize("odd", ["", "ties", "nan", "zeros"])
def test_the_largest_of_each_row_are_found_by_halves(kept: int, odd: str) -> None:
    rows = torch.randn(7, 4096, generator=torch.Generator().manual_seed(kept)).abs()
    rows = (rows * 4).round() if odd == "ties" else rows * (rows > 3) if odd == "zeros" else rows
    if odd == "nan":
        rows[3, 17] = torch.nan
    indices = largest_of_rows(rows, kept)
    assert all(len(row.unique()) == kept for row in indices)
    assert same(rows.gather(1, indices).sort(1).values, rows.topk(kept).values.flip(1))


def largest_of(x: torch.Tensor, codec: ChunkTopK) -> torch.Tensor:
    """x [n] with zeros but for the largest of each chunk, by sorting all."""
    out = []
    for part in x.split(codec.chunk):
        order = part.abs().sort(descending=True, stable=True).indices[: codec.kept(len(part))]
        out.append(torch.zeros_like(part).index_copy_(0, order, part[order]))
    return torch.cat(out) if out else x


@pytest.mark.parametrize("options", ["top=64", "chunk=512,top=7", "chunk=100,top=100", "chunk=64,top=1"])
def test_each_chunk_of_a_parameter_sends_its_largest(options: str) -> None:
    meeting, codec = (
        Meeting(f"chunktopk:{options},values=plain", SHAPES, replicas=3),
        member(f"chunktopk:{options}"),
    )
    grads, sizes = drawn(meeting.numel, 1, 2, 3), [torch.Size(shape).numel() for shape in SHAPES]
    want = [torch.cat([largest_of(part, codec) for part in grad.split(sizes)]) for grad in grads]
    assert torch.equal(meeting.step(grads), want[0] + want[1] + want[2])
    assert all(torch.equal(a, b) for a, b in zip(meeting.decoded, want, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("values", ["2bit", "bf16", "plain"])
def test_what_each_sends_adds_up_in_the_order_of_replicas(values: str, dtype: torch.dtype) -> None:
    meeting = Meeting(f"chunktopk:values={values}", SHAPES, replicas=3, dtype=dtype)
    total = meeting.step([x.to(dtype) for x in drawn(meeting.numel, 1, 2, 3)])
    assert total.dtype == dtype and total.isfinite().all() and total.count_nonzero() >= 3
    first, second, third = meeting.decoded
    assert torch.equal(total, first + second + third)


@pytest.mark.parametrize("around", ["", "+ef:beta=0", "+ef:beta=0.95", "+ef"])
def test_all_elements_as_they_are_make_the_plain_sum(around: str) -> None:
    text = f"chunktopk:top=4096,values=plain{around}"
    meeting = Meeting(text, [(3, 4096), (50, 20), (9,)], replicas=3)
    assert CODECS.read(text).fidelity is Fidelity.ROUNDING
    for step in range(3):
        grads = drawn(meeting.numel, 3 * step, 3 * step + 1, 3 * step + 2)
        assert torch.equal(meeting.step(grads), grads[0] + grads[1] + grads[2])
        assert all(not memory["left"].any() for memory in meeting.memories if around)


def test_an_exchange_of_sparse_loco_sends_a_two_hundredth_of_fp32() -> None:
    shapes = [(512, 512), (512,), (2048, 512), (2048,), (256, 512)]
    meeting = Meeting("chunktopk+ef:beta=0.95", shapes, dtype=torch.float32)
    for step in range(3):
        meeting.step([x.float() for x in drawn(meeting.numel, 2 * step, 2 * step + 1)])
        sent = sum(nbytes for _, nbytes in meeting.requests[-1])
        assert [op for op, _ in meeting.requests[-1]] == ["Gather", "Gather"]
        assert 200 * sent <= 4 * meeting.numel
    declared = CODECS.read("chunktopk").work(shapes, 4, 2).sent
    assert declared == pytest.approx(sent, rel=0.01)


def test_no_order_of_places_takes_much_more_bytes() -> None:
    """Gaps of one chunk skip 4,032 elements at most, so their unary parts have 64 + 126 bits at most."""
    x = torch.zeros(4096)
    x[::64] = 1.0  # gaps of 63; and of 32 and 95 in turns, as long as there are
    hard = torch.zeros(4096)
    hard[torch.tensor([33 * i for i in range(62)] + [4094, 4095])] = 1.0
    for grad in (x, hard, drawn(4096, 1)[0].float()):
        meeting = Meeting("chunktopk", [(4096,)], replicas=1, dtype=torch.float32)
        meeting.step([grad])
        assert meeting.requests[0][1][1] <= (64 + 126 + 63) // 64 * 8


def test_replicas_whose_gaps_take_more_or_fewer_bytes_meet() -> None:
    meeting = Meeting("chunktopk:values=plain", [(16, 4096)], replicas=2)
    near = torch.zeros(16, 4096).double()
    near[:, :64] = 1.0
    far = drawn(meeting.numel, 1)[0]
    codec = member("chunktopk")
    assert torch.equal(meeting.step([near.view(-1), far]), near.view(-1) + largest_of(far, codec))


def test_two_clusters_are_two_levels() -> None:
    cut = cut_of((8, 4), (8, 3), (8, 1), (8, 2), (8, 2))
    values = torch.tensor([-1.0, 10, 1, -10, 0, -4, 4, 0.3, 0, 0, 2, -200])
    back = from_levels(*two_levels(values, cut), cut)
    assert torch.allclose(back, values, rtol=0.02)
    assert torch.equal(back == 0, values == 0)  # zeros stay zeros, beside what is none


def least_error(values: torch.Tensor) -> torch.Tensor:
    """values [chunks, n], not negative → norm [chunks] of what the best two levels leave, by trying every cut."""
    x, n = values.double().sort(1).values, torch.arange(1, values.shape[1] + 1)
    sums, squares = x.cumsum(1), (x * x).cumsum(1)
    above, rest = sums[:, -1:] - sums, (values.shape[1] - n).clamp(min=1)
    return (squares[:, -1:] - sums**2 / n - above**2 / rest).amin(1).clamp(min=0).sqrt()


@pytest.mark.parametrize("power", [1, 3, 5])
def test_levels_leave_hardly_more_than_the_best_ones(power: int) -> None:
    """Of 512 chunks of normal values and of their powers, whose largest elements differ more."""
    normal = torch.randn(512, 4096, generator=torch.Generator().manual_seed(1))
    rows = (normal**power).abs().topk(64).values
    cut = cut_of(*[(4096, 64)] * 512)
    off = (from_levels(*two_levels(rows.view(-1), cut), cut).view_as(rows) - rows).norm(dim=1)
    assert (off / least_error(rows)).mean() < 1.08
    assert bool((off < rows.norm(dim=1)).all())


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("values", ["2bit", "bf16", "plain"])
def test_what_is_not_finite_reaches_everybody(values: str, bad: float) -> None:
    meeting = Meeting(f"chunktopk:values={values}", SHAPES)
    grads = drawn(meeting.numel, 1, 2)
    for place in (3, 1203, meeting.numel - 1):
        grads[1][place] = bad
        assert not meeting.step(grads)[place].isfinite()


def test_what_is_left_decays() -> None:
    beta, meeting = 0.5, Meeting("chunktopk:chunk=64,top=4+ef:beta=0.5", [(8, 64)])
    left = [torch.zeros(meeting.numel).double() for _ in range(2)]
    bare = Meeting("chunktopk:chunk=64,top=4", [(8, 64)], replicas=1)
    for step in range(4):
        grads = drawn(meeting.numel, 2 * step, 2 * step + 1)
        meeting.step(grads)
        for mine, grad, memory in zip(left, grads, meeting.memories, strict=True):
            mine.mul_(beta).add_(grad)
            mine.sub_(bare.step([mine]))
            assert torch.equal(memory["left"], mine), step


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("chunktopk:top=5000", "no more than the 4096 elements of a chunk can be sent"),
        ("chunktopk:chunk=64,top=65", "no more than the 64"),
        ("chunktopk:values=3bit", "values"),
        ("chunktopk+ef:beta=1.5", "beta"),
        ("chunktopk+ef:beta=0.95+ef", "two would count everything twice"),
        ("topk+ef:beta=0.5+mc", "another memory"),
    ],
)
def test_what_means_nothing_is_refused_by_name(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        CODECS.read(text)


def test_small_parameters_travel_as_they_are_where_that_is_said() -> None:
    meeting = Meeting("chunktopk:dense=256+ef:beta=0.95", [(300,), (3, 5), (64, 64)], replicas=3)
    grads = drawn(meeting.numel, 1, 2, 3)
    total, whole = meeting.step(grads), grads[0] + grads[1] + grads[2]
    torch.testing.assert_close(total[:315], whole[:315])
    assert [op for op, _ in meeting.requests[0]] == ["Sum", "Gather", "Gather"]
