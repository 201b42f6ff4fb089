"""How a run ends: it is asked to, a worker failed, or one says nothing any more. No torch.

The first true failure is looked for among the echoes that it causes; then all others are killed. Killing outright is
safe because nothing in a run folder is written in place, and quick because a worker inside a collective hears no milder
signal.
"""

from unisono.launch import error_record
from unisono.launch.run import events
from unisono.launch.run.commands import AskStacks, OnHost, ReadStacks, Show, Tell
from unisono.launch.run.meeting import meet
from unisono.launch.run.state import LEAVE, Phase, Turn
from unisono.launch.run.verdict import Failure, judge_all
from unisono.spec.errors import Interrupted, Stopped, UnisonoError, out_of_grace

ECHO_GRACE = 2.0
"""Seconds to wait for the true failure after one that is only an echo of another."""
ALIKE_GRACE = 0.3
"""Seconds in which other workers may fail too after one that did: what all raise is no fault of one of them."""
STACK_GRACE = 0.5
"""Seconds that workers get to write their stacks in a hang."""
CUT_GRACE = 0.5
"""Seconds to wait for a death after a worker has missed another; without one, their connection was cut."""


def asked_to_end(turn: Turn, how: str) -> None:
    state, at_once = turn.state, turn.state.stopping == how == "interrupt"
    unborn = not state.group or any(not worker.born and worker.status is None for worker in state.members())
    if unborn and not state.has_trained:
        turn.set(stopping=state.stopping or how)
        kind = Interrupted if how == "interrupt" else Stopped
        end(turn, kind("stopped before the ranks had started"))
        turn.do(*(OnHost(number, "end") for number in state.hosts))  # one may be importing for seconds yet
    elif at_once:
        end(turn, Interrupted("stopped at once"))
    else:
        stop(turn, how)


def stop(turn: Turn, how: str) -> None:
    """Ask all to end with the step that they are in; who asked first decides how that is told."""
    state = turn.state
    if state.phase is Phase.OVER:
        return
    if not state.stopping:
        turn.do(Show(-1, {"kind": "stopping", "how": how}))
    turn.set(stopping=state.stopping or how, phase=Phase.STOPPING)
    for number in state.group:
        turn.do(*(Tell(number, word) for word in (("stop", "hurry") if how == "terminate" else ("stop",))))
    if how == "terminate" and state.terms.grace is not None and state.grace_at is None:
        turn.set(grace_at=turn.now + state.terms.grace)


def fail(turn: Turn, failure: Failure) -> None:
    """A worker failed by itself, or only says that another one has gone."""
    state = turn.state
    turn.set(failures=(*state.failures, failure))
    if not failure.echo:
        due = turn.now + (ALIKE_GRACE if turn.state.unfinished() else 0.0)
        turn.set(verdict_at=due if state.verdict_at is None else min(due, state.verdict_at))
    elif state.verdict_at is None:
        turn.set(verdict_at=turn.now + ECHO_GRACE)


def found_hang(turn: Turn, event: events.FoundHang) -> None:
    """A worker that stands still is replaced, as if it had died. If all have met anew since, the hang is over."""
    state = turn.state
    if state.phase is Phase.OVER or (state.terms.recovers and event.epoch != state.epoch):
        return
    error = error_record.revive(event.error, None, state.terms.host)
    rank = error.rank
    if error.code == "H01" and rank is not None and 0 <= rank < len(state.group) and state.can_recover():
        may = state.tries.may_hang(rank)
        turn.set(tries=state.tries.hanged(rank))
        if may:
            turn.do(Show(-1, {"kind": "note", "text": error.what}))
            turn.kill(state.members()[rank])
            return
    turn.set(is_hung=True)
    end(turn, error)


def mind_the_time(turn: Turn) -> None:
    """What is due."""
    state, now = turn.state, turn.now
    if state.phase is Phase.OVER:
        return
    if state.grace_at is not None and state.grace_at <= now:
        end(turn, Stopped(out_of_grace(state.terms.grace or 0.0)))
        return
    if state.leave_at is not None and state.leave_at <= now:
        end_by_failures(turn)
        return
    if (silent := state.silence_at()) is not None and silent <= now:
        turn.set(is_hung=True, verdict_at=now + STACK_GRACE)
        turn.do(AskStacks(tuple(worker.number for worker in state.unfinished())))
    for worker in state.members():
        if (at := state.frozen_at(worker)) is not None and at <= now:
            turn.kill(worker)
    if turn.state.verdict_at is not None and turn.state.verdict_at <= now:
        _find_verdict(turn)


def _find_verdict(turn: Turn) -> None:
    """The true failure has had its time to come."""
    state = turn.state
    turn.set(verdict_at=None)
    if not state.is_hung and state.can_recover() and meet(turn):
        return
    if state.failures:
        end_by_failures(turn)
    elif unfinished := state.unfinished():
        turn.set(verdict_at=turn.now + STACK_GRACE)
        turn.do(ReadStacks(tuple(worker.number for worker in unfinished)))


def end(turn: Turn, error: UnisonoError | None) -> None:
    """The run is over: whoever lives is killed. error: what ended it; the first one counts."""
    state = turn.state
    if state.phase is not Phase.OVER:
        turn.set(phase=Phase.OVER, error=error)
    for worker in list(turn.state.workers.values()):
        turn.kill(worker)


def end_by_failures(turn: Turn) -> None:
    """The run is over by what workers failed of, if any did."""
    failures = turn.state.failures
    end(turn, judge_all(failures, range(turn.state.spread.ranks)) if failures else None)


def end_if_all_are_gone(turn: Turn) -> None:
    state = turn.state
    if (
        state.group
        and state.phase is not Phase.OVER
        and all(worker.status is not None for worker in state.everyone())
    ):
        end_by_failures(turn)


def let_go(turn: Turn) -> None:
    """Workers that only handed over what they held leave as soon as they have; the group together: one that closed its
    sockets while another still waits for bytes would look like a failure."""
    state = turn.state
    for number in state.leaving:
        if state.workers[number].has_reported:
            turn.do(Tell(number, "leave"))
    if not state.group or not all(worker.has_reported for worker in state.members()):
        return
    turn.do(*(Tell(number, "leave") for number in state.group))
    for number in state.beside:
        turn.do(Tell(number, "leave" if state.workers[number].has_reported else "stop"))
    if state.leave_at is None:
        turn.set(leave_at=turn.now + LEAVE)
