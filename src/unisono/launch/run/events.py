"""What may happen in a run, as the state machine hears it: values. No torch.

Words of workers come as JSON (`from_worker`), and so do reports of hosts (`from_host`).
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from unisono.launch.error_record import EMPTY, Record
from unisono.launch.rank_status import RankStatus
from unisono.launch.run.membership import RunSpread
from unisono.spec.errors import UnisonoError

Json = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class HostUp:
    """A host has joined. host: its number, 0 for the supervisor's own. room: how many workers it takes."""

    host: int
    name: str
    room: int
    address: str = ""


@dataclass(frozen=True, slots=True)
class HostPrepared:
    """A host has read the run's data."""

    host: int


@dataclass(frozen=True, slots=True)
class HostFailed:
    """A host cannot prepare the run, or fork a worker. worker: which one; None if it forks none at all."""

    host: int
    error: Record
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class HostDown:
    """A host is gone, and all workers there with it. how: its fork server ended, in words."""

    host: int
    how: str = ""


@dataclass(frozen=True, slots=True)
class HostsMissing:
    """Hosts that the run needs to begin do not come."""

    error: UnisonoError


@dataclass(frozen=True, slots=True)
class Born:
    """A worker's process has been forked."""

    worker: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A worker's process has ended. status: its exit status, negative for a signal. place: the line in which its main
    thread was, as far as its last output tells."""

    worker: int
    status: int
    place: str = ""


@dataclass(frozen=True, slots=True)
class Frozen:
    """A signal has stopped a worker (SIGSTOP), or another one lets it go on."""

    worker: int
    is_frozen: bool


@dataclass(frozen=True, slots=True)
class Ready:
    """A worker has met the others of its epoch and trains. step: after which step."""

    worker: int
    step: int
    event: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Stepped:
    """A worker has made its steps up to this one. silence: seconds that a worker may say nothing at this pace; None as
    before."""

    worker: int
    step: int
    event: Json = field(default_factory=dict)
    silence: float | None = None


@dataclass(frozen=True, slots=True)
class Finished:
    """A worker has done all it had to do."""

    worker: int
    result: dict[str, Any] | None


@dataclass(frozen=True, slots=True)
class Failed:
    """A worker's code raised."""

    worker: int
    record: Record


@dataclass(frozen=True, slots=True)
class Missed:
    """A worker waits in vain for another one."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FoundHang:
    """The workers of an epoch have found whose fault a hang is."""

    worker: int
    error: Record
    epoch: int


@dataclass(frozen=True, slots=True)
class WorkerPaused:
    """A worker has ended its step because all are to meet under another plan."""

    worker: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Drained:
    """A worker and all others have saved within a step."""

    worker: int
    text: str


@dataclass(frozen=True, slots=True)
class Said:
    """A worker says something else. Its `kind` says what: `start` names the backend by which it talks to the others,
    `settled` what workers agreed on at their start, such as the plan. On the others no decision depends."""

    worker: int
    event: Json


@dataclass(frozen=True, slots=True)
class Signalled:
    """The run is asked to end, by a signal to the supervisor or to one worker. how: "interrupt" (Ctrl-C) or
    "terminate"."""

    how: str
    worker: int | None = None


@dataclass(frozen=True, slots=True)
class Advised:
    """Somebody has looked for a better spread. spread: the one to go on with, None to stay. text: why; "" for nothing
    to say."""

    spread: RunSpread | None
    text: str = ""


@dataclass(frozen=True, slots=True)
class StacksRead:
    """Where the workers are that have not ended."""

    stands: tuple[RankStatus, ...]


@dataclass(frozen=True, slots=True)
class Resumed:
    """The whole run was stopped for a while (Ctrl-Z), so that no worker could say anything."""


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The supervisor cannot go on."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


WorkerEvent = (
    Born | Exited | Frozen | Ready | Stepped | Finished | Failed | Missed | FoundHang | WorkerPaused | Drained | Said
)  # fmt: skip
HostEvent = HostUp | HostPrepared | HostFailed | HostDown
Event = WorkerEvent | HostEvent | HostsMissing | Signalled | Advised | StacksRead | Resumed | Abandoned | Tick


def from_worker(worker: int, event: dict[str, Any], silence: float | None = None) -> WorkerEvent | Signalled:
    """The event in a worker's words; `Said` where they are of another kind, or not as they should be."""
    match event:
        case {"kind": "ready", "step": int(step)}:
            return Ready(worker, step, event)
        case {"kind": "step", "step": int(step)}:
            return Stepped(worker, step, event, silence)
        case {"kind": "result", "value": dict() | None as value}:
            return Finished(worker, value)
        case {"kind": "error", "error": {"what": str(), "echo": bool()} as record}:
            return Failed(worker, EMPTY | record)
        case {"kind": "lost", "epoch": int(epoch)}:
            return Missed(worker, epoch)
        case {"kind": "hang", "error": {"what": str()} as record, "epoch": int(epoch)}:
            return FoundHang(worker, EMPTY | record, epoch)
        case {"kind": "paused", "epoch": int(epoch)}:
            return WorkerPaused(worker, epoch)
        case {"kind": "asked", "how": "interrupt" | "terminate" as how}:
            return Signalled(how, worker)
        case {"kind": "drained", "text": str(text)}:
            return Drained(worker, text)
        case _:
            return Said(worker, event)


def from_host(host: int, report: dict[str, Any]) -> Event | None:
    """The event in a host's report; None for one on which no decision depends."""
    match report:
        case {"op": "prepared"}:
            return HostPrepared(host)
        case {"op": "failed", "error": {"what": str()} as record}:
            return HostFailed(host, EMPTY | record, report.get("worker"))
        case {"op": "gone"}:
            return HostDown(host, report.get("how", ""))
        case {"op": "born", "worker": int(worker)}:
            return Born(worker)
        case {"op": "exit", "worker": int(worker), "status": int(status)}:
            return Exited(worker, status)
        case {"op": "stopped", "worker": int(worker), "stopped": bool(stopped)}:
            return Frozen(worker, stopped)
        case _:
            return None
