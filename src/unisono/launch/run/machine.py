"""What follows from each event of a run: `handle`. Total and pure: no I/O, no clock of its own, no torch.

A worker is *lost* when the kernel ended it by a signal, or when it was ended here because it stood still. Then a new
process takes its place, and all of the group meet again (an *epoch*), while the others keep theirs. A worker that
failed by itself (its code raised, it left by os._exit) would fail again: that ends the run (`ending`).
"""

import signal
from dataclasses import replace

from unisono.launch import error_record
from unisono.launch.backend import GPUS
from unisono.launch.outcome import helper_killed, host_gone
from unisono.launch.run import events
from unisono.launch.run.commands import Command, Kill, OnHost, Show
from unisono.launch.run.ending import (
    CUT_GRACE,
    asked_to_end,
    end,
    end_by_failures,
    end_if_all_are_gone,
    fail,
    found_hang,
    let_go,
    mind_the_time,
    stop,
)
from unisono.launch.run.meeting import all_paused, begin_anew, begin_group, fill_beside, grow, meet, move
from unisono.launch.run.state import Host, Phase, RunState, Turn, Worker
from unisono.launch.run.verdict import Failure, hang
from unisono.spec.errors import Stopped


def handle(state: RunState, event: events.Event, now: float) -> tuple[RunState, list[Command]]:
    """The state after an event, and what is to be done. now: seconds of a monotonic clock."""
    turn = Turn(state, now)
    match event:
        case events.HostUp():
            _host_up(turn, event)
        case events.HostPrepared(host=host) if host in state.hosts:
            turn.do(OnHost(host, "probe"))
            if state.terms.recovers and state.group and state.phase is not Phase.OVER:
                grow(turn)
        case events.HostFailed():
            _host_failed(turn, event)
        case events.HostDown(host=host) if host in state.hosts:
            _host_down(turn, event)
        case events.HostsMissing(error=error) if state.phase is Phase.WAITING:
            end(turn, error)
        case events.Signalled(how=how, worker=None):
            asked_to_end(turn, how)
        case events.Advised():
            _advised(turn, event)
        case events.StacksRead(stands=stands) if stands and state.phase is not Phase.OVER:
            end(turn, hang(stands, state.silence))
        case events.Resumed():
            turn.set(workers={n: replace(other, heard=now) for n, other in state.workers.items()})
        case events.Abandoned():
            end(turn, None)
        case events.Tick():
            mind_the_time(turn)
        case _ if (worker := state.workers.get(getattr(event, "worker", -1))) is not None:
            _of_worker(turn, worker, event)
        case _:
            pass
    end_if_all_are_gone(turn)
    return turn.state, turn.commands


# Hosts.


def _host_up(turn: Turn, event: events.HostUp) -> None:
    state, number = turn.state, event.host
    if number in state.hosts:  # it has noticed sooner than we have
        _host_down(turn, events.HostDown(number))
    turn.set(hosts={**turn.state.hosts, number: Host(event.name, event.room)})
    if number:
        if state.group and state.terms.recovers:
            turn.set(joined=(*turn.state.joined, event.name))
        arrival = {"kind": "host", "came": event.name, "room": event.room, "address": event.address}
        turn.do(Show(-1, arrival))
    turn.do(OnHost(number, "prepare"))
    begin_group(turn)


def _host_failed(turn: Turn, event: events.HostFailed) -> None:
    """Workers that it will not fork never live."""
    for worker in list(turn.state.workers.values()):
        if worker.host == event.host and not worker.born and event.worker in (None, worker.number):
            turn.change(worker.number, status=1)
    end(turn, error_record.revive(event.error, None, turn.state.terms.host))


def _host_down(turn: Turn, event: events.HostDown) -> None:
    state, host = turn.state, turn.state.hosts[event.host]
    lost = [worker for worker in state.members() if worker.host == event.host and worker.is_at_work]
    for worker in state.workers.values():
        if worker.host == event.host and worker.status is None:
            turn.change(worker.number, status=-signal.SIGKILL)
    turn.set(hosts={number: other for number, other in state.hosts.items() if number != event.host})
    turn.do(OnHost(event.host, "close"))
    if event.host == 0:
        _fork_server_gone(turn, event.how)
        return
    if state.terms.recovers:
        turn.set(gone=(*state.gone, host.name))
    turn.do(Show(-1, {"kind": "host", "gone": host.name}))
    if state.phase is Phase.OVER or not lost or _is_done_by_first(turn):
        return
    failures = [Failure(worker.rank, None, -signal.SIGKILL, host=host.name) for worker in lost]
    if not (turn.state.can_recover() and meet(turn, failures, f"host {host.name} is gone")):
        room = sum(turn.state.room.values())
        end(turn, host_gone(host.name, [worker.rank for worker in lost], room))


def _fork_server_gone(turn: Turn, how: str) -> None:
    """The workers of the supervisor's own host have died with it."""
    state = turn.state
    if state.phase is Phase.OVER:
        return
    if state.group and all(worker.finished for worker in state.members()):
        end(turn, None)
    elif any(not failure.echo for failure in state.failures):
        end_by_failures(turn)
    elif state.terms.recovers and any(worker.finished for worker in state.members()[:1]):
        end(turn, None)
    elif state.terms.recovers and not state.stopping and state.tries.may():
        begin_anew(turn, how)
    else:
        end(turn, helper_killed(state.terms.host))


