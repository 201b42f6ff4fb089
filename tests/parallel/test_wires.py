"""Eight bits on `shard`: how far numbers are off, how few bytes are sent, and what proofs say of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.threads import prove
from tests.train.small import recipe, started
from unisono.parallel.wires import EightBits, segment_of, through_eight_bits
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.plan.options import BLOCK
from unisono.spec.fidelity import Fidelity


@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 5),
    width=st.integers(1, 3 * BLOCK),
    seed=st.integers(0, 9),
    size=st.sampled_from([1e-6, 1.0]),
)
def test_no_entry_is_off_by_more_than_half_a_level(rows: int, width: int, seed: int, size: float) -> None:
    x = torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * size
    got = through_eight_bits(x)
    for row, rounded in zip(x, got, strict=True):
        for block, seen in zip(row.split(BLOCK), rounded.split(BLOCK), strict=True):
            assert (seen - block).abs().max() <= block.abs().max() / 254 * (1 + 1e-6)
    assert torch.equal(through_eight_bits(x[1:]), got[1:])  # whoever holds a row


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_buffer_comes_back_segment_by_segment(dtype: torch.dtype) -> None:
    shapes = [(4, 100), (6,), (2, 3, 50), ()]
    parts = [torch.randn(shape, dtype=dtype) for shape in shapes]
    wire = EightBits(tuple(segment_of(shape, 1) for shape in shapes))
    flat = torch.cat([p.flatten() for p in parts]).view(1, -1).repeat(2, 1)
    code = wire.encode(flat)
    assert code.dtype == torch.uint8 and code.shape == (2, wire.nbytes(dtype.itemsize))
    assert wire.numel == flat.shape[1]
    back = wire.decode(code, dtype)
    for i, part in enumerate(back[0].split([p.numel() for p in parts])):
        assert torch.equal(part, through_eight_bits(parts[i]).flatten())
    assert torch.equal(back[0], back[1])
    assert torch.equal(back[0][400:406], parts[1])  # vectors travel as they are


def test_an_infinity_arrives_as_none_that_is_finite() -> None:
    x = torch.ones(1, BLOCK)
    for bad in (float("inf"), float("nan")):
        x[0, 3] = bad
        assert not through_eight_bits(x).isfinite().all()
    assert torch.equal(through_eight_bits(torch.zeros(2, 5)), torch.zeros(2, 5))


def sent(ctx: Any, folder: str, plan: str) -> Any:
    """Bytes of a step on `shard`, by operation, and spans of gathers that others work beside."""
    from unisono.train.step.train_step import train_step

    run, feed, _ = started(ctx, recipe(Path(folder), dtype="float32"), plan)
    train_step(run, feed.fetch(0, run.leaves))
    run.recorder.lap()
    run.recorder.keep = True
    report = train_step(run, feed.fetch(1, run.leaves))
    spans = [
        s for s in run.recorder.take() if s.tags.get("op") == "all_gather" and not s.tags.get("exposed", True)
    ]
    return report.loss, dict(run.recorder.lap().nbytes), [(s.start_ns, s.stop_ns) for s in spans]


def test_fewer_bytes_are_sent(threads: Any, tmp_path: Path) -> None:
    def bytes_of(zero: str) -> tuple[int, int]:
        (_, nbytes, _), *_ = threads(sent, 2, folder=str(tmp_path), plan=f"shard=2 zero={zero}")
        scattered = nbytes.get(("shard", "reduce_scatter"), 0) + nbytes.get(("shard", "all_to_all"), 0)
        return nbytes["shard", "all_gather"], scattered

    plain, both, gathered, scattered = map(bytes_of, ("3", "3:wire=int8", "3:gather=int8", "3:scatter=int8"))
    assert both == (gathered[0], scattered[1])
    assert (gathered[1], scattered[0]) == (plain[1], plain[0])
    for low, high in zip(both, plain, strict=True):
        # Rows of 16 have one scale: 20 bytes in place of 64; vectors stay.
        assert 16 / 64 < low / high < 0.45


def under_way(spans: list[tuple[int, int]]) -> int:
    """The most that were under way together."""
    return max((sum(a <= start < b for a, b in spans) for start, _ in spans), default=0)


def test_what_is_prefetched_is_under_way_while_others_compute(threads: Any, tmp_path: Path) -> None:
    def play(zero: str) -> tuple[Any, Any, list[tuple[int, int]]]:
        return threads(sent, 2, folder=str(tmp_path), plan=f"shard=2 zero={zero}")[0]

    loss, nbytes, none = play("3")
    assert none == []
    for ahead in (1, 2):
        same, bytes_ahead, spans = play(f"3:prefetch={ahead}")
        assert same == loss and bytes_ahead == nbytes
        assert under_way(spans) == ahead


def test_checks_know_what_cannot_be(tmp_path: Path) -> None:
    def codes(text: str) -> set[str]:
        return {problem.code for problem in Plan.parse(text).check(recipe(tmp_path, dtype="float32"))}

    assert codes("zero=3:prefetch=2") == codes("zero=2:scatter=int8") == {"P16"}
    assert codes("shard=2 zero=2:prefetch=1") == codes("shard=2 tp=2 zero=3:gather=int8") == {"P16"}
    assert codes("shard=2 zero=3:wire=int8 sync=canonical") == {"P16"}
    assert not codes("shard=2 zero=3:wire=int8,prefetch=2") and not codes("zero=3:gather=int8")
    assert fidelity_of(Plan.parse("shard=2 zero=3:prefetch=2")) is Fidelity.ROUNDING
    assert fidelity_of(Plan.parse("shard=2 zero=3:wire=int8")) is Fidelity.LOSSY


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_with_eight_bits_are_proven(tmp_path: Path) -> None:
    plans = ["shard=2 zero=3:gather=int8", "dp=2 shard=2 zero=3:wire=int8", "shard=2 pp=2 zero=2:wire=int8",
             "shard=2 tp=2 zero=3:scatter=int8,prefetch=1"]  # fmt: skip
    given = recipe(tmp_path, global_batch=4, micro_batch=1)
    gathered, *scattered = prove(given, [Plan.parse(text) for text in plans], steps=2)
    assert gathered.passed and gathered.fidelity == "LOSSY" and gathered.max_rel_err["grad"] < 1e-12, gathered
    for proof in scattered:
        assert proof.passed and 1e-4 < proof.max_rel_err["grad"] < proof.bound < 0.02, proof
