"""`unisono.init`: from a plan and whoever started this process to a Job."""

import atexit
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from unisono.comm.collectives import COLLECTIVES
from unisono.comm.device import beside_cpus, of_rank, of_script, of_wire
from unisono.comm.mesh import Mesh, Shape
from unisono.launch import inspect_folder
from unisono.launch.context import NullChannel, RankContext
from unisono.launch.env import Started, idle_here, place_here
from unisono.launch.pace import StepPace, margin
from unisono.launch.rank import under
from unisono.launch.rank.calls import Ledger
from unisono.launch.run.membership import Role
from unisono.library import proven
from unisono.library.explain import explained
from unisono.library.job import Job
from unisono.observe.span import Recorder
from unisono.plan import Plan
from unisono.spec.errors import ConfigProblems, Problem, UnisonoError, UsageError
from unisono.spec.settings import tell

# What only `unisono train` can do, and why.
_WHOLE = "your loop calls the whole model, and this key cuts it"
_LOOP = "your loop decides this"
NOT_HERE = {
    "pp": (_WHOLE, "unisono train RECIPE --plan ..."),
    "tp": (_WHOLE, "unisono train RECIPE --plan ..."),
    "cp": (_WHOLE, "unisono train RECIPE --plan ..."),
    "ep": (_WHOLE, "unisono train RECIPE --plan ..."),
    "micros": (_LOOP, "with job.accumulate(): loss.backward() for all but a step's last batch"),
    "precision": (_LOOP, "torch.autocast around the forward, or unisono train RECIPE"),
    "recompute": (_LOOP, "torch.utils.checkpoint in the model, or unisono train RECIPE"),
    "blocks": (
        "your loop calls the model, whose blocks have no numbers here",
        "unisono train RECIPE --plan ...",
    ),
    "zero": ("its options round and reorder what your loop would compute", "zero without options"),
    "schedule": ("it orders the stages of pp", "leave it out, or unisono train RECIPE"),
    "cp_kind": ("it belongs to cp", "leave it out"),
    "sync": ("gradients meet as a backward ends", "unisono train RECIPE --plan ..."),
    "codec": ("gradients travel as they are", "unisono train RECIPE --plan ..."),
    "offload": ("your optimiser holds its state itself", "unisono train RECIPE --plan ..."),
}


@dataclass(frozen=True, slots=True)
class ScriptStage:
    """Who plays a script in its user's place: it gives `init` another plan and other ranks, and sees the job.

    plan: instead of the script's own, which is kept if None. context: this rank. see: is shown each Job before the
    script has it."""

    plan: Plan | None
    context: RankContext
    see: Callable[[Any], None] = lambda job: None


_STAGE: ContextVar[ScriptStage] = ContextVar("who plays this script")


def is_staged() -> bool:
    """Whether somebody plays this script in its user's place."""
    return _STAGE.get(None) is not None


@contextmanager
def staged(on: ScriptStage) -> Iterator[None]:
    """Have `init` use this stage inside."""
    token = _STAGE.set(on)
    try:
        yield
    finally:
        _STAGE.reset(token)


def init(
    plan: "str | Plan" = "dp=-1",
    *,
    context: RankContext | None = None,
    timeout: float | None = None,
    strict: bool = False,
    folder: str | Path | None = None,
) -> Job:
    """Join the other ranks of this script and return the job.

    Call it once, before `job.prepare`. The ranks are those that torchrun, Slurm, MPI or the variables RANK, WORLD_SIZE,
    MASTER_ADDR, MASTER_PORT and LOCAL_RANK have started, or those of an initialised process group. One process alone is
    a world of one.

    plan: `dp`, `shard`, `zero` and `collective`, such as "dp=2 shard=4"; `dp=-1` fills the started ranks. context: a
    rank's place from a launcher of your own. timeout: seconds that a rank may keep the others waiting; follows the
    optimiser's steps if None. The rank that exceeds it is named, and all ranks exit with 6. strict: raise an error
    where a note would say that several ranks compute something else than one. folder: where `unisono doctor hang
    FOLDER` finds this run while it is alive, from any host that sees the folder; a private folder of each host if None.

    Raises UsageError for a plan that a loop cannot play, with the command line that can.
    """
    with explained():
        played = _STAGE.get(None)  # None where the script's user has started it
        plan, context = (plan, context) if played is None else (played.plan or plan, played.context)
        wanted = plan if isinstance(plan, Plan) else Plan.parse(plan, where="unisono.init(plan=...)")
        problems = [*wanted.check(), *not_here(wanted)]
        if problems:
            raise ConfigProblems(list({p.where: p for p in problems}.values()))
        place = None if context is not None or dist.is_initialized() else place_here()
        if place is not None and place.role is not Role.TRAINER:
            raise UsageError(
                f"this process is {place.name} of the cluster, a {place.role}, and trains nothing",
                where=f"process environment: {place.source}",
                fix="rpc.init() and rpc.shutdown() serve calls; unisono train does what the task is for",
                code="J09",
            )
        alone = context is None and place is None and not dist.is_initialized()
        for idle in idle_here() if alone else ():
            tell(f"note  {idle}")
        world = _world(context, place)
        wanted = _filled(wanted, world, alone)
        ledger = Ledger()
        if place is not None and world > 1:
            context = under.join(place, NullChannel(), timeout=timeout)
            _watch(context, place, StepPace(timeout), ledger, folder)
        at_exit = place is not None
        job = _job(wanted, context, timedelta(seconds=margin(timeout)), at_exit, strict, ledger)
        if played is not None:
            played.see(job)
        elif at_exit and world > 1:
            job.advice = _advice(wanted)
            for text in job.advice if job.is_main else ():
                tell(f"note  {text}")
        return job


