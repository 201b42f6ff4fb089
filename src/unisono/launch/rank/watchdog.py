"""A rank's watchdog: two threads beside the one that trains, which notice a hang and agree on whose it is.

One looks once a second whether the main thread still stands in the same line, waiting for others, or sleeps. After the
deadline (`pace`) it raises the alarm, over the store that ranks met over. So does the other at once where ranks have
made different calls (`rank_calls`). Then every rank that can says where it stands; who raised the alarm looks from
outside at those that cannot, judges (`verdict.hang`), and the others obey. The main thread does nothing for all this,
so it costs a step nothing.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any

from unisono.comm.begun import is_any_pending
from unisono.comm.device import begun_collectives, spins
from unisono.comm.group import Group
from unisono.comm.outside import OutsideWait
from unisono.launch import error_record, inspect_folder
from unisono.launch.inspect_folder import RankProcess, home
from unisono.launch.inspect_schema import RankReport
from unisono.launch.pace import PATIENCE, Sleep, StepPace
from unisono.launch.rank.calls import Calls, Ledger, before_abort
from unisono.launch.rank.presence import Presence
from unisono.launch.rank_status import Frame, RankStatus, from_outside, process_state, status_of
from unisono.launch.run import verdict
from unisono.spec.errors import UnisonoError

GRACE = 3.0
"""Seconds that ranks get to say where they stand."""
STOPPED = 2.0
"""Seconds later than it should be, after which a look comes out of a stop of the whole process."""
_OBEY = timedelta(seconds=30)

Ended = Callable[[UnisonoError, bool, tuple[int, ...]], None]
"""What to do in a hang: the error, whether this rank is the one to tell it, processes of this host to kill first."""


class Watchdog:
    """The two threads of one rank, which begin at once and never keep a process alive; a rank that is alone needs none.

    store: a connection of their own. ended: called on every rank that can hear it. lines: the file into which this
    process writes its lines (`rank_status.catch_lines`). ledger: what else ranks have to do alike. since: groups made
    before are of an earlier meeting (`begun.groups_made`). Call `close` before the store goes.
    """

    def __init__(
        self,
        rank: int,
        world: int,
        host: str,
        store: Any,
        pace: StepPace,
        ended: Ended,
        lines: int = -1,
        ledger: Ledger | None = None,
        since: int = 0,
    ) -> None:
        self._rank, self._world, self._host, self._store = rank, world, host, store
        self._pace, self._ended = pace, ended
        self._main = threading.main_thread()
        self._program = getattr(sys.modules.get("__main__"), "__file__", None) or ""  # gone when it has ended
        self._over = threading.Event()
        self._idle = self._stuck = 0.0
        self._sleep = Sleep(spins())
        self._heard = False
        self._first: RankProcess | None = None
        self._calls, self._shown = Calls(rank, store, ledger, since), Calls(rank, ledger=ledger, since=since)
        self._since = since
        self._clashed = threading.Event()
        self.condemned = False
        self._threads: list[threading.Thread] = []
        self._lines, self._presence = lines, None
        self._take_back: Callable[[], None] = lambda: None
        if world == 1:
            return
        self._take_back = before_abort(self._before_abort)
        me = inspect_folder.this_process(rank, world, host, lines)
        store.set(f"watchdog/who/{rank}", json.dumps(asdict(me)))
        self._start(self._look)
        self._start(self._listen)

    def _start(self, work: Callable[[], None]) -> None:
        self._threads.append(threading.Thread(target=work, name="unisono-watchdog", daemon=True))
        self._threads[-1].start()

    def watch_alone(self) -> None:
        """Where this rank is alone, look at it all the same: one that sleeps for long is noticed. Call it once."""
        if self._world == 1:
            self._start(self._look)

    def appear(self, run: str, folder: Path, private: bool = False) -> None:
        """Answer who asks from outside, in this folder; where it cannot be written, nobody can. run: the secret of this
        start. private: other hosts have folders of their own."""
        self.watch_alone()
        me = inspect_folder.this_process(self._rank, self._world, self._host, self._lines, run, private)
        with suppress(OSError):
            self._presence = Presence(folder, me, self.report)

    def dismiss(self) -> None:
        """No more alarms; returns at once. The threads end by themselves."""
        self._over.set()
        self._take_back()
        if self._presence is not None:
            self._presence.close()

    def close(self) -> None:
        """No more alarms; returns when the threads have ended."""
        self.dismiss()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(5.0)

    def _period(self) -> float:
        return min(1.0, max(0.1, self._pace.deadline() / 8))

    # The thread that looks at this rank.

    def _look(self) -> None:
        seen, since, raised, looked, noted = None, time.monotonic(), 0.0, time.monotonic(), False
        while not self._over.wait(self._period()):
            now, moved = time.monotonic(), self._moved()
            stopped = now - looked > self._period() + STOPPED  # all of this process was, by Ctrl-Z
            looked = now
            if moved != seen or stopped:
                seen, since, raised, self._stuck = moved, now, 0.0, 0.0
            self._idle = now - since
            far = (self._pace.step, _turns(self._main))
            self._sleep.look(now, moved if self._sleep.by_line else far, stopped)
            if max(self._idle, self._sleep.seconds) < min(self._pace.deadline(), self._pace.asleep() / 2):
                noted = False
                continue
            here = self.status()
            limit = self._limit(here)
            if here.idle < limit:
                if here.state == "runs" and self._rank == 0 and here.idle >= limit / 2 and not noted:
                    noted = self._tell_of_sleep(here, limit)
            elif self._world == 1:
                if here.state == "runs" and not self.condemned:
                    self._obey(verdict.hang([here], here.idle), True, [])
            elif not self._stuck and here.idle >= max(limit, 2 * raised):
                self._stuck = raised = here.idle
            elif self._stuck and not self._heard and here.idle > self._stuck + GRACE:
                self._alone(here)

    def _limit(self, here: RankStatus) -> float:
        """Seconds for which this rank may stand there."""
        pace = self._pace
        if here.state == "ended" and pace.timeout is None:
            return pace.deadline() * PATIENCE  # others may still write what only one of them writes
        return pace.asleep() if here.state == "runs" else min(pace.asleep(), pace.deadline())

    def _tell_of_sleep(self, here: RankStatus, limit: float) -> bool:
        where = here.place or "our code"
        text = f"rank {self._rank} does nothing since {here.idle:.0f} s, in {where}; the run ends at {limit:.0f} s"
        print(f"note: {text}", file=sys.stderr, flush=True)
        return True

    def _moved(self) -> Any:
        """What changes whenever the main thread goes on. Waiting for the store, it also wakes for others."""
        frames = _frames(self._main)
        outer = [
            f for f in frames if not f.f_code.co_filename.endswith(("launch/rank/store.py", "launch/wire.py"))
        ]
        line = self._pace.step, _turns(self._main), *((id(frame), frame.f_lasti) for frame in outer)
        return line, begun_collectives() if spins() and self._idle > self._pace.deadline() / 2 else ""

    def report(self) -> RankReport:
        """All that this rank knows of itself, for who asks from outside. One thread at a time may call it."""
        frames, pace = _frames(self._main), self._pace
        here, kernel = self.status(frames), inspect_folder.kernel(os.getpid())
        calls, clashed = self._shown.lately(here), self._clashed.is_set()
        return RankReport(here, _lines(frames), calls, kernel, pace.since, pace.usual, clashed)

    def status(self, frames: list[FrameType] | None = None) -> RankStatus:
        """Where this rank stands now. frames: of its main thread."""
        frames = _frames(self._main) if frames is None else frames
        group = next(
            (g for f in frames[:12] if isinstance(g := f.f_locals.get("self"), Group) and g.size > 1), None
        )
        op = ""
        if group is not None:
            inner = [f for f in frames[:12] if f.f_locals.get("self") is group]
            op = f"{inner[-1].f_code.co_name.removeprefix('start_')} over {group.axis}"
        lines, pending = _lines(frames), is_any_pending(self._since)
        here = status_of(self._rank, lines, op, pending, self._program, host=self._host, step=self._pace.step)
        return replace(here, idle=self._sleep.seconds if here.state == "runs" else self._idle)

    # The thread that compares calls and hears alarms.

    def _listen(self) -> None:
        turn = 0
        try:
            self._first = self._process(0)
            rest = min(1.5, self._world / 1000)  # one store hears them all
            while not self._over.wait(_until_next(self._period() + rest)):
                alarm, clashed = f"watchdog/{turn}/alarm", self._clashed.is_set()
                asks = self._calls.pending() if clashed else self._calls.compare()
                if self._stuck or asks or clashed:
                    word = {"raiser": self._rank, "waited": self._stuck, "asks": asks, "clashed": clashed}
                    self._store.compare_set(alarm, "", json.dumps(word))
                if self._store.check([alarm]):
                    self._heard = True
                    self._meet(turn, json.loads(self._store.get(alarm)))
                    turn += 1
        except (RuntimeError, OSError):
            return  # the store has gone, and with it the run

    def _meet(self, turn: int, alarm: dict[str, Any]) -> None:
        here, mine = self.status(), alarm["raiser"] == self._rank
        answer = {"status": asdict(here), "calls": self._calls.answers(alarm["asks"], here)}
        self._store.set(f"watchdog/{turn}/stand/{self._rank}", json.dumps(answer))
        if mine:
            self._store.set(f"watchdog/{turn}/verdict", json.dumps(self._judge(turn, alarm)))
        judged = json.loads(self._get(f"watchdog/{turn}/verdict"))
        self._stuck, self._heard = 0.0, False
        self._calls.refuted.update(map(tuple, alarm["asks"]))
        if judged:
            self._obey(error_record.revive(judged["error"], None, self._host), mine, judged["kill"])

    def _before_abort(self) -> None:
        """Gloo is about to abort this process: first all ranks look why."""
        self._clashed.set()
        self._over.wait(_OBEY.total_seconds())

    def _obey(self, error: UnisonoError, mine: bool, kill: list[list[Any]]) -> None:
        self.condemned = True
        if self._presence is not None:
            self._presence.leave()
        self._ended(error, mine, tuple(pid for its, pid in kill if its == home()))

    def _judge(self, turn: int, alarm: dict[str, Any]) -> dict[str, Any]:
        """The error, and who is to be killed; nothing where the rank that is waited for may take its time."""
        answers, kill, waited = self._hear(turn), [], alarm["waited"]
        stands = {rank: RankStatus(**answer["status"]) for rank, answer in answers.items()}
        for rank in set(range(self._world)) - stands.keys():
            process = self._process(rank) if self._store.check([f"watchdog/who/{rank}"]) else None
            stands[rank] = _look_at(rank, process)
            if process is not None and stands[rank].state in ("stopped", "silent", "runs"):
                kill.append([process.home, process.pid])
        order = [stands[rank] for rank in sorted(stands)]
        called = verdict.differing(answers[rank]["calls"] for rank in sorted(answers))
        if not called and alarm["clashed"]:
            called = [*order]
            called[self._rank] = replace(order[self._rank], state="clashed")
        if not called and (alarm["asks"] or self._may_go_on(order, waited)):
            return {}
        return {
            "error": error_record.describe(verdict.hang(called or order, waited)) | {"shared": True},
            "kill": kill,
        }

    def _hear(self, turn: int) -> dict[int, dict[str, Any]]:
        """What the ranks say that answer in time."""
        answers = {}
        until = time.monotonic() + GRACE
        while len(answers) < self._world and time.monotonic() < until:
            for rank in range(self._world):
                key = f"watchdog/{turn}/stand/{rank}"
                if rank not in answers and self._store.check([key]):
                    answers[rank] = json.loads(self._store.get(key))
            if len(answers) < self._world:
                time.sleep(0.05)
                if time.monotonic() > until - GRACE + 0.5 and not self._still_awaited(answers):
                    break
        return answers

    def _may_go_on(self, order: list[RankStatus], waited: float) -> bool:
        """Whether the rank that is waited for computes, and the user has set no deadline: one that sleeps has none."""
        odd = verdict.odd_one_out(order)
        first, patience = odd[0], self._pace.deadline() * PATIENCE
        if (
            self._pace.timeout is not None
            or first.state != "runs"
            or first.idle >= waited / 2
            or waited >= patience
        ):
            return False
        text = f"{verdict.waiting(order, odd)}, which is in {first.place or 'our code'} since {waited:.0f} s"
        print(f"note: {text}; the run ends at {patience:.0f} s", file=sys.stderr, flush=True)
        return True

    def _still_awaited(self, stands: Container[int]) -> bool:
        """Whether a rank that has not answered may still do so: one that is stopped will not."""
        missing = [self._process(rank) for rank in range(self._world) if rank not in stands]
        return not all(process.is_here() and process_state(process.pid) in "TtZX" for process in missing)

    def _process(self, rank: int) -> RankProcess:
        return RankProcess(**json.loads(self._store.get(f"watchdog/who/{rank}")))

    def _alone(self, here: RankStatus) -> None:
        """Nobody took the alarm: the store does not answer, so it is rank 0 that hangs, whose process holds it."""
        first, process = _look_at(0, self._first), self._first
        kill = [[process.home, process.pid]] if process is not None and first.state == "stopped" else []
        self._obey(verdict.hang([first, here], self._idle), True, kill)

    def _get(self, key: str) -> bytes:
        self._store.wait([key], _OBEY)
        return self._store.get(key)


def _look_at(rank: int, process: RankProcess | None) -> RankStatus:
    """A rank that did not answer."""
    if process is None or not process.is_here():
        return RankStatus(rank, "silent", process.host if process is not None else "")
    return from_outside(rank, process.pid, process.main, process.lines, process.host)


def _until_next(period: float) -> float:
    """Seconds to the next multiple of `period` on the clock: ranks look at one moment, so that they see the same."""
    return period - time.time() % period


def _lines(frames: list[FrameType]) -> list[Frame]:
    return [Frame(f.f_code.co_filename, f.f_lineno, f.f_code.co_name) for f in frames]


def _turns(thread: threading.Thread) -> int:
    """Turns of the wait for something outside of the run in which the thread is; 0 where it is in none."""
    waits = (frame.f_locals.get("self") for frame in _frames(thread)[:12])
    return next((wait.turns for wait in waits if isinstance(wait, OutsideWait)), 0)


def _frames(thread: threading.Thread) -> list[FrameType]:
    """Innermost first."""
    frame, frames = sys._current_frames().get(thread.ident or 0), []
    while isinstance(
        frame, FrameType
    ):  # of a thread that runs on, what was a frame may be something else by now
        frames.append(frame)
        frame = frame.f_back
    return frames
