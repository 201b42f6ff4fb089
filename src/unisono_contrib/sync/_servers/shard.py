"""Some of the parameters with their optimiser: carries out the sequencer's log on tensors. No input or output."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.parallel.params import dense_of, values_of
from unisono_contrib.sync._servers.sequencer import Entry

Gradients = list[Tensor | None]
"""Of each parameter of a shard in order; None where a replica has none."""


@dataclass(frozen=True, slots=True)
class Reply:
    """What a shard says. to: a replica's number, -1: the sequencer. tensors: weights of each parameter in order, then,
    if asked for, of each the optimiser's state in its order."""

    to: int
    said: dict[str, Any]
    tensors: Sequence[Tensor] = ()


@dataclass(slots=True)
class Shard:
    """params: by name, the weights of this shard, in the order in which all speak of them. optimizer: over them.
    compensation: the factor λ of DC-ASGD (Zheng et al. 2017), by which a gradient becomes g + λ g⊙g⊙(w - w_read); 0:
    off. by_rows: names of those whose gradients may have few rows, of which a replica gets the rows that have changed
    since it read last. counted: names of those that count in the norm of the whole model, since another shard may have
    the same; None: all. version: updates that made these weights, since the run began; -1 until it has begun. Every
    method is called by one thread at a time."""

    params: Mapping[str, nn.Parameter]
    optimizer: Optimizer
    workers: set[int]
    compensation: float = 0.0
    by_rows: frozenset[str] = frozenset()
    counted: frozenset[str] | None = None
    version: int = -1
    _changed: dict[str, Tensor] = field(default_factory=dict)
    _seen: dict[int, int] = field(default_factory=dict)
    _arrived: dict[tuple[int, int], Gradients] = field(default_factory=dict)  # by the step that they are of
    _taken: dict[tuple[int, int], Gradients] = field(default_factory=dict)  # by the update that they are for
    _read: dict[int, list[Tensor]] = field(default_factory=dict)

    def states(self) -> list[Tensor]:
        """What the optimiser keeps of each parameter in order, each in the order of its keys."""
        kept = (self.optimizer.state.get(p, {}) for p in self.params.values())
        return [x for state in kept for _, x in sorted(state.items()) if isinstance(x, Tensor)]

    @torch.no_grad()
    def fill(self, weights: Iterable[Tensor], states: Iterable[Tensor]) -> Reply:
        """Begin with these weights and states; what was pushed before is void."""
        for mine, x in zip((*self.params.values(), *self.states()), (*weights, *states), strict=True):
            mine.copy_(x)
        self.version = -1
        self._arrived.clear()
        self._taken.clear()
        self._read.clear()
        self._seen.clear()
        rows = {name: p for name, p in self.params.items() if name in self.by_rows}
        self._changed = {name: torch.zeros(len(p), dtype=torch.int64) for name, p in rows.items()}
        return Reply(-1, {"op": "filled"})

    def push(self, worker: int, step: int, gradients: Gradients) -> Reply:
        """A replica's gradient for `step`."""
        self._arrived[worker, step] = gradients
        return Reply(-1, {"op": "have", "worker": worker, "step": step})

    def carry_out(self, entry: Entry) -> list[Reply]:
        """Do what an entry of the log says. Entries come in order, and what they need is here."""
        return _STEPS[entry["op"]](self, entry)

    def _begun(self, entry: Entry) -> list[Reply]:
        if "worker" in entry:
            self.workers.add(entry["worker"])
            return [Reply(entry["worker"], entry)]
        self.version = entry["version"]
        return [Reply(worker, entry) for worker in sorted(self.workers)]

    def _took(self, entry: Entry) -> list[Reply]:
        gradients = self._arrived.pop((entry["worker"], entry["step"]))
        if not entry["late"]:
            self._taken[entry["worker"], entry["for"]] = gradients
        return [Reply(entry["worker"], entry)]

    @torch.no_grad()
    def _combine(self, entry: Entry) -> list[Reply]:
        mean = self._mean(entry["workers"], entry["version"])
        counted = self.params if self.counted is None else self.counted
        each = zip(self.params, mean, strict=True)
        parts = [
            torch.sum(values_of(g).double() ** 2) for name, g in each if g is not None and name in counted
        ]
        squared = float(torch.stack(parts).sum()) if parts else 0.0
        return [Reply(-1, {"op": "square", "attempt": entry["attempt"], "squared": squared})]

    @torch.no_grad()
    def _update(self, entry: Entry) -> list[Reply]:
        version, workers = entry["version"], entry["workers"]
        if workers:
            mean = self._mean(workers, version)
            for p, gradient in zip(self.params.values(), mean, strict=True):
                p.grad = gradient
                if gradient is not None and entry["divisor"] != 1.0:
                    values_of(gradient).div_(entry["divisor"])
            self._mark(version + 1)
            if self.compensation and len(workers) == 1:
                self._compensate(workers[0])
            for group in self.optimizer.param_groups:
                group["lr"] = entry["lr"]
            self.optimizer.step()
            self.optimizer.zero_grad()
        for worker in (*workers, *entry["void"]):
            self._taken.pop((worker, version), None)
        self.version = version + 1
        return []

    def _mark(self, version: int) -> None:
        """Note which rows this version changes: those with a gradient, all where it is dense."""
        for name, changed in self._changed.items():
            grad = self.params[name].grad
            if grad is not None:
                changed[grad.indices()[0] if grad.is_sparse else slice(None)] = version

    def _mean(self, workers: Sequence[int], version: int) -> Gradients:
        """The mean gradient of these replicas, in their order, so that it has the same bits whoever came first."""
        parts = [self._taken[worker, version] for worker in workers]
        return [_mean([g for g in each if g is not None], len(parts)) for each in zip(*parts, strict=True)]

    def _compensate(self, worker: int) -> None:
        for p, read in zip(self.params.values(), self._read.get(worker, ()), strict=True):
            if p.grad is not None:
                g = p.grad = dense_of(p.grad)
                g.addcmul_(g * g, p - read, value=self.compensation)

    @torch.no_grad()
    def _give(self, entry: Entry) -> list[Reply]:
        worker, weights = entry["worker"], [p.detach().clone() for p in self.params.values()]
        if self.compensation:
            self._read[worker] = weights
        if (seen := self._seen.get(worker)) is not None:
            names = zip(self.params, weights, strict=True)
            weights = [self._news(name, x, seen) if name in self._changed else x for name, x in names]
        self._seen[worker] = entry["version"]
        return [Reply(worker, entry, weights)]

    def _news(self, name: str, weight: Tensor, seen: int) -> Tensor:
        """The rows that have changed since version `seen`."""
        rows = (self._changed[name] > seen).nonzero()[:, 0]
        return torch.sparse_coo_tensor(
            rows[None], weight[rows], weight.shape, is_coalesced=True, check_invariants=False
        )

    @torch.no_grad()
    def _gather(self, entry: Entry) -> list[Reply]:
        kept = [x.detach().clone() for x in (*self.params.values(), *self.states())]
        return [Reply(worker, entry, kept) for worker in sorted(self.workers)]

    def _gone(self, entry: Entry) -> list[Reply]:
        self.workers.discard(entry["worker"])
        self._read.pop(entry["worker"], None)
        self._seen.pop(entry["worker"], None)
        for kept in (self._arrived, self._taken):
            for key in [key for key in kept if key[0] == entry["worker"]]:
                del kept[key]
        return []


_STEPS: dict[str, Callable[[Shard, Entry], list[Reply]]] = {
    "begun": Shard._begun,
    "took": Shard._took,
    "combine": Shard._combine,
    "update": Shard._update,
    "read": Shard._give,
    "gather": Shard._gather,
    "gone": Shard._gone,
}


def _mean(gradients: Sequence[Tensor], count: int) -> Tensor | None:
    """The sum of the gradients there are by `count`; sparse where all are."""
    if not gradients:
        return None
    if not all(g.is_sparse for g in gradients):
        gradients = [dense_of(g) for g in gradients]
    total = gradients[0].clone()
    for g in gradients[1:]:
        total = total + g
    total = total.coalesce() if total.is_sparse else total
    values_of(total).div_(count)
    return total


def shares(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """Names dealt to `servers`, so that each has about as many bytes: the largest first, each to whoever has least.
    sizes: bytes by name. In each share names keep their order."""
    load, owner = [0] * servers, dict[str, int]()
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = load.index(min(load))
        load[owner[name]] += sizes[name]
    return [[name for name in sizes if owner[name] == server] for server in range(servers)]
