"""A function of the user's own is given the model as one, whatever the plan."""

from pathlib import Path

import pytest
import torch

from tests.train.small import recipe
from unisono.config import resolve
from unisono.models.build import build as build_model
from unisono.models.init import initialise
from unisono.observe.span import Recorder
from unisono.spec.errors import UsageError, UserCodeError
from unisono.train.build.build import build, facts_of, place_of
from unisono.train.data.load import load
from unisono.train.step.played_model import PlayedModel, evaluated
from unisono_contrib.comm.threads import run as on_threads

from tests.threads import context  # isort: skip

QUICK = ("dp=3", "tp=2 cp=2")
PLANS = ["dp=1", "dp=3", "shard=2 pp=2", "tp=2 cp=2", "tp=2x2", "pp=2 schedule=dualpipe",
         "cp=2 tp=2 sync=canonical:shards=2", "dp=2 tp=2 precision=fp64"]  # fmt: skip
INPUTS = torch.randint(0, 256, (19, 8), generator=torch.Generator().manual_seed(1))


def played(folder: Path, plan: str, ranks: int, work, **changes):
    told = recipe(folder, global_batch=12, micro_batch=2, **changes)

    def live(rank: int):
        ctx = context(rank, ranks)
        resolved = resolve(told, plan, ranks)
        corpus = load(resolved.recipe.data, resolved.recipe.model)
        place = place_of(rank, ranks, rank, ctx.backend, 60.0)
        run = build(resolved.recipe, resolved.plan, place, corpus, Recorder(rank))
        return work(PlayedModel(run, corpus))

    return on_threads(ranks, live, join=True, timeout=60.0)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "plan", [pytest.param(p, marks=() if p in QUICK else pytest.mark.slow) for p in PLANS]
)
def test_every_rank_gets_what_one_device_computes(tmp_path: Path, plan: str):
    told = recipe(tmp_path, global_batch=12, micro_batch=2)
    corpus = load(told.data, told.model)
    model = build_model(told.model, facts_of(corpus), device="cpu").double()
    initialise(model, told.seed)
    want = model(INPUTS).float()
    at = torch.arange(19) % 8
    resolved = resolve(told, plan, None)

    def work(played: PlayedModel):
        assert played.window == 8
        return played(INPUTS), played(INPUTS[:, :5]), played(INPUTS, at)

    for whole, short, some in played(tmp_path, plan, resolved.plan.world, work):
        torch.testing.assert_close(whole, want, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(short, want[:, :5], rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(some, want[torch.arange(19), at], rtol=1e-6, atol=1e-6)


@pytest.mark.timeout(60)
def test_what_a_function_says_is_a_number_or_several(tmp_path: Path):
    own = tmp_path / "own.py"
    own.write_text(
        "def one(model): return model.step + 1\n"
        "def many(model): return {'a': model.window, 'b': 2}\n"
        "def wrong(model): return 'much'\n"
        "def raises(model): return 1 / 0\n"
        "def long(model):\n    import torch\n    return model(torch.zeros(1, 9, dtype=torch.int64)).sum()\n"
    )

    def work(played: PlayedModel):
        assert evaluated(f"{own}:one", played) == {"one": 1.0}
        assert evaluated(f"{own}:many", played) == {"a": 8.0, "b": 2.0}
        for name, words in (("wrong", "returned str"), ("raises", "division by zero"), ("long", "9 tokens")):
            with pytest.raises(UserCodeError, match=words):
                evaluated(f"{own}:{name}", played)
        with pytest.raises(UsageError, match="no function none"):
            evaluated(f"{own}:none", played)
        return True

    assert played(tmp_path, "dp=1", 1, work) == [True]
