"""torchrun, torch's own launcher, on one host or several."""

from collections.abc import Sequence
from typing import ClassVar

from unisono.launch.starters import Environ, Started, Starter
from unisono.launch.starters.environment import PlainVariables, read_variables


class Torchrun(Starter):
    """`TORCHELASTIC_RUN_ID` and the plain variables."""

    name: ClassVar[str] = "torchrun"
    turn: ClassVar[int] = 10

    def detect(self, environ: Environ) -> Started | None:
        return read_variables(environ, "torchrun") if "TORCHELASTIC_RUN_ID" in environ else None

    def leaves(self, host: int, local_rank: int, hosts: Sequence[int]) -> Environ:
        return {**PlainVariables().leaves(host, local_rank, hosts), "TORCHELASTIC_RUN_ID": "run"}
