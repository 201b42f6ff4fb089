"""lag: replicas upload gradients that have changed, and all take what others uploaded last."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.sync.outer import distance, flat, gradients_of, play, recipe_of

pytestmark = pytest.mark.timeout(120)

STEPS, N, XI, WINDOW = 12, 3, 0.4, 4
SYNC = f"sync=lag:xi={XI},window={WINDOW}"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


def oracle(recipe) -> tuple[dict[str, Tensor], list[int]]:
    """The weights after the last step and how many uploaded in each, by the paper's rule for gradient descent: moves of
    the weights, divided by the rate."""
    gradients = gradients_of(recipe, N)
    weights, uploaded = dict(gradients.start), [None] * N
    lasts, counts = [dict(weights)], []
    for step in range(STEPS):
        rate = recipe.train.rate()(step)
        moves = [
            sum(float(((a[name] - b[name]) ** 2).sum()) for name in a) / rate**2
            for a, b in zip(lasts[-1 : -WINDOW - 1 : -1], lasts[-2 : -WINDOW - 2 : -1], strict=False)
        ]
        counts.append(0)
        for replica in range(N):
            new = {name: g / N for name, g in gradients(step, replica, weights).items()}
            old = uploaded[replica]
            changed = None if old is None else sum(float(((new[k] - old[k]) ** 2).sum()) for k in new)
            if changed is None or changed > XI / N**2 * sum(moves):
                uploaded[replica] = new
                counts[-1] += 1
        weights = {name: w - rate * sum(g[name] for g in uploaded) for name, w in weights.items()}
        lasts.append(dict(weights))
    return weights, counts


def test_weights_and_uploads_are_those_of_the_paper_written_out(source) -> None:
    recipe = recipe_of(source, STEPS, batch=6, lr=0.3, lr_schedule="constant")
    wanted, counts = oracle(recipe)
    assert len(set(counts[1:])) > 2  # none, some, all
    for got in play(recipe, f"dp={N} {SYNC}"):
        assert [line["uploads"] for line in got.metrics] == counts
        assert distance(got.last, flat(wanted)) < 1e-10


def test_what_nobody_uploads_is_not_sent(source) -> None:
    got = play(recipe_of(source, STEPS, batch=6, lr=0.3, lr_schedule="constant"), f"dp={N} {SYNC}")
    by_uploads = {line["uploads"]: sum(each.sent[i] for each in got) for i, line in enumerate(got[0].metrics)}
    gradient = 8 * sum(x.numel() for x in got[0].weights[0].values())
    assert by_uploads[0] < 2000
    assert gradient <= by_uploads[1] < by_uploads[N] / 2


@pytest.mark.parametrize("inside", ["tp=2", "pp=2"])
def test_the_inside_of_a_replica_may_be_cut_in_any_way(source, inside: str) -> None:
    recipe = recipe_of(source, STEPS, batch=8, lr=0.3, lr_schedule="constant")
    model = recipe.model.model_copy(update={"tie_embeddings": False})
    recipe = recipe.model_copy(update={"model": model})
    plain, cut = (play(recipe, f"dp=2 {more} sync=lag:xi=0.2") for more in ("", inside))
    assert [line["uploads"] for line in cut[0].metrics] == [line["uploads"] for line in plain[0].metrics]
    assert [r.loss for r in cut[0].reports] == pytest.approx([r.loss for r in plain[0].reports], rel=1e-9)


def test_a_run_that_was_saved_goes_on_also_on_other_replicas(source, tmp_path) -> None:
    recipe = recipe_of(source, STEPS, batch=12, lr=0.3, lr_schedule="constant")
    whole = play(recipe, f"dp=3 {SYNC}", save_at=5, folder=tmp_path / "run")
    folder = next((tmp_path / "run" / "checkpoints").iterdir())
    again = play(recipe, f"dp=3 {SYNC}", begin=folder)
    assert all(torch.equal(a.last, b.last) for a, b in zip(whole, again, strict=True))
    # Parts of what was uploaded are equal then, and all that they were counts: so the first update is the same.
    (one, other) = play(recipe, f"dp=2 {SYNC}", begin=folder, steps=6)
    assert torch.equal(one.last, other.last)
    total = {name: x for name, x in one.state.items() if name.endswith("/total")}
    parts = [sum(each.state[name.replace("/total", "/uploaded")] for each in (one, other)) for name in total]
    assert (
        distance(torch.cat([x.flatten() for x in parts]), torch.cat([x.flatten() for x in total.values()]))
        < 1e-12
    )


def test_a_step_that_is_not_of_numbers_uploads_nothing(source) -> None:
    recipe = recipe_of(source, STEPS, batch=6, lr=0.3, lr_schedule="constant")

    def spoil(run, step: int) -> None:
        if step == 3 and run.mesh.rank == 1:
            with torch.no_grad():
                run.local.slots[0].master.fill_(float("nan"))

    for got in play(recipe, f"dp=3 {SYNC}", watch=spoil):
        assert got.reports[-1].bad
        assert len(got.reports) == 5
        assert all(x.isfinite().all() for x in got.state.values())
