"""A job as a value: one recipe, how it is spread over nodes, and what each node must have. No torch."""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from unisono.config import Loaded, Resolved, resolve, resolved_toml
from unisono.spec.errors import UsageError
from unisono.spec.hostlist import hosts_in
from unisono.verbs.train.room import rank_bytes
from unisono_contrib.config.sections.job import JobConfig
from unisono_contrib.config.sections.k8s import K8sConfig
from unisono_contrib.config.sections.network import NetworkConfig
from unisono_contrib.config.sections.slurm import SlurmConfig

PORT = 29500
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class JobFile:
    """A file of a job. name: below the job's folder."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class NodeNeed:
    """What a node must have for its ranks: cores, MiB of memory, GPUs."""

    cores: int
    mib: int
    gpus: int = 0


@dataclass(frozen=True, slots=True)
class JobRequest:
    """What a scheduler gets. name: of the run. world: all ranks. recipes: one run each, as resolved TOML; several are
    an array. need: of a node. grace: seconds in which ranks save. out: the folder of runs. variables: of all ranks.
    shell: the command that runs another on a host (`launch.shell`)."""

    name: str
    world: int
    nodes: int
    ranks_per_node: int
    need: NodeNeed
    recipes: tuple[str, ...]
    grace: float
    out: str
    variables: Mapping[str, str]
    shell: str
    config: JobConfig
    slurm: SlurmConfig
    k8s: K8sConfig

    @property
    def python(self) -> str:
        """The interpreter on nodes that share this one's file system."""
        return self.config.python or sys.executable

    def train(self, recipe: str, grace: float) -> list[str]:
        """What `python -m` runs as one rank: it goes on with the newest run of its name. recipe: path of its file."""
        return ["unisono", "train", recipe, "--resume", "auto", "--launch.grace", f"{grace:g}"]


def job_of(loaded: Sequence[Loaded], name: str) -> JobRequest:
    """The job of this name that plays these recipes, which differ in values alone. Raises ConfigProblems,
    and UsageError P14 or C06."""
    config = _section(loaded[0], JobConfig)
    resolved = [_resolved(recipe, config) for recipe in loaded]
    first = resolved[0]
    world = first.plan.world
    nodes, each = _spread(config, world)
    if {run.plan.world for run in resolved} != {world}:
        raise UsageError("the runs of an array take different numbers of ranks", where="--each",
                         fix="one launch for each plan", code="C06")  # fmt: skip
    launch = first.recipe.launch
    network = _section(loaded[0], NetworkConfig)
    return JobRequest(
        name, world, nodes, each, need_of(resolved, config, each), tuple(map(resolved_toml, resolved)),
        launch.grace, first.recipe.out.dir,
        {**network.variables(), **dict(variable.split("=", 1) for variable in config.env)}, launch.shell,
        config, _section(loaded[0], SlurmConfig), _section(loaded[0], K8sConfig),
    )  # fmt: skip


def need_of(resolved: Sequence[Resolved], config: JobConfig, ranks: int) -> NodeNeed:
    """What a node of so many ranks must have for any of these runs: the ledger's bytes of the fullest rank for each of
    them, rounded up to MiB. Raises UsageError C06 for a model without a ledger."""
    launch = resolved[0].recipe.launch
    gpus = {"nccl": ranks, "nccl:shared": 1}.get(launch.backend, 0)
    mib = ceil(config.memory_gib * 1024) if config.memory_gib else 0
    if not mib:
        for run in resolved:
            nbytes, counted = rank_bytes(run.recipe, run.plan)
            if not counted:
                raise UsageError(
                    f"a model of kind {run.recipe.model.kind} has no ledger of memory", where="job.memory_gib",
                    fix="--job.memory_gib N: what a node must have", code="C06",
                )  # fmt: skip
            mib = max(mib, ceil(ranks * nbytes / _MIB))
    cores = ranks * (config.cores_per_rank or launch.threads_per_rank or 1)
    return NodeNeed(cores, mib, gpus if config.gpus_per_node is None else config.gpus_per_node)


def _section(loaded: Loaded, kind: Any) -> Any:
    """The recipe's section of this kind; its defaults where it has none."""
    return getattr(loaded.recipe, kind.name) or kind()


def _resolved(loaded: Loaded, config: JobConfig) -> Resolved:
    """The recipe as the ranks of the job play it: with as many threads as a rank has cores, as no rank can see what
    its container may use."""
    recipe = loaded.recipe
    if recipe.launch.threads_per_rank is None:
        launch = recipe.launch.model_copy(update={"threads_per_rank": config.cores_per_rank or 1})
        recipe = recipe.model_copy(update={"launch": launch})
    return resolve(recipe, loaded.plan, _world(config), loaded.origins)


def _world(config: JobConfig) -> int | None:
    """How many ranks there are, where that is not the plan's to say."""
    rooms = rooms_of(config.hosts)
    if rooms and config.nodes is None:
        counts = [room or config.ranks_per_node for _, room in rooms]
        return sum(filter(None, counts)) if all(counts) else None
    return config.nodes and config.ranks_per_node and config.nodes * config.ranks_per_node


def rooms_of(hosts: str) -> list[tuple[str, int | None]]:
    """Each host of `a:4,node[01-02]`, and how many ranks it takes, None where that is not said."""
    parts = [word.partition(":") for word in hosts_in(hosts)]
    return [(host, int(count) if count.isdigit() else None) for host, _, count in parts]


def _spread(config: JobConfig, world: int) -> tuple[int, int]:
    """(nodes, ranks of each) of so many ranks. Raises UsageError P14 where they do not come out even."""
    rooms = rooms_of(config.hosts)
    if rooms and config.nodes is None:  # hosts may take different numbers
        return len(rooms), max(room or config.ranks_per_node or ceil(world / len(rooms)) for _, room in rooms)
    each = config.ranks_per_node or world // (config.nodes or 1)
    nodes = config.nodes or world // max(1, each)
    if nodes * each != world:
        raise UsageError(
            f"the plan takes {world} ranks, and {nodes or 'no'} nodes of {each or 'no'} ranks have {nodes * each}",
            where="plan, job.nodes, job.ranks_per_node", code="P14",
            fix="nodes x ranks_per_node as many as the plan's ranks; dp=-1 in the plan fills them",
        )  # fmt: skip
    return nodes, each
