"""What a client does in a round: local steps from the weights that it is sent, with the model of this process."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial

import numpy as np
import torch
from torch import Tensor

from unisono.comm.device import of_rank
from unisono.config import Recipe
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import UsageError, UserCodeError
from unisono.sync import Sync, Verdict
from unisono.sync._around import SyncAround
from unisono.sync._slots import learning_dense
from unisono.train.build.build import Place, build
from unisono.train.data.dataset import Corpus, Uneven
from unisono.train.data.feed import Micro
from unisono.train.data.order import samples_at
from unisono.train.step.batch_norm import changed_buffers
from unisono.train.step.run import Run
from unisono.train.step.train_step import train_step
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated import draws
from unisono_contrib.spec.federated import LocalWork, Strategy

Vectors = Mapping[str, Tensor]
_CLIENT = 40  # bits of a position below the client's number: dropout depends on both


@dataclass(frozen=True, slots=True)
class Task:
    """What a client is asked to do. number: of the round, or of the task where there are no rounds; the same for no two
    tasks of one client. weights: [d]. lr: of its steps. share: of its local steps that it makes. sent: vectors of the
    strategy's server, [d] in the model's dtype. run: whose task it is, where clients are elsewhere. heard: number of
    the last task of this client whose answer the server has, -1 for none."""

    number: int
    client: int
    weights: Tensor
    lr: float
    share: float = 1.0
    sent: Vectors = field(default_factory=dict)
    run: str = ""
    heard: int = -1


@dataclass(frozen=True, slots=True)
class LocalResult:
    """What came of it. delta: [d]. growth: what the vectors that the client keeps grew by. loss: nats per target, mean
    over its steps. rates: the sum of their learning rates."""

    delta: Tensor
    growth: Vectors
    steps: int
    loss: float


class PulledSync(SyncAround):
    """Gradients with what a strategy adds to them. pull(): [d], or None."""

    def __init__(self, inner: Sync, trainer: "LocalTrainer") -> None:
        super().__init__(inner)
        self._trainer = trainer

    def settle(self) -> Verdict:
        verdict = self.inner.settle()
        if (pull := self._trainer.pull()) is not None:
            self._trainer.add_to_gradients(pull)
        return verdict


class LocalTrainer:
    """The model, optimiser and loss of a recipe on this process, lent to one client after the other.

    recipe: resolved, of one micro-batch a step. Raises UsageError as a run's start does; C06 where a step changes more
    of the model than its parameters.
    """

    def __init__(self, recipe: Recipe, plan: Plan, corpus: Corpus, strategy: Strategy) -> None:
        self.recipe, self.corpus, self.strategy = recipe, corpus, strategy
        self.config = FederatedConfig.of(recipe)
        place = Place(0, 1, of_rank("gloo", 0), "gloo", timedelta(seconds=600))
        # [privacy] protects clients in their rounds, not the samples of one in its steps.
        steps = recipe.model_copy(update={"privacy": None})
        self.run: Run = build(steps, plan, place, corpus, Recorder(0))
        _refuse_buffers(self.run)
        self.slots = learning_dense(self.run.local.slots, "federated")
        self.run.sync = self.run.gradients.sync = PulledSync(self.run.sync, self)
        self.run.update = replace(self.run.update, rate=lambda step: self._lr)
        self._uneven = corpus.train if isinstance(corpus.train, Uneven) else None
        self._lr, self._pulling = 0.0, partial(_nothing)
        optimizer = self.run.update.optimizer
        self._fresh = [
            (x, x.clone())
            for kept in optimizer.state.values()
            for x in kept.values()
            if isinstance(x, Tensor)
        ]

    @property
    def numel(self) -> int:
        """Numbers of a delta."""
        return sum(slot.master.numel() for slot in self.slots)

    def weights(self) -> Tensor:
        """[d], a copy."""
        return torch.cat([slot.master.detach().reshape(-1) for slot in self.slots])

    @torch.no_grad()
    def load(self, weights: Tensor) -> None:
        """Have these weights, and an optimiser at its beginning."""
        for slot, part in zip(self.slots, self._parts(weights), strict=True):
            slot.master.copy_(part)
        for x, fresh in self._fresh:
            x.copy_(fresh)

    def _parts(self, vector: Tensor) -> list[Tensor]:
        """A vector [d] cut into tensors like the parameters."""
        pieces = vector.split([slot.master.numel() for slot in self.slots])
        return [piece.view(slot.master.shape) for slot, piece in zip(self.slots, pieces, strict=True)]

    def pull(self) -> Tensor | None:
        """What the strategy adds to the gradient of the step under way."""
        return self._pulling()

    @torch.no_grad()
    def add_to_gradients(self, pull: Tensor) -> None:
        """Add a vector [d] to the gradients, in the units that the loss's scale gives them."""
        scale = self.run.update.scaler.factor
        for slot, part in zip(self.slots, self._parts(pull), strict=True):
            if slot.master.grad is not None:
                slot.master.grad.add_(part if scale is None else part * scale)

    def train(self, task: Task, samples: np.ndarray, kept: Vectors) -> LocalResult:
        """A client's local steps. samples: its numbers in the training data. kept: what it keeps for the strategy.
        Raises UserCodeError where a loss or gradient is no number."""
        self.load(task.weights)
        self._lr, self.run.step, losses = task.lr, 0, list[float]()
        start, sent = task.weights, task.sent
        if type(self.strategy).pull is not Strategy.pull:  # else weights need not be gathered in each step
            self._pulling = lambda: self.strategy.pull(self.weights(), start, sent, kept)
        try:
            for chosen, rows in self._batches(task, samples):
                losses.append(self._step(task, rows, chosen))
        finally:
            self._pulling = partial(_nothing)
            self.run.recorder.lap()
        weights = self.weights()
        work = LocalWork(weights, start, len(losses) * task.lr, sent, kept)
        return LocalResult(
            weights - start, dict(self.strategy.learn(work)), len(losses), math.fsum(losses) / len(losses)
        )

    def _step(self, task: Task, rows: np.ndarray, chosen: np.ndarray) -> float:
        """One local step; its loss. rows: of the training data. chosen: their positions, which also say what is dropped
        (`models.noise`)."""
        leaves = [self._leaf(task.client, rows, chosen)]
        while (report := train_step(self.run, leaves)).again:  # under fp16, with a smaller scale
            pass
        if report.bad:
            raise UserCodeError(
                f"client {task.client}: {report.bad}",
                where=f"round {task.number + 1}, local step {report.step + 1}",
                likely="a learning rate that is too high for this client's data",
                fix="a lower train.lr, or fewer local steps: federated.local_epochs, federated.local_steps",
            )
        return report.loss

    def _leaf(self, client: int, rows: np.ndarray, chosen: np.ndarray) -> Micro:
        data, run = self.corpus.train, self.run
        inputs, targets = data.fetch(rows)
        inputs = inputs.to(run.replica.dtype) if inputs.is_floating_point() else inputs
        documents = self._uneven.documents(rows) if self._uneven is not None else None
        counted = self._uneven.counted(rows) if self._uneven is not None else None
        positions = torch.from_numpy(chosen + (client << _CLIENT))
        inputs, targets, positions = (x.to(run.local.device) for x in (inputs, targets, positions))
        documents = documents if documents is None else documents.to(run.local.device)
        scale = 1.0 if counted is None else targets.numel() / max(1, int(counted.sum()))
        return Micro(inputs, targets, positions, documents, scale)

    def _batches(self, task: Task, samples: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Of each local step, positions in the order of all that this client ever sees, one after the other, and the
        rows of the training data that stand there."""
        config, batch, count = self.config, self.recipe.train.global_batch, len(samples)
        a_pass = -(-count // batch)
        steps = config.local_steps or a_pass * config.local_epochs
        passes = -(-steps // a_pass)
        first, order = task.number * passes * count, draws.key(self.recipe.seed, "order", task.client)
        left = max(1, math.ceil(task.share * steps))
        for turn in range(passes):
            positions = first + turn * count + np.arange(count, dtype=np.int64)
            rows = samples[samples_at(order, positions, count)]
            for at in range(0, count, batch)[:left]:
                yield positions[at : at + batch], rows[at : at + batch]
            left -= a_pass
            if left <= 0:
                return


def _nothing() -> None:
    return None


def _refuse_buffers(run: Run) -> None:
    """Raises UsageError C06 where steps change statistics of the model, of which clients would have each their own."""
    for stage in run.local.stages.values():
        for name in changed_buffers(stage, run.local.routers):
            raise UsageError(
                f"local steps change {name}, which is no parameter: clients would have each their own",
                where="model.kind",
                likely="batch norm, or a router that balances its experts by a running bias",
                fix="a model with layer or group norms",
                code="C06",
            )
