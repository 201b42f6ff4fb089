"""Who plays the tasks of a run: clients with their data and what each of them keeps, in this process or elsewhere."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from unisono.spec.errors import UsageError, UserCodeError
from unisono_contrib.federated.client import LocalTrainer, Task
from unisono_contrib.federated.keep import ClientKeeper
from unisono_contrib.federated.secure.messages import Reply, Request
from unisono_contrib.federated.secure.party import SecureParty
from unisono_contrib.federated.secure.terms import SecureTerms
from unisono_contrib.federated.wire import DeltaCodec

CODEC, STRATEGY = "codec/", "strategy/"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client sends after its local steps. parts: its delta, as its codec sends it. growth: see `Strategy.learn`.
    samples: that it has. loss: nats per target, mean over its steps."""

    number: int
    client: int
    samples: int
    parts: Sequence[Tensor]
    growth: Mapping[str, Tensor] = field(default_factory=dict)
    steps: int = 0
    loss: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return sum(x.nbytes for x in (*self.parts, *self.growth.values()))


class Clients(ABC):
    """The clients of a run, as its server sees them."""

    @abstractmethod
    def start(self, task: Task) -> None:
        """Ask a client, which has answered its last task or dropped out of it."""

    @abstractmethod
    def finish(self, task: Task) -> Answer | None:
        """The answer to a task that was started. None: the client has dropped out of it."""

    @abstractmethod
    def exchange(self, number: int, requests: Mapping[int, Request]) -> dict[int, Reply]:
        """One exchange of the secure round `number`: requests by client, and the replies that came, in the same order.
        Of a client that drops out, none. Raises UsageError A01 where a client cannot take part, and so nobody can."""

    @abstractmethod
    def reject(self, client: int, why: str) -> None:
        """A client has answered what no client of this run does, and would do so again: it is told why, and taken for
        gone. Raises UserCodeError where it is of this process."""

    def state(self) -> dict[str, Tensor]:
        """What clients keep, as far as it lies here, by `CLIENT/NAME`: for a checkpoint."""
        return {}

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        return None

    def close(self) -> None:
        """The run is over."""
        return None


def unchanged(delta: Tensor) -> Tensor:
    return delta


@dataclass(slots=True)
class ClientHost:
    """Clients whose data is here. parts: training samples of each client of the run. clip(delta): what a delta [d] is
    bounded by before anything of it leaves its client. secure: where deltas leave their clients under masks alone.
    kept: by client, what it has from round to round. keeper: where clients of another server keep it."""

    trainer: LocalTrainer
    parts: Sequence[np.ndarray]
    codec: DeltaCodec
    clip: Callable[[Tensor], Tensor] = unchanged
    secure: SecureTerms | None = None
    keeper: ClientKeeper | None = None
    kept: dict[int, dict[str, Tensor]] = field(default_factory=dict)
    _parties: dict[int, SecureParty] = field(default_factory=dict, repr=False)

    def play(self, task: Task) -> Answer:
        """Train one client. Its answer has no delta where sums are secure: `reply` has it. Raises UserCodeError where
        its numbers go bad."""
        kept = self.kept_of(task)
        mine = {n.removeprefix(STRATEGY): x for n, x in kept.items() if n.startswith(STRATEGY)}
        coded = {n.removeprefix(CODEC): x for n, x in kept.items() if n.startswith(CODEC)}
        samples = self.parts[task.client]
        result = self.trainer.train(task, samples, mine)
        for name, grown in result.growth.items():
            mine[name].add_(grown)
        parts = self.codec.encode(self.clip(result.delta), coded, task.number)
        if self.keeper is not None:
            self.keeper.after(task, kept)
        growth, count = result.growth, len(samples)
        return self.hidden(Answer(task.number, task.client, count, parts, growth, result.steps, result.loss))

    def hidden(self, answer: Answer) -> Answer:
        """An answer without its delta, which `reply` has, where sums are secure."""
        if self.secure is None:
            return answer
        delta = self.codec.decode(answer.parts, {}, answer.number)
        # Clipped once more in float64, as a server does that sees it.
        party = SecureParty(answer.client, answer.number, self.secure, self.clip(delta.double()))
        self._parties[answer.client] = party
        return replace(answer, parts=())

    def reply(self, client: int, number: int, request: Request) -> Reply:
        """What a client replies to a request of the secure round `number`. Raises UsageError as `SecureParty.reply`."""
        party = self._parties.get(client)
        if party is None or party.number != number:
            what = f"client {client} has trained nothing for round {number + 1}"
            raise UsageError(what, where="federated.secure", fix="another round", code="A03")
        return party.reply(request)

    def kept_of(self, task: Task) -> dict[str, Tensor]:
        """What a client begins a task with, to be changed in place."""
        kept = self.kept.get(task.client) if self.keeper is None else self.keeper.before(task)
        if kept is None:
            like, names = self.trainer.weights(), self.trainer.strategy.client_keeps
            mine = {f"{STRATEGY}{name}": torch.zeros_like(like) for name in names}
            kept = mine | {f"{CODEC}{n}": x for n, x in self.codec.initial().items()}
        self.kept[task.client] = kept
        return kept

    @property
    def keeps(self) -> bool:
        """Whether clients of this recipe keep anything from task to task."""
        return bool(self.trainer.strategy.client_keeps or self.codec.initial())


class SimulatedClients(Clients):
    """All clients in this process, one after the other. tamper(answer): what an attacker sends in its place."""

    def __init__(self, host: ClientHost, tamper: Callable[[Answer], Answer] = lambda answer: answer) -> None:
        self._host, self._tamper = host, tamper
        self._answers: dict[int, Answer] = {}

    def start(self, task: Task) -> None:
        self._answers[task.client] = self._tamper(self._host.play(task))

    def finish(self, task: Task) -> Answer | None:
        return self._answers.pop(task.client)

    def reject(self, client: int, why: str) -> None:
        raise UserCodeError(
            f"client {client}: {why}",
            where="federated.codec, federated.strategy",
            likely="a codec of your own",
        )

    def exchange(self, number: int, requests: Mapping[int, Request]) -> dict[int, Reply]:
        return {client: self._host.reply(client, number, request) for client, request in requests.items()}

    def state(self) -> dict[str, Tensor]:
        return {f"{client}/{n}": x for client, kept in self._host.kept.items() for n, x in kept.items()}

    def load(self, state: Mapping[str, Tensor]) -> None:
        self._host.kept.clear()
        for key, x in state.items():
            client, _, name = key.partition("/")
            self._host.kept.setdefault(int(client), {})[name] = x.clone()
