"""How a run is spread over the hosts that are there: what it begins with, and how it goes on when some are lost or
come. No torch."""

import socket
from collections.abc import Callable
from dataclasses import replace
from math import ceil

from unisono.comm.members import Members, Shape, assign
from unisono.config import Recipe
from unisono.config.resolve import on_any_ranks
from unisono.launch.host_listener import HostListener
from unisono.launch.remote_hosts import RemoteHosts, RequestedHost, address_towards, is_here
from unisono.launch.run.membership import Role, RunSpread
from unisono.plan import Plan
from unisono.plan.batch import Batch, batch_of
from unisono.plan.grammar import member
from unisono.programs.schedules import SCHEDULES
from unisono.spec.errors import UsageError
from unisono.spec.settings import Settings
from unisono.verbs.train.order import TrainOrder

Other = Callable[[int], Plan | None]
"""The best plan for so many ranks, by the planner; None where it knows none."""


def hosts_of(text: str, ranks: int) -> tuple[int, list[RequestedHost]]:
    """(room on this host, the others) from `a,b:4,c`, this one first. Raises UsageError U-L10."""
    words = [word.strip() for word in text.split(",") if word.strip()]
    each = ceil(ranks / max(1, len(words)))
    hosts = [_host(word, each) for word in words]
    if not hosts or not is_here(hosts[0].name):
        raise UsageError(
            f"the first of --hosts is not this host: {hosts[0].name if hosts else 'none is named'}", where="--hosts",
            fix="this host's own name first: rank 0 and the supervisor are here", code="L10",
        )  # fmt: skip
    names = [guest.name for guest in hosts]
    for name in names:
        if names.count(name) > 1 or name.startswith("-"):
            raise UsageError(
                f"{name} is no host, or named twice", where="--hosts", fix="--hosts a,b,c", code="L10"
            )
    return hosts[0].room, hosts[1:]


def room_of(text: str) -> int:
    """For how many ranks `--hosts` has room. Raises UsageError U-L10 where one does not say."""
    for word in text.split(","):
        if ":" not in word:
            raise UsageError(f"dp=-1 fills the hosts, and {word.strip()} does not say how many ranks it takes",
                             where="--hosts", fix=f"--hosts {word.strip()}:4, or dp=N", code="L10")  # fmt: skip
    here, guests = hosts_of(text, 1)
    return here + sum(guest.room for guest in guests)


def _host(word: str, room: int) -> RequestedHost:
    name, colon, count = word.rpartition(":")
    if colon and not (count.isdigit() and int(count)):
        raise UsageError(f"{word}: how many ranks a host takes is a number", where="--hosts", fix="--hosts a,b:4",
                         code="L10")  # fmt: skip
    return RequestedHost(name, int(count)) if colon else RequestedHost(word, room)


def remote_hosts(order: TrainOrder, text: str, settings: Settings, other: Other) -> RemoteHosts:
    """The hosts that `--hosts` names, and where they join. other: see Spreading. Raises UsageError U-L10."""
    recipe, plan = order.recipe, order.plan
    here, guests = hosts_of(text, plan.world)
    room = here + sum(guest.room for guest in guests)
    if room < plan.world:
        raise UsageError(f"the plan takes {plan.world} ranks, and --hosts has room for {room}", where="--hosts, plan",
                         fix="more hosts, more ranks on some (a:4), or a smaller plan", code="L10")  # fmt: skip
    address = address_towards(guests[0].name if guests else socket.gethostname())
    listener = HostListener.at(address, recipe.launch.tls, recipe.launch.host_timeout)
    listener.refused = lambda text: settings.note(f"note  {text}")
    return RemoteHosts(listener, here, Spreading(recipe, plan, other), guests)


