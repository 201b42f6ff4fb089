"""What `[train]` and `[data]` of a recipe choose by name: optimisers, learning rates. No torch.

The fields of a member are its options: in a recipe they are keys of the section itself (`[train] betas`), which mean
something where the chosen member has them, or stand behind its name (`optimizer = "mine.py:Lion:decay=0.9"`).
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.family import Family, Member

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Count = Annotated[int, Field(ge=1)]
Depth = Annotated[
    int, Field(ge=1, le=100_000)
]  # blocks of a model; more is a slip, and would be counted for hours
Natural = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0.0, lt=1.0)]
Positive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]

IGNORED = -100  # a target that does not count, as torch's cross-entropy has it


@dataclass(frozen=True, slots=True)
class UpdateSizes:
    """Sizes of one update of one tensor. step: updates made before it. rounding: relative error of the formula.
    observed: by names of `Optimiser.observed`, (value after the update, largest absolute error), float64."""

    lr: float
    decay: float
    step: int
    rounding: float
    observed: "Mapping[str, tuple[Tensor, Tensor]]" = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MatrixWork:
    """What a matrix costs the rank that computes its step (`Optimiser.gathers`).

    kept: numbers of its state. cost: by which matrices are divided over ranks, in any unit. products, decompositions:
    floating-point operations of an update, in the mean of all updates, of matrix products and of eigendecompositions,
    which are computed in float64. narrow: parts of gradients and steps travel in two bytes an element; else as wide as
    master weights are. observed: numbers that every other rank sends the owner of what it has observed
    (`Optimiser.observed`), in the mean of all updates.
    """

    kept: int
    cost: float
    products: float = 0.0
    decompositions: float = 0.0
    narrow: bool = False
    observed: float = 0.0


class Optimiser(Member, ABC):
    """How a gradient changes a weight. squares: it divides by the root of squares of gradients, of coded ones too, as
    Adam does. apart: each parameter is stepped by its own gradient and state alone, and need not wait for others.
    couples: weight decay times the weight is added to its gradient; otherwise a weight loses `lr · decay` of itself
    beside its step (decoupled). whole: an element's step depends on all elements of its tensor, so that a rank which
    holds a part of one cannot make it. gathers: one rank gathers the parts and makes the step for all (`owners.py` of
    the sister package); else plans that cut such a tensor are refused. with_owner: that rank keeps the state, too.
    norms: a step needs norms of whole tensors alone, which ranks that hold parts of one add up; its live optimiser is a
    `train.optim._normed_steps.NormedSteps` of the sister package. paced: its learning rate follows the noise of
    gradients, as `train/build/adascale.py` of the sister package has a run measure it. observed: state that follows
    from what goes into linear layers and from gradients of what comes out, which `train/build/layer_products.py` of the
    sister package has a run observe; the gradient alone does not tell it, so `law` is given its values. by_shape:
    `for_parameter` goes by shapes alone, so that it is known of any model which parameters are whose."""

    squares: ClassVar[bool] = False
    apart: ClassVar[bool] = False
    couples: ClassVar[bool] = False
    whole: ClassVar[bool] = False
    gathers: ClassVar[bool] = False
    with_owner: ClassVar[bool] = False
    norms: ClassVar[bool] = False
    paced: ClassVar[bool] = False
    observed: ClassVar[tuple[str, ...]] = ()
    by_shape: ClassVar[bool] = False

    def for_parameter(self, name: str, shape: tuple[int, ...]) -> "Optimiser":
        """The optimiser of one parameter, by its name and full shape. As here: this one. Another one where some
        parameters are none for it, as Muon leaves embeddings to AdamW."""
        return self

    def problems(self, plan: Any, model: Any) -> Iterator[Problem]:
        """What of a plan and of a `[model]` it cannot be played with."""
        yield from ()

    @property
    def crossing(self) -> float | None:
        """Decay of its first moment, where this is what a codec is given on `dp`; None: gradients are. Then its update
        is `m = crossing · m + (1 - crossing) · gradient`, and no other sum of gradients is kept in coded steps."""
        return None

    def whole_steps(self, step: int) -> int:
        """In how many of the first `step` steps gradients cross as they are, whatever the codec."""
        return step

    def observed_share(self, step: int) -> float:
        """The share of what is new in `observed` state after update `step`, from 0; 0.0 where nothing is observed."""
        return 0.0

    @property
    @abstractmethod
    def kept(self) -> int:
        """Numbers that it keeps of each parameter: 2 for Adam, 1 for a velocity."""

    @property
    def most_kept(self) -> int:
        """Numbers that it or another one that steps for it keeps of a parameter at most. The planner's memory counts
        as many of each."""
        return self.kept

    def matrix_work(self, shape: tuple[int, ...]) -> MatrixWork:
        """What the step of one whole matrix of this shape, which it `gathers`, costs the rank that computes it."""
        return MatrixWork(self.kept * prod(shape), float(prod(shape) * min(shape)))

    @abstractmethod
    def bind(self, groups: Sequence[Mapping[str, Any]], lr: float, fused: bool) -> "torch.optim.Optimizer":
        """The live optimiser of one rank. groups: parameters with their `weight_decay`. fused: one kernel for all
        tensors where there is one."""

    @abstractmethod
    def state(self, parameter: "Tensor") -> "dict[str, Tensor]":
        """What it keeps of `parameter` before the first step, so that a checkpoint can be loaded into it: names as
        the live optimiser's, tensors like the parameter or of no dims."""

    def law(
        self,
        update: UpdateSizes,
        weight: "Tensor",
        state: "Mapping[str, Tensor]",
        grad: "Tensor",
        error: "Tensor",
    ) -> "dict[str, tuple[Tensor, Tensor]]":
        """Name → (value after the update, largest absolute error), float64, of "param" and all of `state`: what the
        prover holds an update to. error: absolute, of `grad`, by element. {}: nobody has written it down."""
        return {}


