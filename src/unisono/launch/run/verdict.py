"""Who broke the run, and how to say it. Pure functions on what the supervisor gathered. No torch."""

import signal
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launch import error_record
from unisono.launch.rank_status import RankStatus
from unisono.spec.errors import HangError, UnisonoError, UserCodeError
from unisono.spec.frames import is_foreign


@dataclass(frozen=True)
class Failure:
    """A rank that raised (`record`) or died without a word (`status`). place: the line in which a dead one was, as far
    as its last output tells. host: where it was."""

    rank: int
    record: error_record.Record | None
    status: int = 0
    place: str = ""
    host: str = ""

    @property
    def echo(self) -> bool:
        """True when it only says that somebody else has gone."""
        return self.record is not None and bool(self.record["echo"])


def culprit(failures: Sequence[Failure]) -> Failure:
    """The first failure that is not an echo of another; the first of all when all are echoes."""
    return next((failure for failure in failures if not failure.echo), failures[0])


def alike(failure: Failure, failures: Sequence[Failure]) -> list[int]:
    """The ranks that failed as this one did: the same words from the same place."""
    if failure.record is None:
        return [failure.rank]
    same = (failure.record["what"], failure.record["where"])
    return sorted(
        {f.rank for f in failures if f.record is not None and (f.record["what"], f.record["where"]) == same}
    )


def judge_all(failures: Sequence[Failure], ranks: Sequence[int]) -> UnisonoError:
    """The error to show for a run of these ranks that ended by these failures."""
    failure = culprit(failures)
    same = alike(failure, failures)
    return judge(failure, same, [rank for rank in ranks if rank not in same])


def judge(failure: Failure, alike: Sequence[int], others: Sequence[int]) -> UnisonoError:
    """The error to show for `failure`. alike: the ranks that raised it. others: those stopped because of it."""
    if failure.record is None:
        return _died(failure, others)
    error = error_record.revive(failure.record, failure.rank, failure.host)
    if not error.likely and isinstance(error, UserCodeError) and error.code == "R01":
        error.likely = raised_by(alike, others)
    return error


def raised_by(alike: Sequence[int], others: Sequence[int]) -> str:
    """Who raised an error and who did not, so that nobody looks for it on one machine if all have it."""
    if len(alike) > 1 and not others:
        return "every rank raised it: not one machine, but the code or the data that all share"
    if len(alike) > 1:
        return f"{listed(alike)} raised it; {stopped_because(others)}"
    return stopped_because(others)


def stopped_because(others: Sequence[int]) -> str:
    if not others:
        return ""
    return f"{listed(others)} {'was' if len(others) == 1 else 'were'} stopped because of it"


