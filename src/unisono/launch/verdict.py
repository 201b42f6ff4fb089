"""Who broke the run, and how to say it. Pure functions on what the supervisor gathered. No torch."""

import re
import signal
from collections.abc import Sequence
from dataclasses import dataclass

from unisono.launch import crossing
from unisono.launch.seats import Seat
from unisono.spec.errors import HangError, UnisonoError, UserCodeError
from unisono.spec.frames import is_foreign

_FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>\S+)')


@dataclass(frozen=True)
class Failure:
    """A rank that raised (`record`) or died without a word (`status`)."""

    rank: int
    record: crossing.Record | None
    status: int = 0

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


def judge(
    failure: Failure, alike: Sequence[int], others: Sequence[int], host: str, last_lines: Sequence[str]
) -> UnisonoError:
    """The error to show for `failure`. alike: the ranks that raised it. others: those stopped because of it."""
    if failure.record is None:
        return _died(failure, others, host, last_lines)
    error = crossing.revive(failure.record, failure.rank, host)
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


def _died(failure: Failure, others: Sequence[int], host: str, last_lines: Sequence[str]) -> UnisonoError:
    where = next((place for line in last_lines if (place := _place(line))), "")
    if failure.status >= 0:
        return UserCodeError(
            f"the process left with status {failure.status} without a word",
            where=where,
            likely="something called os._exit or sys.exit underneath Python",
            rank=failure.rank,
            host=host,
            code="R02",
        )
    number = -failure.status
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    causes: dict[int, str] = {
        signal.SIGKILL: "the kernel ran out of memory and killed it (dmesg says so), or somebody did",
        signal.SIGABRT: "a check in native code failed; its words are above",
        signal.SIGSEGV: "a fault in native code; its stack is above",
        signal.SIGBUS: "a mapped file was cut short, or /dev/shm is full",
    }
    likely = causes.get(number, stopped_because(others))
    fix = "fewer ranks, or a smaller train.micro_batch" if number == signal.SIGKILL else ""
    error = UserCodeError(
        f"killed by {name}", where=where, likely=likely, fix=fix, rank=failure.rank, host=host, code="R02"
    )
    error.__dict__["exit"] = 128 + number  # the contract's 128+n, for this one error
    return error


def _place(line: str) -> str:
    match = _FRAME.search(line)
    return f"{match['file']}:{match['line']} in {match['name']}" if match else ""


def waits_for_others(seat: Seat, in_store: bool) -> bool:
    """True when its stack says that it sits in a collective or at the store, as healthy ranks do in a hang."""
    first = next((place for line in seat.lines if (place := _place(line))), "")
    return in_store or "torch/distributed/" in first or "rank_store" in first


def hang(seats: Sequence[Seat], in_store: Sequence[int], seconds: float, host: str) -> HangError:
    """Names the ranks that have not reported; `seats` are the unfinished ones, their `lines` their stacks."""
    silent = [seat for seat in seats if not waits_for_others(seat, seat.rank in in_store)] or list(seats)
    waiting = [seat.rank for seat in seats if seat not in silent]
    what = f"no word from {listed([seat.rank for seat in silent])} for {seconds:.0f} s"
    if waiting:
        what += f"; {listed(waiting)} wait{'s' if len(waiting) == 1 else ''} for others"
    places = [place for line in silent[0].lines if (place := _place(line))]
    where = next((place for place in places if not is_foreign(place)), "")
    where = where or (places[0] if places else "")
    if not places:
        likely = "it does not even answer a signal: stopped, or stuck in the kernel"
    elif waiting:
        likely = "it is slow or stuck where shown; the others are healthy"
    else:
        likely = "ranks run different collectives, or a step takes longer than the limit"
    return HangError(
        what,
        where=where,
        likely=likely,
        fix="a longer launch.timeout if this step is expected to take so long",
        rank=silent[0].rank,
        host=host,
    )
