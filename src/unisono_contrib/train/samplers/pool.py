"""A run's samplers as the first trainer sees them: weights go out by version, samples come back with theirs.

Weights are sent without waiting. The acknowledgement of a version is read before any sample that was drawn from it, so
that a sampler which holds other weights is found at the next answer, and in `settle` at the latest.
"""

import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from torch import Tensor

from unisono.spec.beside import BesideRanks
from unisono_contrib.sync._servers import wire
from unisono_contrib.train.samplers import door
from unisono_contrib.train.samplers.door import SILENCE
from unisono_contrib.train.samplers.errors import SamplerLost, SampleTooOld, WeightsNotHeld
from unisono_contrib.train.samplers.weights import HeldWeights, WeightHolder, differing, expected

PATIENCE = 20.0
"""Seconds in which the process that takes a lost sampler's place has to come: less than those for which a rank may say
nothing, so that the sampler is blamed and not the rank that waits for it."""

_AGAIN = 0.1  # seconds between two calls of one that has gone

Request = tuple[Mapping[str, Any], Sequence[Tensor]]


@dataclass(frozen=True, slots=True)
class DrawnSamples:
    """The answer to one request. version: of the weights from which it was drawn."""

    version: int
    tensors: list[Tensor]


@dataclass(slots=True)
class _CalledSampler:
    """One sampler. sent: what it has to answer yet, in order: a version, or the number of a request with the
    request."""

    number: int
    connection: Connection | None = None
    sent: deque[int | tuple[int, Request]] = field(default_factory=deque)

    @property
    def name(self) -> str:
        return f"sampler {self.number}"


