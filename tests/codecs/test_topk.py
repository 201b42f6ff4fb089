"""Top-k: exactly the largest of each parameter, whichever way they are found, in payloads of one length."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.codecs.meeting import Meeting, drawn
from unisono.codecs import CODECS
from unisono.codecs._parcel import CHUNK, SPAN, Parcel, kept_of
from unisono.codecs._sparse import packed, sampled, unpacked

SHAPES = [(30, 40), (7,), (0, 4), (1,), (5, 5, 2)]


def largest_of(x: torch.Tensor, kept: int) -> torch.Tensor:
    """x [n] with zeros but for its `kept` largest magnitudes, by sorting all."""
    order = x.abs().sort(descending=True, stable=True).indices[:kept]
    return torch.zeros_like(x).index_copy_(0, order, x[order])


@pytest.mark.parametrize("kind", ["exact", "sampled", "chunked"])
@pytest.mark.parametrize("ratio", [0.01, 0.3, 1.0])
def test_each_parameter_keeps_exactly_its_largest(kind: str, ratio: float) -> None:
    meeting = Meeting(f"topk:ratio={ratio},kind={kind},dense=0", SHAPES, replicas=3)
    grads = drawn(meeting.numel, 1, 2, 3)
    total = meeting.step(grads)
    want = []
    for grad in grads:
        parts = grad.split([torch.Size(shape).numel() for shape in SHAPES])
        want.append(torch.cat([largest_of(part, kept_of(part.numel(), ratio)) for part in parts]))
    assert torch.equal(total, want[0] + want[1] + want[2])
    assert all(torch.equal(a, b) for a, b in zip(meeting.decoded, want, strict=True))


def test_a_chunk_keeps_its_own_largest() -> None:
    meeting = Meeting("topk:ratio=0.01,kind=chunked,dense=0", [(3 * CHUNK + 100,), (50,)], replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    total = meeting.step(grads)
    sizes = [CHUNK, CHUNK, CHUNK, 100, 50]
    want = [torch.cat([largest_of(p, kept_of(p.numel(), 0.01)) for p in g.split(sizes)]) for g in grads]
    assert torch.equal(total, want[0] + want[1])


HARD = {
    "normal": lambda n: drawn(n, 5)[0],
    "heavy tail": lambda n: drawn(n, 5)[0] ** 5,
    "small beside one": lambda n: torch.cat([drawn(n - 1, 5)[0] * 1e-30, torch.ones(1).double()]),
    "all alike": lambda n: torch.full((n,), -2.0).double(),
    "mostly zeros": lambda n: drawn(n, 5)[0] * (torch.arange(n) % 5000 == 17),
    "zeros": lambda n: torch.zeros(n).double(),
    "large at the end alone": lambda n: drawn(n, 5)[0] * (torch.arange(n) > n - 3000),
    "every column of one width": lambda n: drawn(n, 5)[0] * (torch.arange(n) % 64 == 0),
}


@pytest.mark.parametrize("name", HARD)
def test_a_threshold_by_samples_finds_the_same_magnitudes(name: str) -> None:
    x = HARD[name](3 * SPAN + 11)
    kept = kept_of(x.numel(), 0.01)
    places, count = sampled(x, kept)
    assert len(places) == kept and bool((places.diff() >= 0).all())
    assert len(places[:count].unique()) == count
    found = x[places].abs()
    found[count:] = 0
    assert torch.equal(found.sort().values, x.abs().topk(kept).values.flip(0))


@pytest.mark.parametrize("kind", ["exact", "sampled", "chunked"])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_reaches_everybody(kind: str, bad: float) -> None:
    meeting = Meeting(f"topk:ratio=0.001,kind={kind}", [(400, 300)], replicas=2)
    grads = drawn(meeting.numel, 1, 2)
    grads[1][777] = bad
    assert not meeting.step(grads)[777].isfinite()


@given(st.integers(1, 3 * SPAN), st.floats(0.0001, 1.0), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_what_is_packed_is_unpacked(numel: int, ratio: float, seed: int) -> None:
    kept = kept_of(numel, ratio)
    lot = torch.Generator().manual_seed(seed)
    places = torch.randperm(numel, generator=lot)[:kept].sort().values
    values = torch.randn(kept, generator=lot)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        parcel = Parcel(numel, kept, dtype.itemsize)
        row = packed(values.to(dtype), places, parcel)
        assert row.nbytes == parcel.nbytes < kept * (dtype.itemsize + 2) + 4 * (numel // SPAN + 1) + 24
        again, where = unpacked(row, parcel, dtype)
        assert torch.equal(again, values.to(dtype)) and torch.equal(where, places)


def test_values_in_two_bytes_halve_what_is_sent_and_round_it() -> None:
    meeting = Meeting("topk:ratio=0.05,values=bf16", [(100, 300)], dtype=torch.float32)
    grads = [grad.float() for grad in drawn(meeting.numel, 1, 2)]
    total = meeting.step(grads)
    kept = kept_of(meeting.numel, 0.05)
    assert meeting.requests == [[("Gather", Parcel(meeting.numel, kept, 2).nbytes)]]
    want = [largest_of(grad, kept).bfloat16().float() for grad in grads]
    assert torch.equal(total, want[0] + want[1]) and torch.equal(meeting.decoded[1], want[1])


@pytest.mark.parametrize("kind", ["exact", "sampled", "chunked"])
def test_norms_and_biases_are_a_sum_beside_the_gather(kind: str) -> None:
    shapes = [(40,), (100, 60), (30,), (20, 4)]
    meeting = Meeting(f"topk:ratio=0.05,kind={kind}+ef", shapes, replicas=3)
    grads = drawn(meeting.numel, 1, 2, 3)
    total = meeting.step(grads)
    assert [op for op, _ in meeting.requests[0]] == ["Gather", "Sum"]
    assert meeting.requests[0][1] == ("Sum", (40 + 30 + 80) * 8)
    for flat in (total, *(memory["left"] for memory in meeting.memories)):
        few = flat[40:6040]
        assert 0 < few.count_nonzero() < 6000
    whole = sum(grads)
    assert torch.equal(total[:40], whole[:40]) and torch.equal(total[6040:], whole[6040:])
    assert all(memory["left"][:40].count_nonzero() == 0 for memory in meeting.memories)
    declared = {call.op: call.nbytes for call in CODECS.read(meeting.text).work(shapes, 8, 3).calls}
    gathered = meeting.requests[0][0][1]
    assert declared == {"all_gather": 2 * gathered, "all_reduce": 2 * 150 * 8 * 2 // 3}


def test_a_bucket_of_norms_alone_is_a_sum() -> None:
    meeting = Meeting("topk+ef", [(40,), (30,)])
    grads = drawn(meeting.numel, 1, 2)
    assert torch.equal(meeting.step(grads), grads[0] + grads[1])
    assert [op for op, _ in meeting.requests[0]] == ["Sum"]
    assert [call.op for call in CODECS.read("topk").work([(40,), (30,)], 8, 2).calls] == ["all_reduce"]


def test_a_hundredth_in_chunks_costs_four_bytes_an_element_that_is_sent() -> None:
    shapes = [(1024, 1024), (4096, 1024), (1024,)]
    work = CODECS.read("topk:ratio=0.01,kind=chunked,values=bf16").work(shapes, 4, 4)
    plain = CODECS.read("plain").work(shapes, 4, 4)
    assert work.sent / plain.sent < 0.0205


@pytest.mark.parametrize(
    "text", ["topk", "topk:kind=chunked", "threshold", "randomk", "block", "block:kind=rows"]
)
def test_norms_biases_and_small_tensors_go_whole(text: str) -> None:
    shapes = [(50, 40), (40,), (3, 5), (0, 4), (5000,)]
    meeting = Meeting(text, shapes, replicas=2)
    for step in range(2):
        grads = drawn(meeting.numel, step, step + 10)
        total, whole = meeting.step(grads), grads[0] + grads[1]
        assert torch.allclose(total[2000:], whole[2000:], rtol=1e-15, atol=1e-15)
        assert total[:2000].count_nonzero() <= 400
