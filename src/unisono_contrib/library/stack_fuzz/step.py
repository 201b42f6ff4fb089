"""The training step that a drawn case means."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from unisono.spec.finder import function_in
from unisono_contrib.library.stack_fuzz import models
from unisono_contrib.library.stack_fuzz.models import (
    LENGTH,
    NOTHING,
    VOCABULARY,
    WIDTH,
    DrawnModel,
    mean_loss,
)
from unisono_contrib.library.stacks._step import StackPlace, TrainingStep

ROWS = 4


class DrawnStep(TrainingStep):
    """A step by the words of a `StackCase`. each: micro-batches of a step, over all ranks."""

    def __init__(
        self, model: str, optimizer: str, targets: str, clip: float, seed: int, train: str, each: int
    ) -> None:
        self.kind: type[DrawnModel] = getattr(models, f"Drawn{model.capitalize()}")
        self.clip, self.seed, self.targets, self.each = clip, seed, targets, each
        self.rule = OPTIMIZERS[optimizer]
        self.by_user = function_in(train, "unisono_drawn_train", "verify --stack") if train else None

    def model(self) -> DrawnModel:
        torch.manual_seed(self.seed)
        return self.kind()

    def batch(self, number: int) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(1000 * self.seed + number)
        if self.kind.tokens:
            inputs = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=draws)
            labels = inputs.roll(-1, 1)
        else:
            inputs = torch.randn(ROWS, WIDTH, generator=draws)
            inputs[:, 0] = inputs[:, 0].abs() * (1 if self.kind.uses_all(number, number // self.each) else -1)
            labels = torch.randint(0, VOCABULARY, (ROWS,), generator=draws)
        if self.targets != "even":
            many = labels.numel()
            out = int(torch.randint(0, many, (), generator=draws))
            out = many if self.targets == "empty" and number % 4 == 1 else out
            labels.view(-1)[torch.randperm(many, generator=draws)[:out]] = NOTHING
        return {"inputs": inputs, "labels": labels}

    def weight(self, batch: dict[str, Tensor]) -> float:
        return float((batch["labels"] != NOTHING).sum())

    def loss(self, model: Any, batch: dict[str, Tensor]) -> Tensor:
        return mean_loss(model(batch["inputs"]), batch["labels"])

    def optimizer(self, params: Iterable[nn.Parameter]) -> Optimizer:
        return self.rule(list(params))

    def train(self, place: StackPlace) -> Any:
        return NotImplemented if self.by_user is None else self.by_user(self, place)


def _groups(params: list[nn.Parameter]) -> Optimizer:
    """Matrices decay, vectors do not."""
    parts = [
        ([p for p in params if (p.dim() > 1) == decays], decay)
        for decays, decay in ((True, 0.1), (False, 0.0))
    ]
    return AdamW([{"params": part, "weight_decay": decay} for part, decay in parts if part], lr=0.02)


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "momentum": lambda params: SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda params: SGD(params, lr=0.1, momentum=0.8, nesterov=True),
    "adam": lambda params: Adam(params, lr=0.02, weight_decay=0.1),
    "adamw": lambda params: AdamW(params, lr=0.02, weight_decay=0.1),
    "groups": _groups,
    "amsgrad": lambda params: AdamW(params, lr=0.02, betas=(0.8, 0.9), amsgrad=True),
    "rmsprop": lambda params: RMSprop(params, lr=0.01, momentum=0.5),
    "adagrad": lambda params: Adagrad(params, lr=0.05),
}