class SamplerPool:
    """count: of samplers. bound: versions that a sample may be behind the step that trains it. holder: the trainer's
    own copy of the model, by which it knows what samplers have to compute. patience: see `PATIENCE`. silence: seconds
    for which a sampler may say nothing."""

    def __init__(
        self,
        beside: BesideRanks,
        count: int,
        bound: int,
        holder: WeightHolder,
        patience: float = PATIENCE,
        silence: float = SILENCE,
    ) -> None:
        self._beside, self._bound, self._holder = beside, bound, holder
        self._patience, self._silence = patience, silence
        self._samplers = [_CalledSampler(number) for number in range(count)]
        self._weights: Mapping[str, Tensor] = {}
        self._wanted: dict[int, HeldWeights] = {}
        self._number, self._steps = 0, dict[int, list[int]]()
        self._answers: dict[int, tuple[_CalledSampler, DrawnSamples]] = {}

    def publish(self, version: int, weights: Mapping[str, Tensor]) -> None:
        """Send whole weights by name to all samplers. Raises WeightsNotHeld where this process itself, which loads them
        in the same way, does not compute with them; SamplerLost."""
        self._holder.put(version, weights)
        held = self._holder.held()
        digests = expected(weights, self._holder.ties)
        if odd := differing(digests, held.digests):
            raise WeightsNotHeld(
                "the trainer's own copy", version, odd, "tensors differ from those of the run"
            )
        self._weights, self._wanted[version] = weights, HeldWeights(version, digests, held.logits)
        for sampler in self._samplers:
            self._send(sampler, version)

    def ask(self, step: int, requests: Sequence[Request]) -> None:
        """Ask for the samples that `step` will train, dealt to samplers in turn. Raises ValueError where the bound does
        not admit them yet; SamplerLost."""
        if not self._weights or not admits(self._holder.version, step, self._bound):
            raise ValueError(
                f"step {step} is asked for at version {self._holder.version}, bound {self._bound}"
            )
        self._steps[step] = []
        for i, request in enumerate(requests):
            self._number += 1
            self._steps[step].append(self._number)
            self._send(self._samplers[i % len(self._samplers)], (self._number, request))

    def collect(self, step: int) -> list[DrawnSamples]:
        """The samples of a step, in the order in which they were asked for. Raises WeightsNotHeld, SampleTooOld,
        SamplerLost."""
        numbers = self._steps.pop(step)
        for sampler in self._samplers:
            waits = {sent[0] for sent in sampler.sent if not isinstance(sent, int)} & set(numbers)
            while waits:
                waits.discard(self._hear(sampler))
        drawn = list[DrawnSamples]()
        for number in numbers:
            sampler, answer = self._answers.pop(number)
            if not admits(answer.version, step, self._bound):
                raise SampleTooOld(sampler.name, answer.version, step, self._bound)
            drawn.append(answer)
        return drawn

    def settle(self) -> None:
        """Wait until all versions that were sent are acknowledged. Raises WeightsNotHeld, SamplerLost."""
        for sampler in self._samplers:
            while any(isinstance(sent, int) for sent in sampler.sent):
                self._hear(sampler)

    def close(self) -> None:
        """Hang up; samplers wait for whoever calls next."""
        for sampler in self._samplers:
            if sampler.connection is not None:
                with suppress(OSError):
                    sampler.connection.close()
                sampler.connection = None

    def _send(self, sampler: _CalledSampler, what: "int | tuple[int, Request]") -> None:
        sampler.sent.append(what)
        if sampler.connection is None:
            self._call(sampler, "")
            return
        try:
            self._write(sampler.connection, what)
        except OSError as error:
            self._lost(sampler, error)

    def _write(self, connection: Connection, what: "int | tuple[int, Request]") -> None:
        if isinstance(what, int):
            said = {"version": what, "names": list(self._weights)}
            connection.send_bytes(wire.packed(said, list(self._weights.values())))
        else:
            number, (said, tensors) = what
            connection.send_bytes(wire.packed({"number": number, "request": dict(said)}, tensors))

    def _hear(self, sampler: _CalledSampler) -> int:
        """Take in the next answer; the number of the request that it answers, 0 for one to weights."""
        while True:
            if sampler.connection is None:
                self._call(sampler, "")
            try:
                said, tensors = wire.unpacked(sampler.connection.recv_bytes())  # type: ignore[union-attr]
            except (OSError, EOFError, ValueError) as error:
                self._lost(sampler, error)
                continue
            if "beat" in said:
                continue
            due = sampler.sent.popleft()
            if isinstance(due, int):
                self._acknowledged(sampler, due, said)
                return 0
            if said.get("number") != due[0]:
                raise WeightsNotHeld(
                    sampler.name, self._holder.version, (), f"it answered {sorted(said)} to a request"
                )
            drawn = DrawnSamples(int(said["version"]), [x for x in tensors if x is not None])
            self._answers[due[0]] = sampler, drawn
            return due[0]

    def _acknowledged(self, sampler: _CalledSampler, version: int, said: Mapping[str, Any]) -> None:
        """Hold an acknowledgement against what the trainer has. Raises WeightsNotHeld."""
        wanted = self._wanted[version]
        self._wanted = {v: held for v, held in self._wanted.items() if v >= min(self._due_versions(version))}
        if said.get("holds") != version:
            how = f"it says version {said['holds']}" if "holds" in said else "it did not acknowledge them"
            raise WeightsNotHeld(sampler.name, version, (), how)
        if odd := differing(wanted.digests, said["digests"]):
            raise WeightsNotHeld(sampler.name, version, odd, f"{len(odd)} of its tensors differ")
        if said["logits"] != wanted.logits:
            raise WeightsNotHeld(
                sampler.name, version, (), "all tensors are equal, and its logits are others"
            )

    def _due_versions(self, version: int) -> list[int]:
        return [version, *(sent for s in self._samplers for sent in s.sent if isinstance(sent, int))]

    def _lost(self, sampler: _CalledSampler, error: Exception) -> None:
        """Its place is taken by a new process, which gets the newest weights and what was not answered yet. Raises
        SamplerLost where none comes, or it is silent."""
        if isinstance(error, BlockingIOError | TimeoutError):
            raise SamplerLost(sampler.name, f"it says nothing for {self._silence:g} s") from error
        self._beside.note(f"{sampler.name} is lost ({_why(error)}): a new process takes its place")
        if sampler.connection is not None:
            with suppress(OSError):
                sampler.connection.close()
            sampler.connection = None
        self._call(sampler, _why(error))

    def _call(self, sampler: _CalledSampler, why: str) -> None:
        """Connect to the newest process that came as this sampler, and send again what is not answered. why: it was
        lost; "" for the first time. Raises SamplerLost."""
        until = time.monotonic() + self._patience
        while sampler.connection is None:
            left = until - time.monotonic()
            try:
                if left <= 0.0:
                    raise RuntimeError("nobody has come")
                birth = max(1, door.births(self._beside, sampler.number))
                sampler.connection = door.call(self._beside, sampler.number, birth, left, self._silence)
                again = [what for what in sampler.sent if not isinstance(what, int)]
                sampler.sent = deque([self._holder.version, *again])
                for what in sampler.sent:
                    self._write(sampler.connection, what)
            except (BlockingIOError, TimeoutError) as error:
                how = f"it does not answer within {self._silence:g} s"
                raise SamplerLost(sampler.name, how) from error
            except (OSError, EOFError) as error:  # it has gone, or serves the connection before yet
                sampler.connection, why = None, _why(error)
                time.sleep(_AGAIN)
            except RuntimeError as error:  # of the store too: nobody has come
                raise SamplerLost(sampler.name, why or "it has never come") from error


def _why(error: Exception) -> str:
    """Why a connection ended, without the number of an error."""
    return getattr(error, "strerror", None) or str(error) or "its connection ended"


def admits(version: int, step: int, bound: int) -> bool:
    """Whether samples of weights of this version may be trained in a step: `ssp:s=bound`, with the sampler as the
    replica that is ahead."""
    return step - version <= bound
