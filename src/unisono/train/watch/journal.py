"""What each step did, told to observers: the live table and the sinks (`spec.sink`). Nothing of it changes a step."""

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, Protocol

from unisono.observe.calls import MOST as ROWS
from unisono.observe.calls import affordable, rows
from unisono.observe.memory import peak_rss_mib
from unisono.observe.metrics import plain
from unisono.observe.span import PARTS, Lap
from unisono.spec.rendezvous import Rendezvous
from unisono.spec.sink import Observer, StepRecord
from unisono.spec.words import INSTRUMENTS, is_number
from unisono.train.step.update import Report

EVERY = 0.5  # seconds
RECENT = 256  # steps; more are not made while one waits to be told
MOST = 10_000  # steps that wait for a disk with room, about 10 MB


class Uplink(Protocol):
    """To the supervisor: see launch.context.Channel."""

    hears: bool

    def send(self, kind: str, **fields: Any) -> None: ...
    def stop_requested(self) -> bool: ...
    def rendezvous(self, error: BaseException) -> Rendezvous | None: ...
    def moves(self) -> bool: ...
    def hurried(self) -> bool: ...
    def hurry(self) -> None: ...
    def drain(self) -> None: ...
    def drained(self, text: str) -> None: ...


class Journal:
    """Tells observers of the steps, at once those that ended within `EVERY` seconds: writing down one short
    step, with code and data fallen out of the CPU's caches, costs several times what it costs among others.

    Its owner flushes it before a checkpoint, so that no line is missing where a run is resumed. It closes it when the
    run ends, also by an error.

    An observer that cannot write (the disk is full) is given the same steps again with the next ones, the last `MOST`
    at most; tell(text) hears of it.
    """

    def __init__(
        self, observers: Sequence[Observer], tokens: int, tell: Callable[[str], None] = lambda text: None
    ) -> None:
        self._observers, self._tokens, self._tell = observers, tokens, tell
        self._waiting: list[tuple[Report, Lap, float, float]] = []
        self._recent: deque[StepRecord] = deque(maxlen=RECENT)
        self._behind: dict[int, list[StepRecord]] = {}  # by an observer's place
        self._flushed = 0.0

    def add(self, report: Report, lap: Lap, seconds: float, more: bool = False, share: float = 1.0) -> None:
        """A step ended: what it did, what its recorder says, wall seconds. more: `beside` is to follow. share: of the
        global batch, that the step was made of."""
        self._waiting.append((report, lap, seconds, share))
        now = time.monotonic()
        if (now - self._flushed >= EVERY and not more) or report.stop or not report.finite:
            self._flushed = now
            self.flush()
        values = {"loss": report.loss, "lr": report.lr, "grad_norm": report.norm, **report.says}
        self._each(lambda observer: observer.stepped(report.step + 1, values))
        self._each(lambda observer: observer.ended(report.step + 1, report.stop))

    def validated(self, step: int, values: Mapping[str, float]) -> None:
        """A validation after step `step` came to these values."""
        self._each(lambda observer: observer.validated(step, values))

    def saved(self, step: int, checkpoint: str) -> None:
        """A checkpoint after step `step` is whole on disk."""
        self._each(lambda observer: observer.saved(step, checkpoint))

    def _each(self, call: Callable[[Observer], None]) -> None:
        """Call each observer; one that cannot write is no reason to end."""
        for observer in self._observers:
            try:
                call(observer)
            except OSError as error:
                self._tell(f"cannot write into the run folder: {error.strerror or error}; training goes on")

    def beside(self, numbers: Mapping[str, float]) -> None:
        """What a validation found, to be told with the step that ended last, if that still waits."""
        if self._waiting:
            report, lap, seconds, share = self._waiting[-1]
            self._waiting[-1] = replace(report, says={**report.says, **numbers}), lap, seconds, share

    def flush(self, must: bool = False) -> None:
        """Tell what waits. must: raises OSError where it cannot be written; else that waits further."""
        if not self._waiting and not self._behind:
            return
        mem_mib = round(peak_rss_mib(), 1)
        steps = [self._record(*waiting, mem_mib) for waiting in self._waiting]
        self._waiting.clear()
        self._recent.extend(steps)
        failed: OSError | None = None
        for place, observer in enumerate(self._observers):
            due = [*self._behind.get(place, ()), *steps]
            try:
                if due:
                    observer.observe(due)
                self._behind.pop(place, None)
            except OSError as error:
                failed = error
                if not self._behind:
                    self._tell(
                        f"cannot write into the run folder: {error.strerror or error}; training goes on, and the lines"
                        " of its steps wait in memory"
                    )
                self._behind[place] = due[-MOST:]
        if failed is not None and must:
            raise failed

    def recent(self) -> list[dict[str, Any]]:
        """The latest steps told, as JSON values: should the rank be lost that writes them down, they are not yet."""
        return [plain(asdict(replace(record, calls=(), modules={}))) for record in self._recent]

    def catch_up(self, recent: Sequence[Mapping[str, Any]], known: int) -> None:
        """Tell steps after `known` that another rank has told. Raises OSError."""
        steps = [StepRecord(**record) for record in recent if record["step"] > known]
        for observer in self._observers if steps else ():
            observer.observe(steps)

    def close(self) -> None:
        """The run is over: tell what waits, and let go of the files. Raises OSError."""
        try:
            self.flush(must=True)
        finally:
            for observer in self._observers:
                observer.close()

    def _record(self, report: Report, lap: Lap, seconds: float, share: float, mem_mib: float) -> StepRecord:
        nbytes = {f"{axis}.{op}": n for (axis, op), n in lap.nbytes.items()}
        calls = rows(lap.calls, lap.start_ns, ROWS if lap.modules else affordable(seconds))
        return StepRecord(
            report.step + 1, report.loss, report.lr, report.norm, round(self._tokens * share), seconds,
            _times(lap, seconds), nbytes, mem_mib, report.says, {"/".join(key): n for key, n in lap.ledger.items()},
            lap.start_s, lap.clock, *calls, lap.modules, lap.host,
        )  # fmt: skip


def _times(lap: Lap, seconds: float) -> dict[str, float]:
    known = {part: lap.seconds.get(part, 0.0) for part in PARTS}
    spent = sum(value for part, value in known.items() if part not in ("comm_hidden", "other"))
    known["other"] = max(0.0, seconds - spent)
    return {part: round(value, 6) for part, value in known.items()}


class LiveTable(Observer):
    """The live table of ranks: one event for the steps that came together, about the last of them."""

    def __init__(self, line: Uplink, steps: int, stage: int) -> None:
        self._line, self._steps, self._stage = line, steps, stage

    def observe(self, steps: Sequence[StepRecord]) -> None:
        last, heard = steps[-1], dict[str, float]()
        for record in steps:  # a policy need not say each of them in each step
            heard |= {key: record.says[key] for key in INSTRUMENTS if is_number(record.says.get(key))}
        self._line.send(
            "step",
            step=last.step,
            steps=self._steps,
            loss=last.loss,
            tokens_per_s=last.tokens / last.seconds,
            ms=last.seconds * 1e3,
            times=last.times,
            mem_mib=last.mem_mib,
            stage=self._stage,
            **({"instruments": heard} if heard else {}),
        )
