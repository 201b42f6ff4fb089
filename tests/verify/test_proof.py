"""The definition of correct: every plan of this version computes what one device computes, in float64, with dropout,
clipping, accumulation, AdamW and tied embeddings."""

import pytest

from tests.threads import prove
from unisono.config import LaunchConfig, ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.verify.prover import prove_on

pytestmark = pytest.mark.timeout(300)

PLANS = [
    "dp=4",
    "shard=2 zero=1",
    "shard=2 zero=2",
    "shard=4 zero=3",
    "dp=2 shard=2",
    "tp=4",
    "pp=2 schedule=gpipe",
    "pp=4 schedule=1f1b",
    "dp=2 tp=2 pp=2",
    "shard=2 tp=2 pp=2",
    "recompute=full",
]
MORE = [
    "shard=4 zero=1",
    "shard=4 zero=2",
    "tp=2",
    "pp=2 schedule=1f1b",
    "pp=4 schedule=gpipe",
    "pp=2 recompute=full",
]
EXACT = {"pp=2 schedule=gpipe", "pp=2 schedule=1f1b", "recompute=full", "pp=2 recompute=full"}


def recipe(**model):
    given = {"n_layer": 4, "n_head": 4, "d_model": 16, "context": 8, "dropout": 0.1, **model}
    train = TrainConfig(
        steps=6,
        global_batch=8,
        micro_batch=2,
        dtype="float64",
        lr=1e-2,
        warmup_steps=2,
        clip=0.5,
        weight_decay=0.1,
    )
    return Recipe(seed=3, model=ModelConfig(**given), train=train)


@pytest.mark.parametrize(
    ("plans", "steps", "micro_batch"),
    [(PLANS, 2, 2), pytest.param(PLANS + MORE, 3, 1, marks=pytest.mark.slow)],
)
def test_every_plan_equals_one_device(plans, steps, micro_batch):
    """With two micro-batches in a step at least, but where four ranks share it."""
    told, asked = [], recipe()
    train = asked.train.model_copy(update={"micro_batch": micro_batch})
    asked = asked.model_copy(update={"train": train})
    proofs = prove(asked, [Plan.parse(text) for text in plans], steps, told.append)
    assert told == proofs  # in the order asked for, whatever ran first
    for text, proof in zip(plans, proofs, strict=True):
        assert proof.passed, proof
        assert max(proof.max_rel_err.values()) < 1e-10, proof
        if text in EXACT:
            assert proof.bit_identical, proof


def test_llamas_variant_and_sgd_too():
    llama = recipe(
        positions="rotary", activation="swiglu", norm="rms", bias=False, n_kv_head=2, tie_embeddings=False
    )
    sgd = llama.model_copy(update={"train": llama.train.model_copy(update={"optimizer": "sgd"})})
    plans = [Plan.parse(text) for text in ("dp=2 tp=2", "shard=2 pp=2 zero=1")]
    for proof in prove(sgd, plans, steps=2):
        assert proof.passed and max(proof.max_rel_err.values()) < 1e-10, proof


def test_float32_is_held_to_its_own_bound():
    single = recipe()
    single = single.model_copy(update={"train": single.train.model_copy(update={"dtype": "float32"})})
    proofs = prove(single, [Plan.parse("pp=2"), Plan.parse("dp=2")], steps=2)
    assert proofs[0].bit_identical
    assert proofs[1].passed and not proofs[1].bit_identical


def test_all_that_is_compared_computes_on_one_kind_of_device():
    """A host of one GPU serves the one device that a plan of four ranks is held to, and not the plan."""
    asked: list[tuple[int, str, int]] = []

    class Refusing:
        def run(self, argument, ranks, *rest, serves, **more):
            asked.append((ranks, rest[3], serves))
            raise InterruptedError

    for backend in ("auto", "nccl:shared"):
        small = recipe().model_copy(update={"launch": LaunchConfig(backend=backend)})
        with pytest.raises(InterruptedError):
            prove_on(Refusing(), small, [Plan.parse("dp=2"), Plan.parse("dp=4")], 1)  # type: ignore[arg-type]
    assert asked == [(1, "auto", 4), (1, "nccl:shared", 4)]
