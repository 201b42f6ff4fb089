"""Small models of every kind, their plans, and what their ranks are seen to do: one rehearsal for each pipeline row."""

from collections import defaultdict
from functools import cache

import torch

from unisono.comm.imagined import imagined
from unisono.config import DataConfig, ModelConfig, Recipe, TrainConfig, resolve
from unisono.plan import Plan
from unisono.plan.grid import columns_of
from unisono.planner.work.networks import Network
from unisono.planner.work.stage import Transfer
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.model import Facts
from unisono.train.build.rehearsal import Rehearsed, rehearse
from unisono.train.data.dataset import Corpus, Images, TokenWindows
from unisono_contrib.verify.cover import covering

# Sizes that every number of ranks in the covering set divides, so that nothing is filled up.
_GPT = {"n_layer": 4, "n_head": 24, "d_model": 96, "context": 24, "vocab": 48, "d_ff": 192}
_LLAMA = {
    "positions": "rotary",
    "norm": "rms",
    "activation": "swiglu",
    "bias": False,
    "tie_embeddings": False,
}
KINDS = {
    "llama": ModelConfig(kind="gpt", **_GPT, **_LLAMA, n_kv_head=6),
    "tied": ModelConfig(kind="gpt", **_GPT, dropout=0.1),
    "untied": ModelConfig(kind="gpt", **_GPT, tie_embeddings=False, bias=False),
    "experts": ModelConfig(kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, bias=False),
    "shared": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, n_shared_experts=1, dropout=0.1
    ),
    "convnet": ModelConfig(kind="convnet", n_layer=4, channels=24, bias=False),
    "mlp": ModelConfig(kind="mlp", hidden=(24, 48, 96, 48)),
}
# Routers that ask about the other positions of a leaf.
ASKING = {
    "balanced": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, aux_loss=0.01, capacity_factor=1.5
    ),
    "choosing": ModelConfig(
        kind="moe", **{**_GPT, "n_layer": 2}, n_experts=12, d_expert=24, router="expert_choice", z_loss=0.001
    ),
}
EVERY = KINDS | ASKING
FACTS = Facts(classes=24, sample_shape=(3, 4, 4))


def recipe(kind: str, samples: int = 1, batch: int = 24) -> Recipe:
    data = DataConfig() if EVERY[kind].attends else DataConfig(source="digits")  # not read
    train = TrainConfig(global_batch=batch, micro_batch=samples, steps=1)
    return Recipe(model=EVERY[kind], data=data, train=train)


def samples_of(plan: Plan) -> int:
    """Of a micro-batch: one, but rows of a grid have one each."""
    return plan.tp // columns_of(plan.tp)


@cache
def corpus(kind: str) -> Corpus:
    draws = torch.Generator().manual_seed(0)
    if EVERY[kind].attends:
        tokens = torch.randint(48, (30 * 24 + 1,), generator=draws).numpy()
        some, facts = TokenWindows(tokens, 24), Facts(vocab=48)
    else:
        some = Images(torch.rand(30, 3, 4, 4, generator=draws), torch.randint(24, (30,), generator=draws))
        facts = FACTS
    return Corpus(
        some, some, facts.vocab, facts.classes or 0, facts.sample_shape or (24,), None, None, "", "here"
    )


def model(kind: str) -> Transformer | Network:
    if EVERY[kind].attends:
        return transformer(EVERY[kind], 48)
    return Network(EVERY[kind].workload(FACTS), by_weights=True)


@cache
def covered(kind: str) -> list[Plan]:
    """Every pair of values, on up to four ranks."""
    return covering(recipe(kind), ranks=4, least=0)


def rehearsed(kind: str, plan: Plan) -> list[Rehearsed]:
    """Of each row of the pipeline, what its first rank does in a step."""
    resolved, found = resolve(recipe(kind, samples_of(plan)), str(plan), plan.world), list[Rehearsed]()
    row = plan.world // plan.pp  # ranks of one; rows are the outermost axis
    for rank in range(0, plan.world, row):
        with imagined(rank, plan.world) as calls:
            found.append(rehearse(resolved.recipe, resolved.plan, corpus(kind), rank, calls))
    return found


def sent(seen: Rehearsed, least: int) -> dict[str, float]:
    """Axis -> bytes that the rank sends in the step, without numbers of a step, which are smaller than `least` bytes on
    dp and are priced nowhere."""
    found = defaultdict[str, float](float)
    for call in seen.calls:
        if call.op not in ("arrived", "recv") and (call.axis != "dp" or call.nbytes >= least):
            axis = {"row": "tp", "column": "tp", "cp+tp": "tp"}.get(call.axis, call.axis)
            found[axis] += Transfer(axis, call.op, call.nbytes).sent(len(call.ranks))
    return found