class LearningRate(Member, ABC):
    """The learning rate over a run, counted in optimiser steps of the whole run, never per process."""

    warmup_steps: Natural = Field(default=0, description="steps of linear warm-up")

    def at(self, step: int, steps: int, lr: float) -> float:
        """Learning rate of step `step` (from 0) of `steps`: linear warm-up to `lr`, then `after`."""
        if step < self.warmup_steps:
            return lr * (step + 1) / self.warmup_steps
        span = max(1, steps - 1 - self.warmup_steps)
        return self.after(min(1.0, (step - self.warmup_steps) / span), lr)

    @abstractmethod
    def after(self, done: float, lr: float) -> float:
        """Learning rate when a share `done` (0 to 1) of the steps after the warm-up is done."""


class Decaying(LearningRate):
    """A learning rate that ends below its peak."""

    min_lr: NotNegative | None = Field(default=None, description="last learning rate; lr/10 when absent")

    def floor(self, lr: float) -> float:
        """The last learning rate."""
        return lr / 10 if self.min_lr is None else self.min_lr


@dataclass(frozen=True, slots=True)
class Teaching:
    """A loss that listens to a trained model. path: where that lies. mix: a function of logits [..., classes], the
    teacher's logits of the same shape, and targets [...], that gives the loss summed over all targets."""

    path: str
    mix: "Callable[[Tensor, Tensor, Tensor], Tensor]"


class Loss(Member, ABC):
    """What training makes small, in the place of the model's own loss."""

    @abstractmethod
    def bind(self) -> "Callable[[Tensor, Tensor], Tensor]":
        """A function of logits [..., classes] and targets [...] that gives the loss summed over all targets."""

    def teaching(self) -> Teaching | None:
        """What takes its place in training where it has a teacher; None: it has none."""
        return None


class Metric(Member, ABC):
    """What a validation tells beside the loss. Counts are summed over all targets of all ranks before they mean
    anything, so that a metric is the same under every plan."""

    def count(self, logits: "Tensor", targets: "Tensor") -> "Tensor | float":
        """Of one micro-batch, summed over its targets; logits [..., classes], targets [...]."""
        return 0.0

    @abstractmethod
    def value(self, mean: float, loss: float) -> float:
        """The metric. mean: count by target. loss: nats by target."""


OPTIMISERS: Family[Optimiser] = Family(
    "optimiser", "unisono.train.optim", Optimiser, "train.optimizer", ("C02", "C02")
)
RATES: Family[LearningRate] = Family(
    "learning-rate schedule", "unisono.train.rates", LearningRate, "train.lr_schedule", ("C02", "C02")
)
LOSSES: Family[Loss] = Family("loss", "unisono.train.losses", Loss, "train.loss", ("C02", "C02"))
METRICS: Family[Metric] = Family("metric", "unisono.train.metrics", Metric, "train.metrics", ("C02", "C02"))
