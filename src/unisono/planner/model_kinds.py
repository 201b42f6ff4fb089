"""The kinds of models that have a price; for each a module with the same functions says what it does."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Protocol

from unisono.plan import Plan
from unisono.planner import general, transformers
from unisono.planner.machines.cluster import Cluster
from unisono.planner.memory import Memory
from unisono.planner.price_parts import Passes
from unisono.planner.stack import Stack
from unisono.planner.work.networks import Network
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.errors import Problem
from unisono.spec.finder import contributed
from unisono.spec.model import Facts, ModelConfig
from unisono.spec.training import Optimiser

Model = Transformer | Network


class Kind(Protocol):
    """What a kind of model says of a plan."""

    def passes(
        self, model: Any, plan: Plan, cluster: Cluster, stack: Stack, micro_batch: int, micros: int, /
    ) -> Passes:
        """What the passes of a step take on devices."""
        ...

    def memories(
        self, model: Any, plan: Plan, stack: Stack, micro_batch: int, micros: int, /
    ) -> Iterable[tuple[int, Memory]]:
        """(row, its memory) on devices, of the rows that can be fullest."""
        ...

    def problems(self, model: Any, plan: Plan, /) -> list[Problem]:
        """What keeps a plan from being priced."""
        ...

    def layers(self, model: Any, plan: Plan, is_balanced: bool, /) -> tuple[float, ...]:
        """Blocks of each row of the pipeline. is_balanced: stages are cut by cost."""
        ...


def declared(model: ModelConfig, facts: Facts) -> Model:
    """What a recipe's `[model]` is in numbers. facts: what the data decides. Raises UsageError where a size is open."""
    if model.attends:
        return transformer(model, model.sized(facts).vocab or 0)
    return Network(model.workload(facts), by_weights=model.by_weights)


def with_optimiser(model: Model, optimiser: Optimiser, averages: int = 0) -> Model:
    """The model as an optimiser steps it. averages: of each weight, that sections of the recipe keep beside."""
    steps = None
    if optimiser.gathers:
        steps = contributed("unisono.planner.work.matrix_steps").steps_of(optimiser, model)
    return replace(model, states=optimiser.most_kept, steps=steps, averages=averages)


def attending(model: Model) -> Transformer | None:
    """The model where it has attention, as tp, cp, screens and cuts of blocks that are all alike know it."""
    return model if isinstance(model, Transformer) else None


def kind(model: Model) -> Kind:
    """The functions of the model's kind."""
    return transformers if isinstance(model, Transformer) else general
