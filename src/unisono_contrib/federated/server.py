"""The server of a federated run: rounds, its own state, evaluation of the global model, checkpoints."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unisono.config import Resolved
from unisono.spec.errors import HangError, UsageError
from unisono.spec.training import METRICS
from unisono.train.data.dataset import Corpus
from unisono.train.data.feed import Permuted
from unisono.train.state.checkpoint import Box, read_full, save, tensor_names
from unisono.train.state.run_state import pieces_of, restore
from unisono.train.step.evaluate import evaluate
from unisono.train.step.played_model import PlayedModel, evaluated
from unisono_contrib.config.sections.federated import FederatedConfig
from unisono_contrib.federated.client import LocalTrainer, Task
from unisono_contrib.federated.clients import Answer, ClientHost, Clients, SimulatedClients
from unisono_contrib.federated.cohorts import BufferCohorts, Cohorts, Collected, RoundCohorts, RoundDraws
from unisono_contrib.federated.combine import Combiner, stacked
from unisono_contrib.federated.protect import clip_of, combiner_of
from unisono_contrib.federated.samples import samples_of
from unisono_contrib.federated.secure.terms import SecureTerms
from unisono_contrib.federated.wire import DeltaCodec
from unisono_contrib.spec.federated import SPLITS, STRATEGIES, Strategy

PREFIX = "federated/"


_OF_A_ROUND = ("A01", "A02", "A03")
"""Errors of a secure sum that another round may not have."""
_IN_VAIN = 10
"""Rounds in a row that may be lost."""


@dataclass(frozen=True, slots=True)
class Combined:
    """What the answers of a round came to. collected: those that count. delta: float64 [d]; None where there is no
    step, for the reason `skipped`; error: what was raised. received: bytes of a secure sum."""

    collected: Collected
    delta: Tensor | None = None
    skipped: str = ""
    received: int = 0
    error: UsageError | None = None


@dataclass(slots=True)
class Federation:
    """A run at some round. weights: [d], the global model's. kept: the strategy's vectors on the server, float64 [d].
    enough: answers of a round with which the aggregate was tried before the first one. codec_kept: by client, what the
    server keeps to decode its deltas. number: rounds made. in_vain: of the last ones, lost by a fault."""

    resolved: Resolved
    corpus: Corpus
    trainer: LocalTrainer
    strategy: Strategy
    codec: DeltaCodec
    combiner: Combiner
    clients: Clients
    cohorts: Cohorts
    parts: list[np.ndarray]
    weights: Tensor
    kept: dict[str, Tensor]
    enough: int = 1
    codec_kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    number: int = 0
    in_vain: int = 0

    def rounds(self) -> Iterator[dict[str, Any]]:
        """Rounds until the last one, each with its line of metrics."""
        while self.number < FederatedConfig.of(self.resolved.recipe).rounds:
            yield self.play_round()

    def play_round(self) -> dict[str, Any]:
        """One step of the server; its line of metrics. Raises UserCodeError where numbers go bad, UsageError for what
        another round would not mend, HangError where clients have answered none of many rounds."""
        begun, recipe, rate = time.perf_counter(), self.resolved.recipe, self.rate
        combined = self._combined(self.cohorts.collect(self.number, self.clients, self._task))
        norm = self._stepped(combined)
        self.number += 1
        record = self._record(combined, rate, norm, time.perf_counter() - begun)
        if self.number == FederatedConfig.of(recipe).rounds or _due(recipe.train.eval_every, self.number):
            record |= {f"val_{name}": value for name, value in self.evaluate().items()}
        return record

    def _task(self, number: int, client: int, share: float) -> Task:
        sent = {name: self.kept[name].to(self.weights.dtype) for name in self.strategy.sends}
        return Task(number, client, self.weights.clone(), self.rate, share, sent)

    @property
    def rate(self) -> float:
        """The learning rate of local steps in this round."""
        return self.resolved.recipe.train.rate()(self.number)

    def _combined(self, collected: Collected) -> Combined:
        """The delta of a round, or why there is none."""
        if not collected.answers:
            return Combined(collected, skipped="no client has answered")
        if (terms := self.combiner.secure) is not None:
            return self._summed(collected, terms)
        deltas = [self._decoded(answer) for answer in collected.answers]
        fit = collected.only([delta is not None for delta in deltas])
        if not fit.answers:
            return Combined(fit, skipped="no client has answered with numbers")
        rows = stacked([delta for delta in deltas if delta is not None])
        rows *= torch.tensor([self.strategy.share(n) for n in fit.behind], dtype=torch.float64)[:, None]
        counts = torch.tensor([self._count(answer) for answer in fit.answers], dtype=torch.float64)
        try:
            return Combined(fit, self.combiner(rows, counts, self.number))
        except UsageError as error:
            if len(rows) >= self.enough:
                raise
            return Combined(fit, skipped=error.what)

    def _summed(self, collected: Collected, terms: SecureTerms) -> Combined:
        """The same of deltas that stay with their clients."""
        weights = {answer.client: self._count(answer) for answer in collected.answers}
        exchange = partial(self.clients.exchange, self.number)
        try:
            summed = self.combiner.summed(exchange, weights, terms, self.number)
        except UsageError as error:
            if error.code not in _OF_A_ROUND:
                raise
            return Combined(collected, skipped=error.what, error=error)
        stayed = collected.only([answer.client in summed.survivors for answer in collected.answers])
        return Combined(stayed, summed.delta, received=summed.received)

    def _stepped(self, combined: Combined) -> float:
        """Step the global weights; the norm of the round's delta, 0 where there is none and nothing changes."""
        answers, strategy, delta = combined.collected.answers, self.strategy, combined.delta
        if delta is None:
            self._bear(combined)
            return 0.0
        self.in_vain = 0
        growth = {name: [answer.growth[name] for answer in answers] for name in strategy.client_keeps}
        strategy.hear(growth, FederatedConfig.of(self.resolved.recipe).clients, self.kept)
        step = strategy.step(delta, self.kept)
        self.weights = (self.weights.double() + step).to(self.weights.dtype)
        return float(delta.norm())

    def _bear(self, combined: Combined) -> None:
        """A round without a step. One that the seed leaves too few clients is no fault. Raises after `_IN_VAIN` others
        in a row, which no drop-outs explain: the next ones would be the same."""
        collected, error = combined.collected, combined.error
        if len(collected.answers) == collected.tasks and (error is None or error.code == "A02"):
            return
        self.in_vain += 1
        if self.in_vain < _IN_VAIN:
            return
        where = f"rounds {self.number + 2 - _IN_VAIN} to {self.number + 1}"
        if error is not None:
            what = f"{_IN_VAIN} rounds in a row are lost; the last one: {error.what}"
            raise UsageError(what, where=where, likely=error.likely, fix=error.fix, code=error.code)
        raise HangError(
            f"{_IN_VAIN} rounds in a row are lost; the last one: {combined.skipped}",
            where=where,
            likely="clients that are there, and do not answer within federated.patience, or whose numbers go bad",
            fix="the notes of their processes; a longer patience, a lower train.lr",
        )

    def _count(self, answer: Answer) -> float:
        """What an answer counts for. What a client says of its samples is believed where nobody else can know."""
        config = FederatedConfig.of(self.resolved.recipe)
        if config.weights == "equal":
            return 1.0
        return float(answer.samples if SPLITS.read(config.split).apart else len(self.parts[answer.client]))

    def _decoded(self, answer: Answer) -> Tensor | None:
        """The delta of an answer; None for one without numbers, and for what is no delta of this run: its client would
        send no better one, and is rejected."""
        kept = self.codec_kept.setdefault(answer.client, self.codec.initial())
        try:
            delta = self.codec.decode(answer.parts, kept, answer.number)
        except (ValueError, RuntimeError, IndexError) as error:  # of torch, where parts do not go together
            self.clients.reject(answer.client, f"its answer is no delta of this run: {error}")
            return None
        named = self.strategy.client_keeps
        vectors = (delta, *answer.growth.values())
        if answer.growth.keys() != {*named} or any(x.shape != self.weights.shape for x in vectors):
            self.clients.reject(answer.client, "its answer has not the vectors of this model and strategy")
            return None
        return delta if bool(torch.isfinite(delta).all()) else None

    def _record(self, combined: Combined, rate: float, norm: float, seconds: float) -> dict[str, Any]:
        collected, answers = combined.collected, combined.collected.answers
        samples = sum(answer.samples for answer in answers)
        loss = sum(answer.loss * answer.samples for answer in answers) / samples if samples else None
        behind = {"behind": max(collected.behind, default=0)} if self.strategy.asynchronous else {}
        return {
            "step": self.number,
            "loss": loss,
            "lr": rate,
            "clients": len(answers),
            "dropped": collected.dropped,
            "late": collected.late,
            "samples": samples,
            "local_steps": sum(answer.steps for answer in answers),
            "delta_norm": norm,
            "bytes_received": combined.received + sum(answer.nbytes for answer in answers),
            "seconds": seconds,
            **behind,
            **self.combiner.says(self.number),
            **({"skipped": combined.skipped} if combined.skipped else {}),
        }

    def evaluate(self) -> dict[str, float]:
        """Loss and metrics of the global model on what is held out, and what a function of the user's says."""
        recipe, run, values = self.resolved.recipe, self.trainer.run, dict[str, float]()
        train, held = recipe.train, self.corpus.val
        self.trainer.load(self.weights)
        if len(held):
            batch, dtype = train.global_batch, run.replica.dtype
            feed = Permuted(
                held,
                recipe.seed + 1,
                batch,
                batch,
                run.local.device,
                dtype=dtype,
                repeat=True,
                prefetch=False,
            )
            batches = [feed.fetch(i, run.leaves) for i in range(train.eval_batches)]
            values["loss"], metrics = evaluate(run, batches, [METRICS.read(text) for text in train.metrics])
            values |= metrics
        if train.evaluate is not None:
            values |= evaluated(train.evaluate, PlayedModel(run, self.corpus))
        return values

    def save(self, run_dir: Path) -> Path:
        """Write a checkpoint, which any verb reads that reads those of runs. Raises UsageError K02."""
        self.cohorts.settle(self.clients)
        self.trainer.load(self.weights)
        self.trainer.run.step = self.number
        tensors, under_way = self.cohorts.state()
        parts = {
            "server": self.kept,
            "clients": self.clients.state(),
            "decoders": {f"{c}/{name}": x for c, kept in self.codec_kept.items() for name, x in kept.items()},
            "under_way": tensors,
        }
        boxes = [
            Box(f"{PREFIX}{part}/{name}", tuple(x.shape), (0,) * x.dim(), x)
            for part, named in parts.items()
            for name, x in named.items()
        ]
        recipe = self.resolved.recipe
        state = {
            "step": self.number,
            "data": {"fingerprint": self.corpus.fingerprint},
            "plan": str(self.resolved.plan),
            "recipe": recipe.model_dump(mode="json"),
            "cut_names": {n: list(names) for n, names in self.trainer.run.local.cut_names.items()},
            "federated": under_way,
        }
        keep = recipe.train.keep or None
        pieces = [*pieces_of(self.trainer.run), *boxes]
        return save(run_dir, self.number, pieces, state, keep=keep, keep_every=recipe.train.keep_every)

    def restore(self, folder: Path) -> None:
        """Go on from a checkpoint, to the last bit. Raises UsageError as `load` does."""
        state = restore(self.trainer.run, folder)
        names = [name for name in tensor_names(folder) if name.startswith(PREFIX)]
        parts: dict[str, dict[str, Tensor]] = {}
        for name, x in read_full(folder, names).items():
            part, _, key = name.removeprefix(PREFIX).partition("/")
            parts.setdefault(part, {})[key] = x
        self.weights, self.number = self.trainer.weights(), int(state["step"])
        self.kept = {**self.kept, **parts.get("server", {})}
        self.clients.load(parts.get("clients", {}))
        self.codec_kept = {}
        for key, x in parts.get("decoders", {}).items():
            client, _, name = key.partition("/")
            self.codec_kept.setdefault(int(client), {})[name] = x
        if state.get("federated"):
            self.cohorts.load(parts.get("under_way", {}), state["federated"])


