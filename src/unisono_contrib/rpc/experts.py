"""A mixture layer whose experts live on workers that come and go (Learning@home, Ryabinin and Gusev 2020, arXiv
2002.04013).

    host_experts({"0.0": feed_forward(), "0.1": feed_forward()}, lambda params: SGD(params, lr=0.1))   # on some workers
    layer = RemoteExperts(64, (2, 4), ["host0", "host1"])                                              # on a trainer
    y = layer(x)

An expert's name is its place in a grid, one number for each side. The gate scores the numbers of each side by
themselves, and an expert by the sum over its place, so that a gate of few weights serves many experts. Each sample goes
to the best `k` experts that are there. Who does not answer in time is left out, and the others' weights are scaled up
to a sum of 1. Calls keep nothing at the host: backward sends the samples again, and the host computes them once more,
returns their gradient and steps its expert. So a host may go between forward and backward, and another one may come.

Fidelity: LOSSY. Where all answer, a step is that of the same layer on one device up to rounding; where one does not,
its samples' outputs lack that expert, or its gradient.
"""

import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from unisono.spec.errors import UnisonoError, UsageError
from unisono.spec.fidelity import Fidelity
from unisono_contrib.rpc.current import here
from unisono_contrib.rpc.errors import CallTimeout, PeerLost, refused
from unisono_contrib.rpc.exports import exported

SERVICE = "experts"
Place = tuple[int, ...]


class NoExpert(UnisonoError):
    """No expert is there, or none that was asked has answered."""

    exit = 1
    default_code: ClassVar[str] = "Q07"


@dataclass(eq=False)
class HostedExpert:
    """An expert and its optimiser. updates: steps that it has made. lock: held by who uses it."""

    module: nn.Module
    optimizer: Optimizer
    updates: int = 0

    def __post_init__(self) -> None:
        self.lock = threading.Lock()


def host_experts(
    experts: Mapping[str, nn.Module], optimizer: Callable[[Iterable[nn.Parameter]], Optimizer]
) -> dict[str, HostedExpert]:
    """Let other workers use these experts from now on. experts: by place, as "0.3"; each takes and gives float tensors
    [samples, width]. optimizer: of an expert's parameters; it steps in every backward. Raises UsageError Q06 outside
    `rpc.init`, Q04 for a name that is no place."""
    for name in experts:
        _place(name)
    hosted = {name: HostedExpert(module, optimizer(module.parameters())) for name, module in experts.items()}
    here().services[SERVICE] = hosted
    return hosted


@exported
def held() -> list[str]:
    """The experts that this worker has."""
    return sorted(here().services.get(SERVICE, {}))


@exported
def ask(name: str, x: Tensor) -> Tensor:
    """What an expert makes of `x` [samples, width]. Raises UsageError Q04 where it is not here."""
    expert = _hosted(name)
    with expert.lock, torch.no_grad():
        return expert.module(x)


@exported
def teach(name: str, x: Tensor, gradient: Tensor) -> Tensor:
    """Step an expert by the gradient of its output for `x`, both [samples, width]; the gradient of `x`. Raises
    UsageError Q04 where it is not here."""
    expert = _hosted(name)
    with expert.lock, torch.enable_grad():
        x = x.detach().requires_grad_()
        expert.optimizer.zero_grad()
        expert.module(x).backward(gradient)
        expert.optimizer.step()
        expert.updates += 1
        return x.grad if x.grad is not None else torch.zeros_like(x)


def _hosted(name: str) -> HostedExpert:
    worker = here()
    expert = worker.services.get(SERVICE, {}).get(name)
    if expert is None:
        raise refused(f"expert {name} is not here", "host_experts on this worker", where=worker.info.name)
    return expert


def _place(name: str) -> Place:
    """The place that a name says. Raises UsageError Q04."""
    numbers = name.split(".")
    if not all(number.isdecimal() for number in numbers):
        raise refused(f"{name!r} is no place of an expert", 'numbers from 0 on, as "0.3"')
    return tuple(map(int, numbers))