def listed(ranks: Sequence[int]) -> str:
    """ "rank 1", "ranks 0, 2, 3", "ranks 0-6"."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if len(ranks) > 3 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"ranks {ranks[0]}-{ranks[-1]}"
    return "ranks " + ", ".join(map(str, ranks))


def how_died(status: int) -> str:
    """ "killed by SIGKILL": how a process ended, by its exit status."""
    if status >= 0:
        return f"left with status {status}"
    try:
        return f"killed by {signal.Signals(-status).name}"
    except ValueError:
        return f"killed by signal {-status}"


def _died(failure: Failure, others: Sequence[int]) -> UnisonoError:
    if failure.status >= 0:
        return UserCodeError(
            f"the process left with status {failure.status} without a word",
            where=failure.place,
            likely="something called os._exit or sys.exit underneath Python",
            rank=failure.rank,
            host=failure.host,
            code="R02",
        )
    number = -failure.status
    causes: dict[int, str] = {
        signal.SIGKILL: "the kernel ran out of memory and killed it (dmesg says so), or somebody did",
        signal.SIGABRT: "a check in native code failed; its words are above",
        signal.SIGSEGV: "a fault in native code; its stack is above",
        signal.SIGBUS: "a mapped file was cut short, or /dev/shm is full",
    }
    likely = causes.get(number, stopped_because(others))
    fix = "fewer ranks, or a smaller train.micro_batch" if number == signal.SIGKILL else ""
    error = UserCodeError(
        how_died(failure.status),
        where=failure.place,
        likely=likely,
        fix=fix,
        rank=failure.rank,
        host=failure.host,
        code="R02",
    )
    error.__dict__["exit"] = 128 + number  # the contract's 128+n, for this one error
    return error


def odd_one_out(stands: Sequence[RankStatus]) -> list[RankStatus]:
    """The ranks that a hang is the fault of, the first of them above all.

    Those that do not even stand still in a collective come first. Where all wait for each other, they are in different
    ones, and the fewer are odd; among as many, those in the less usual one; else what rank 0 does is right.
    """
    for state in ("clashed", "gone", "stopped", "silent"):
        if odd := [status for status in stands if status.state == state]:
            return odd
    if odd := [status for status in stands if status.state == "runs"]:
        return sorted(odd, key=lambda status: (-status.idle, status.rank))
    alike = Counter((status.doing(), status.place) for status in stands)
    order = sorted(stands, key=lambda o: (alike[o.doing(), o.place], -o.odd, o.rank == 0, o.rank))
    first = order[0]
    return [status for status in order if (status.doing(), status.place) == (first.doing(), first.place)]


def waiting(stands: Sequence[RankStatus], odd: Sequence[RankStatus]) -> str:
    """ "ranks 0, 2 wait in all_reduce over dp": what the others are in."""
    groups: dict[str, list[int]] = {}
    for status in stands:
        if status not in odd:
            groups.setdefault(status.doing(), []).append(status.rank)
    verbs = ("called", "called") if odd[0].state == "called" else ("wait in", "waits in")
    return "; ".join(
        f"{listed(ranks)} {verbs[len(ranks) == 1]} {doing}" if doing else f"{listed(ranks)} go on"
        for doing, ranks in groups.items()
    )


def differing(answers: Iterable[list[Mapping[str, Any] | None]]) -> list[RankStatus]:
    """What ranks have called where their answers differ first; nothing where they agree."""
    for at in zip(*answers, strict=True):
        calls = [dict(call) for call in at if call is not None]
        if len({call.pop("says") for call in calls} - {""}) > 1:
            return [RankStatus(**call) for call in calls]
    return []


_HOW = {
    "gone": "{ranks} left without a word",
    "stopped": "{ranks} {is_} stopped by a signal, for {seconds:.0f} s",
    "silent": "no word from {ranks} for {seconds:.0f} s",
    "runs": "no word from {ranks} for {seconds:.0f} s",
    "ended": "{ranks} left the loop early",
    "waits": "{ranks} {is_} in {doing}",
    "called": "{ranks} called {doing}",
    "clashed": "{ranks} got another message than the one waited for in {doing}",
}
_WHY = {
    "gone": "it was killed, or something called os._exit; its own output says more",
    "stopped": "somebody sent it SIGSTOP, or a debugger holds it",
    "silent": "its machine or its Python is held up: a call that never comes back from C, or memory that swaps",
    "runs": "it is stuck or slow where shown: a lock, a read that never ends, a loader, a loop",
    "ended": "its loop had fewer turns, or broke off: every rank must make the same steps",
    "waits": "it made a call that the others did not make, or missed one; all ranks make the same calls in one order",
    "called": "other shapes or another call at this line, or one call more or less before it, than on the others",
    "clashed": "a tensor of another size was sent: other shapes, other calls, or a send that fits no receive",
}

_LONGER = "a longer launch.timeout (library: unisono.init(timeout=...)) if it may take so long"
_SAME = "the same calls with the same shapes on every rank, in one order"
_FIX = {
    "gone": "read what it printed last, or what the kernel says of it (dmesg)",
    "stopped": "kill -CONT it in time; for a debugger, a longer launch.timeout (library: unisono.init(timeout=...))",
    "ended": "look at the line above on that rank",
    "waits": "look at the line above on that rank",
    "called": _SAME,
    "clashed": _SAME,
}


def hang(stands: Sequence[RankStatus], seconds: float) -> HangError:
    """The error for ranks that wait for each other since `seconds`: the one whose fault it is, and what others do."""
    odd = odd_one_out(stands)
    first = odd[0]
    code = "H02"
    if first.state in ("gone", "stopped", "silent", "runs"):
        code = "H01"
    what = _HOW[first.state].format(
        ranks=listed([status.rank for status in sorted(odd, key=lambda status: status.rank)]),
        is_="is" if len(odd) == 1 else "are",
        seconds=seconds,
        doing=first.doing() or "a collective",
    )
    others = waiting(stands, odd)
    if first.state in ("runs", "stopped", "silent") and first.doing():
        what += f", in {first.doing()}"
    rest = [
        status for status in stands if status not in odd and status.place and not is_foreign(status.place)
    ]
    places = {
        place: listed([status.rank for status in rest if status.place == place])
        for place in (o.place for o in rest)
    }
    seen = "".join(f"; {ranks} at {place}" for place, ranks in list(places.items())[:3])
    return HangError(
        f"{what}; {others}" if others else what,
        where=first.place,
        likely=_WHY[first.state] + seen,
        fix=_FIX.get(first.state, _LONGER),
        rank=first.rank,
        host=first.host,
        code=code,
    )
