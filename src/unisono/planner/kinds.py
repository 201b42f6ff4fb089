"""The kinds of models that have a price; for each a module with the same functions says what it does."""

from typing import Any, Protocol

from unisono.plan import Plan
from unisono.planner.work import networks, passes
from unisono.planner.work.networks import Network
from unisono.planner.work.stage import RowWork, StageWork
from unisono.planner.work.transformer import Transformer, transformer
from unisono.spec.model import Facts, ModelConfig

Model = Transformer | Network


class Kind(Protocol):
    """What a kind of model says of a plan on a host of ranks."""

    def stages(self, model: Any, plan: Plan, micro_batch: int, micros: int, /) -> tuple[StageWork, ...]:
        """Every stage of the timetable."""
        ...

    def rows(self, model: Any, plan: Plan, micro_batch: int, micros: int, /) -> tuple[RowWork, ...]:
        """Every row of the pipeline."""
        ...

    def tied(self, model: Any, plan: Plan, /) -> float:
        """Bytes of the gradient of a weight that two rows have."""
        ...


def declared(model: ModelConfig, facts: Facts) -> Model:
    """What a recipe's `[model]` is in numbers. facts: what the data decides. Raises UsageError where a size is open."""
    if model.attends:
        return transformer(model, model.sized(facts).vocab or 0)
    return Network(model.workload(facts), by_weights=model.by_weights)


def kind(model: Model) -> Kind:
    """The functions of the model's kind."""
    return passes if isinstance(model, Transformer) else networks
