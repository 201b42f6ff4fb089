"""Products of tensor parallelism in chunks of positions."""

import math
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.threads import prove
from tests.train.small import recipe
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.parallel.chunks import Chunks
from unisono.parallel.parts import ends_of
from unisono.parallel.tensor import ColumnLinear, RowLinear
from unisono.plan import Plan


@pytest.mark.parametrize(
    ("length", "ranks", "count"), [(12, 2, 2), (11, 3, 2), (7, 4, 5), (5, 4, 3), (8, 1, 3)]
)
def test_every_position_is_in_one_chunk(length: int, ranks: int, count: int) -> None:
    class Sized:
        size, index = ranks, 0

    chunks = Chunks(Sized(), length, count)  # type: ignore[arg-type]
    seen = [list(range(length))[place] for cut in chunks.cuts for place in chunks.places(cut)]
    assert sorted(at for some in seen for at in some) == list(range(length))
    assert len(chunks.cuts) == min(count, math.ceil(length / ranks))


def through(ctx: Any, count: int, length: int, half: bool) -> Any:
    """A column-wise and a row-wise layer of a small net, and what a step records."""
    recorder = Recorder(ctx.rank)
    recorder.keep = True
    mesh = Mesh(Shape(tp=ctx.world), ctx.rank, recorder, timedelta(seconds=60))
    torch.manual_seed(0)
    up: Any = nn.Linear(6, 9, dtype=torch.float64)
    down: Any = nn.Linear(9, 5, dtype=torch.float64)
    x = torch.randn(2, length, 6, dtype=torch.float64)
    grad = torch.randn(2, length, 5, dtype=torch.float64)
    ends = ends_of(length, ctx.world)
    own = slice(ends[ctx.rank], ends[ctx.rank + 1])
    layers: Any = [
        kind(one, mesh.tp, length, None, count) for kind, one in ((ColumnLinear, up), (RowLinear, down))
    ]
    first, last = layers
    here: Any = x[:, own].clone().requires_grad_()
    if half:
        first, last, here = first.float(), last.float(), here.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
        y = last(torch.tanh(first(here)))
    y.backward(grad[:, own].to(y.dtype))
    whole: Any = x.clone().requires_grad_()
    z = down(torch.tanh(up(whole)))
    z.backward(grad)
    found: list[Any] = [
        (y, z[:, own]),
        (here.grad, whole.grad[:, own]),
        (last.bias.grad, grad[:, own].sum((0, 1))),
    ]
    for mine, full in ((first, up), (last, down)):
        cut = mine.cuts["weight"]
        found.append((mine.weight.grad, full.weight.grad.narrow(cut.dim, cut.start, cut.size)))
    found.append((first.bias.grad, up.bias.grad.narrow(0, first.cuts["bias"].start, first.cuts["bias"].size)))
    return [(a.double() - b).abs().max().item() / b.abs().max().item() for a, b in found], recorder.take()


@pytest.mark.parametrize(("ranks", "length", "count"), [(2, 12, 2), (3, 11, 2), (4, 7, 3)])
def test_products_and_gradients_are_those_of_the_whole(
    threads: Any, ranks: int, length: int, count: int
) -> None:
    for errors, _ in threads(through, ranks, count=count, length=length, half=False):
        assert max(errors) < 1e-14
    for errors, _ in threads(through, ranks, count=count, length=length, half=True):
        assert max(errors) < 0.06


def test_the_next_chunk_is_on_its_way_while_one_is_multiplied(threads: Any) -> None:
    for _, spans in threads(through, 2, count=3, length=12, half=False):
        comm = [span for span in spans if span.kind == "comm" and span.tags.get("axis") == "tp"]
        hidden = [span for span in comm if not span.tags.get("exposed", True)]
        # Two layers, each there and back, three chunks each; both halves of every flight are recorded.
        assert len(hidden) == 12 and len(comm) == 24
        for op in ("all_gather", "all_to_all"):
            flights = sorted((span.start_ns, span.stop_ns) for span in hidden if span.tags["op"] == op)
            ahead = sum(later < end for (_, end), (later, _) in pairwise(flights))
            assert ahead >= 4, (
                op,
                flights,
            )  # of each three, the second and the third leave before the one before ends


@pytest.mark.parametrize("plan", ["tp=2:chunks=2", "tp=3:chunks=2 recompute=full"])
def test_it_writes_and_reads_itself(plan: str) -> None:
    made = Plan.parse(plan)
    assert made.chunks == 2 and Plan.parse(str(made)) == made and str(made).startswith("tp=")


@pytest.mark.parametrize(
    ("plan", "said"),
    [("tp=1:chunks=2", "gathers nothing"), ("tp=2x2:chunks=2", "rows and columns"),
     ("dp=2 tp=2:chunks=2 sync=canonical:shards=2", "one product at a time")],
)  # fmt: skip
def test_where_nothing_is_gathered_it_is_refused(tmp_path: Path, plan: str, said: str) -> None:
    problems = Plan.parse(plan).check(recipe(tmp_path))
    assert any(one.code == "P16" and said in one.what for one in problems), problems


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_plans_in_chunks_are_proven(tmp_path: Path) -> None:
    told = recipe(tmp_path, global_batch=4)
    model = {"context": 11, "n_head": 4, "n_kv_head": 2, "d_model": 20}
    odd = told.model_copy(update={"model": told.model.model_copy(update=model)})
    even = told.model_copy(update={"model": told.model.model_copy(update={**model, "context": 12})})
    plans = ["tp=2:chunks=2", "tp=3:chunks=2", "pp=2 tp=2:chunks=3", "shard=2 tp=2:chunks=2 recompute=full"]
    proofs = prove(odd, [Plan.parse(text) for text in plans], steps=2)
    proofs += prove(even, [Plan.parse("tp=2:chunks=2 cp=2")], steps=2)
    for proof in proofs:
        assert proof.passed and proof.verdict == "proven" and proof.fidelity == "ROUNDING", proof
