"""What tests of other engines share: a small recipe, and the rows of a proof with engines beside torch."""

from collections.abc import Sequence
from typing import Any

from tests.threads import ThreadForkServer
from unisono.config import ModelConfig, Recipe, TrainConfig
from unisono.plan import Plan
from unisono.verify.prover import ENTRY, Proof, prove_on
from unisono_contrib.verify.engines.beside import EngineRow
from unisono_contrib.verify.engines.session import EngineSession

LLAMA = {
    "positions": "rotary", "activation": "swiglu", "norm": "rms", "bias": False, "n_kv_head": 2,
    "tie_embeddings": False,
}  # fmt: skip


def recipe(optimizer: str = "adamw", **model: object) -> Recipe:
    """Two blocks over bytes, eight samples a step."""
    sizes = {"n_layer": 2, "n_head": 4, "d_model": 16, "context": 8, **model}
    train = TrainConfig(
        steps=6, global_batch=8, micro_batch=2, dtype="float64", lr=1e-2, clip=0.5, optimizer=optimizer
    )
    return Recipe(seed=3, model=ModelConfig(**sizes), train=train)


def beside(
    of: Recipe,
    plans: Sequence[str],
    *,
    witnesses: Sequence[str] = (),
    engines: Sequence[str] = (),
    steps: int = 2,
) -> tuple[list[Proof], list[EngineRow], list[str]]:
    """The proofs, the rows of the engines, and which engine is the odd one."""
    read = [Plan.parse(f"{text} precision=fp64") for text in plans]
    session = EngineSession.of(witnesses, engines, of, read)
    with session.opened():
        server: Any = ThreadForkServer(ENTRY)
        proofs = prove_on(server, of, read, steps, keep_going=True, shelf=session.shelf)
        tables = list(session.tables())
        return proofs, [row for table in tables for row in table.rows], [x for t in tables for x in t.odd()]