def _due(every: int, number: int) -> bool:
    return bool(every and number % every == 0)


@dataclass(frozen=True, slots=True)
class RunParts:
    """What a server and the processes of its clients make alike. samples: of each client."""

    trainer: LocalTrainer
    codec: DeltaCodec
    samples: list[np.ndarray]

    @property
    def sizes(self) -> dict[str, int]:
        """Numbers of each parameter of a delta, in its order."""
        return {slot.name: slot.master.numel() for slot in self.trainer.slots}

    @classmethod
    def of(cls, resolved: Resolved, corpus: Corpus) -> "RunParts":
        """From a resolved recipe and its data. Raises UsageError."""
        recipe = resolved.recipe
        torch.set_num_threads(recipe.launch.threads_per_rank or 1)  # sums depend on their number
        strategy = STRATEGIES.read(FederatedConfig.of(recipe).strategy)
        trainer = LocalTrainer(recipe, resolved.plan, corpus, strategy)
        named = {slot.name: slot.master.detach() for slot in trainer.slots}
        return cls(
            trainer,
            DeltaCodec(FederatedConfig.of(recipe).codec, named, recipe.seed),
            samples_of(recipe, corpus),
        )


def client_host(resolved: Resolved, parts: RunParts) -> ClientHost:
    """The clients whose data is in this process. Raises UsageError E01."""
    recipe = resolved.recipe
    secure = SecureTerms.of(FederatedConfig.of(recipe), parts.sizes, recipe.seed)
    return ClientHost(parts.trainer, parts.samples, parts.codec, clip_of(recipe), secure)


