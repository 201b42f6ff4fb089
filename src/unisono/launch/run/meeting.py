"""How the workers of an epoch meet: the first time, after a loss, for a move, and from the beginning. No torch."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from unisono.launch.run.commands import Forget, OnHost, Regroup, Show, Spawn, Tell
from unisono.launch.run.membership import Place, Role, RunSpread, among_host, places
from unisono.launch.run.state import Phase, RunState, Turn, Worker
from unisono.launch.run.verdict import Failure, how_died
from unisono.spec.rendezvous import RankMeeting


def begin_group(turn: Turn) -> None:
    """Spawn the first workers, once there is room for all of the group."""
    state = turn.state
    if state.phase is not Phase.WAITING or sum(state.room.values()) < state.spread.ranks:
        return
    turn.set(phase=Phase.STOPPING if state.stopping else Phase.MEETING)
    chosen = places(state.room, state.spread.ranks)
    turn.set(group=tuple(_spawn(turn, chosen, rank, len(chosen), joins=False) for rank in range(len(chosen))))
    fill_beside(turn)


def move(turn: Turn, spread: RunSpread) -> None:
    """Let all end the step that they are in, and go on spread otherwise."""
    if turn.state.has_trained and not turn.state.stopping and turn.state.move is None:
        turn.set(move=spread)
        turn.do(*(Tell(number, "move") for number in turn.state.group))


def grow(turn: Turn) -> None:
    """More room than before lets more workers train."""
    spread = turn.state.next_spread()
    if spread is not None and spread.ranks > turn.state.spread.ranks:
        room = sum(turn.state.room.values())
        move(turn, replace(spread, why=f"there is room for {room} ranks"))


def all_paused(state: RunState) -> bool:
    """Whether all have ended their step for a move."""
    return state.move is not None and all(worker.paused == state.epoch for worker in state.members())


def meet(turn: Turn, lost: Sequence[Failure] = (), why: str = "") -> bool:
    """New workers take the places of those that are lost, and all meet anew. If the others cannot, since they have not
    trained or have ended, all begin anew, from the newest checkpoint; so on GPUs, where a kernel of NCCL that waits for
    a lost worker ends with its process alone. Where all have paused for a move, nothing is lost. why: in words, if it
    is more than that workers are gone. Returns False where there is no room to go on."""
    state, planned = turn.state, all_paused(turn.state)
    spread = state.move if planned else None
    if spread is None or spread.ranks > sum(state.room.values()):
        spread = state.next_spread()
    if spread is None:
        return False
    joins = state.has_trained and (planned or not state.is_on_gpus)
    joins = joins and not any(worker.has_reported for worker in state.members())
    ranks = {failure.rank for failure in lost}
    turn.set(
        epoch=state.epoch + 1, spread=spread, ready=frozenset(), move=None, failures=(), verdict_at=None,
        has_trained=state.has_trained and joins, losses=state.losses + (not planned),
        tries=state.tries if planned else state.tries.lost(ranks),
        phase=Phase.STOPPING if state.stopping else Phase.MEETING,
    )  # fmt: skip
    born = _seat(turn, joins)
    fill_beside(turn)
    turn.drop()
    _show(
        turn, state, {failure.rank: why or how_died(failure.status) for failure in lost}, born, planned, why
    )
    return True


def _seat(turn: Turn, joins: bool) -> list[int]:
    """Give each rank of the new epoch a worker: one that lives, a spare, or a new one. Returns the ranks of new
    ones."""
    state, spread = turn.state, turn.state.spread
    group = [state.workers[number] for number in (*state.group, *state.leaving)]
    beside = {
        worker.place: worker for worker in (state.workers[n] for n in state.beside) if worker.is_at_work
    }
    alive = {worker.place: worker for worker in group if worker.is_at_work} if joins else {}
    spares = {place: worker for place, worker in beside.items() if worker.role is Role.SPARE} if joins else {}
    chosen = places(state.room, spread.ranks, alive, spares, beside)
    kept: Mapping[Place, Worker] = {p: worker for p, worker in (spares | alive).items() if p in chosen}
    leaving = [worker for place, worker in alive.items() if place not in chosen]
    stays = {worker.number for worker in (*kept.values(), *leaving)}
    give_up(turn, [worker for worker in group if worker.number not in stays])
    give_up(
        turn, [worker for place, worker in beside.items() if place in chosen and worker.number not in stays]
    )
    present = spread.ranks + len(leaving)
    calls = dict[int, RankMeeting]()
    for place, worker in kept.items():
        rank = chosen.index(place)
        calls[worker.number] = _meeting(turn.state, chosen, rank, present)
        turn.change(worker.number, rank=rank, role=spread.role(rank))
    for rank, worker in enumerate(leaving, spread.ranks):
        calls[worker.number] = RankMeeting(state.epoch, rank, spread.ranks, present, 0, 1, spread.as_json())
        turn.change(worker.number, rank=rank)
    turn.do(Regroup(state.epoch, calls))
    born = [rank for rank, place in enumerate(chosen) if place not in kept]
    numbers = [
        _spawn(turn, chosen, rank, present, joins) if rank in born else kept[place].number
        for rank, place in enumerate(chosen)
    ]
    turn.set(group=tuple(numbers), leaving=tuple(worker.number for worker in leaving))
    return born


def fill_beside(turn: Turn) -> None:
    """Workers beside the group, where there is room: those that live stay what they are, others are new."""
    state, spread = turn.state, turn.state.spread
    used = {worker.place for worker in state.members()}
    alive = [state.workers[n] for n in state.beside if n not in state.group]
    alive = [worker for worker in alive if worker.is_at_work and worker.place not in used]
    used |= {worker.place for worker in alive}
    free = [(host, index) for host, room in state.room.items() for index in range(room)]
    free = [place for place in free if place not in used]
    numbers = list[int]()
    for seat, role in enumerate(spread.roles[spread.ranks :]):
        rank = spread.ranks + seat
        same = next((worker for worker in alive if worker.role is role and worker.seat == seat), None)
        if same is not None:
            alive.remove(same)
            turn.change(same.number, rank=rank)
            numbers.append(same.number)
        elif free:
            meeting = RankMeeting(state.epoch, rank, spread.ranks, spread.ranks, 0, 1, spread.as_json())
            numbers.append(_new(turn, free.pop(0), meeting, joins=False, role=role))
            turn.change(numbers[-1], seat=seat)
    give_up(turn, alive)
    turn.set(beside=tuple(numbers))


def begin_anew(turn: Turn, how: str) -> None:
    """The supervisor's own fork server has gone: another one is started, and forks all workers anew."""
    state = turn.state
    give_up(turn, list(state.workers.values()))
    turn.set(
        spread=state.terms.spread, group=(), beside=(), leaving=(), epoch=state.epoch + 1, phase=Phase.WAITING,
        has_trained=False, ready=frozenset(), tries=state.tries.lost(()), losses=state.losses + 1, settled={},
        advised={}, move=None, is_on_gpus=False, failures=(), is_hung=False, verdict_at=None, leave_at=None,
    )  # fmt: skip
    turn.drop()
    born = list(range(turn.state.spread.ranks))
    event = {"kind": "members", "epoch": turn.state.epoch, "lost": {"helper": how}, "born": born}
    turn.do(Regroup(turn.state.epoch, {}), Show(-1, event), OnHost(0, "start"))


