"""A mixture of experts that live on peers which come and go (Ryabinin & Gusev, "Towards crowdsourced training of large
neural networks using decentralized mixture-of-experts", 2020, arXiv 2002.04013).

    rpc.offer("expert.0.1", rpc.Expert(module, torch.optim.SGD(module.parameters(), lr=0.1)))    # on a peer

    layer = rpc.UnreliableExperts(64, {(0, 1): "peer1", (0, 2): "peer2"}, k=2, timeout=5.0)      # on a trainer
    loss_of(layer(x)).backward()

A trainer keeps the gate alone. A peer computes its experts and steps their own optimisers, when a gradient comes. An
expert that does not answer is left out, and the weights of the others are normalised without it.

Fidelity: LOSSY, since who answers is chance. While all answer, it is the same layer on one device, up to rounding.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from unisono.spec.errors import UnisonoError
from unisono.spec.fidelity import Fidelity
from unisono_contrib.rpc.current import here
from unisono_contrib.rpc.errors import NoExperts
from unisono_contrib.rpc.exports import exported
from unisono_contrib.rpc.futures import CallFuture
from unisono_contrib.rpc.objects import RRef, offered

Point = tuple[int, ...]
"""A place of the grid: one number for each of its dimensions."""


def expert_name(point: Point) -> str:
    """The name under which a peer offers the expert of a place: "expert.0.1" for (0, 1)."""
    return ".".join(("expert", *map(str, point)))


@exported
class Expert:
    """An expert on its peer. module: a function of its input [n, width] alone, the same in forward and backward, so
    without dropout. optimizer: over its parameters; it steps with each gradient that comes, of whichever trainer."""

    def __init__(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._module, self._optimizer, self._lock = module, optimizer, threading.Lock()

    def forward(self, x: Tensor) -> Tensor:
        """[n, width] → [n, width of the module's output]."""
        with self._lock, torch.no_grad():
            return self._module(x)

    def backward(self, x: Tensor, gradient: Tensor) -> Tensor:
        """Compute the forward again, step the optimiser, and return the gradient of x. gradient: of what `forward` gave
        for it."""
        with self._lock, torch.enable_grad():
            x = x.detach().requires_grad_()
            self._optimizer.zero_grad()
            self._module(x).backward(gradient)
            self._optimizer.step()
            return torch.zeros_like(x) if x.grad is None else x.grad


class GridGate(nn.Module):
    """[n, width] → scores [n, experts]: that of a place is the sum of one number for each of its coordinates, so that a
    grid of 100 × 100 places needs 200 outputs."""

    places: Tensor

    def __init__(self, width: int, points: Sequence[Point]) -> None:
        super().__init__()
        sizes = [1 + max(axis) for axis in zip(*points, strict=True)]
        self.axes = nn.ModuleList(nn.Linear(width, size) for size in sizes)
        self.register_buffer("places", torch.tensor(points), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return sum(
            (axis(x)[:, at] for axis, at in zip(self.axes, self.places.T, strict=True)), x.new_zeros(())
        )


@dataclass(slots=True)
class _Peer:
    """What a trainer knows of an expert. rref: to it, where it was found. rests: it is not asked before this time."""

    worker: str
    name: str
    rref: RRef[Expert] | None = None
    rests: float = 0.0


class UnreliableExperts(nn.Module):
    """[..., width] → [..., width of the experts' outputs]: of each sample, the mean of the `k` experts with the highest
    scores of those that answer, weighted by the softmax of their scores.

    experts: by its place in the grid, the worker that offers it. k: how many a sample is sent to. timeout: seconds that
    an expert has to answer. rest: seconds for which one that did not is not asked; then it is looked for again, so that
    a peer that returns is used again. clock: seconds that pass.

    Where nobody has answered yet, it goes on asking for `timeout` seconds. counts: of calls since the start, "answered"
    and "failed" in forward, "lost" gradients in backward. Raises NoExperts (Q07) where no expert answers for some
    sample. Make it after `rpc.init`."""

    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __init__(
        self, width: int, experts: Mapping[Point, str], *, k: int = 2, timeout: float = 5.0, rest: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__()
        if not experts or k < 1 or len({len(point) for point in experts}) != 1:
            raise ValueError("experts at places of one grid, and k of at least 1")
        self.gate, self.k, self.timeout, self.rest = GridGate(width, list(experts)), k, timeout, rest
        self._peers = [_Peer(worker, expert_name(point)) for point, worker in experts.items()]
        self._clock, self.counts, self._worker = clock, Counter[str](), here()

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = self.gate(flat)
        chosen, answers = self._answered(flat.detach(), scores.detach())
        weights = scores.masked_fill(~chosen, -torch.inf).softmax(1)
        experts, rows, values = zip(*answers, strict=True)
        # Experts learn even where nothing before this layer does.
        anchor = torch.zeros((), device=flat.device, requires_grad=torch.is_grad_enabled())
        outputs = _Answers.apply(flat, anchor, self, experts, rows, *values)
        mixed = flat.new_zeros(len(flat), *outputs[0].shape[1:])
        for expert, at, y in zip(experts, rows, outputs, strict=True):
            mixed = mixed.index_add(0, at, weights[at, expert, None] * y)
        return mixed.reshape(*x.shape[:-1], *mixed.shape[1:])

    def _answered(self, x: Tensor, scores: Tensor) -> tuple[Tensor, list[tuple[int, Tensor, Tensor]]]:
        """(bool [n, experts], which have answered for which sample; of each expert its number, the rows [m] that it was
        sent, its answer [m, width]). Samples for which nobody has answered are sent to the next best."""
        chosen = torch.zeros_like(scores, dtype=torch.bool)
        answers: list[tuple[int, Tensor, Tensor]] = []
        left, error = torch.arange(len(x), device=x.device), None
        now, patience = self._clock(), time.monotonic() + self.timeout
        usable = torch.tensor([peer.rests <= now for peer in self._peers], device=x.device)
        if not usable.any():  # rather one that rests than none
            usable.fill_(True)
        while len(left):
            if not usable.any() and not self.counts["answered"] and time.monotonic() < patience:
                time.sleep(0.02)  # peers begin when they can
                usable.fill_(True)
            if not usable.any():
                raise NoExperts(len(self._peers), self.timeout) from error
            best = (
                scores[left].masked_fill(~usable, -torch.inf).topk(min(self.k, int(usable.sum())), 1).indices
            )
            routes = [(expert, left[(best == expert).any(1)]) for expert in best.unique().tolist()]
            replies = self._call("forward", [(expert, (x[rows],)) for expert, rows in routes])
            for (expert, rows), reply in zip(routes, replies, strict=True):
                if isinstance(reply, Tensor):
                    answers.append((expert, rows, reply))
                    chosen[rows, expert] = True
                else:
                    usable[expert], error = False, reply
                self.counts["answered" if isinstance(reply, Tensor) else "failed"] += 1
            left = left[~chosen[left].any(1)]
        return chosen, answers

    def _call(
        self, method: str, calls: Sequence[tuple[int, Sequence[Tensor]]]
    ) -> list[Tensor | UnisonoError]:
        """Call a method of some experts at once. The error of one that does not answer stands for its result; it rests
        then."""
        under_way = [self._begun(self._peers[expert], method, args) for expert, args in calls]
        results: list[Tensor | UnisonoError] = []
        for (expert, _), call in zip(calls, under_way, strict=True):
            try:
                results.append(call if isinstance(call, UnisonoError) else call.wait())
            except UnisonoError as error:
                results.append(error)
            if isinstance(results[-1], UnisonoError):
                peer = self._peers[expert]
                peer.rref, peer.rests = None, self._clock() + self.rest
        return results

    def _begun(self, peer: _Peer, method: str, args: Sequence[Tensor]) -> CallFuture[Tensor] | UnisonoError:
        """A call under way; the expert is looked for where it is not known."""
        try:
            rref = peer.rref
            if rref is None:
                rref = self._worker.call(peer.worker, offered, (peer.name,), timeout=self.timeout).wait()
                peer.rref = rref
            return rref.call("async", self.timeout, method, args, {})
        except UnisonoError as error:
            return error

    def gradient_of(self, x: Tensor, calls: Sequence[tuple[int, Tensor, Tensor]]) -> Tensor:
        """The gradient of x by way of these experts: of each its number, rows [m] of x, and the gradient of its answer
        [m, ...]. One that has gone meanwhile adds nothing."""
        total = torch.zeros_like(x)
        replies = self._call("backward", [(expert, (x[rows], gradient)) for expert, rows, gradient in calls])
        for (_, rows, _), reply in zip(calls, replies, strict=True):
            if isinstance(reply, Tensor):
                total.index_add_(0, rows, reply.to(total))
            else:
                self.counts["lost"] += 1
        return total


class _Answers(torch.autograd.Function):
    """Answers of experts as functions of x; in backward they are asked for its gradient, all at once."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        anchor: Tensor,
        layer: UnreliableExperts,
        experts: Sequence[int],
        rows: Sequence[Tensor],
        *values: Tensor,
    ) -> tuple[Tensor, ...]:
        ctx.layer, ctx.experts, ctx.rows = layer, experts, rows
        ctx.save_for_backward(x)
        return tuple(value.to(x) if value.device != x.device else value.view_as(value) for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:
        (x,) = ctx.saved_tensors
        calls = list(zip(ctx.experts, ctx.rows, gradients, strict=True))
        return ctx.layer.gradient_of(x, calls), None, None, None, None, *(None for _ in gradients)
