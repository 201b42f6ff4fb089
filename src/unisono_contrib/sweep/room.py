"""How many trials fit on a machine at once: by cores, by the planner's ledger of memory, and by GPUs. No torch."""

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from unisono.config import Loaded, resolve
from unisono.verbs.train.room import SHARE, has_gpus, host_bytes, rank_bytes

_VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, slots=True)
class Need:
    """What a trial takes while it trains. cores: one for each thread of each rank. gpus: one for each rank, where there
    are some."""

    cores: int
    nbytes: float = 0.0
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class TrialRoom:
    """What a machine has."""

    cores: int
    nbytes: float
    gpus: tuple[str, ...] = ()

    def why_not(self, need: Need, running: Iterable[Need]) -> str:
        """What a trial has to wait for beside those that run; "" where it fits. A trial alone always may."""
        others = [*running]
        if not others:
            return ""
        if need.gpus and sum(other.gpus for other in others) + need.gpus > len(self.gpus):
            return "GPUs"
        if not need.gpus and sum(other.cores for other in others) + need.cores > self.cores:
            return "cores"
        if sum(other.nbytes for other in others) + need.nbytes > SHARE * self.nbytes:
            return "memory"
        return ""


def machine(environ: Mapping[str, str]) -> TrialRoom:
    """What this machine has, known without torch."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    gpus: tuple[str, ...] = ()
    if has_gpus():
        visible = environ.get(_VISIBLE)
        known = sorted(
            (p.name[6:] for p in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", p.name)), key=int
        )
        gpus = tuple(filter(None, visible.split(","))) if visible is not None else tuple(known)
    return TrialRoom(cores, host_bytes(1), gpus)


def need_of(trial: Loaded, room: TrialRoom) -> Need:
    """What a trial takes on this machine. Raises ConfigProblems where its plan does not fit its recipe."""
    resolved = resolve(trial.recipe, trial.plan, None, trial.origins)
    world, launch = resolved.plan.world, trial.recipe.launch
    nbytes, _ = rank_bytes(resolved.recipe, resolved.plan)
    on_gpus = bool(room.gpus) and launch.backend != "gloo"
    return Need(world * (launch.threads_per_rank or 1), world * nbytes, world if on_gpus else 0)


def free_gpus(room: TrialRoom, taken: Iterable[str], count: int) -> tuple[str, ...]:
    """GPUs for a trial that are not taken."""
    busy = {*taken}
    return tuple(gpu for gpu in room.gpus if gpu not in busy)[:count]


def only_gpus(gpus: Sequence[str]) -> dict[str, str]:
    """Variables of a trial that has these GPUs alone; none where there are none."""
    return {_VISIBLE: ",".join(gpus)} if gpus else {}