def federation_of(
    resolved: Resolved,
    corpus: Corpus,
    combiner: Combiner | None = None,
    clients_of: Callable[[RunParts], Clients] | None = None,
) -> Federation:
    """A run before its first round. clients_of: where the clients are; in this process if None. Raises UsageError as a
    run's start does, ConfigProblems where the strategy does not go with the rest of the recipe."""
    recipe, parts = resolved.recipe, RunParts.of(resolved, corpus)
    strategy, trainer = parts.trainer.strategy, parts.trainer
    eligible = [client for client, mine in enumerate(parts.samples) if len(mine)]
    drawn = RoundDraws(recipe.seed, FederatedConfig.of(recipe), eligible)
    combiner = combiner or combiner_of(recipe, parts.sizes, drawn)
    buffer = getattr(strategy, "buffer", 0)
    enough = buffer or drawn.size
    _try_aggregate(combiner, enough)
    clients = SimulatedClients(client_host(resolved, parts)) if clients_of is None else clients_of(parts)
    weights = trainer.weights()
    kept = {
        name: torch.full(weights.shape, strategy.initial(name), dtype=torch.float64)
        for name in strategy.server_keeps
    }
    cohorts = BufferCohorts(drawn, buffer) if strategy.asynchronous else RoundCohorts(drawn)
    return Federation(
        resolved,
        corpus,
        trainer,
        strategy,
        parts.codec,
        combiner,
        clients,
        cohorts,
        parts.samples,
        weights,
        kept,
        enough,
    )


def _try_aggregate(combiner: Combiner, clients: int) -> None:
    """Raises what the aggregate raises where it needs more clients than are ever asked at once."""
    combiner.aggregate.combine(
        torch.zeros(clients, 1, dtype=torch.float64), torch.ones(clients, dtype=torch.float64)
    )
