"""Whose deltas a step of the server is made of: a round of clients, or a buffer of those that were ready first.

Who is asked, who drops out and who is late follows from the seed and the round. So a run has the same clients again
when it is resumed, and whether they are simulated or real.
"""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from unisono_contrib.federated import draws
from unisono_contrib.federated.client import Task
from unisono_contrib.federated.clients import Answer, Clients

_SLOWEST, _LATE = 4.0, 4.0
"""Times as long as the quickest client the slowest takes for a local step, and a straggler for its task."""


@dataclass(frozen=True, slots=True)
class Collected:
    """Answers of one step of the server, and how many clients have not answered. behind: of each answer, the server
    steps since its task began. tasks: how many were sent, to clients that the seed did not let drop out."""

    answers: Sequence[Answer]
    dropped: int = 0
    late: int = 0
    behind: Sequence[int] = ()
    tasks: int = 0

    def only(self, fits: Sequence[bool]) -> "Collected":
        """Those answers that fit; the others count as dropped."""
        answers = [answer for answer, fit in zip(self.answers, fits, strict=True) if fit]
        behind = [count for count, fit in zip(self.behind, fits, strict=True) if fit]
        dropped = self.dropped + len(fits) - len(answers)
        return replace(self, answers=answers, dropped=dropped, behind=behind)


@dataclass(frozen=True, slots=True)
class RoundDraws:
    """What is drawn for a run. clients: those that have samples."""

    seed: int
    config: Any
    clients: Sequence[int]

    @property
    def size(self) -> int:
        """How many clients are asked in a round, or train at once."""
        return max(1, min(len(self.clients), round(self.config.participation * len(self.clients))))

    def cohort(self, number: int) -> list[int]:
        """The clients of a round, in the order in which their deltas are added up."""
        places = draws.chosen(self.seed, "cohort", self.size, len(self.clients), number)
        return sorted(self.clients[place] for place in places)

    def drops(self, number: int, client: int) -> bool:
        """Whether a client drops out of a task."""
        return draws.uniform(self.seed, "dropout", number, client) < self.config.dropout

    def share(self, number: int, client: int) -> float:
        """The share of its local steps that a client has done in time: 1 of who is no straggler."""
        if draws.uniform(self.seed, "straggler", number, client) >= self.config.stragglers:
            return 1.0
        return draws.uniform(self.seed, "share", number, client)

    def seconds(self, number: int, client: int) -> float:
        """How long a task takes, on the logical clock of asynchronous runs."""
        pace = 1.0 + (_SLOWEST - 1.0) * draws.uniform(self.seed, "pace", client)
        jitter = 0.5 + draws.uniform(self.seed, "jitter", number, client)
        return pace * jitter * (_LATE if self.share(number, client) < 1.0 else 1.0)


TaskOf = Callable[[int, int, float], Task]
"""(number, client, share of its local steps) → its task, with the weights as they are now."""


class Cohorts(ABC):
    """How a strategy collects answers."""

    @abstractmethod
    def collect(self, number: int, clients: Clients, task_of: TaskOf) -> Collected:
        """The answers for step `number` (from 0) of the server."""

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """(tensors, JSON) of what is under way between steps."""
        return {}, {}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        """Go on from what `state` gave."""
        return None

    def settle(self, clients: Clients) -> None:
        """Have the answers of all that is under way, so that `state` has them."""
        return None


class RoundCohorts(Cohorts):
    """The server waits for all clients of a round that answer."""

    def __init__(self, drawn: RoundDraws) -> None:
        self._drawn = drawn

    def collect(self, number: int, clients: Clients, task_of: TaskOf) -> Collected:
        drawn, tasks, dropped, late = self._drawn, list[Task](), 0, 0
        for client in drawn.cohort(number):
            share = drawn.share(number, client)
            late += share < 1.0
            if drawn.drops(number, client) or (share < 1.0 and drawn.config.late == "drop"):
                dropped += 1
                continue
            tasks.append(task_of(number, client, share))
        for task in tasks:
            clients.start(task)
        came = [clients.finish(task) for task in tasks]
        answers = [answer for answer in came if answer is not None]
        dropped += len(came) - len(answers)
        return Collected(answers, dropped, late, (0,) * len(answers), len(tasks))