def spread_of(recipe: Recipe, plan: Plan) -> RunSpread | None:
    """Return how a plan is spread with any number of replicas: leaves that replicas do not divide are dealt as evenly
    as can be. None where some replica would have none, or the plan does not go with the recipe."""
    if (policy := member("sync", plan.sync)) is not None:
        plan = replace(plan, sync=policy.among(plan.sync, plan.dp))
    batch, _ = batch_of(replace(plan, micros=None), recipe.train)
    if batch is not None:
        plan = replace(plan, micros=batch.micros)
        return RunSpread(str(plan), plan.world) if not plan.check(on_any_ranks(recipe)) else None
    return dealt(recipe, plan, (1.0,) * plan.dp)


def dealt(recipe: Recipe, plan: Plan, speeds: tuple[float, ...]) -> RunSpread | None:
    """The plan where each replica gets leaves by its speed; None where the policy cannot be played so."""
    train, policy = recipe.train, member("sync", plan.sync)
    shape = Shape(pp=plan.pp, dp=plan.dp, shard=plan.shard, cp=plan.cp, tp=plan.tp)
    try:
        leaves, branches = (
            train.global_batch // (train.micro_batch or 1),
            policy is not None and policy.leafwise,
        )
        assignment = assign(leaves, shape, Members.first(shape.world), speeds, branches)
    except ValueError:
        return None
    counts = {len(leaves) for leaves in assignment.values()}
    for count in counts:
        part = replace(plan, micros=count)
        batch = Batch(train.global_batch, train.micro_batch or 1, count, plan.replicas)
        if policy is None or any(True for _ in policy.problems(part, batch)):
            return None
        try:
            SCHEDULES.read(plan.schedule).timetable(plan.pp, count)
        except (ValueError, UsageError):
            return None
    return RunSpread(str(replace(plan, micros=max(counts))), plan.world, speeds)


def shrunk(recipe: Recipe, plan: Plan, room: int) -> RunSpread | None:
    """The plan with as many replicas as there is room for."""
    inner = plan.world // plan.dp
    for dp in range(min(plan.dp, room // inner), 0, -1):
        if (spread := spread_of(recipe, replace(plan, dp=dp))) is not None:
            return spread
    return None


class Spreading:
    """How a run goes on with room for so many ranks: as it began where it can, else with fewer replicas, else under
    another plan that fits. other: asks the planner."""

    def __init__(self, recipe: Recipe, plan: Plan, other: Other = lambda ranks: None) -> None:
        self.recipe, self.plan, self._other = recipe, plan, other
        self._known: dict[tuple[int, str], RunSpread | None] = {}

    def __call__(self, room: int, settled: str) -> RunSpread | None:
        """settled: the plan as ranks have settled it at their start; "" before they have."""
        key = min(room, self.plan.world), settled
        if key not in self._known:
            self._known[key] = self._for(*key)
        return self._known[key]

    def _for(self, room: int, settled: str) -> RunSpread | None:
        plan = Plan.parse(settled) if settled else self.plan
        if room == self.plan.world:
            return spread_of(self.recipe, plan)
        # What was measured among so many ranks does not hold among others.
        plan = replace(plan, collective=self.plan.collective, sync=self.plan.sync)
        if (spread := shrunk(self.recipe, plan, room)) is not None:
            return spread
        for ranks in range(room, 0, -1):
            other = self._other(ranks)
            spread = spread_of(self.recipe, other) if other is not None else None
            if spread is not None:
                return spread
        return None


def with_beside(recipe: Recipe, plan: Plan) -> RunSpread:
    """The ranks of a plan, and after them the processes that sections of the recipe want beside them."""
    beside = [Role(role) for section in recipe.sections() for role in section.beside]
    roles = (*([Role.TRAINER] * plan.world), *beside) if beside else ()
    return RunSpread(str(plan), plan.world, roles=roles)


def may_stand_beside(recipe: Recipe, others: str) -> None:
    """others: what starts the ranks, if that is not a supervisor of ours on this host. Raises UsageError L16 where the
    recipe wants processes beside them then."""
    wanted = [section.name for section in recipe.sections() if section.beside]
    if others and wanted:
        raise UsageError(
            f"[{wanted[0]}] wants processes beside the ranks, which `unisono train` starts on one host alone",
            where=others, fix="samplers = 0: the ranks draw samples themselves", code="L16",
        )  # fmt: skip
