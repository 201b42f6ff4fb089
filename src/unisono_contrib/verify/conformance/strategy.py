"""What every strategy owes: state that somebody else keeps, and the identities that it declares."""

from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from unisono.config import Recipe, TrainConfig, resolve
from unisono.spec.training import OPTIMISERS
from unisono.train.data.load import load
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.server import federation_of
from unisono_contrib.spec.federated import LocalWork, Strategy
from unisono_contrib.verify.conformance.mailed import recipe_of

_NUMEL, _ROUNDS = 5, 2


def faults(member: Strategy, folder: Path, text: str = "") -> Iterator[str]:
    """What is wrong with a strategy, a sentence each: 1. What it sends is what its server keeps, and `learn` answers
    for all that clients keep. 2. A step is float64 [d], changes no delta, and depends on nothing but the delta and what
    is kept, so that a run can go on from a checkpoint. 3. Its identities hold."""
    if not {*member.sends} <= {*member.server_keeps}:
        yield "it sends vectors that its server does not keep"
        return
    generator = torch.Generator().manual_seed(0)
    deltas = [torch.randn(_NUMEL, generator=generator, dtype=torch.float64) for _ in range(3)]
    zeros = {name: torch.zeros(_NUMEL, dtype=torch.float64) for name in member.client_keeps}
    sent = {name: torch.zeros(_NUMEL, dtype=torch.float64) for name in member.sends}
    grown = member.learn(LocalWork(deltas[0], deltas[1], 1.0, sent, zeros))
    if grown.keys() != {*member.client_keeps}:
        yield f"clients keep {sorted(member.client_keeps)} and learn {sorted(grown)}"
    kept = {n: torch.full((_NUMEL,), member.initial(n), dtype=torch.float64) for n in member.server_keeps}
    for delta in deltas:
        before, copy = {name: x.clone() for name, x in kept.items()}, delta.clone()
        step = member.step(delta, kept)
        if step.shape != delta.shape or step.dtype != torch.float64:
            yield f"its step is {step.dtype} {list(step.shape)}"
            return
        if not torch.equal(delta, copy):
            yield "its step changes the delta"
        again = type(member).model_validate(member.model_dump()).step(copy.clone(), before)
        if not torch.equal(again, step):
            yield "its step depends on more than the delta and what is kept"
    yield from _identities(member, folder)


def _identities(member: Strategy, folder: Path) -> Iterator[str]:
    source = folder / "text.txt"
    source.write_text("to be or not to be, that is the question: " * 40, encoding="utf-8")
    for text, other in member.equals:
        first, second = (_weights(source, each) for each in (text, other))
        if not torch.equal(first, second):
            yield f"{text} is off by {float((first - second).norm() / second.norm()):.1g} from {other}"


def _weights(source: Path, strategy: str) -> Tensor:
    """The weights after some rounds of simulated clients, of which some drop out. The last text is that of the
    identity, whatever other options the member has."""
    section = FederatedConfig(
        clients=4, rounds=_ROUNDS, participation=0.75, dropout=0.2, local_steps=2, strategy=strategy
    )
    recipe = recipe_of(source, 4)
    train = recipe.train.model_dump(exclude_unset=True) | {
        "steps": _ROUNDS, "micro_batch": 4, "optimizer": "sgd", "momentum": 0.0
    }  # fmt: skip
    known = {key: value for key, value in train.items() if key not in OPTIMISERS.find("adamw").model_fields}
    whole = Recipe(**{**dict(recipe), "train": TrainConfig(**known), "federated": section})
    resolved = resolve(whole, "dp=1 precision=fp64", 1)
    federation = federation_of(resolved, load(resolved.recipe.data, resolved.recipe.model))
    for _ in range(_ROUNDS):
        federation.play_round()
    return federation.weights
