"""Products of what passes linear layers: once each, whole rows however a layer is cut, sums that go to owners alone."""

from datetime import timedelta
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch import nn

from tests.train.small import recipe, started
from unisono.comm.mesh import Mesh, Shape
from unisono.observe.span import Recorder
from unisono.train.step.train_step import train_step
from unisono_contrib.train.optim._kfac_steps import KfacSteps
from unisono_contrib.train.step.layer_products import LayerProducts, LayerRows, LayerSums, PassedBy
from unisono_contrib.train.step.owners import Matrix, MatrixPart, Owners


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_a_backward_that_is_repeated_shows_a_layer_once() -> None:
    x, y = randn(3, 4), randn(3, 2, seed=1).requires_grad_()
    seen: list[torch.Tensor] = []
    out = PassedBy.apply(y, x, lambda rows, grad: seen.append(grad))
    for _ in range(2):
        torch.autograd.backward([out], [torch.ones_like(y)], retain_graph=True)
    assert len(seen) == 1 and y.grad is not None and torch.equal(y.grad, 2 * torch.ones_like(y))


@pytest.mark.parametrize("cut", ["", "left", "right"])
@pytest.mark.parametrize("widths", [(2, 3), (4, 1, 2)])
def test_each_row_is_multiplied_by_one_rank_with_all_of_its_columns(threads, cut: str, widths: Any) -> None:
    """Seven rows and uneven columns; sums of all ranks are those of the whole layer."""
    whole = {"left": randn(7, sum(widths)), "right": randn(7, sum(widths), seed=1)}
    ends = (0, *accumulate(widths))

    def body(ctx: Any) -> tuple[torch.Tensor, torch.Tensor, int]:
        mesh = Mesh(Shape(tp=len(widths)), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60))
        mine = slice(ends[ctx.rank], ends[ctx.rank + 1])
        held = {side: x[:, mine] if side == cut else x for side, x in whole.items()}
        sizes = dict.fromkeys(whole, sum(widths))
        layer = LayerSums(nn.Parameter(randn(1)), sizes, LayerRows(mesh.tp, cut, ends if cut else ()))
        layer.add(held["right"], held["left"])
        return layer.sums["left"], layer.sums["right"], layer.rows

    ranks = threads(body, len(widths))
    for i, x in enumerate(whole.values()):
        assert torch.allclose(torch.stack([rank[i] for rank in ranks]).sum(0), x.mT @ x, rtol=0, atol=1e-12)
    assert sum(rank[2] for rank in ranks) == 7


def test_what_is_packed_is_unpacked_and_nothing_is_learnt_where_no_row_passes() -> None:
    layer = LayerSums(nn.Parameter(randn(1)), {"left": 3, "right": 2}, None)
    assert layer.unpacked(layer.packed(), 5.0) == {} and layer.packed().numel() == layer.length
    x, grad = randn(4, 2), randn(4, 3, seed=1)
    layer.add(x, grad)
    means = layer.unpacked(layer.packed(), 5.0)
    assert torch.allclose(means["left"], grad.mT @ grad / 5) and torch.allclose(means["right"], x.mT @ x / 4)


def test_one_layer_of_three_ranks_is_added_up_by_its_owner_and_the_others_have_nothing(threads) -> None:
    def body(ctx: Any) -> dict[Any, dict[str, torch.Tensor]]:
        group = Mesh(Shape(dp=3), ctx.rank, Recorder(ctx.rank), timedelta(seconds=60)).dp
        weight = nn.Parameter(randn(3, 2))
        matrix = Matrix(weight, (3, 2), 1, (MatrixPart(0, (0, 0), (3, 2)),) * 3, frozenset({1}))
        products = LayerProducts({weight: LayerSums(weight, {"left": 3, "right": 2}, None)})
        products.begin(12.0)
        products.layers[weight].add(randn(4, 2, seed=ctx.rank), randn(4, 3, seed=9 + ctx.rank))
        return products.gather([weight], Owners(group, {weight: matrix}))

    ranks = threads(body, 3)
    assert ranks[0] == ranks[2] == {}
    ((means,),) = (list(ranks[1].values()),)
    x, y = (
        torch.cat([randn(4, 2, seed=i) for i in range(3)]),
        torch.cat([randn(4, 3, seed=9 + i) for i in range(3)]),
    )
    assert torch.allclose(means["right"], x.mT @ x / 12) and torch.allclose(means["left"], y.mT @ y / 12)


def test_sums_go_to_owners_alone_and_only_in_updates_that_observe(threads, tmp_path) -> None:
    """Of d_model 16: matrices 48 x 16, 16 x 16, 64 x 16 and 16 x 64 in each of two blocks. Both of a pair send what the
    other owns: together each triangle once, beside each gradient there and each step back."""
    told = recipe(tmp_path, optimizer="kfac", kfac_factor_interval=2)
    edges = [(48, 16), (16, 16), (64, 16), (16, 64)] * 2
    triangles = sum(1 + sum(n * (n + 1) // 2 for n in pair) for pair in edges)
    matrices = sum(a * b for a, b in edges)

    def body(ctx: Any) -> tuple[list[int], list[int]]:
        run, feed, _ = started(ctx, told, "dp=2 precision=fp64")
        (live,) = [part for part in run.update.optimizer.parts if isinstance(part, KfacSteps)]  # type: ignore[attr-defined]
        sent, taken = [], []
        for step in range(3):
            run.recorder.lap()
            train_step(run, feed.fetch(step, run.leaves))
            lap = run.recorder.lap()
            sent.append(lap.nbytes[("owners", "all_to_all")])
            taken.append(max(int(state["taken"]) for state in live.state.values() if "taken" in state))
        assert not any(
            module._forward_hooks for stage in run.local.stages.values() for module in stage.modules()
        )
        return sent, taken

    ranks = threads(body, 2)
    assert [rank[1] for rank in ranks] == [[1, 1, 2]] * 2
    totals = [sum(both) for both in zip(*(rank[0] for rank in ranks), strict=True)]
    # A gradient is sent by the replica of its owner to itself; a step goes to the other replica.
    assert totals == [8 * (triangles + matrices), 8 * matrices, 8 * (triangles + matrices)]