class Directory:
    """Which experts are there, and at whom. hosts: workers that may have some. retry_s: seconds after which one that
    did not answer is asked again, beside the training."""

    def __init__(
        self, worker: Any, hosts: Sequence[str], timeout: float, retry_s: float, clock: Callable[[], float]
    ) -> None:
        self._worker, self._hosts, self._timeout = worker, tuple(hosts), timeout
        self._retry_s, self._clock = retry_s, clock
        self._pool = ThreadPoolExecutor(
            max_workers=max(4, 2 * len(self._hosts)), thread_name_prefix="experts"
        )
        self._known: dict[str, list[str]] = {}
        self._asked: dict[str, Future[list[str]]] = {}
        self._again = dict.fromkeys(self._hosts, -math.inf)  # when to ask who is absent

    def call(self, host: str, function: Any, *args: Any) -> Future[Any]:
        """Begin a call. Its future raises PeerLost, CallTimeout, RemoteError, UsageError."""
        return self._pool.submit(
            lambda: self._worker.call(host, function, args, timeout=self._timeout, context=0).wait()
        )

    def present(self) -> dict[str, str]:
        """Hosts by expert, of all that are there. Waits where nobody is known to be."""
        for host in self._hosts:
            if host not in self._known and host not in self._asked and self._clock() >= self._again[host]:
                self._asked[host] = self.call(host, held)
        nobody = not self._known
        for host, future in list(self._asked.items()):
            if future.done() or nobody:
                del self._asked[host]
                names = answer_of(future, self._timeout)
                if names is None:
                    self.lost(host)
                else:
                    self._known[host] = names
        return {name: host for host in sorted(self._known, reverse=True) for name in self._known[host]}

    def lost(self, host: str) -> None:
        """A host has not answered."""
        self._known.pop(host, None)
        self._again[host] = self._clock() + self._retry_s


