"""A live run on one rank: what it holds by itself, and what a step works with among certain members."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from unisono.comm.mesh import Mesh
from unisono.observe.span import Recorder
from unisono.parallel.player import Player
from unisono.parallelize import Local
from unisono.plan import Plan
from unisono.programs.pipeline import Action, Timetable
from unisono.spec.beside import BesideRanks
from unisono.sync import Sync
from unisono.sync._outer import MailboxPlace
from unisono.train.step.assigner import Assigner
from unisono.train.step.grad_norm import Measure
from unisono.train.step.gradients import Gradients
from unisono.train.step.shared_numbers import SharedNumbers
from unisono.train.step.update import Report, Update


@dataclass(frozen=True, slots=True)
class Replica:
    """What one rank holds that does not depend on the other members. plan: resolved. global_batch, micro_batch:
    in samples. steps: updates of the whole run, 0 where nobody knows.
    servers: of parameters, where the policy has some. mailbox: where this run meets others. around: each changes the
    run when its members have met (see `spec.section`). beside: how to reach processes beside the ranks."""

    plan: Plan
    mesh: Mesh
    local: Local
    update: Update
    global_batch: int
    micro_batch: int
    dtype: torch.dtype
    seed: int
    recorder: Recorder
    steps: int = 0
    servers: int = 1
    mailbox: MailboxPlace | None = None
    around: "tuple[Callable[[Run], Run], ...]" = ()
    beside: BesideRanks | None = None


@dataclass(slots=True)
class Run:
    """A live run on one rank, among certain members. `step` is the number of updates made; all else `join` made anew.

    gate: held while a step changes what is kept in checkpoints, so that another thread may keep it from doing so.
    leaves: that this rank computes, of `of_leaves` in the global batch. timetable: of all rows of the pipeline; `row`
    is this rank's, `eval_row` its forwards alone. whole: whether weights and states are those after `step` steps: not
    in the middle of an update. untold: the report of a step after which replicas are still to come together. assigner:
    may change who computes which leaves, between two steps.
    """

    replica: Replica
    mesh: Mesh
    leaves: range
    of_leaves: int
    local: Local
    player: Player
    timetable: Timetable
    row: Sequence[Action]
    eval_row: Sequence[Action]
    sync: Sync
    gradients: Gradients
    measure: Measure
    update: Update
    shared: SharedNumbers
    seed: int
    recorder: Recorder
    step: int = 0
    whole: bool = True
    untold: Report | None = None
    assigner: Assigner = field(default_factory=Assigner)
    gate: threading.Lock = field(default_factory=threading.Lock)