def _advice(plan: Plan) -> tuple[str, ...]:
    """Say whether `unisono prove` has proven this script; () where no script runs."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    if script is None or not Path(script).is_file():
        return ()
    command = shlex.join(["unisono", "prove", script, "--plan", str(plan)])
    advice = proven.note_of(proven.look_up(Path(script).resolve(), plan), command)
    return (f"U-{advice.code}: {advice.what}; {advice.fix}",)


def _watch(
    context: RankContext, place: Started, pace: StepPace, ledger: Ledger, folder: str | Path | None
) -> None:
    """Notice hangs until the script ends, and answer who asks; each step of an optimiser is one of the pace's."""

    def tell_hang(error: UnisonoError, mine: bool) -> None:
        if mine:
            tell(error.render())

    def stepped(*_: Any) -> None:
        pace.stepped(pace.step + 1)

    register_optimizer_step_post_hook(stepped)
    watchdog = under.watch(context, place, pace, tell_hang, ledger)
    atexit.register(watchdog.close)
    with suppress(OSError):  # then nobody can ask from outside
        if folder is not None:
            Path(folder).mkdir(parents=True, exist_ok=True)
        seen = (
            inspect_folder.private(context.run_token)
            if folder is None
            else Path(folder, inspect_folder.ALIVE)
        )
        watchdog.appear(context.run_token, seen, private=folder is None)


def not_here(plan: Plan) -> list[Problem]:
    """Return the problems of a plan that a user's own loop cannot be played under."""
    plain = Plan()
    return [
        Problem("J01", f"{key}={plan.text(key)} in the library way: {why}", f"plan.{key}", fix)
        for key, (why, fix) in NOT_HERE.items()
        if plan.text(key) != getattr(plain, key) and (key != "zero" or plan.options)
    ]


def _world(context: RankContext | None, place: Any) -> int:
    if context is not None:
        return context.world
    if dist.is_initialized():
        return dist.get_world_size()
    return place.world if place is not None else 1


def _filled(plan: Plan, world: int, alone: bool) -> Plan:
    plan = plan.fill(world)
    if plan.world == world:
        return plan
    script = shlex.join(sys.argv if sys.argv and sys.argv[0] not in ("", "-c", "-m") else ["script.py"])
    command = f"torchrun --standalone --nproc-per-node {plan.world} {script}"
    if alone:
        raise UsageError(
            f"the plan {str(plan)!r} takes {plan.world} ranks, and this is one process by itself",
            where="unisono.init(plan=...)",
            fix=command,
            code="J09",
        )
    raise UsageError(
        f"the plan {str(plan)!r} takes {plan.world} ranks, and {world} were started",
        where="unisono.init(plan=...)",
        fix=f"{command}, or dp=-1 to take as many as there are",
        code="P14",
    )


def _job(
    plan: Plan, context: RankContext | None, timeout: timedelta, at_exit: bool, strict: bool, ledger: Ledger
) -> Job:
    mine = plan.world > 1 and not dist.is_initialized()
    device = of_script() if context is None else of_rank(context.backend, context.local_rank)
    if mine and context is not None:
        dist.init_process_group(  # without a store torch makes one from the variables of the environment
            beside_cpus(context.backend),
            timeout=timeout,
            world_size=context.world,
            rank=context.rank,
            store=context.store,
        )
    rank = dist.get_rank() if dist.is_initialized() else 0
    collective = COLLECTIVES.read(plan.collective)
    mesh = Mesh(Shape(dp=plan.dp, shard=plan.shard), rank, Recorder(rank), timeout, collective=collective)
    job = Job(plan, mesh, device, of_wire(device), owner=mine, strict=strict, ledger=ledger)
    if mine and at_exit:
        atexit.register(job.close_at_exit)
    return job
