"""adasum: replicas' gradients merge tensor by tensor, pair by pair."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.outer import distance, flat, gradients_of, play, recipe_of
from unisono.config import resolve
from unisono.spec.errors import ConfigProblems, UsageError
from unisono_contrib.sync._adasum import merge_weights

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def written_out(gradients: list[Tensor]) -> Tensor:
    """The paper's formula on vectors."""
    while len(gradients) > 1:
        merged = []
        for a, b in zip(gradients[::2], gradients[1::2], strict=False):
            dot = (a * b).sum()
            merged.append((1 - dot / (2 * (a * a).sum())) * a + (1 - dot / (2 * (b * b).sum())) * b)
        gradients = [*merged, *gradients[2 * len(merged) :]]
    return gradients[0]


def merged(rows: Tensor) -> Tensor:
    return (merge_weights((rows @ rows.T)[None]) @ rows)[0]


@pytest.mark.parametrize("n", range(2, 10))
def test_weights_from_dot_products_are_the_formula_on_vectors(n: int) -> None:
    rows = torch.randn(n, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) + 0.5
    torch.testing.assert_close(merged(rows), written_out(list(rows)), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("n", [2, 3, 4, 5, 8])
def test_equal_gradients_give_their_mean_and_orthogonal_ones_their_sum(n: int) -> None:
    one = torch.linspace(-1, 2, 40, dtype=torch.float64)
    torch.testing.assert_close(merged(one.expand(n, 40)), one, rtol=1e-12, atol=1e-12)
    apart = torch.eye(n, 40, dtype=torch.float64) * 3
    torch.testing.assert_close(merged(apart), apart.sum(0), rtol=1e-12, atol=1e-12)


def test_zeros_and_what_cancels_change_nothing() -> None:
    a = torch.linspace(-1, 2, 40, dtype=torch.float64)
    torch.testing.assert_close(merged(torch.stack((a, torch.zeros_like(a)))), a)
    rows = torch.stack((a, -a, a.flip(0), a.flip(0)))
    torch.testing.assert_close(merged(rows), a.flip(0), rtol=1e-7, atol=1e-7)


def oracle(recipe, replicas: int, steps: int) -> Tensor:
    """Horovod: Adasum merge. Gradient descent whose step is the formula, tensor by tensor."""
    gradients = gradients_of(recipe, replicas)
    weights = dict(gradients.start)
    for step in range(steps):
        each = [gradients(step, replica, weights) for replica in range(replicas)]
        rate = recipe.train.rate()(step)
        weights = {
            k: w - rate * written_out([g[k].flatten() for g in each]).view_as(w) for k, w in weights.items()
        }
    return flat(weights)


@pytest.mark.parametrize("replicas", [2, 3, 4])
def test_horovod_adasum_merge(source, replicas: int) -> None:
    recipe = recipe_of(source, 3, batch=2 * replicas, lr=0.3, lr_schedule="constant")
    wanted = oracle(recipe, replicas, 3)
    ranks = play(recipe, f"dp={replicas} micros=2 sync=adasum")
    assert all(distance(rank.last, wanted) < 1e-10 for rank in ranks)
    assert all(torch.equal(rank.last, ranks[0].last) for rank in ranks)
    summed = play(recipe, f"dp={replicas} micros=2")[0]
    assert distance(summed.last, wanted) > 1e-4
    assert ranks[0].reports[0].loss == pytest.approx(summed.reports[0].loss, rel=1e-12)


def test_a_step_tells_how_many_gradients_it_made_use_of(source) -> None:
    recipe = recipe_of(source, 3, batch=8)
    assert [line["adasum_gain"] for line in play(recipe, "dp=4 sync=adasum", twins=True)[0].metrics] == [
        1.0
    ] * 3
    assert all(1.0 < line["adasum_gain"] < 4.0 for line in play(recipe, "dp=4 sync=adasum")[0].metrics)


@pytest.mark.parametrize(
    ("inside", "tied"),
    [("tp=2", True), ("pp=2", False), ("shard=2", True), ("shard=2 zero=1", False), ("cp=2", True)],
)
def test_the_inside_of_a_replica_may_be_cut_in_any_way(source, inside: str, tied: bool) -> None:
    recipe = recipe_of(source, 3, batch=8, lr=0.3, lr_schedule="constant")
    model = recipe.model.model_copy(update={"tie_embeddings": tied})
    recipe = recipe.model_copy(update={"model": model})
    plain, cut = (play(recipe, f"dp=2 {more} sync=adasum") for more in ("", inside))
    assert [r.loss for r in cut[0].reports] == pytest.approx([r.loss for r in plain[0].reports], rel=1e-9)
    assert [r.norm for r in cut[0].reports] == pytest.approx([r.norm for r in plain[0].reports], rel=1e-9)


def test_uses_of_a_tied_weight_on_two_stages_are_refused(source) -> None:
    with pytest.raises(UsageError, match="tied weight") as refused:
        play(recipe_of(source, 1), "dp=2 pp=2 sync=adasum")
    assert refused.value.code == "P24"


@pytest.mark.parametrize("more", ["codec=int8", "pp=2 schedule=dualpipe micros=4"])
def test_what_has_no_whole_gradient_is_refused(source, more: str) -> None:
    with pytest.raises(ConfigProblems, match="sync=adasum"):
        resolve(recipe_of(source, 1, batch=8), f"dp=2 sync=adasum {more}", 4 if "pp" in more else 2)


def test_a_gradient_that_is_not_of_numbers_is_seen_by_all(source) -> None:
    recipe = recipe_of(source, 3, batch=4)

    def spoil(run, step: int) -> None:
        if step == 0 and run.mesh.rank == 1:
            with torch.no_grad():
                run.local.slots[0].master.fill_(float("nan"))

    assert all(rank.reports[-1].bad for rank in play(recipe, "dp=2 sync=adasum", watch=spoil))
