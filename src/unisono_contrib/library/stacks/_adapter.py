"""How a step is played on a rank under a stack. A stack is a subclass of `StackAdapter` in a file of its own."""

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unisono.library.gradient_check import plain_name
from unisono.spec.errors import UsageError
from unisono.spec.finder import names_in
from unisono.spec.words import meant
from unisono_contrib.library.stacks._one_device import alone
from unisono_contrib.library.stacks._step import StackPlace, TrainingStep, numbers_of, total
from unisono_contrib.library.stacks._watch import SeenStep, StackWatch, copied


@dataclass(slots=True)
class StackAdapter:
    """A stack. `library`: what is imported for it. dtype: torch's default one while it plays. shows_clipped: whether
    the gradients that are seen have been clipped already. draws: options that a fuzz draws, and their values, the usual
    one first; None for a stack that no fuzz plays. for_unused: options for a model with parameters that some batches do
    not use. models: of those that a fuzz draws the ones that the stack can play, all if ()."""

    library: ClassVar[str] = "torch"
    extra: ClassVar[str] = ""
    dtype: ClassVar[str] = "float64"
    shows_clipped: ClassVar[bool] = True
    owns_loop: ClassVar[bool] = False
    processes: ClassVar[bool] = True
    draws: ClassVar[Mapping[str, Sequence[Any]] | None] = None
    for_unused: ClassVar[Mapping[str, Any]] = {}
    models: ClassVar[Sequence[str]] = ()
    step: TrainingStep
    place: StackPlace
    bare: Any = None
    names: dict[int, str] = field(default_factory=dict)

    @classmethod
    def groups(cls, ranks: int, options: Mapping[str, Any]) -> int:
        """Return how many ranks have data of their own. Raises UsageError V09 for numbers that do not fit."""
        return ranks

    @staticmethod
    def alone(step: TrainingStep, argument: Mapping[str, Any]) -> dict[str, Any]:
        """Leave in files what one device makes of the step. Returns what of it fits into JSON."""
        return alone(step, argument)

    def play(self, steps: int) -> list[SeenStep]:
        """Build the model and make the steps. Each rank calls it."""
        torch.manual_seed(0)
        self.bare = self.step.model()
        self.begin()
        watch = StackWatch(self.named, self.owns_loop)
        with watch.looking():
            self.run(steps, watch)
        return watch.steps

    def run(self, steps: int, watch: StackWatch) -> None:
        """Make the steps, one after the other."""
        for number in range(steps):
            self.load(number)
            with watch.step() as seen:
                if self.step.train(self.place) is NotImplemented:
                    self.train()
                self.settle(watch)
            seen.weights = self.weights()

    def load(self, number: int) -> None:
        """Give the place this rank's micro-batches of a step."""
        place = self.place
        every = [self.step.batch(n) for n in numbers_of(number, place.groups, place.micros)]
        first = self.seat() * place.micros
        weights = [float(self.step.weight(batch)) for batch in every]
        place.step, place.total_weight = number, total(weights)
        place.batches, place.weights = (
            every[first : first + place.micros],
            weights[first : first + place.micros],
        )

    def seat(self) -> int:
        """Return which share of the data is this rank's."""
        return self.place.rank

    def begin(self) -> None:
        """Wrap the model, and make the optimiser."""
        wrapped = self.step.wrap(self.bare, self.place)
        self.place.model = self.wrapped() if wrapped is None else wrapped
        self.place.optimizer = self.step.optimizer(
            [p for p in self.place.model.parameters() if p.requires_grad]
        )

    def wrapped(self) -> Any:
        """Return the model under the stack."""
        return self.bare

    def train(self) -> None:
        """Make one step as the stack's documentation says. A stack that owns the loop has a `run` instead."""
        raise NotImplementedError

    def settle(self, watch: StackWatch) -> None:
        """After a step: show what the stack has kept of gradients."""
        return

    def named(self) -> dict[str, Tensor]:
        """Return the trained parameters as the stack has them, by the names of one device."""
        model: nn.Module = self.place.model
        return {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}

    def weights(self) -> dict[str, Tensor]:
        """Return whole weights. Each rank calls it."""
        return {name: copied(p) for name, p in self.named().items()}

    def finish(self) -> None:
        """Take the optimiser's step of a plain loop, and forget the gradients."""
        place = self.place
        if place.clip:
            torch.nn.utils.clip_grad_norm_(place.model.parameters(), place.clip)
        place.optimizer.step()
        place.optimizer.zero_grad()


def stack_named(name: str) -> type[StackAdapter]:
    """Return a stack by the name of its file. Raises UsageError V08 where there is none, or it is not installed."""
    names = names_in("unisono.library.stacks")
    if name not in names:
        what = f"there is no stack {name!r}{meant(name, names)}"
        raise UsageError(what, where="check_stack", fix=f"one of: {' '.join(names)}", code="V08")
    module = import_module(f"{__package__}.{name}")
    kinds = [
        kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, StackAdapter)
    ]
    kind = next(kind for kind in kinds if kind.__module__ == module.__name__)
    if importlib.util.find_spec(kind.library) is None:
        raise UsageError(
            f"{kind.library} is not installed",
            where=f'check_stack("{name}")',
            fix=f"pip install {kind.extra or kind.library}",
            code="V08",
        )
    return kind


def misfit(what: str, where: str, fix: str) -> UsageError:
    """The error of a step, or of options, that a stack cannot play."""
    return UsageError(what, where=where, fix=fix, code="V09")
