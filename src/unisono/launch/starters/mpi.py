"""MPI's launchers: mpirun of Open MPI, and those that speak PMI (MPICH, Intel MPI)."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import PORT, Environ, Started, Starter, number, required

_KINDS = {
    "Open MPI": tuple(f"OMPI_COMM_WORLD_{what}" for what in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "PMI": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}


class Mpi(Starter):
    """`OMPI_COMM_WORLD_*` or `PMI_*`; several hosts need `MASTER_ADDR`."""

    name: ClassVar[str] = "mpi"
    turn: ClassVar[int] = 40

    def detect(self, environ: Environ) -> Started | None:
        source = next((source for source, names in _KINDS.items() if names[0] in environ), None)
        if source is None:
            return None
        required(environ, _KINDS[source], source)
        rank, world, local_rank, local_world = (number(environ, name) for name in _KINDS[source])
        if world != local_world:
            required(environ, ["MASTER_ADDR"], f"{source} on several hosts")
        return Started(
            source=source,
            rank=rank,
            world=world,
            local_rank=local_rank,
            local_world=local_world,
            master=environ.get("MASTER_ADDR", "127.0.0.1"),
            port=number(environ, "MASTER_PORT", default=PORT),
        )

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        numbers = (sum(hosts[:host]) + local_rank, sum(hosts), local_rank, hosts[host])
        known = dict(zip(_KINDS["Open MPI"], map(str, numbers), strict=True))
        return {**known, "MASTER_ADDR": "host0"} if len(hosts) > 1 else known