@dataclass(order=True, slots=True)
class _Flight:
    """A task under way. at: when it ends, by the logical clock."""

    at: float
    number: int
    client: int
    begun: int = field(compare=False)
    task: Task | None = field(compare=False, default=None)
    answer: Answer | None = field(compare=False, default=None)


class BufferCohorts(Cohorts):
    """Some clients train at any time; whoever is ready is followed by another one. The server steps when it has a
    buffer of deltas. All times are those of a logical clock, which the seed decides."""

    def __init__(self, drawn: RoundDraws, buffer: int) -> None:
        self._drawn, self._buffer = drawn, buffer
        self._clock, self._number = 0.0, 0
        self._flights: list[_Flight] = []

    def collect(self, number: int, clients: Clients, task_of: TaskOf) -> Collected:
        answers, behind, dropped = list[Answer](), list[int](), 0
        while len(answers) < self._buffer:
            while len(self._flights) < self._drawn.size:
                self._begin(number, clients, task_of)
            flight = heapq.heappop(self._flights)
            self._clock = flight.at
            answer = self._landed(flight, clients)
            if answer is None or self._drawn.drops(flight.number, flight.client):
                dropped += 1
                if dropped > _PATIENCE * self._buffer:
                    break
                continue
            answers.append(answer)
            behind.append(number - flight.begun)
        return Collected(answers, dropped, 0, behind, self._buffer)

    def _begin(self, number: int, clients: Clients, task_of: TaskOf) -> None:
        """Ask a client that has nothing to do: each as likely as any other."""
        busy, drawn = {flight.client for flight in self._flights}, self._drawn
        idle = [client for client in drawn.clients if client not in busy]
        client = idle[draws.chosen(drawn.seed, "next", 1, len(idle), self._number)[0]]
        task = task_of(self._number, client, 1.0)
        clients.start(task)
        at = self._clock + drawn.seconds(self._number, client)
        heapq.heappush(self._flights, _Flight(at, self._number, client, number, task))
        self._number += 1

    def _landed(self, flight: _Flight, clients: Clients) -> Answer | None:
        return flight.answer if flight.task is None else clients.finish(flight.task)

    def settle(self, clients: Clients) -> None:
        for flight in self._flights:
            flight.answer, flight.task = self._landed(flight, clients), None

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        rows = []
        for flight in sorted(self._flights):
            answer = flight.answer
            row = [flight.at, flight.number, flight.client, flight.begun]
            if answer is not None:
                parts = {str(i): x for i, x in enumerate(answer.parts)}
                grown = {f"growth/{name}": x for name, x in answer.growth.items()}
                tensors |= {f"{flight.number}/{key}": x for key, x in (parts | grown).items()}
                row += [answer.samples, answer.steps, answer.loss, len(answer.parts), sorted(answer.growth)]
            rows.append(row)
        return tensors, {"clock": self._clock, "number": self._number, "flights": rows}

    def load(self, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
        self._clock, self._number = facts["clock"], facts["number"]
        self._flights = []
        for at, number, client, begun, *rest in facts["flights"]:
            answer = None
            if rest:
                samples, steps, loss, count, names = rest
                parts = [tensors[f"{number}/{i}"] for i in range(count)]
                growth = {name: tensors[f"{number}/growth/{name}"] for name in names}
                answer = Answer(number, client, samples, parts, growth, steps, loss)
            self._flights.append(_Flight(at, number, client, begun, None, answer))
        heapq.heapify(self._flights)


_PATIENCE = 100
"""Tasks of which nothing comes, for each delta of a buffer, after which the server steps with what it has."""
