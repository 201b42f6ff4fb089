"""RANK, WORLD_SIZE and the like, set by hand or by a script."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import LOOPBACK, PORT, Environ, Started, Starter, number, required
from unisono.launch.starters.slurm import Slurm
from unisono.spec.errors import UsageError


def read_variables(environ: Environ, source: str) -> Started:
    """The place that the plain variables describe. On one host the local numbers are the global ones."""
    known = dict(environ)
    if known.get("MASTER_ADDR") in LOOPBACK:
        known.setdefault("LOCAL_RANK", known.get("RANK", ""))
        known.setdefault("LOCAL_WORLD_SIZE", known.get("WORLD_SIZE", ""))
    names = ["RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"]
    required(known, names, source)
    return Started(
        source=source,
        rank=number(known, "RANK"),
        world=number(known, "WORLD_SIZE"),
        local_rank=number(known, "LOCAL_RANK"),
        local_world=number(known, "LOCAL_WORLD_SIZE"),
        master=known["MASTER_ADDR"],
        port=number(known, "MASTER_PORT"),
        restart=number(known, "TORCHELASTIC_RESTART_COUNT", default=0),
        error_file=known.get("TORCHELASTIC_ERROR_FILE", ""),
    )


class PlainVariables(Starter):
    """`RANK` `WORLD_SIZE` `MASTER_ADDR` `MASTER_PORT`, `LOCAL_RANK` `LOCAL_WORLD_SIZE` (on one host they follow)."""

    name: ClassVar[str] = "environment"
    turn: ClassVar[int] = 20

    def detect(self, environ: Environ) -> Started | None:
        if not {"RANK", "WORLD_SIZE", "LOCAL_RANK"} & environ.keys():
            return None
        place, other = read_variables(environ, "environment"), Slurm().detect(environ)
        if other is not None and (other.rank, other.world) != (place.rank, place.world):
            raise UsageError(
                f"the environment says rank {place.rank} of {place.world}, Slurm says {other.rank} of {other.world}",
                where="RANK, WORLD_SIZE against SLURM_PROCID, SLURM_NTASKS",
                fix="unset RANK and WORLD_SIZE, or start with torchrun",
                code="L02",
            )
        return place

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        known = {
            "RANK": sum(hosts[:host]) + local_rank,
            "WORLD_SIZE": sum(hosts),
            "LOCAL_RANK": local_rank,
            "LOCAL_WORLD_SIZE": hosts[host],
            "MASTER_ADDR": "host0",
            "MASTER_PORT": PORT,
        }
        return {name: str(value) for name, value in known.items()}
