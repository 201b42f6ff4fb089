"""Tables of a recommender: dealt in three ways, gradients of the rows that were read alone, updated lazily."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.threads import prove
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.launch.context import RankContext
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.plan.fidelity import fidelity_of
from unisono.spec.errors import ConfigProblems
from unisono.spec.fidelity import Fidelity
from unisono.train.build.build import build, feeds, place_of
from unisono.train.data.load import load
from unisono.train.step.train_step import train_step
from unisono_contrib.train.step.rows import add_up

ROWS = (40, 30, 7)


def recipe(cut: str = "table", optimizer: str = "adamw", **train: Any) -> Recipe:
    """A small recommender in float64; three rows of each table a sample, so that a sum over ranks has an order."""
    own = {"d_table": 6, "n_dense": 4, "bottom": (8,), "top": (8,), "tables": ROWS, "lookups": 3}
    given = {"steps": 4, "global_batch": 24, "lr": 1e-2, "dtype": "float64", "clip": 0.3, **train}
    return Recipe(
        seed=3,
        model=ModelConfig(kind="dlrm", table_sharding=cut, **own),
        data=DataConfig(source="clicks:samples=600"),
        train=TrainConfig(optimizer=optimizer, **given),
    )


def plans(*texts: str) -> list[Plan]:
    return [Plan.parse(f"{text} precision=fp64") for text in texts]


@pytest.mark.parametrize(
    ("cut", "optimizer", "texts"),
    [
        ("table", "adamw", ("shard=2 ep=2 micros=2", "dp=2 shard=3 ep=3 zero=1 pp=2 recompute=full")),
        ("row", "sgd", ("shard=4 ep=4", "dp=2 shard=4 ep=2 zero=2")),
        ("column", "adagrad", ("shard=4 ep=4 zero=1", "dp=2 shard=2 ep=2 micros=3")),
    ],
)
def test_dealt_tables_learn_what_one_device_learns(cut: str, optimizer: str, texts: tuple[str, ...]) -> None:
    for proof in prove(recipe(cut, optimizer), plans(*texts), 3):
        assert proof.passed, (proof.plan, proof.first_divergence)
        assert fidelity_of(Plan.parse(proof.plan)) is Fidelity.ROUNDING


def test_replicas_and_stages_hold_whole_tables() -> None:
    exact = ("pp=2 micros=4", "dp=2 shard=2 sync=canonical", "schedule=zb1p pp=2 micros=4")
    for proof in prove(recipe(), plans("dp=3 micros=2", "shard=2 zero=3", *exact), 3):
        assert proof.passed, (proof.plan, proof.first_divergence)
        assert proof.bit_identical or not any(proof.plan.startswith(text[:4]) for text in exact[1:2])


@pytest.mark.parametrize(
    ("cut", "plan", "code"),
    [
        ("table", "shard=4 ep=4", "P12"),  # three tables
        ("row", "shard=8 ep=8", "P12"),  # seven rows in the smallest
        ("column", "shard=8 ep=8", "P12"),  # six columns
        ("table", "shard=2 ep=2 dp=2 sync=canonical", "P16"),
        ("table", "shard=2 ep=2 pp=2 schedule=dualpipe micros=4", "P13"),
        ("table", "pp=2 schedule=pipedream micros=4", "P13"),
        ("table", "tp=2", "P12"),
    ],
)
def test_what_tables_cannot_be_dealt_by_is_refused(cut: str, plan: str, code: str) -> None:
    with pytest.raises(ConfigProblems) as caught:
        resolve(recipe(cut, clip=0.0), f"{plan} precision=fp64", None)
    assert code in {problem.code for problem in caught.value.problems}


def _played(ctx: RankContext, told: Recipe, plan: str, steps: int = 1) -> dict[str, Any]:
    resolved = resolve(told, plan, ctx.world)
    corpus = load(resolved.recipe.data, resolved.recipe.model)
    place = place_of(ctx.rank, ctx.world, ctx.local_rank, ctx.backend, 60.0)
    recorder = Recorder(ctx.rank)
    run = build(resolved.recipe, resolved.plan, place, corpus, recorder)
    feed, _ = feeds(resolved.recipe, resolved.plan, corpus, place.device)
    tables = [slot for slot in run.local.slots if slot.name.startswith("stem.tables")]
    before = {slot.name: slot.master.detach().clone() for slot in tables}
    rows: dict[str, Any] = {}
    inner = run.measure

    def watched(*given: Any) -> Any:
        rows.update({slot.name: slot.master.grad for slot in tables})
        return inner(*given)

    run.measure = watched
    recorder.lap()
    for step in range(steps):
        train_step(run, feed.fetch(step, run.leaves))
    moved = {slot.name: (slot.master.detach() != before[slot.name]).any(1) for slot in tables}
    grads = {name: (grad.is_sparse, grad.indices()[0]) for name, grad in rows.items()}
    return {
        "moved": moved,
        "grads": grads,
        "sent": recorder.lap(),
        "starts": {s.name: s.start for s in tables},
    }


@pytest.mark.parametrize("plan", ["dp=2", "shard=2", "shard=2 ep=2"])
def test_gradients_stay_sparse_and_only_rows_that_were_read_move(threads: Any, plan: str) -> None:
    """Decay is on, and momentum would carry rows on."""
    ranks = threads(_played, 2, told=recipe(cut="row", weight_decay=0.1), plan=f"{plan} precision=fp64")
    for rank in ranks:
        for name, (sparse, rows) in rank["grads"].items():
            assert sparse and torch.equal(rows, rows.unique())
            assert set(rank["moved"][name].nonzero()[:, 0].tolist()) <= set(rows.tolist())
            assert rank["moved"][name].any() and (not rank["moved"][name].all() or len(rows) < 20)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 8), max_size=6), min_size=2, max_size=2))
def test_a_sum_of_sparse_gradients_is_that_of_whole_ones(rows: list[list[int]]) -> None:
    sizes, masters = ((9, 2), (9, 3)), []
    for size, index in zip(sizes, rows, strict=True):
        p = torch.nn.Parameter(torch.zeros(size, dtype=torch.float64))
        values = torch.randn(len(index), size[1], dtype=torch.float64)
        p.grad = torch.sparse_coo_tensor(
            torch.tensor([index], dtype=torch.int64), values, size, check_invariants=False
        )
        masters.append(p)
    whole = [p.grad.to_dense() for p in masters if p.grad is not None]
    add_up(masters, ())
    for p, want in zip(masters, whole, strict=True):
        assert p.grad is not None and p.grad.is_coalesced()
        assert torch.allclose(p.grad.to_dense(), want)
