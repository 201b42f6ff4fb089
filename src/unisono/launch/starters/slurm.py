"""Slurm: each task of a step (`srun`) is a rank."""

import re
from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import Environ, Started, Starter, number, required
from unisono.spec.errors import UsageError
from unisono.spec.hostlist import hosts_in
from unisono.spec.words import whole

_NODES = 1 << 20
"""More than any job has: a longer list is no list."""


class Slurm(Starter):
    """`SLURM_PROCID` `SLURM_NTASKS` `SLURM_LOCALID` `SLURM_JOB_ID` and the node list, port by the job."""

    name: ClassVar[str] = "slurm"
    turn: ClassVar[int] = 30

    def detect(self, environ: Environ) -> Started | None:
        if "SLURM_STEP_ID" not in environ:
            return None
        ours = {key: value for key, value in environ.items() if value}

        def first(*names: str) -> str:
            """Of several names the first that is set; the last, if none is."""
            return next((name for name in names if name in ours), names[-1])

        tasks = first("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
        per_node = first("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
        nodes = first("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
        required(ours, ["SLURM_PROCID", tasks, "SLURM_LOCALID", "SLURM_JOB_ID", per_node], "Slurm")
        counts = counts_of(ours[per_node])
        if len(counts) > 1:
            meet = "MASTER_ADDR" if "MASTER_ADDR" in ours else nodes
            required(ours, ["SLURM_NODEID", meet], "Slurm on several nodes")
            if not ours.get("MASTER_ADDR") and not first_host(ours[nodes]):
                raise UsageError(f"{nodes} is no list of nodes: {ours[nodes]!r}", code="L02",
                                 where="process environment", fix="set MASTER_ADDR to the first node")  # fmt: skip
        index = number(ours, "SLURM_NODEID", default=0)
        job = number(ours, "SLURM_JOB_ID")
        return Started(
            source="Slurm",
            rank=number(ours, "SLURM_PROCID"),
            world=number(ours, tasks),
            local_rank=number(ours, "SLURM_LOCALID"),
            local_world=counts[index] if index < len(counts) else 0,  # 0: refused as contradictory
            master=ours.get("MASTER_ADDR") or first_host(ours.get(nodes, "")) or "127.0.0.1",
            # Jobs that share a node must not meet; two jobs rarely have numbers 16384 apart.
            port=number(ours, "MASTER_PORT", default=16384 + job % 16384),
            restart=number(ours, "SLURM_RESTART_COUNT", default=0),
        )

    def idle(self, environ: Environ) -> str:
        tasks = environ.get("SLURM_NTASKS", "1")
        if "SLURM_STEP_ID" in environ or (tasks == "1" and "SLURM_PROCID" not in environ):
            return ""
        return (
            f"in a Slurm job of SLURM_NTASKS={tasks}, but not under srun: all that runs is this, on one host;"
            " srun before the command makes each task a rank"
        )

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        return {
            "SLURM_STEP_ID": "0",
            "SLURM_JOB_ID": "7",
            "SLURM_PROCID": str(sum(hosts[:host]) + local_rank),
            "SLURM_NTASKS": str(sum(hosts)),
            "SLURM_LOCALID": str(local_rank),
            "SLURM_NODEID": str(host),
            "SLURM_JOB_NODELIST": f"host[0-{len(hosts) - 1}]",
            "SLURM_TASKS_PER_NODE": ",".join(map(str, hosts)),
        }


def first_host(nodes: str) -> str:
    """The first host of a Slurm node list: `gpu[07-09,12],login` gives gpu07; "" of what is none."""
    return next(iter(hosts_in(nodes, most=1)), "")


def counts_of(per_node: str) -> list[int]:
    """Tasks of each node of a Slurm list: `4(x2),3` gives 4, 4, 3."""
    counts: list[int] = []
    for match in re.finditer(r"([0-9]+)(?:\(x([0-9]+)\))?", per_node):
        tasks, nodes = whole(match[1]), whole(match[2] or "1")
        if tasks is None or nodes is None or len(counts) + nodes > _NODES:
            return []  # refused as contradictory
        counts += [tasks] * nodes
    return counts
