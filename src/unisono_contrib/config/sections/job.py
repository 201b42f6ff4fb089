"""`[job]`: what `unisono launch` asks of a scheduler for a run. No torch."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from unisono.spec.errors import Problem
from unisono.spec.hostlist import hosts_in
from unisono.spec.section import Section
from unisono.spec.training import Count, Natural, Positive

_TIME = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")
_VARIABLE = re.compile(r"[A-Za-z_]\w*=.*", re.DOTALL)


class JobConfig(Section):
    """A job of a scheduler that plays the run: `unisono launch slurm|k8s|ray|ssh FILE`. `unisono train` ignores it.

    Cores, memory and devices that are not said here follow from the plan: its ranks, and the bytes of its fullest rank.
    """

    name: ClassVar[str] = "job"

    nodes: Count | None = Field(
        default=None,
        description="nodes; as many as ranks_per_node makes of the plan's ranks when absent, or 1",
    )
    ranks_per_node: Count | None = Field(
        default=None, description="ranks of a node; the plan's ranks over nodes when absent"
    )
    cores_per_rank: Count | None = Field(
        default=None, description="cores of a rank; launch.threads_per_rank when absent, or 1"
    )
    memory_gib: Positive | None = Field(
        default=None, description="GiB of a node; when absent by the planner's ledger, rounded up"
    )
    gpus_per_node: Natural | None = Field(
        default=None,
        description="GPUs of a node; when absent one for each rank with launch.backend nccl, one with nccl:shared,"
        " else none",
    )
    time: Annotated[str, Field(pattern=f"^(?:{_TIME.pattern})?$")] = Field(
        default="", description="limit of one start, HOURS:MINUTES:SECONDS; the scheduler's own when absent"
    )
    restarts: Natural = Field(
        default=6, description="how often the job is started again, after saves (exit 75) or losses"
    )
    hosts: str = Field(
        default="",
        description="launch ssh: hosts of the run, the first one leads: node[01-04], or a:4,b:8 with ranks",
    )
    python: str = Field(
        default="",
        description="interpreter on the nodes; when absent the one that submits, in a container python",
    )
    setup: tuple[str, ...] = Field(
        default=(), description="lines of shell before the run, such as module load cuda; not for k8s"
    )
    env: tuple[str, ...] = Field(default=(), description="variables of all ranks, each NAME=VALUE")

    @property
    def seconds(self) -> int | None:
        """The limit of one start in seconds; None without one."""
        match = _TIME.fullmatch(self.time)
        return int(match[1]) * 3600 + int(match[2]) * 60 + int(match[3]) if match else None

    def problems(self, recipe: Any, plan: Any) -> Iterator[Problem]:
        if self.hosts and not hosts_in(self.hosts):
            yield Problem(
                "C06", f"{self.hosts!r} is no list of hosts", "job.hosts", 'hosts = "node[01-04]:8"'
            )
        for variable in self.env:
            if not _VARIABLE.fullmatch(variable):
                yield Problem("C06", f"{variable!r} is no NAME=VALUE", "job.env", 'env = ["NCCL_DEBUG=INFO"]')