# Workers.


def _of_worker(turn: Turn, worker: Worker, event: events.Event) -> None:
    """What a worker does or says."""
    state = turn.state
    match event:
        case events.Born():
            turn.change(worker.number, born=True, heard=turn.now)
            if worker.killed or worker.status is not None or state.phase is Phase.OVER:
                turn.change(worker.number, killed=True)
                turn.do(Kill(worker.number))
            return
        case events.Exited():
            if worker.status is None:  # else it died with its host
                _exited(turn, worker, event)
            return
        case events.Frozen(is_frozen=is_frozen):
            turn.change(worker.number, frozen=turn.now if is_frozen else None)
            return
        case _:
            pass
    if worker not in state.everyone():
        return  # its place is taken
    worker = turn.change(worker.number, heard=turn.now)
    match event:
        case events.Finished(result=result):
            turn.change(worker.number, finished=True, result=result)
            let_go(turn)
        case events.Failed(record=record):
            turn.change(worker.number, record=record)
            fail(turn, Failure(worker.rank, record, host=_host_name(state, worker)))
            let_go(turn)
        case _:
            _goes_on(turn, worker, event)


def _goes_on(turn: Turn, worker: Worker, event: events.Event) -> None:
    """A word of a worker that has not ended."""
    state = turn.state
    match event:
        case events.Signalled(how=how):
            stop(turn, how)
        case events.Drained(text=text):
            if worker.rank == 0:  # whose part comes last
                end(turn, Stopped(text))
        case events.FoundHang():
            found_hang(turn, event)
        case events.Missed(epoch=epoch):
            # If nobody turns out to be dead, a connection was cut: then all meet anew too.
            if state.terms.recovers and epoch == state.epoch and state.verdict_at is None:
                turn.set(verdict_at=turn.now + CUT_GRACE)
        case events.WorkerPaused(epoch=epoch):
            if epoch == state.epoch and state.phase is not Phase.OVER:
                turn.change(worker.number, paused=epoch)
                if all_paused(turn.state) and not meet(turn):
                    end(turn, host_gone("", range(state.spread.ranks), sum(state.room.values())))
        case events.Ready() | events.Stepped() | events.Said():
            _progressed(turn, worker, event)
        case _:
            pass


def _progressed(turn: Turn, worker: Worker, event: events.Ready | events.Stepped | events.Said) -> None:
    """How far a worker is."""
    state, met = turn.state, None
    match event:
        case events.Said(event={"kind": "start", "backend": backend}):
            turn.set(is_on_gpus=backend == GPUS)
        case events.Said(event={"kind": "settled", "argument": dict(argument)}):
            turn.set(settled=argument)
        case events.Stepped(step=step):
            silence = state.silence if event.silence is None else event.silence
            turn.set(tries=state.tries.stepped(step), silence=silence)
        case events.Ready(step=step) if worker.number in state.group:
            ready = state.ready | {worker.rank}
            met = step if len(ready) == state.spread.ranks > len(state.ready) else None
            turn.set(ready=ready, has_trained=state.has_trained or met is not None)
        case _:
            pass
    if met is not None and state.phase is Phase.MEETING:
        turn.set(phase=Phase.RUNNING)
    if met is not None and state.epoch:
        facts = {"epoch": state.epoch, "met": met, "ranks": state.spread.ranks, "plan": state.spread.plan}
        turn.do(Show(-1, {"kind": "members", **facts}))
    turn.do(Show(worker.rank, event.event))


def _exited(turn: Turn, worker: Worker, event: events.Exited) -> None:
    """A process is gone; what it had to say was heard before."""
    turn.change(worker.number, status=event.status)
    state = turn.state
    if worker.number in (*state.group, *state.leaving):
        if not worker.has_reported and state.phase is not Phase.OVER and not _is_done_by_first(turn):
            host = _host_name(state, worker)
            failure = Failure(worker.rank, None, event.status, event.place, host)
            if not (event.status < 0 and state.can_recover() and meet(turn, [failure])):
                fail(turn, failure)
    elif worker.number in state.beside:
        goes_on = state.phase is not Phase.OVER and any(state.unfinished())
        if not worker.has_reported and goes_on and state.tries.may():
            turn.set(tries=state.tries.lost([worker.rank]))
            fill_beside(turn)
            turn.drop()
    else:
        turn.drop()


def _is_done_by_first(turn: Turn) -> bool:
    """Whether rank 0 has finished, so that all is done and said: whoever is lost then has finished too."""
    state = turn.state
    if not state.terms.recovers or not any(worker.finished for worker in state.members()[:1]):
        return False
    for worker in state.members():
        if worker.status is not None and not worker.has_reported:
            turn.change(worker.number, finished=True)
    let_go(turn)
    return True


def _host_name(state: RunState, worker: Worker) -> str:
    host = state.hosts.get(worker.host)
    return host.name if host is not None else state.terms.host


def _advised(turn: Turn, event: events.Advised) -> None:
    state, room = turn.state, sum(turn.state.room.values())
    if event.text:
        turn.do(Show(-1, {"kind": "note", "text": event.text}))
    if event.spread is not None and event.spread.ranks <= room and state.phase is not Phase.OVER:
        turn.set(advised={**state.advised, room: replace(event.spread, why="")})
        move(turn, event.spread)