def answer_of(future: "Future[Any]", timeout: float) -> Any:
    """What a call came to; None if the host did not answer, or has the expert no longer. Raises RemoteError, since an
    expert that fails is a mistake and not an absence."""
    try:
        return future.result(timeout)
    except (PeerLost, CallTimeout, TimeoutError):
        return None
    except UsageError as error:
        if error.code != "Q04":
            raise
        return None


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one expert. rows: of the batch, which it was asked for. out: [rows, width]."""

    name: str
    host: str
    place: Place
    rows: Tensor
    out: Tensor


class _Asked(torch.autograd.Function):
    """The outputs of all answers, [all rows, width], as a function of the samples; backward teaches the experts."""

    @staticmethod
    def forward(
        ctx: Any, layer: "RemoteExperts", answers: Sequence[Answer], x: Tensor, anchor: Tensor
    ) -> Tensor:
        ctx.layer, ctx.answers = layer, answers
        ctx.save_for_backward(x)
        return torch.cat([answer.out for answer in answers])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, Tensor, None]:
        (x,) = ctx.saved_tensors
        return None, None, ctx.layer.teach(ctx.answers, x, gradients[0]), None


class RemoteExperts(nn.Module):
    """Mixture of the experts that are there. x: [..., width] → the same shape.

    grid: how many numbers each side of the grid has. hosts: names of workers that may have experts. k: experts of a
    sample. timeout: seconds that a call may take. retry_s: seconds after which an absent host is asked again.
    unanswered, untaught: calls of forward and of backward so far that came to nothing. used: samples by expert so far.

    Raises NoExpert (Q07) where a sample finds no expert at all, RemoteError where one fails.
    """

    fidelity: ClassVar[Fidelity] = Fidelity.LOSSY

    def __init__(
        self, width: int, grid: Sequence[int], hosts: Sequence[str], *, k: int = 4, timeout: float = 5.0,
        retry_s: float = 5.0, worker: Any = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(width, side) for side in grid)
        self.grid, self.k, self.timeout = tuple(grid), k, timeout
        self.directory = Directory(worker or here(), hosts, timeout, retry_s, clock)
        self.unanswered = self.untaught = 0
        self.used: dict[str, int] = {}

    def forward(self, x: Tensor) -> Tensor:
        flat = x.reshape(-1, x.shape[-1])
        scores = [gate(flat) for gate in self.gates]
        answers = self._answers(flat.detach(), [side.detach() for side in scores])
        # Experts learn even where nothing before this layer does.
        anchor = torch.zeros((), requires_grad=torch.is_grad_enabled())
        out = _Asked.apply(self, answers, flat, anchor)
        rows = torch.cat([answer.rows for answer in answers])
        chosen = torch.cat([_score(scores, answer.place)[answer.rows] for answer in answers])
        highest = chosen.new_full((len(flat),), -math.inf).scatter_reduce(0, rows, chosen.detach(), "amax")
        weight = (chosen - highest[rows]).exp()
        share = weight / weight.new_zeros(len(flat)).index_add(0, rows, weight)[rows]
        return torch.zeros_like(flat).index_add(0, rows, share[:, None] * out).view_as(x)

    def balance_loss(self, x: Tensor) -> Tensor:
        """To be added to a loss with a small factor, so that the gate does not send all samples to few experts: over
        the sides of the grid, the squared coefficient of variation of what each number is given (Shazeer et al. 2017,
        arXiv 1701.06538). []"""
        flat = x.reshape(-1, x.shape[-1])
        shares = [gate(flat).softmax(-1).mean(0) for gate in self.gates]
        return torch.stack([share.var(correction=0) / share.mean() ** 2 for share in shares]).sum()

    def _answers(self, x: Tensor, scores: Sequence[Tensor]) -> list[Answer]:
        """Answers for every sample. Those for which nobody answered go to the best of the others."""
        answers, missing = list[Answer](), torch.arange(len(x))
        while len(missing):
            present = self.directory.present()
            places = {name: place for name in present if self._fits(place := _place(name))}
            if not places:
                raise NoExpert(
                    f"no expert is there for {len(missing)} of {len(x)} samples",
                    where="RemoteExperts",
                    likely="all hosts are gone, or none has called host_experts yet",
                    fix="start hosts, or name others in hosts=",
                )
            new = self._asked(x, missing, scores, present, places)
            answers += new
            answered = torch.zeros(len(x), dtype=torch.bool)
            for answer in new:
                answered[answer.rows] = True
            missing = missing[~answered[missing]]
        return answers

    def _asked(
        self, x: Tensor, rows: Tensor, scores: Sequence[Tensor], present: Mapping[str, str], places: Mapping[str, Place]
    ) -> list[Answer]:  # fmt: skip
        """Ask the best experts of these rows; whoever does not answer is absent from now on."""
        names = sorted(places)
        table = torch.stack([_score(scores, places[name])[rows] for name in names], dim=1).cpu()
        best = table.topk(min(self.k, len(names)), dim=1).indices
        calls = []
        for column, name in enumerate(names):
            its = rows[(best == column).any(1)]
            if len(its):
                calls.append((name, its, self.directory.call(present[name], ask, name, x[its].cpu())))
        answers = []
        for name, its, future in calls:
            out = answer_of(future, self.timeout)
            if out is None:
                self.unanswered += 1
                self.directory.lost(present[name])
                continue
            self.used[name] = self.used.get(name, 0) + len(its)
            answers.append(Answer(name, present[name], places[name], its, out.to(x)))
        return answers

    def teach(self, answers: Sequence[Answer], x: Tensor, gradient: Tensor) -> Tensor:
        """Teach the experts that answered, by the gradient of their outputs, [all rows, width]; the gradient of `x`, in
        which those are missing that are gone."""
        parts = gradient.split([len(answer.rows) for answer in answers])
        calls = [
            self.directory.call(
                answer.host, teach, answer.name, x[answer.rows].cpu(), part.contiguous().cpu()
            )
            for answer, part in zip(answers, parts, strict=True)
        ]
        whole = torch.zeros_like(x)
        for answer, future in zip(answers, calls, strict=True):
            back = answer_of(future, self.timeout)
            if back is None:
                self.untaught += 1
                self.directory.lost(answer.host)
            else:
                whole.index_add_(0, answer.rows, back.to(whole))
        return whole

    def _fits(self, place: Place) -> bool:
        return len(place) == len(self.grid) and all(
            n < side for n, side in zip(place, self.grid, strict=True)
        )


def _score(scores: Sequence[Tensor], place: Place) -> Tensor:
    """Of each sample, the score of the expert at a place."""
    return torch.stack([side[:, n] for side, n in zip(scores, place, strict=True)]).sum(0)