def give_up(turn: Turn, workers: list[Worker]) -> None:
    """Workers that have no part in the run any more: those that live are killed."""
    for worker in workers:
        turn.kill(worker)
        turn.do(Forget(worker.number))


def _meeting(state: RunState, chosen: Sequence[Place], rank: int, present: int) -> RankMeeting:
    local = among_host(chosen, rank)
    spread = state.spread.as_json() if state.epoch else {}
    return RankMeeting(state.epoch, rank, len(chosen), present, *local, spread)


def _spawn(turn: Turn, chosen: Sequence[Place], rank: int, present: int, joins: bool) -> int:
    meeting = _meeting(turn.state, chosen, rank, present)
    return _new(turn, chosen[rank], meeting, joins, turn.state.spread.role(rank))


def _new(turn: Turn, place: Place, meeting: RankMeeting, joins: bool, role: Role) -> int:
    """The number of a new worker."""
    state, (host, index) = turn.state, place
    number = state.count + 1
    worker = Worker(number, meeting.rank, host, index, turn.now, role)
    turn.set(count=number, workers={**state.workers, number: worker})
    settled = {**state.settled, **state.spread.as_json()} if state.epoch else {}
    turn.do(Spawn(number, host, index, meeting, joins, settled, role))
    if state.stopping:
        turn.do(Tell(number, "stop"))
    return number


def _show(
    turn: Turn, before: RunState, lost: Mapping[int, str], born: list[int], planned: bool, why: str
) -> None:
    spread, was = turn.state.spread, before.spread
    event: dict[str, Any] = {
        "kind": "members", "epoch": turn.state.epoch, "born": born, "ranks": spread.ranks, "plan": spread.plan,
    }  # fmt: skip
    if not planned:
        event["lost"] = dict(lost)
    if before.gone or before.joined:
        event["hosts"] = {"gone": list(before.gone), "joined": list(before.joined)}
        turn.set(gone=(), joined=())
    if planned or (spread.plan, spread.speeds) != (was.plan, was.speeds):
        event["why"] = spread.why or why
    turn.do(Show(-1, event))
